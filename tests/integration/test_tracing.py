"""Traces of real replicas: what reaches nodes, what reaches a collector, and what it costs off."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest

from app.admission.keys import hash_key
from app.cluster.embedded import free_port
from app.errors import ConfigError
from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support.collector import Collector
from tests.support.rawclient import RawClient, ask
from tests.support.rawnode import RawNode, events, json_answer, sse_answer
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"
STATE = "vendor=a1b2,other=t61rcWkgMzE"
KEY, MARK = "sk-trace-1f2e3d", "mark-of-the-prompt"
SERVER, CLIENT, ERROR = 2, 3, 2  # of the protocol: span kinds, status code
SAMPLED = 1  # of the flags at the end of a traceparent


@dataclass
class Traced:
    """A replica, its nodes and the collector that it exports to."""

    gw: Gateway
    nodes: list[RawNode]
    collector: Collector

    def ask(self, *headers: str, stream: bool = True, model: str = "m") -> RawClient:
        """One request."""
        body = (
            f'{{"model": "{model}", "stream": {str(stream).lower()}, '
            f'"messages": [{{"role": "user", "content": "{MARK}"}}]}}'
        ).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1", "host: g", "content-type: application/json",
            f"authorization: Bearer {KEY}", f"content-length: {len(body)}", *headers,
        ]  # fmt: skip
        return ask(self.gw.port, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


@contextlib.contextmanager
def replica(environment: dict[str, str] | None = None, **telemetry: Any) -> Iterator[Traced]:
    """A replica over two nodes. The first is preferred; it must end cleanly."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        collector = stack.enter_context(Collector())
        nodes = [stack.enter_context(RawNode()) for _ in range(2)]
        if telemetry.get("tracing"):
            telemetry.setdefault("otlp_endpoint", collector.url)
        settings: dict[str, Any] = small_settings(
            nodes, circuit={"failure_threshold": 1000, "failure_rate": 1}, telemetry=telemetry
        )
        settings["nodes"][0]["weight"] = 1000
        settings["keys"] = [{"name": "team", "hash": hash_key(KEY)}]
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "20", **(environment or {})}
        gw = stack.enter_context(
            Gateway(settings, server.url, replica_id="r7", environment=environment)
        )
        yield Traced(gw, nodes, collector)
        assert_ended_cleanly(gw)


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    """A replica that traces."""
    with replica(tracing=True, access_log="json") as started:
        yield started


def seen(node: RawNode) -> tuple[bytes | None, bytes | None]:
    """The trace context of the last request that reached a node."""
    last = [request for request in node.requests if request.method == "POST"][-1]
    return last.header(b"traceparent"), last.header(b"tracestate")


def test_a_request_and_its_attempts_are_spans_of_the_clients_trace(traced: Traced) -> None:
    bad, good = traced.nodes
    bad.script, good.script = json_answer(500), sse_answer(events(3))
    parts = [f"tracestate: {part}" for part in STATE.split(",")]
    answer = traced.ask(f"traceparent: {PARENT}", *parts, "x-request-id: rq-1")
    assert answer.status == 200
    spans = wait_until(lambda: len(of := traced.collector.of(TRACE)) == 3 and of, what="spans")
    request, first, second = spans
    assert (request.parent_id, request.kind) == (CALLER, SERVER)
    assert request.name == "POST /v1/chat/completions"
    for number, (span, node) in enumerate(((first, bad), (second, good)), 1):
        assert (span.parent_id, span.kind) == (request.span_id, CLIENT)
        assert span.name == "chat m"
        assert seen(node) == (f"00-{TRACE}-{span.span_id}-01".encode(), STATE.encode())
        about = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "m",
            "server.address": "127.0.0.1",
            "server.port": int(node.url.rpartition(":")[2]),
            "leaseway.node": f"b{number}",
            "leaseway.attempt": number,
        }
        assert about.items() <= span.attributes.items()
    assert (first.status, first.attributes["error.type"]) == (ERROR, "status_500")
    assert first.attributes["leaseway.outcome"] == "failed"
    assert (second.status, second.attributes["leaseway.outcome"]) == (0, "ok")
    told = request.attributes
    assert (told["leaseway.node"], told["leaseway.attempts"], told["leaseway.key"]) == (
        "b2", 2, "team",
    )  # fmt: skip
    assert told["leaseway.request_id"] == "rq-1"
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.usage.output_tokens"] >= 3
    assert (request.status, told["leaseway.outcome"]) == (0, "ok")
    assert request.resource["service.name"] == "leaseway"
    assert request.resource["service.instance.id"] == "r7"


