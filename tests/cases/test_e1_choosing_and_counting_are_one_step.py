"""E1: choosing and counting are one step, across replicas, and ties are spread."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import events as answer_of
from tests.support.rawnode import json_answer, sse_answer
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode

NODES = 4
AT_ONCE = 80
ONE_BY_ONE = 400
# The case's premise is that all nodes have the same TTFT. Floor and prior above every time that
# can be measured here give exactly that, whatever else this machine is doing.
TTFT_EQUAL = {"policy": "ttft", "ttft_floor_ms": 10_000, "ttft_prior_ms": 10_000}


def test_eighty_requests_at_one_instant_are_spread_evenly_over_four_equal_nodes(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(json_answer(after_s=3)) for _ in range(NODES)]
    replicas = [gateway(nodes, capacity=AT_ONCE, scoring=TTFT_EQUAL) for _ in range(2)]
    start = threading.Barrier(AT_ONCE)

    def request(i: int) -> int:
        with RawClient(replicas[i % 2].port) as client:
            start.wait(20)
            client.send(chat(stream=False))
            client.read_all()
            return client.status

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(request, range(AT_ONCE))
        wait_until(lambda: sum(node.open for node in nodes) == AT_ONCE, what="all are in flight")
        true = [node.open for node in nodes]
        counted = [state.load(valkey, f"b{i}") for i in range(1, NODES + 1)]
        assert Counter(answers) == {200: AT_ONCE}
    assert max(true) - min(true) <= 2, true
    assert counted == true
    most = [node.max_open for node in nodes]
    assert max(most) - min(most) <= 2, most
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_four_hundred_requests_one_by_one_use_every_idle_node(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(sse_answer(answer_of(2))) for _ in range(NODES)]
    replicas = [gateway(nodes, scoring=TTFT_EQUAL) for _ in range(2)]
    for i in range(ONE_BY_ONE):
        assert ask(replicas[i % 2].port, chat()).status == 200
    shares = [len(node.requests) / ONE_BY_ONE for node in nodes]
    assert sum(len(node.requests) for node in nodes) == ONE_BY_ONE
    assert all(0.15 <= share <= 0.35 for share in shares), shares
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert all(int(state.record(valkey, f"b{i}")["samples"]) > 0 for i in range(1, NODES + 1))
