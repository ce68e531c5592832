"""One JSON line per request on stdout, and no word of a request in any log."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from app.admission.keys import hash_key
from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support.rawclient import RawClient, ask
from tests.support.rawnode import (
    RawNode,
    events,
    hang,
    json_answer,
    reset_before_headers,
    sse_answer,
    write_then_reset,
)
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY, WRONG, NODE_KEY = "sk-access-1f2e3d", "sk-wrong-4c5b6a", "nk-node-7a8b9c"
MARK, ANSWER = "mark-of-the-prompt", "mark-of-the-answer"
TRACE = "0af7651916cd43dd8448eb211c80319c"
FIELDS = {
    "at", "replica", "request_id", "trace_id", "key", "route", "model", "stream", "node",
    "attempts", "outcome", "status", "degraded", "queue_ms", "ttft_ms", "e2e_ms", "prompt_tokens",
    "output_tokens", "bytes_in", "bytes_out",
}  # fmt: skip
# Every logger of the process, down to DEBUG; what the command line sets up comes too late.
EVERYTHING = """
import logging, sys
FORMAT = "%(levelname)s %(name)s: %(message)s"
logging.basicConfig(stream=sys.stderr, level=logging.DEBUG, format=FORMAT)
logging.Logger.setLevel = lambda *_: None
"""


class Bench:
    """A replica with keys over two nodes that log at every level there is."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, **sections: Any) -> None:
        (folder / "sitecustomize.py").write_text(EVERYTHING)
        server = stack.enter_context(ValkeyServer())
        self.nodes = [stack.enter_context(RawNode()) for _ in range(2)]
        settings: dict[str, Any] = small_settings(
            self.nodes, circuit={"failure_threshold": 1000, "failure_rate": 1}, **sections
        )
        settings["nodes"][0] |= {"weight": 1000, "api_key_env": "NODE_KEY"}
        settings["keys"] = [{"name": "team", "hash": hash_key(KEY)}]
        environment = {"PYTHONPATH": str(folder), "NODE_KEY": NODE_KEY}
        gw = Gateway(settings, server.url, replica_id="r7", environment=environment)
        self.gw = stack.enter_context(gw)

    def request(
        self, request_id: str, *headers: str, key: str = KEY, body: bytes | None = None,
        path: str = "/v1/chat/completions", **fields: Any,
    ) -> bytes:  # fmt: skip
        """A request with the mark in it, as bytes."""
        said = {"model": "m", "messages": [{"role": "user", "content": MARK}], **fields}
        body = json.dumps(said).encode() if body is None else body
        lines = [
            f"POST {path}?{MARK} HTTP/1.1", "host: g", "content-type: application/json",
            f"x-request-id: {request_id}", f"x-note: {MARK}", f"authorization: Bearer {key}",
            f"content-length: {len(body)}", *headers,
        ]  # fmt: skip
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def ask(self, request_id: str, *headers: str, **more: Any) -> RawClient:
        """One request, to its end."""
        return ask(self.gw.port, self.request(request_id, *headers, **more))

    def lines(self) -> dict[str, dict[str, Any]]:
        """All lines so far, by request id."""
        read = [json.loads(line) for line in self.gw.out.splitlines()]
        found = {line["request_id"]: line for line in read}
        assert len(found) == len(read), "two lines of one request"
        return found

    def line(self, request_id: str) -> dict[str, Any]:
        """The line of a request, when it is there."""
        line: dict[str, Any] = wait_until(
            lambda: self.lines().get(request_id), what=f"the line of {request_id}"
        )
        return line


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A replica that writes access lines."""
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("site")
        started = Bench(stack, folder, telemetry={"access_log": "json"})
        yield started
        out = started.gw.out
        assert_ended_cleanly(started.gw)
        assert out


def test_a_line_says_who_what_where_how_long_and_how_much(bench: Bench) -> None:
    bench.nodes[0].script = reset_before_headers()
    bench.nodes[1].script = sse_answer(events(5))
    answer = bench.ask("rq-1", f"traceparent: 00-{TRACE}-b7ad6b7169203331-01", stream=True)
    assert answer.status == 200
    line = bench.line("rq-1")
    assert set(line) == FIELDS
    assert abs(datetime.now(UTC) - datetime.fromisoformat(line["at"])) < timedelta(minutes=1)
    expected = {
        "replica": "r7", "request_id": "rq-1", "trace_id": TRACE, "key": "team",
        "route": "/v1/chat/completions", "model": "m", "stream": True, "node": "b2", "attempts": 2,
        "outcome": "ok", "status": 200, "degraded": False,
    }  # fmt: skip
    assert expected.items() <= line.items()
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["e2e_ms"]
    assert line["output_tokens"] >= 5
    assert line["bytes_in"] == len(bench.request("rq-1", stream=True).partition(b"\r\n\r\n")[2])
    assert line["bytes_out"] > len(answer.body)


def test_refusals_and_failures_have_lines_too(bench: Bench) -> None:
    for node in bench.nodes:
        node.script = json_answer(500)
    seen = {
        "rq-500": bench.ask("rq-500"),
        "rq-401": bench.ask("rq-401", key=WRONG),
        "rq-404": bench.ask("rq-404", model=f"{MARK}-model"),
        "rq-400": bench.ask("rq-400", body=b'{"model": "m", '),
    }
    for request_id, answer in seen.items():
        line = bench.line(request_id)
        assert line["status"] == answer.status == int(request_id[3:])
        assert line["outcome"] == ("failed" if answer.status == 500 else "rejected")
        assert (line["node"] is None) == (answer.status != 500)
        assert (line["key"] is None) == (answer.status == 401)
        assert line["model"] == ("m" if answer.status == 500 else None)
        assert (line["ttft_ms"], line["trace_id"]) == (None, None)


def test_a_client_that_leaves_has_a_line(bench: Bench) -> None:
    bench.nodes[0].script = hang()
    with RawClient(bench.gw.port) as client:
        client.send(bench.request("rq-gone"))
        wait_until(lambda: bench.nodes[0].open == 1, what="the node has the request")
    line = bench.line("rq-gone")
    assert (line["outcome"], line["status"], line["node"]) == ("abandoned", None, "b1")


def test_a_broken_stream_is_a_failed_200(bench: Bench) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    bench.nodes[0].script = write_then_reset(head + b"".join(events(3)[:2]))
    assert bench.ask("rq-cut", stream=True).status == 200
    line = bench.line("rq-cut")
    assert (line["outcome"], line["status"], line["attempts"]) == ("failed", 200, 1)


def test_no_content_and_no_key_is_in_any_log_at_any_level(bench: Bench) -> None:
    """DEBUG and up, of every logger in the process, through good and bad requests."""
    said = {"choices": [{"message": {"role": "assistant", "content": ANSWER}}]}
    bench.nodes[1].script = json_answer()
    for number, script in enumerate(
        (json_answer(200, said), json_answer(429), json_answer(401), reset_before_headers())
    ):
        bench.nodes[0].script = script
        bench.ask(f"rq-quiet-{number}")
        bench.ask(f"rq-wrong-{number}", key=WRONG)
        bench.ask(f"rq-odd-{number}", path=f"/v1/{MARK}")
        bench.line(f"rq-wrong-{number}")
    ask(bench.gw.port, f"POST /{MARK}\r\n\r\n".encode())
    assert "DEBUG " in bench.gw.log  # all of them are heard
    for secret in (MARK, ANSWER, KEY, WRONG, NODE_KEY, hash_key(KEY)):
        assert secret not in bench.gw.log
        assert secret not in bench.gw.out


def test_the_last_line_is_there_when_a_replica_ends(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        bench = Bench(stack, tmp_path, telemetry={"access_log": "json"})
        bench.nodes[0].script = json_answer()
        assert bench.ask("rq-last").status == 200
        assert_ended_cleanly(bench.gw)
        assert set(bench.lines()) == {"rq-last"}


def test_without_the_setting_nothing_is_written(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        bench = Bench(stack, tmp_path)
        bench.nodes[0].script = json_answer()
        assert bench.ask("rq-none").status == 200
        assert_ended_cleanly(bench.gw)
        assert bench.gw.out == ""
