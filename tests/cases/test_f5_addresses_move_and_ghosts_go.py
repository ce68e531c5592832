"""F5: addresses move: names are looked up again, and nodes that are gone stay gone."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
import redis

from app.cluster.embedded import free_port
from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.hosts import Hosts
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Script,
    chunk,
    content_event,
    json_answer,
    sse_answer,
)
from tests.support.rawnode import events as answer_of
from tests.support.servers import Gateway, ValkeyServer, wait_until
from tests.support.stagednode import StagedNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, RawNode, Request

INTERVAL_S = CONNECT_S = 0.5
NAME = "b1.nodes.test"
EQUAL = {"policy": "ttft", "ttft_floor_ms": 10_000, "ttft_prior_ms": 10_000}


def until(ended: threading.Event) -> Script:
    """A stream that talks until ``ended`` is set, and then ends well."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(ROLE_EVENT))
        while not ended.is_set():
            await peer.write(chunk(content_event("a")))
            await peer.sleep(0.05)
        await peer.write(chunk(FINISH_EVENT) + chunk(DONE_EVENT) + b"0\r\n\r\n")

    return script


@dataclass
class Bench:
    """Two replicas, of which one at a time makes the probes, before a node known by its name."""

    stack: contextlib.ExitStack
    valkey: redis.Redis
    hosts: Hosts
    port: int = field(default_factory=free_port)
    gateways: list[Gateway] = field(default_factory=list)
    _last: int = 1

    def node(self) -> StagedNode:
        """A node at an address that was not used before, and the port in the URL."""
        self._last += 1
        host = f"127.0.0.{self._last}"
        return self.stack.enter_context(StagedNode(json_answer(), host=host, port=self.port))

    def name(self, *nodes: StagedNode) -> None:
        """From now on the name means these."""
        self.hosts.set(NAME, *(node.host for node in nodes))

    def ask(self, seconds: float) -> Counter[int]:
        """Requests through both replicas in turn, for so long: their statuses."""
        statuses, end = Counter[int](), monotonic() + seconds
        while monotonic() < end:
            for gw in self.gateways:
                statuses[ask(gw.port, chat(stream=False)).status] += 1
            time.sleep(0.01)
        return statuses


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        bench = Bench(stack, valkey, Hosts(tmp_path_factory.mktemp("hosts")))
        bench.name(bench.node())
        settings = small_settings([], health={"interval_s": INTERVAL_S, "timeout_s": 0.5})
        settings["nodes"] = [{"id": "b1", "url": f"http://{NAME}:{bench.port}", "models": ["m"]}]
        for _ in range(2):
            gw = Gateway(settings, server.url, environment=bench.hosts.environment)
            bench.gateways.append(stack.enter_context(gw))
        yield bench
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        for gw in bench.gateways:
            assert_ended_cleanly(gw)


@pytest.mark.parametrize("old_place", ["listens on", "listens no more", "is gone"])
def test_requests_follow_a_name_that_moves_while_its_old_place(
    bench: Bench, old_place: str
) -> None:
    old, new = bench.node(), bench.node()
    bench.name(old)
    bench.ask(INTERVAL_S + CONNECT_S)
    assert old.requests, "connections to the old place are kept alive"
    bench.name(new)
    if old_place == "listens no more":
        old.shut()
    elif old_place == "is gone":
        old.stop()
    # Nobody sees an error: where connections are left, they are used until the move is known.
    assert set(bench.ask(INTERVAL_S + CONNECT_S)) == {200}
    at_old, at_new = len(old.requests), len(new.requests)
    assert at_new > 0
    statuses = bench.ask(0.5)
    assert len(old.requests) == at_old
    assert set(statuses) == {200}
    assert len(new.requests) - at_new == statuses[200]
    assert state.record(bench.valkey, "b1")["streak"] == "0"


def test_streams_go_on_where_they_began_and_a_name_may_come_back(bench: Bench) -> None:
    first, second = bench.node(), bench.node()
    ended = threading.Event()
    bench.name(first)
    bench.ask(INTERVAL_S + CONNECT_S)
    first.script = until(ended)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(gw.port)) for gw in bench.gateways]
        for client in clients:
            client.send(chat()).read_events(2)
        assert first.open == 2
        first.script = json_answer()
        bench.name(second)
        bench.ask(INTERVAL_S + CONNECT_S)
        assert second.requests
        assert first.open == 2
        at_second = len(second.requests)
        ended.set()
        assert all(client.read_all().endswith(DONE_EVENT) for client in clients)
        # Their connections are not used again either, though they have only now become idle.
        at_first = len(first.requests)
        bench.ask(0.3)
        assert len(first.requests) == at_first
        assert len(second.requests) > at_second
    bench.name(first)
    bench.ask(INTERVAL_S + CONNECT_S)
    at_second = len(second.requests)
    assert set(bench.ask(0.3)) == {200}
    assert len(second.requests) == at_second


