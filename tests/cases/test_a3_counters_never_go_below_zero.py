"""A3: a counter can never go below zero, and a negative or missing one never wins."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from app.cluster.link import Link
from app.cluster.scripts import Scripts, constants
from app.config import Settings
from app.model import Outcome
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    chunk,
    content_event,
    json_answer,
    stream_forever,
)
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.servers import ValkeyServer

# Of four equal nodes one gets 50 of 200; more than 80 by chance: 3 in 10 million runs.
REQUESTS, AT_MOST = 200, 80
# Samples below the floor count alike, so that the nodes stay equal on a busy machine.
EQUAL = {"policy": "ttft", "ttft_floor_ms": 200}


def test_a_counter_deleted_under_running_requests_does_not_make_its_node_win(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node() for _ in range(4)]
    gw = gateway(nodes, scoring=EQUAL)
    for node in nodes:
        node.script = stream_forever(0.01, for_s=60)
    clients = [RawClient(gw.port) for _ in range(12)]  # three on each
    for client in clients:
        client.send(chat()).read_events(2)
    assert {f"b{i}": 3 for i in range(1, 5)} == state.snapshot(valkey).counters
    with state.sampling(valkey):
        valkey.delete(state.KEYS.active("b1"))
        for client in clients:
            client.close()
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        for node in nodes:
            node.script = json_answer()
        _spread_over_all(gw)
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_a_negative_counter_does_not_make_its_node_win_and_is_mended_by_its_first_lease(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(stream_forever(0.01, for_s=60)) for _ in range(4)]
    gw = gateway(nodes, scoring=EQUAL)
    valkey.set(state.KEYS.active("b1"), -5)
    with contextlib.ExitStack() as stack:
        for _ in range(4):  # one on each
            client = stack.enter_context(RawClient(gw.port))
            client.send(chat()).read_events(2)
        assert state.snapshot(valkey).counters == {f"b{i}": 1 for i in range(1, 5)}
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    for node in nodes:
        node.script = json_answer()
    valkey.set(state.KEYS.active("b1"), -5)
    _spread_over_all(gw)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert state.snapshot(valkey).counters["b1"] == 0
    state.assert_scores_equal_records(valkey)


def test_a_client_that_leaves_in_the_instant_of_the_end_counts_once(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    async def ends_after_20_ms(request: Request, peer: Peer) -> None:
        head = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"
        await peer.write(head + chunk(ROLE_EVENT) + chunk(content_event("a")))
        await peer.sleep(0.02)
        await peer.write(chunk(FINISH_EVENT) + chunk(DONE_EVENT) + b"0\r\n\r\n")

    node = raw_node(ends_after_20_ms)
    gw = gateway([node], capacity=64)
    draw = random.Random(3)

    def once(offset_s: float) -> None:
        client = RawClient(gw.port)
        client.send(chat()).read_events(2)
        assert client.status == 200
        time.sleep(0.0175 + offset_s)
        client.reset()

    with state.sampling(valkey, 0.002), ThreadPoolExecutor(8) as pool:
        for _ in pool.map(once, [draw.uniform(0, 0.005) for _ in range(200)]):
            pass
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")
    left = len(node.left)
    assert 0 < left < 200, "the offsets hit both sides of the end"
    assert len(node.requests) == 200
    assert state.record(valkey, "b1")["streak"] == "0"


@pytest.mark.parametrize("outcome", list(Outcome))
async def test_a_release_of_an_unknown_lease_creates_nothing(
    valkey: redis.Redis, valkey_server: ValkeyServer, outcome: Outcome
) -> None:
    link = Link(valkey_server.url, budget_s=1, name="stranger")
    await link.start()
    try:
        text = constants(Settings())
        scripts = Scripts(link, namespace="lw", pool="default", constants=text)
        assert not await scripts.release("nobody-1", replica="nobody", outcome=outcome)
        assert not await scripts.first_token("nobody-1", replica="nobody", ttft_us=5)
    finally:
        await link.close()
    assert valkey.keys() == []


def _spread_over_all(gw: Gateway) -> None:
    """Sequential requests; no node gets more than 40 % of them."""
    share: Counter[bytes] = Counter()
    for _ in range(REQUESTS):
        answer = ask(gw.port)
        assert answer.status == 200
        share[answer.headers[b"x-leaseway-node"]] += 1
    assert len(share) == 4
    assert max(share.values()) <= AT_MOST, share
