"""2,000 requests released at once over three replicas land evenly on four equal nodes."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter, deque
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, cast

import orjson
import pytest

from tests.support.fleet import CHAT, MODEL, Fleet, chat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

REQUESTS = 2000
NODES = ("n1", "n2", "n3", "n4")
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


class Truth:
    """Requests inside each node, and the widest that they were ever apart, looked at on every
    single change. ``arrived`` holds the most uneven and the last count of the way up."""

    def __init__(self) -> None:
        self.open: Counter[str] = Counter(dict.fromkeys(NODES, 0))
        self.widest = 0
        self.changes = 0

    def change(self, node: str, by: int) -> None:
        """A request has come in full, or its answer is written."""
        self.open[node] += by
        self.changes += 1
        self.widest = max(self.widest, self.spread)

    @property
    def spread(self) -> int:
        """Max − min over the nodes, now."""
        return max(self.open.values()) - min(self.open.values())


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
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.answer += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    @property
    def served(self) -> bool:
        """Whether the whole answer has come, and is a good one."""
        return self.answer.startswith(b"HTTP/1.1 200") and self.answer.endswith(ANSWER)


@pytest.fixture(autouse=True)
def _enough_files() -> None:
    """Both ends of 4,000 sockets are in this process; replicas inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 16_384) if hard != resource.RLIM_INFINITY else 16_384
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
async def test_two_thousand_at_once_are_never_more_than_two_apart(
    policy: str, record_property: Callable[[str, object], None]
) -> None:
    truth = Truth()
    async with holding_nodes(truth) as nodes:
        settings = [
            {
                "id": name,
                "url": f"http://127.0.0.1:{port}",
                "models": [MODEL],
                "capacity": REQUESTS,
            }
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
        ):
            askers = await connect_askers(fleet)
            ask = request_bytes()
            for asker in askers:
                asker.transport.write(ask)
            await until(lambda: truth.open.total() == REQUESTS, "all requests are at a node")

            up, books = truth.widest, fleet.books()
            assert truth.open == dict.fromkeys(NODES, REQUESTS // len(NODES))
            assert books.active == dict(truth.open)
            assert books.held == REQUESTS
            print("way up", up, truth.changes, watch.seen)

            for turn in range(REQUESTS // len(NODES)):
                for _, held in nodes.values():
                    held.popleft().answer()
                if turn % 20 == 0:
                    await asyncio.sleep(0)
            await until(lambda: all(asker.served for asker in askers), "all are answered")
            await until(fleet.settled, "all leases are given back")
            for asker in askers:
                asker.transport.close()
            record_property("widest_on_the_way_up", up)
            record_property("books_read", watch.seen)
            assert watch.most_held == REQUESTS
        assert truth.widest <= 2
        assert not truth.open.total()
