"""The duty to probe: one claimer for each node and interval in the whole cluster (CASES F4)."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest
import redis

from tests.lua.pool import T0, Pool

if TYPE_CHECKING:
    from tests.support.servers import ValkeyServer

INTERVAL_MS = 5000


def fleet(client: redis.Redis, nodes: int) -> Pool:
    """Nodes n000, n001 …"""
    pool = Pool(client)
    for i in range(nodes):
        pool.register(f"n{i:03}")
    return pool


def claimed_over(pool: Pool, claims: list[tuple[int, int]]) -> Counter[str]:
    """Claims at these times after T0, with these limits: how often each node was claimed."""
    got: Counter[str] = Counter()
    for at_ms, limit in sorted(claims):
        pool.now = T0 + at_ms
        got.update(pool.claim(INTERVAL_MS, limit))
    return got


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_each_node_is_claimed_exactly_once_an_interval_however_many_replicas_ask(
    valkey: redis.Redis, replicas: int
) -> None:
    """Replicas tick every second, each at its own phase; the first ticks at the first instant."""
    pool = fleet(valkey, 7)
    ticks = [
        (second * 1000 + replica * 190, 50) for second in range(40) for replica in range(replicas)
    ]
    assert claimed_over(pool, ticks) == {f"n{i:03}": 8 for i in range(7)}


def test_replicas_that_ask_at_once_share_the_nodes_among_them(
    valkey: redis.Redis, valkey_server: ValkeyServer
) -> None:
    pool = fleet(valkey, 40)

    def asked(_: int) -> list[str]:
        with redis.Redis(port=valkey_server.port, decode_responses=True) as client:
            return Pool(client).claim(INTERVAL_MS, 9)

    with ThreadPoolExecutor(4) as threads:
        shares = list(threads.map(asked, range(8)))
    assert sorted(node for share in shares for node in share) == [f"n{i:03}" for i in range(40)]
    assert max(map(len, shares)) == 9
    assert pool.claim(INTERVAL_MS) == []


def test_the_duty_of_a_claimer_that_died_is_free_after_one_interval_and_not_before(
    valkey: redis.Redis,
) -> None:
    pool = fleet(valkey, 2)
    assert pool.claim(INTERVAL_MS) == ["n000", "n001"]  # and never heard of again
    pool.later(INTERVAL_MS - 1)
    assert pool.claim(INTERVAL_MS) == []
    pool.later(1)
    assert pool.claim(INTERVAL_MS) == ["n000", "n001"]


def test_a_claim_is_bounded_and_takes_those_that_wait_longest(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    for i in (3, 1, 4, 0, 2):
        pool.register(f"n{i}")
        pool.later(10)
    assert [pool.claim(INTERVAL_MS, 2) for _ in range(4)] == [
        ["n3", "n1"],
        ["n4", "n0"],
        ["n2"],
        [],
    ]


def test_with_more_nodes_than_the_limit_none_is_left_out(valkey: redis.Redis) -> None:
    got = claimed_over(fleet(valkey, 23), [(tick * 1000, 5) for tick in range(50)])
    assert len(got) == 23
    assert set(got.values()) == {10}


def test_a_node_that_comes_is_due_at_once_and_one_that_goes_is_not_claimed(
    valkey: redis.Redis,
) -> None:
    pool = fleet(valkey, 1)
    assert pool.claim(INTERVAL_MS) == ["n000"]
    pool.register("late", health="new")
    assert pool.claim(INTERVAL_MS) == ["late"]
    pool.acquired("x", tried=["late"])
    pool.unregister("n000")
    pool.later(INTERVAL_MS)
    assert pool.claim(INTERVAL_MS) == ["late"]
    pool.register("n000")
    assert pool.claim(INTERVAL_MS) == ["n000"]


def test_a_change_by_the_operator_brings_no_second_probe(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 1)
    pool.claim(INTERVAL_MS)
    pool.register("n000", ["m", "n"], weight=3)
    pool.register("n000", ["m", "n"], weight=3)
    assert pool.claim(INTERVAL_MS) == []


def test_a_claim_writes_nothing_else(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 3)
    pool.later(100)
    before = pool.state()
    pool.claim(INTERVAL_MS)
    after = pool.state()
    assert after.pop(pool.keys.probes) == {f"n{i:03}": T0 + 100 + INTERVAL_MS for i in range(3)}
    before.pop(pool.keys.probes)
    assert after == before


def test_a_claim_costs_the_same_with_20_and_with_1000_nodes(valkey: redis.Redis) -> None:
    costs = []
    for nodes in (20, 1000):
        valkey.flushall()
        claim = partial(fleet(valkey, nodes).claim, INTERVAL_MS, 10)
        valkey.config_resetstat()
        assert len(claim()) == 10
        stats = valkey.info("commandstats")
        costs.append({name: of["calls"] for name, of in stats.items() if "config" not in name})
    assert costs[0] == costs[1]
