"""2,000 requests released at once over three replicas land evenly on four equal nodes.

Three looks at the same thing. MONITOR shows every single step of the counters in the order in
which Redis took it, so "at every instant" is meant literally. Samples read counters and leases
in one script. The nodes' own counts are the truth that both must agree with. (On the way up a
node's count lags behind its leases by the time that requests take to travel, and 2,000
travel in no particular order: only what was decided can be compared while they do.)
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import threading
from collections import Counter, deque
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import orjson
import pytest

from tests.support.fleet import CHAT, MODEL, MODEL_LIST, Fleet, chat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

REQUESTS = 2000
NODES = ("n1", "n2", "n3", "n4")
EACH = REQUESTS // len(NODES)
ANSWER = orjson.dumps(
    {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
)
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)
STEP = re.compile(
    rb'"(?P<verb>INCR|DECR|SET|DEL|HSETNX|HDEL)" "lw:\{default\}:'
    rb'(?P<kind>active|leases):(?P<of>\w+)"(?: "(?P<field>[^"]*)")?',
    re.IGNORECASE,
)


class Monitor:
    """``with Monitor(port) as monitor``: all that Redis does, inside scripts too, in order."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._read, name="monitor", daemon=True)

    def _read(self) -> None:
        while part := self._socket.recv(1 << 18):
            self._parts.append(part)

    def __enter__(self) -> Self:
        self._socket.sendall(b"MONITOR\r\n")
        assert self._socket.recv(5) == b"+OK\r\n"
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._socket.close()

    def replay(self) -> Replay:
        """Everything so far, step by step."""
        return replay(b"".join(self._parts))


@dataclass(frozen=True, slots=True)
class Replay:
    """What a walk through every step of the counters has found."""

    steps: int
    widest_up: int
    """Max - min over the nodes while requests were being leased."""
    most: int
    lowest: int
    left: int
    unequal: int
    """Steps after which the counters did not add up to the leases."""


def replay(log: bytes) -> Replay:
    active: Counter[bytes] = Counter()
    leases: set[bytes] = set()
    steps = widest = most = unequal = lowest = 0
    rising = True
    for step in STEP.finditer(log):
        verb, of, field = step["verb"].upper(), step["of"], step["field"] or b""
        if step["kind"] == b"leases":
            (leases.add if verb == b"HSETNX" else leases.discard)(field)
            continue
        assert verb in {b"INCR", b"DECR"}, step[0]  # nothing is ever set by hand
        steps += 1
        active[of] += 1 if verb == b"INCR" else -1
        rising = rising and verb == b"INCR"
        unequal += active.total() != len(leases)
        lowest = min(lowest, *active.values())
        most = max(most, active.total())
        if rising:
            levels = [active[node.encode()] for node in NODES]
            widest = max(widest, max(levels) - min(levels))
    return Replay(steps, widest, most, lowest, active.total(), unequal)


class Truth:
    """Requests inside each node, and the widest (max - min) that they have been apart."""

    def __init__(self) -> None:
        self.open: Counter[str] = Counter(dict.fromkeys(NODES, 0))
        self.widest = 0

    def change(self, node: str, by: int) -> None:
        """A request has come in full, or its answer is written."""
        self.open[node] += by
        self.widest = max(self.widest, max(self.open.values()) - min(self.open.values()))


class HoldingNode(asyncio.Protocol):
    """A connection of a node that holds every request until it is told to answer."""

    transport: asyncio.Transport

    def __init__(self, name: str, truth: Truth, held: deque[HoldingNode]) -> None:
        self._name, self._truth, self._held = name, truth, held
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, blank, body = self._data.partition(b"\r\n\r\n")
        if not blank:
            return
        if head.startswith(b"GET "):
            self._data = b""
            self.transport.write(MODEL_LIST)
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) == length:
            self._data = b""
            self._truth.change(self._name, 1)
            self._held.append(self)

    def answer(self) -> None:
        """Answer the request that is held."""
        self._truth.change(self._name, -1)
        self.transport.write(RESPONSE)


