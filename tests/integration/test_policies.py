"""Every policy serves 60 requests through two replicas over three nodes, in sensible shares."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING

import pytest

from app.lab.faults import Fault
from app.lab.node import NodeConfig
from tests.support.fleet import CHAT, POOL, Fleet, Nodes, chat, pace, plain_async_http, plain_http
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from typing import Any

REQUESTS = 60
TOKEN_MS, SLOW_MS = 1.0, 120.0


@contextmanager
def cluster(policy: str, **fields: Mapping[str, Any]) -> Iterator[tuple[Nodes, Fleet]]:
    """Two replicas with ``policy`` over three equal nodes; a also serves ``other``."""
    equal = NodeConfig(profile=pace(TOKEN_MS))
    with (
        Nodes(a=replace(equal, models=("demo", "other")), b=equal, c=equal) as nodes,
        Fleet(nodes.settings(**fields), replicas=2, scoring={"policy": policy}) as fleet,
    ):
        yield nodes, fleet
        fleet.wait_settled()


def one_by_one(fleet: Fleet, count: int = REQUESTS, model: str = "demo") -> Counter[str]:
    """Shares of requests that never overlap, sent to the replicas in turn."""
    body = {**chat(max_tokens=2, stream=True), "model": model}
    shares: Counter[str] = Counter()
    with plain_http() as http:
        for url in islice(cycle(fleet.urls), count):
            answer = http.post(url + CHAT, json=body)
            assert answer.status_code == 200
            assert answer.text.endswith("data: [DONE]\n\n")
            shares[answer.headers["x-leaseway-node"]] += 1
            # The release goes out before the answer's last byte, and may arrive after it.
            fleet.wait_settled()
    return shares


@asynccontextmanager
async def all_at_once(
    nodes: Nodes, fleet: Fleet, count: int = REQUESTS, model: str = "demo"
) -> AsyncIterator[Counter[str]]:
    """Shares of requests sent in one moment and held by their nodes until the block ends."""
    # A node hears a little later than Redis that the client of a former request has left.
    wait_until(lambda: +Counter(nodes.open()) == fleet.active(), what="nodes and leases agree")
    before = Counter(nodes.open())
    for node_id in nodes.ids:
        nodes[node_id].fault = Fault(mode="hang")
    body = {**chat(), "model": model}
    async with plain_async_http() as http:
        urls = islice(cycle(fleet.urls), count)
        held = [asyncio.create_task(http.post(url + CHAT, json=body)) for url in urls]
        async with asyncio.timeout(20):
            while sum(nodes.open().values()) < before.total() + count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        truth = Counter(nodes.open())
        assert truth == Counter(fleet.active())
        yield truth - before
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
    for node_id in nodes.ids:
        nodes[node_id].fault = Fault()


def even(shares: Counter[str]) -> bool:
    """Whether all three nodes have the same share."""
    return shares == {node_id: shares.total() // 3 for node_id in "abc"}


async def burst_is_even_and_a_busy_node_is_spared(nodes: Nodes, fleet: Fleet) -> None:
    async with all_at_once(nodes, fleet) as shares:
        assert even(shares)
    wait_until(fleet.settled, what="leases of clients that left are given back")
    async with (
        all_at_once(nodes, fleet, 15, model="other") as busy,
        all_at_once(nodes, fleet, 30) as shares,
    ):
        assert busy == {"a": 15}
        assert shares == {"b": 15, "c": 15}
    wait_until(fleet.settled, what="leases of clients that left are given back")


def a_slow_node_gets_little(nodes: Nodes, fleet: Fleet) -> None:
    nodes["b"].fault = Fault(mode="slow", factor=SLOW_MS / TOKEN_MS)
    shares = one_by_one(fleet)
    assert shares["b"] <= 5, shares
    assert shares.total() == REQUESTS
    samples = [int(fleet.redis.llen(f"{POOL}ttft:{node_id}")) for node_id in "abc"]
    # The very first one is lost when its release overtakes the call that brings the script.
    assert sum(min(50, shares[node_id]) for node_id in "abc") - sum(samples) in {0, 1}


async def test_round_robin_is_exactly_even_whoever_asks_and_when() -> None:
    with cluster("round_robin") as (nodes, fleet):
        assert even(one_by_one(fleet))
        async with all_at_once(nodes, fleet) as shares:
            assert even(shares)
            # Load is nothing to it: a busy node gets its turn.
            nodes["a"].fault = nodes["b"].fault = nodes["c"].fault = Fault()
            assert even(await asyncio.to_thread(turns, fleet))


def turns(fleet: Fleet) -> Counter[str]:
    """Shares of 60 more requests while others are held."""
    shares: Counter[str] = Counter()
    with plain_http() as http:
        for url in islice(cycle(fleet.urls), REQUESTS):
            answer = http.post(url + CHAT, json=chat(max_tokens=1))
            shares[answer.headers["x-leaseway-node"]] += 1
    return shares


async def test_random_spreads_over_all_nodes() -> None:
    with cluster("random") as (nodes, fleet):
        # Binomial, n = 60, p = 1/3: outside 4 to 40 once in a million.
        shares = one_by_one(fleet)
        assert shares.total() == REQUESTS
        assert all(4 <= shares[node_id] <= 40 for node_id in "abc"), shares
        async with all_at_once(nodes, fleet) as shares:
            assert all(4 <= shares[node_id] <= 40 for node_id in "abc"), shares


async def test_least_conn_shares_evenly_and_spares_a_busy_node() -> None:
    with cluster("least_conn") as (nodes, fleet):
        await burst_is_even_and_a_busy_node_is_spared(nodes, fleet)
        shares = one_by_one(fleet)
        assert all(4 <= shares[node_id] <= 40 for node_id in "abc"), shares


async def test_ttft_shares_evenly_until_a_node_shows_itself_slow() -> None:
    with cluster("ttft") as (nodes, fleet):
        await burst_is_even_and_a_busy_node_is_spared(nodes, fleet)
        a_slow_node_gets_little(nodes, fleet)


async def test_work_shares_evenly_until_a_node_shows_itself_slow() -> None:
    with cluster("work") as (nodes, fleet):
        await burst_is_even_and_a_busy_node_is_spared(nodes, fleet)
        a_slow_node_gets_little(nodes, fleet)


async def test_peak_ewma_avoids_a_node_that_shows_itself_slow() -> None:
    with cluster("peak_ewma") as (nodes, fleet):
        a_slow_node_gets_little(nodes, fleet)


@pytest.mark.parametrize("policy", ["weighted_least_conn", "ttft"])
async def test_weights_divide_a_burst_in_proportion(policy: str) -> None:
    with cluster(policy, c={"weight": 3}) as (nodes, fleet):
        async with all_at_once(nodes, fleet) as shares:
            assert shares == {"a": 12, "b": 12, "c": 36}


async def test_p2c_keeps_a_burst_nearly_even_and_leaves_no_idle_node_out() -> None:
    with cluster("p2c") as (nodes, fleet):
        async with all_at_once(nodes, fleet) as shares:
            assert max(shares.values()) - min(shares[node_id] for node_id in "abc") <= 6
        wait_until(fleet.settled, what="leases of clients that left are given back")
        async with (
            all_at_once(nodes, fleet, 25, model="other"),
            all_at_once(nodes, fleet, 30) as shares,
        ):
            assert shares["a"] == 0  # the worse of any two
        wait_until(fleet.settled, what="leases of clients that left are given back")
        shares = one_by_one(fleet)
        assert all(4 <= shares[node_id] <= 40 for node_id in "abc"), shares
