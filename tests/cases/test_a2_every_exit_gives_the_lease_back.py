"""A2: every error exit gives the lease back exactly once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    RawNode,
    Request,
    Script,
    chunk,
    close_without_answer,
    content_event,
    event,
    events,
    hang,
    json_answer,
    raw_answer,
    reset_before_headers,
    sse_answer,
    write_then_reset,
)
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cases.conftest import StartGateway, StartNode

REQUESTS = 20
CHUNKED_HEAD = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"
# A chunk that promises 4096 bytes and brings 10: the parser is in the middle of it.
HALF_A_CHUNK = CHUNKED_HEAD + chunk(ROLE_EVENT) + b'1000\r\ndata: {"x"'
FIRST_BYTE_S = 1.5


@dataclass(frozen=True)
class Exit:
    """One way for an attempt to end: what the node does, and the status that its client gets.

    Without a script the node's port is closed; ``deaf`` is a port that takes no SYN.
    """

    name: str
    script: Script | None
    status: int
    stream: bool = True
    deaf: bool = False


EXITS = [
    Exit("connect refused", None, 502),
    Exit("connect timeout", None, 504, deaf=True),
    Exit("reset before headers", reset_before_headers(), 502),
    Exit("close before headers", close_without_answer(), 502),
    Exit("502", json_answer(502, b"bad gateway"), 502),
    Exit("504 after a while", json_answer(504, b"timed out", after_s=1), 504),
    Exit("400", json_answer(400, b"{}"), 400),
    Exit("malformed status line", raw_answer(b"HTTP/1.1 abc Nonsense\r\n\r\n"), 502),
    Exit("headers then reset", write_then_reset(CHUNKED_HEAD), 502),
    Exit("reset inside a chunk", write_then_reset(HALF_A_CHUNK), 200),
    Exit("close inside a chunk", raw_answer(HALF_A_CHUNK), 200),
    Exit("stream that ends", sse_answer(events(5)), 200),
    Exit("stream that ends by the close", sse_answer(events(5), chunked=False), 200),
    Exit("answer in one piece", json_answer(), 200, stream=False),
    Exit("error event in a stream",
         sse_answer([ROLE_EVENT, event({"error": {"message": "x"}})], 0.05), 200),
    Exit("first-byte timeout", hang(), 504),
    Exit("stall", write_then_reset(CHUNKED_HEAD + chunk(ROLE_EVENT), after_s=60), 200),
]  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """One replica in front of one node for each exit; each node serves a model of its own."""

    valkey: redis.Redis
    gateway: Gateway
    nodes: list[RawNode]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        nodes = [RawNode(case.script, models=(f"m{i}",)) for i, case in enumerate(EXITS, 1)]
        leaving = contextlib.ExitStack()  # nodes that are well when they are probed, and then go
        for node, case in zip(nodes, EXITS, strict=True):
            (leaving if case.script is None else stack).enter_context(node)
        settings = small_settings(
            nodes,
            capacity=REQUESTS,
            timeouts={"first_token_s": FIRST_BYTE_S},
            circuit={"failure_threshold": 10_000, "failure_rate": 1},  # all 20 reach the node
            health={"interval_s": 3600},
            scoring={"sample_max_age_s": 3600},
        )
        gateway = stack.enter_context(Gateway(settings, server.url))
        leaving.close()
        for node, case in zip(nodes, EXITS, strict=True):
            if case.deaf:
                stack.enter_context(_deaf(node.port))
        yield Bench(valkey, gateway, nodes)
        assert_ended_cleanly(gateway)


@pytest.mark.parametrize("i", range(1, len(EXITS) + 1), ids=[case.name for case in EXITS])
def test_an_attempt_gives_its_lease_back_when_it_ends_with(bench: Bench, i: int) -> None:
    case, node, valkey = EXITS[i - 1], bench.nodes[i - 1], bench.valkey
    with state.sampling(valkey) as seen:
        clients = _twenty(bench.gateway.port, chat(model=f"m{i}", stream=case.stream))
        _unloaded_within_2_s(valkey)
    assert [client.status for client in clients] == [case.status] * REQUESTS
    assert all(client.complete for client in clients) or "chunk" in case.name
    if case.script is not None:
        assert len(node.requests) == REQUESTS
    assert seen.highest[f"b{i}"] <= REQUESTS
    state.assert_scores_equal_records(valkey, f"m{i}")


def test_the_lease_is_held_until_the_body_ends_not_until_the_headers_come(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    may_end = threading.Event()

    async def halfway(request: Request, peer: Peer) -> None:
        await peer.write(CHUNKED_HEAD + chunk(ROLE_EVENT) + chunk(content_event("a")))
        while not may_end.is_set():
            await peer.sleep(0.01)
        await peer.write(chunk(FINISH_EVENT) + chunk(DONE_EVENT) + b"0\r\n\r\n")

    gw = gateway([raw_node(halfway)])
    with RawClient(gw.port) as client:
        client.send(chat()).read_events(2)
        for _ in range(20):
            assert state.load(valkey, "b1") == 1
            assert [lease.node for lease in state.leases(valkey)] == ["b1"]
            time.sleep(0.01)
        may_end.set()
        client.read_all()
        assert client.complete
    _unloaded_within_2_s(valkey)


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "in one piece"])
def test_the_lease_comes_back_when_the_gateways_own_accounting_raises(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, tmp_path: Path, stream: bool
) -> None:
    # The replica's process loads this before anything else: booking usage now fails.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'serve' in sys.orig_argv:\n"
        "    from app.gateway import observe\n"
        "    def broken(self, usage):\n"
        "        raise ZeroDivisionError('accounting is broken')\n"
        "    observe.Observed.book_usage = broken\n"
    )
    usage = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    whole = [*events(5)[:-1], usage, DONE_EVENT]
    node = raw_node(sse_answer(whole, 0.001) if stream else json_answer())
    gw = gateway(
        [node],
        capacity=REQUESTS,
        environment={"PYTHONPATH": f"{tmp_path}:."},
        log_may_show="accounting is broken",
    )
    with state.sampling(valkey):
        clients = _twenty(gw.port, chat(stream=stream))
        _unloaded_within_2_s(valkey)
    assert len(node.requests) == REQUESTS, "the fault is ours: no other attempt, no open circuit"
    assert "accounting is broken" in gw.log
    if stream:
        # 500 when usage came in the first read already, before a byte had gone to the client.
        assert all(client.cut or client.status == 500 for client in clients), "no proper end"
    else:
        assert [client.status for client in clients] == [500] * REQUESTS
        assert clients[0].json()["error"]["type"] == "server_error"
    assert state.record(valkey, "b1")["streak"] == "0"
    assert ask(gw.port, chat(stream=stream)).ended


def _twenty(port: int, request: bytes) -> list[RawClient]:
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(lambda _: ask(port, request), range(REQUESTS)))


def _unloaded_within_2_s(valkey: redis.Redis) -> None:
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")


@contextlib.contextmanager
def _deaf(port: int) -> Iterator[None]:
    """Make ``port`` one whose backlog is full: the kernel drops every further SYN."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=0))
        assert listener.getsockname()[1] == port
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                filler.connect(("127.0.0.1", port))
        yield