def test_without_a_clients_trace_one_is_begun(traced: Traced) -> None:
    traced.nodes[0].script = json_answer()
    assert traced.ask("x-request-id: rq-2", stream=False).status == 200
    parent, state = seen(traced.nodes[0])
    assert parent is not None
    assert state is None
    trace_id = parent.decode().split("-")[1]
    request, attempt = wait_until(
        lambda: len(of := traced.collector.of(trace_id)) == 2 and of, what="spans"
    )
    assert request.parent_id == ""
    assert parent.decode()[:-2] == f"00-{trace_id}-{attempt.span_id}-"
    assert int(parent[-1:]) & SAMPLED
    line = wait_until(
        lambda: [one for one in traced.gw.out.splitlines() if '"rq-2"' in one], what="its line"
    )
    assert f'"trace_id":"{trace_id}"' in line[0]


@pytest.mark.parametrize(
    "given",
    ["", "00-0-0-01", f"00-{'0' * 32}-{CALLER}-01", f"ff-{TRACE}-{CALLER}-01", "\xff" * 55],
)
def test_a_broken_context_begins_a_new_trace(traced: Traced, given: str) -> None:
    traced.nodes[0].script = json_answer()
    assert traced.ask(f"traceparent: {given}", stream=False).status == 200
    parent, _ = seen(traced.nodes[0])
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", parent or b"")
    assert TRACE.encode() not in (parent or b"")


def test_refusals_are_spans_without_attempts(traced: Traced) -> None:
    trace_id = "1" * 32
    context = f"traceparent: 00-{trace_id}-{CALLER}-01"
    assert traced.ask(context, model="nobody-has-it").status == 404
    (request,) = wait_until(lambda: traced.collector.of(trace_id), what="a span")
    assert request.attributes["leaseway.outcome"] == "rejected"
    assert request.attributes["error.type"] == "404"
    assert request.status == 0  # the caller's fault (OpenTelemetry's conventions for servers)
    assert "nobody-has-it" not in str(request)


def test_no_content_and_no_key_is_exported(traced: Traced) -> None:
    traced.nodes[0].script = json_answer()
    before = len(traced.collector.spans)
    assert traced.ask(stream=False).status == 200
    wait_until(lambda: len(traced.collector.spans) > before, what="spans")
    for secret in (MARK, KEY, hash_key(KEY)):
        assert secret.encode() not in traced.collector.raw


def test_the_standard_variables_decide_the_rest() -> None:
    environment = {
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_SERVICE_NAME": "edge",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-token=t0",
    }
    with replica(environment, tracing=True) as traced:
        for node in traced.nodes:
            node.script = json_answer()
        assert traced.ask(stream=False).status == 200
        parent, _ = seen(traced.nodes[0])
        assert parent is not None
        assert not int(parent[-1:]) & SAMPLED  # and passed on all the same
        assert traced.ask(f"traceparent: {PARENT}", stream=False).status == 200
        request, _ = wait_until(
            lambda: len(of := traced.collector.of(TRACE)) == 2 and of, what="the client sampled"
        )
        assert len(traced.collector.spans) == 2
        assert request.resource["service.name"] == "edge"
        assert traced.collector.headers[-1]["x-token"] == "t0"


def test_off_context_passes_and_nothing_of_it_is_imported() -> None:
    with replica({"PYTHONPROFILEIMPORTTIME": "1"}) as plain:
        plain.nodes[0].script = json_answer()
        answer = plain.ask(f"traceparent: {PARENT}", f"tracestate: {STATE}", stream=False)
        assert answer.status == 200
        assert seen(plain.nodes[0]) == (PARENT.encode(), STATE.encode())
        imported = plain.gw.log
        assert "app.telemetry.metrics" in imported
        # (redis-py reads the SDK's metrics, where there is an SDK.)
        assert not re.search(r"opentelemetry\.(sdk\.trace|exporter|proto)", imported)
        assert "app.telemetry.tracing" not in imported
        assert plain.collector.spans == []
    with replica({"PYTHONPROFILEIMPORTTIME": "1"}, tracing=True) as traced:
        assert "opentelemetry.sdk.trace" in traced.gw.log  # it would have been seen


def test_a_collector_that_is_away_costs_nobody_anything() -> None:
    with replica(tracing=True, otlp_endpoint=f"http://127.0.0.1:{free_port()}") as traced:
        traced.nodes[0].script = json_answer()
        for _ in range(20):
            assert traced.ask(stream=False).status == 200
        started = monotonic()
        assert traced.gw.stop() == 0
        assert monotonic() - started < 12  # not the exporter's own patience with it
        assert "Traceback" not in traced.gw.log


def test_missing_packages_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(sys.modules, "app.telemetry.tracing", raising=False)
    with pytest.raises(ConfigError, match=r"telemetry.tracing = true: .*leaseway\[tracing\]"):
        import_module("app.telemetry.tracing")