def test_a_name_that_keeps_its_address_keeps_its_connections_even_while_it_cannot_be_looked_up(
    bench: Bench,
) -> None:
    node, other = bench.node(), bench.node()
    bench.name(node)
    bench.ask(INTERVAL_S + CONNECT_S)
    asked = len(node.requests)
    bench.ask(2 * INTERVAL_S)
    bench.name(node, other)  # one more address, as a service of several has
    bench.ask(2 * INTERVAL_S)
    bench.name(other, node)
    bench.ask(2 * INTERVAL_S)
    bench.name()
    assert set(bench.ask(4 * INTERVAL_S)) == {200}
    assert len({request.connection for request in node.requests[asked:]}) == 2, "one each"
    assert not other.requests


def keys_of(valkey: redis.Redis, node_id: str) -> list[str]:
    """Keys that are named after a node, and those of the pool that hold it."""
    found = []
    for key in map(str, valkey.scan_iter("*")):
        kind = valkey.type(key)
        held: Any = []
        if kind == "zset":
            held = valkey.zrange(key, 0, -1)
        elif kind == "set":
            held = valkey.smembers(key)
        if key.endswith(f":{node_id}") or node_id in held:
            found.append(key)
    return found


def held(stack: contextlib.ExitStack, gw: Gateway, nodes: list[RawNode]) -> dict[bytes, Any]:
    """Two streams on each of two equal nodes: clients by node."""
    clients: dict[bytes, Any] = {b"b1": [], b"b2": []}
    for _ in range(4):
        client = stack.enter_context(RawClient(gw.port))
        client.send(chat()).read_events(2)
        clients[client.headers[b"x-leaseway-node"]].append(client)
    assert [node.open for node in nodes] == [2, 2]
    return clients


def test_a_node_that_is_removed_gets_nothing_new_its_streams_finish_and_its_keys_go(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    ended = threading.Event()
    nodes = [raw_node(until(ended)), raw_node(until(ended))]
    b1, b2 = nodes
    sections = {"scoring": EQUAL, "leases": {"ttl_s": 1}, "health": {"interval_s": 0.25}}
    gw1 = gateway([b1, b2], capacity=64, **sections)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        streams = held(stack, gw1, nodes)
        with RawClient(gw1.port) as leaves:
            # The one that starts last has the last word on what is configured.
            gw2 = gateway([b1], capacity=64, **sections)  # type: ignore[arg-type]
            b1.script = b2.script = sse_answer(answer_of(2))
            probes = b2.probes
            for _ in range(30):
                for gw in (gw1, gw2):
                    done = ask(gw.port, chat())
                    assert (done.status, done.headers[b"x-leaseway-node"]) == (200, b"b1")
            leaves.send(chat()).read_all()
        assert len(b2.requests) == 2
        assert b2.probes <= probes + 1, "not probed any more"
        assert not any(client.ended for client in streams[b"b2"]), "its streams go on"
        assert state.load(valkey, "b2") == 2
        assert "b2" not in state.scores(valkey)

        streams[b"b2"][0].reset()
        wait_until(lambda: state.load(valkey, "b2") == 1, within_s=2, what="one has left")
        ended.set()
        assert streams[b"b2"][1].read_all().endswith(DONE_EVENT)
        wait_until(lambda: not keys_of(valkey, "b2"), within_s=2, what="its keys are gone")
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert keys_of(valkey, "b1")


def test_a_node_that_was_removed_while_a_replica_stood_still_does_not_come_back_with_it(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    ended = threading.Event()
    nodes = [raw_node(until(ended)), raw_node(until(ended))]
    b1, b2 = nodes
    sections = {"scoring": EQUAL, "leases": {"ttl_s": 1}, "health": {"interval_s": 0.25}}
    old = gateway([b1, b2], replica_id="old", capacity=64, **sections)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        streams = held(stack, old, nodes)
        old.signal(signal.SIGSTOP)
        new = gateway([b1], replica_id="new", capacity=64, **sections)  # type: ignore[arg-type]
        wait_until(
            lambda: state.snapshot(valkey).replicas == {"new"}, within_s=3, what="it is reaped"
        )
        wait_until(lambda: not keys_of(valkey, "b2"), within_s=2, what="b2's keys are gone")
        old.signal(signal.SIGCONT)
        b1.script = b2.script = sse_answer(answer_of(2))
        asked = len(b2.requests)
        wait_until(
            lambda: state.snapshot(valkey).replicas == {"new", "old"}, within_s=3, what="it is back"
        )
        wait_until(lambda: state.load(valkey, "b1") == 2, within_s=3, what="and so are its leases")
        for _ in range(30):
            for gw in (old, new):
                assert ask(gw.port, chat()).headers[b"x-leaseway-node"] == b"b1"
        assert len(b2.requests) == asked
        assert not keys_of(valkey, "b2")
        ended.set()
        for client in streams[b"b1"] + streams[b"b2"]:
            assert client.read_all().endswith(DONE_EVENT)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert not keys_of(valkey, "b2")