class Asker(asyncio.Protocol):
    """A client connection, open before the start, that sends one request when released."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.answer += data

    @property
    def served(self) -> bool:
        """Whether the whole answer has come, and is a good one."""
        return self.answer.startswith(b"HTTP/1.1 200") and self.answer.endswith(ANSWER)


@pytest.fixture(autouse=True)
def _enough_files() -> None:
    """An end of each of 4,000 sockets is in this process; replicas inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 16_384 if hard == resource.RLIM_INFINITY else min(hard, 16_384)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@asynccontextmanager
async def holding_nodes(truth: Truth) -> AsyncIterator[dict[str, tuple[int, deque[HoldingNode]]]]:
    """Port and held requests of each node, by name."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        nodes: dict[str, tuple[int, deque[HoldingNode]]] = {}
        for name in NODES:
            held: deque[HoldingNode] = deque()

            def connection(name: str = name, held: deque[HoldingNode] = held) -> HoldingNode:
                return HoldingNode(name, truth, held)

            server = await loop.create_server(connection, "127.0.0.1", 0, backlog=4096)
            stack.callback(server.close)
            nodes[name] = (server.sockets[0].getsockname()[1], held)
        yield nodes


async def until(condition: Callable[[], object], what: str, within_s: float = 30.0) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.002)


async def connect_askers(fleet: Fleet) -> list[Asker]:
    """Open connections, in turn over the replicas."""
    loop = asyncio.get_running_loop()
    ports = [replica.port for replica in fleet.replicas]
    askers: list[Asker] = []
    for start in range(0, REQUESTS, 100):
        made = await asyncio.gather(
            *(
                loop.create_connection(Asker, "127.0.0.1", ports[number % len(ports)])
                for number in range(start, start + 100)
            )
        )
        askers += [asker for _, asker in made]
    return askers


def request_bytes() -> bytes:
    body = orjson.dumps(chat(max_tokens=1))
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


@pytest.mark.parametrize("policy", ["ttft", "least_conn"])
async def test_two_thousand_at_once_are_never_more_than_two_apart(policy: str) -> None:
    truth = Truth()
    async with holding_nodes(truth) as nodes:
        settings = [
            {"id": name, "url": f"http://127.0.0.1:{port}", "models": [MODEL], "capacity": REQUESTS}
            for name, (port, _) in nodes.items()
        ]
        with (
            Fleet(
                settings,
                scoring={"policy": policy},
                timeouts={"connect_s": 20},
                redis={"call_timeout_ms": 20_000},
            ) as fleet,
            fleet.watched() as watch,
            Monitor(fleet.valkey.port) as monitor,
        ):
            await fleet.nodes_well(*nodes)
            askers = await connect_askers(fleet)
            ask = request_bytes()
            for asker in askers:
                asker.transport.write(ask)
            await until(lambda: truth.open.total() == REQUESTS, "all requests are at a node")

            top = fleet.books()
            assert truth.open == dict.fromkeys(NODES, EACH)
            assert top.active == dict(truth.open)
            assert top.held == REQUESTS

            truth.widest = 0
            for turn in range(EACH):
                for _, held in nodes.values():
                    held.popleft().answer()
                if turn % 20 == 0:
                    await asyncio.sleep(0)
            assert truth.widest <= 2
            await until(lambda: all(asker.served for asker in askers), "all are answered")
            await until(fleet.settled, "all leases are given back")
            for asker in askers:
                asker.transport.close()

        found = monitor.replay()
        print(found)
        assert found.steps == 2 * REQUESTS
        assert found.most == REQUESTS
        assert found.widest_up <= 2
        assert (found.lowest, found.left, found.unequal) == (0, 0, 0)
        assert watch.most_held == REQUESTS
