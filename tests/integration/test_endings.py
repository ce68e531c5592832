"""Endings that are neither an error nor good: nothing is invented, and no cut looks whole."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import ask, chat
from tests.support.rawnode import (
    COMPLETION,
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    RawNode,
    chunk,
    content_event,
    json_answer,
    raw_answer,
    sized,
)
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawclient import RawClient
    from tests.support.rawnode import Peer, Request, Script

JSON = [(b"content-type", b"application/json")]
ANSWER = json.dumps(COMPLETION).encode()
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
TOKENS = [ROLE_EVENT, content_event("a"), content_event("b")]


@dataclass(frozen=True)
class Bench:
    """One replica over two nodes; ``valkey`` reads their Redis."""

    gw: Gateway
    nodes: list[RawNode]
    valkey: redis.Redis

    def first_then(self, first: Script, then: Script) -> None:
        """The first request of all is answered by ``first``, on whichever node."""
        turns = itertools.count()

        async def script(request: Request, peer: Peer) -> None:
            await (then if next(turns) else first)(request, peer)

        for node in self.nodes:
            node.requests.clear()
            node.script = script

    def ask(self, *, stream: bool) -> RawClient:
        # Without the question for counts, which is not the matter here.
        asked = {"include_usage": False}
        body = chat(stream_options=asked) if stream else chat(stream=False)
        client = ask(self.gw.port, body)
        wait_until(lambda: state.unloaded(self.valkey), what="load = 0")
        return client

    def attempts(self, outcome: str) -> int:
        """Attempts that have ended so, so far."""
        page = ask(self.gw.port, b"GET /metrics HTTP/1.1\r\nhost: g\r\n\r\n").body.decode()
        lines = [line for line in page.splitlines() if f'outcome="{outcome}"' in line]
        counts = [line for line in lines if line.startswith("leaseway_attempts_total{")]
        return sum(int(float(line.rpartition(" ")[2])) for line in counts)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        nodes = [stack.enter_context(RawNode()) for _ in range(2)]
        settings = small_settings(nodes, circuit={"failure_threshold": 1000, "failure_rate": 1.0})
        settings["retries"] = {"max_attempts": 2}
        gw = stack.enter_context(Gateway(settings, server.url))
        yield Bench(gw, nodes, valkey)
        assert gw.stop() == 0
        assert "Traceback" not in gw.log, gw.log


# Before the first byte: another node is asked, and the books say why

BAD_200: dict[str, tuple[bytes, bool]] = {
    "an empty body": (sized(200, b"", JSON), False),
    "no chunk": (OK + CHUNKED + b"0\r\n\r\n", False),
    "an empty stream": (STREAM_HEAD + CHUNKED + b"0\r\n\r\n", True),
    "an empty stream that only closes": (STREAM_HEAD + b"\r\n", True),
    "less than its length": (OK + b"content-length: 999\r\n\r\n" + ANSWER, False),
    "chunks without an end": (OK + CHUNKED + chunk(ANSWER), False),
    "half of JSON, closed": (OK + b"\r\n" + ANSWER[:40], False),
    "half of JSON with its length": (sized(200, ANSWER[:40], JSON), False),
    "half of JSON in chunks": (OK + CHUNKED + chunk(ANSWER[:40]) + b"0\r\n\r\n", False),
    "JSON with something behind it": (sized(200, ANSWER + b"}", JSON), False),
}


@pytest.mark.parametrize("name", BAD_200)
def test_a_200_that_says_nothing_or_half_is_asked_of_another_node(bench: Bench, name: str) -> None:
    bad, stream = BAD_200[name]
    bench.first_then(raw_answer(bad), json_answer())
    failed, ok = bench.attempts("failed"), bench.attempts("ok")
    client = bench.ask(stream=stream)
    assert (client.status, client.json()) == (200, COMPLETION)
    assert client.headers[b"x-leaseway-attempts"] == b"2"
    assert [len(node.requests) for node in bench.nodes] == [1, 1]
    assert (bench.attempts("failed"), bench.attempts("ok")) == (failed + 1, ok + 1)


@pytest.mark.parametrize("name", BAD_200)
def test_when_no_node_does_better_the_client_is_told_or_gets_what_the_node_said(
    bench: Bench, name: str
) -> None:
    bad, stream = BAD_200[name]
    bench.first_then(raw_answer(bad), raw_answer(bad))
    failed, ok = bench.attempts("failed"), bench.attempts("ok")
    client = bench.ask(stream=stream)
    assert client.complete
    said = {
        "half of JSON with its length": ANSWER[:40],
        "half of JSON in chunks": ANSWER[:40],
        "JSON with something behind it": ANSWER + b"}",
    }
    if name in said:  # whole, as far as HTTP knows: the node's own word, not the gateway's
        assert (client.status, client.body) == (200, said[name])
    else:
        assert client.status == 502
        assert client.json()["error"]["type"] == "upstream_error"
    assert (bench.attempts("failed"), bench.attempts("ok")) == (failed + 2, ok)


# In a stream: what the node ended properly passes as it is

PROPER_ENDS: dict[str, list[bytes]] = {
    "no [DONE]": [*TOKENS, FINISH_EVENT],
    "no finish": [*TOKENS, DONE_EVENT],
    "neither": TOKENS,
    "[DONE] alone": [DONE_EVENT],
    "no blank line at the end": [*TOKENS, FINISH_EVENT, DONE_EVENT[:-2]],
    "[DONE] twice": [*TOKENS, FINISH_EVENT, DONE_EVENT, DONE_EVENT],
}


@pytest.mark.parametrize("name", PROPER_ENDS)
def test_nothing_is_invented_for_a_stream_that_its_node_has_ended(bench: Bench, name: str) -> None:
    parts = PROPER_ENDS[name]
    answer = STREAM_HEAD + CHUNKED + b"".join(map(chunk, parts)) + b"0\r\n\r\n"
    bench.first_then(raw_answer(answer), json_answer(500))
    failed, ok = bench.attempts("failed"), bench.attempts("ok")
    client = bench.ask(stream=True)
    assert client.complete
    assert client.body == b"".join(parts)
    assert (bench.attempts("failed"), bench.attempts("ok")) == (failed, ok + 1)


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
def test_the_nodes_status_body_and_retry_after_are_the_clients(bench: Bench, status: int) -> None:
    told = {"error": {"message": "no", "type": "x", "param": None, "code": status}}
    wait = b"0.01" if status == 503 else b"17"  # for so long a busy node is left alone
    headers = [*JSON, (b"retry-after", wait), (b"x-ratelimit-remaining-tokens", b"0")]
    bench.first_then(json_answer(status, told, headers), json_answer(status, told, headers))
    for stream in (False, True):
        wait_until(lambda: min(state.scores(bench.valkey).values()) > 0, what="both may be asked")
        client = bench.ask(stream=stream)
        assert (client.status, client.json()) == (status, told)
        assert client.headers[b"retry-after"] == wait
        assert client.headers[b"x-ratelimit-remaining-tokens"] == b"0"
