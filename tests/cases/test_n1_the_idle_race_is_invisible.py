"""N1: the idle-connection race is invisible to clients, and nothing else is taken for it."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.fleet import MODEL_LIST
from tests.support.rawclient import ask, chat, post
from tests.support.rawnode import (
    COMPLETION,
    Peer,
    Request,
    close_without_answer,
    json_answer,
    reset_before_headers,
    sized,
)
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.servers import ValkeyServer

# 200 requests, with gaps of 0.9 to 1.1 s between those of one client. Each client has a node of
# its own, so that a connection is idle for just that gap.
CLIENTS, EACH = 40, 5
IDLE_S = 1.0
ANSWER = sized(200, json.dumps(COMPLETION).encode(), [(b"content-type", b"application/json")])


class _Connection(asyncio.Protocol):
    """Answers whole requests; once idle for ``IDLE_S`` it closes on the next one's first bytes."""

    def __init__(self, home: ClosesWhenReused) -> None:
        self._home = home
        self._held = bytearray()
        self._idle_since: float | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._home.connections += 1

    def data_received(self, data: bytes) -> None:
        idle_since, self._idle_since = self._idle_since, None
        if idle_since is not None and time.monotonic() - idle_since >= IDLE_S:
            self._home.raced += 1
            self._transport.close()
            return
        self._held += data
        head, blank, body = bytes(self._held).partition(b"\r\n\r\n")
        if blank and head.startswith(b"GET "):
            self._home.connections -= 1  # a probe, with a connection of its own
            self._transport.write(MODEL_LIST)
            self._transport.close()
            return
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if blank and len(body) == int(lines[b"content-length"]):
            self._held.clear()
            self._home.bodies.append(body)
            self._transport.write(ANSWER)
            self._idle_since = time.monotonic()


class ClosesWhenReused:
    """B1 of the case, on many ports. ``bodies`` are complete requests, ``raced`` the closes."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.raced = 0
        self.connections = 0
        self.ports: list[int] = []
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        for _ in range(CLIENTS):
            listen = self._loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
            self._servers.append(self._loop.run_until_complete(listen))
            self.ports.append(self._servers[-1].sockets[0].getsockname()[1])
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        for server in self._servers:
            server.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


def test_two_hundred_requests_around_the_idle_limit_all_succeed_and_reach_the_node_once(
    valkey: redis.Redis, valkey_server: ValkeyServer
) -> None:
    def client(number: int) -> list[tuple[int, bytes]]:
        draw = random.Random(number)
        answers = []
        for i in range(EACH):
            padding = "x" * (2 * 1024 * 1024) if (number + i) % 10 == 0 else ""
            body = json.dumps(
                {"model": f"m{number}", "id": f"{number}.{i}", "padding": padding}
            ).encode()
            done = ask(gw.port, post("/v1/completions", body))
            answers.append((done.status, done.headers[b"x-leaseway-attempts"]))
            time.sleep(draw.uniform(0.9, 1.1))
        return answers

    with ClosesWhenReused() as node:
        settings = small_settings([], timeouts={"connect_s": 2}, health={"interval_s": 3600})
        settings["nodes"] = [
            {"id": f"b{i}", "url": f"http://127.0.0.1:{port}", "models": [f"m{i}"]}
            for i, port in enumerate(node.ports)
        ]
        with Gateway(settings, valkey_server.url) as gw:
            with ThreadPoolExecutor(CLIENTS) as pool:
                answers = Counter(a for done in pool.map(client, range(CLIENTS)) for a in done)
            wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
            metrics = ask(gw.port, b"GET /metrics HTTP/1.1\r\nhost: g\r\n\r\n").body
            log = gw.log
    assert answers == {(200, b"1"): CLIENTS * EACH}
    ids = Counter(json.loads(body)["id"] for body in node.bodies)
    assert set(ids) == {f"{n}.{i}" for n in range(CLIENTS) for i in range(EACH)}
    assert set(ids.values()) == {1}
    assert sum(len(body) > 2 * 1024 * 1024 for body in node.bodies) == CLIENTS * EACH // 10
    assert node.raced >= 40, "the race did not happen often enough to say anything"
    assert node.connections < CLIENTS * EACH, "connections are not reused at all"
    for i in range(CLIENTS):
        record = state.record(valkey, f"b{i}")
        assert (record["streak"], record["circuit"]) == ("0", "closed")
    assert b'outcome="failed"' not in metrics
    assert "Traceback" not in log


def test_idle_connections_are_dropped_before_the_nodes_limit(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node()
    gw = gateway([node], timeouts={"node_idle_s": 0.3}, health={"interval_s": 3600})
    probes = node.connections
    for _ in range(2):
        assert ask(gw.port).status == 200
        wait_until(lambda: node.connected == 0, within_s=1, what="the idle connection is closed")
    assert node.connections - probes == 2
    assert len(node.requests) == 2


def test_a_close_after_the_whole_request_on_a_fresh_connection_is_a_failure_and_moves_on(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    first = threading.Event()
    closes, well = close_without_answer(), json_answer()

    async def script(request: Request, peer: Peer) -> None:
        """Whichever node is asked first closes without a byte."""
        if first.is_set():
            await well(request, peer)
        else:
            first.set()
            await closes(request, peer)

    nodes = [raw_node(script), raw_node(script)]
    gw = gateway(nodes)
    done = ask(gw.port, chat(stream=False))
    assert (done.status, done.headers[b"x-leaseway-attempts"]) == (200, b"2")
    assert [len(node.requests) for node in nodes] == [1, 1]  # never twice on the same node
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    used = done.headers[b"x-leaseway-node"].decode()
    other = {"b1": "b2", "b2": "b1"}[used]
    assert state.record(valkey, other)["streak"] == "1"
    assert state.record(valkey, used)["streak"] == "0"


def test_with_one_node_only_the_client_gets_a_502_and_the_node_the_request_once(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node()
    gw = gateway([node])
    for failures, script in enumerate((close_without_answer(), reset_before_headers()), 1):
        node.requests.clear()
        node.script = script
        done = ask(gw.port, chat(stream=False))
        assert done.status == 502
        assert done.json()["error"]["type"] == "upstream_error"
        assert len(node.requests) == 1
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        assert state.record(valkey, "b1")["streak"] == str(failures)


def test_a_reused_connection_that_closes_after_work_is_no_race(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node()
    gw = gateway([node])
    assert ask(gw.port).status == 200

    async def works_and_closes(request: Request, peer: Peer) -> None:
        await peer.sleep(1.5)
        peer.close()

    node.script = works_and_closes
    assert ask(gw.port).status == 502
    first, second = (request.connection for request in node.requests)  # asked once
    assert first == second, "not reused"
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert state.record(valkey, "b1")["streak"] == "1"
