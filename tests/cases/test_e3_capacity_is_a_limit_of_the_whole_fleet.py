"""E3: capacity is a fleet-wide limit.

The catalogue's requests of 2 s take 0.4 s here: sixty at one instant overlap all the same.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    Script,
    chunk,
    content_event,
    events,
    json_answer,
    sse_answer,
)
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.relay import Relay

CAPACITY, AT_ONCE, TAKES_S = 4, 60, 0.4
KINDS = {
    "in one piece": [chat(stream=False)],
    "streams": [chat()],
    "both, over two models of the node": [
        chat(), chat(model="n"), chat(stream=False), chat(stream=False, model="n"),
    ],
}  # fmt: skip


async def _takes_its_time(request: Request, peer: Peer) -> None:
    if request.json()["stream"]:
        whole = events(2)
        await sse_answer([b"".join(whole[:-1]), whole[-1]], TAKES_S)(request, peer)
    else:
        await json_answer(after_s=TAKES_S)(request, peer)


def _until(ended: threading.Event) -> Script:
    """A stream that is held until ``ended`` is set."""

    async def script(request: Request, peer: Peer) -> None:
        head = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"
        await peer.write(head + chunk(ROLE_EVENT) + chunk(content_event("a")))
        while not ended.is_set():
            await peer.sleep(0.02)
        await peer.write(chunk(FINISH_EVENT) + chunk(DONE_EVENT) + b"0\r\n\r\n")

    return script


def _at_once(replicas: list[Gateway], requests: list[bytes], n: int = AT_ONCE) -> list[RawClient]:
    """``n`` requests at one instant, over all replicas; the ended clients."""
    start = threading.Barrier(n)

    def one(i: int) -> RawClient:
        with RawClient(replicas[i % len(replicas)].port, timeout_s=20) as client:
            start.wait(20)
            client.send(requests[i // len(replicas) % len(requests)]).read_all()
            return client

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


def _served(clients: list[RawClient]) -> int:
    """How many were served; each of the others was told when to come back."""
    for client in clients:
        assert client.complete
        if client.status != 200:
            assert client.status in {429, 503}
            assert int(client.headers[b"retry-after"]) >= 1
            assert set(client.json()["error"]) == {"message", "type", "param", "code"}
        elif client.headers[b"content-type"].startswith(b"text/event-stream"):
            assert client.body.endswith(DONE_EVENT)
    return sum(client.status == 200 for client in clients)


@pytest.mark.parametrize("kind", list(KINDS))
def test_sixty_at_one_instant_through_two_replicas_are_never_more_than_four_at_the_node(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, kind: str
) -> None:
    node = raw_node(_takes_its_time)
    node.models = ("m", "n")
    replicas = [gateway([node], capacity=CAPACITY) for _ in range(2)]
    for _ in range(2):
        before = len(node.requests)
        with state.sampling(valkey) as seen:
            served = _served(_at_once(replicas, KINDS[kind]))
            wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        assert node.max_open == CAPACITY
        assert seen.highest["b1"] <= CAPACITY
        assert served == len(node.requests) - before >= CAPACITY
    # Nothing was lost: as many at once as ever.
    assert _served(_at_once(replicas, KINDS[kind], CAPACITY)) == CAPACITY
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_a_capacity_that_was_changed_counts_at_once_for_what_runs_and_for_what_comes(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    may_end = [threading.Event() for _ in range(3)]
    patient = {"stall_s": 60}
    node = raw_node(_until(may_end[0]))
    gw1 = gateway([node], capacity=4, timeouts=patient)
    with contextlib.ExitStack() as stack:

        def hold(n: int) -> list[RawClient]:
            held = [stack.enter_context(RawClient(gw1.port)) for _ in range(n)]
            for client in held:
                client.send(chat()).read_events(2)
                assert client.status == 200
            return held

        first = hold(3)
        node.script = _until(may_end[1])
        hold(1)
        node.script = json_answer()
        # The operator lowers it under what is running, and later raises it.
        gw2 = gateway([node], capacity=2, timeouts=patient)
        for gw in (gw1, gw2):
            assert _served([ask(gw.port)]) == 0
        may_end[0].set()
        assert all(client.read_all().endswith(DONE_EVENT) for client in first)
        wait_until(lambda: state.load(valkey, "b1") == 1, within_s=2, what="three have ended")
        for gw in (gw1, gw2):
            assert ask(gw.port).status == 200
            # The other replica may ask before this lease's release is with Redis.
            wait_until(lambda: state.load(valkey, "b1") == 1, within_s=2, what="released")
        node.script = _until(may_end[2])
        hold(1)
        for gw in (gw1, gw2):
            assert _served([ask(gw.port)]) == 0, "two are running"

        gw3 = gateway([node], capacity=6, timeouts=patient)
        node.max_open = 2
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(_at_once, [gw1, gw2, gw3], [chat()], 20)
            wait_until(lambda: node.open == 6, what="four more are running")
            assert state.load(valkey, "b1") == 6
            may_end[1].set()
            may_end[2].set()
            assert _served(asked.result()) >= 4
        assert node.max_open == 6
        assert state.record(valkey, "b1")["circuit"] == "closed"
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_a_failed_attempt_moves_to_another_node_only_while_that_has_room(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    fails, well = raw_node(json_answer(500, b"no")), raw_node(_takes_its_time)
    # The circuit stays closed: all the time requests leave b1 for b2.
    circuit = {"failure_threshold": 10_000, "failure_rate": 1}
    replicas = [gateway([fails, well], capacity=CAPACITY, circuit=circuit) for _ in range(2)]
    with state.sampling(valkey) as seen:
        clients = _at_once(replicas, [chat(stream=False)])
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert well.max_open == CAPACITY
    assert fails.max_open <= CAPACITY
    assert max(seen.highest.values()) <= CAPACITY
    assert fails.requests
    assert {client.status for client in clients} <= {200, 429, 500, 503}
    assert sum(client.status == 200 for client in clients) == len(well.requests)


def test_without_redis_each_replica_keeps_to_its_share(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay
) -> None:
    node = raw_node(_takes_its_time)
    replicas = [
        gateway(
            [node], redis_url=relay.url, replica_id=f"gw{i}", capacity=CAPACITY,
            leases={"ttl_s": 1.5},
        )
        for i in (1, 2)
    ]  # fmt: skip
    for _ in range(2):  # whole heartbeats: gw1 has seen gw2
        beat = valkey.zscore(state.KEYS.replicas, "gw1")
        wait_until(
            lambda b=beat: valkey.zscore(state.KEYS.replicas, "gw1") != b, what="gw1's heartbeat"
        )
    relay.pause()
    clients = _at_once(replicas, [chat(stream=False)])
    relay.resume()
    assert _served(clients) == len(node.requests) >= CAPACITY
    assert node.max_open == CAPACITY
    assert {client.status for client in clients} == {200, 429}
    assert all(client.headers[b"x-leaseway-degraded"] == b"1" for client in clients)
    wait_until(
        lambda: state.unloaded(valkey) and all(gw.ready() for gw in replicas),
        what="back to shared state",
    )
