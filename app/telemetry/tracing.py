"""OpenTelemetry spans of requests and of their attempts on nodes, sent to an OTLP collector.

Imported only when ``telemetry.tracing`` is on. The provider is the replica's own, not the global
one: libraries that trace by themselves stay quiet. What the settings leave open the standard
``OTEL_*`` variables decide. Attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/ and,
with names of the project's own, ``leaseway.*``; never content.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from app.errors import ConfigError
from app.model import Outcome

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as exc:
    raise ConfigError(
        "telemetry.tracing = true: its packages are missing; pip install 'leaseway[tracing]'"
    ) from exc

if TYPE_CHECKING:
    from app.config import TelemetrySettings
    from app.model import Node
    from app.telemetry.exchange import Exchange, Headers

_CONTEXT = frozenset((b"traceparent", b"tracestate"))
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_LAST_FLUSH_S = 2.0  # a collector that is away must not hold up the end of a replica
_NOT_OUR_FAULT = frozenset((Outcome.OK, Outcome.REJECTED, Outcome.ABANDONED))


class Tracing:
    """The spans of one replica: one of each request (``SERVER``), one of each attempt (``CLIENT``)
    below it. A node is given the context of its attempt."""

    def __init__(self, settings: TelemetrySettings, replica: str) -> None:
        endpoint = settings.otlp_endpoint and f"{settings.otlp_endpoint}/v1/traces"
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are in it as well.
        resource = Resource.create({"service.instance.id": replica})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "leaseway"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("leaseway")
        self._w3c = TraceContextTextMapPropagator()
        # Every try of the exporter's would have a line while a collector is away.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)

    def begin(self, exchange: Exchange, method: str, headers: Headers) -> None:
        """A span for the request, within the client's trace if it names one."""
        method = method if method in _METHODS else "_OTHER"
        carrier: dict[str, str] = {}
        for raw, value in headers:
            if raw in _CONTEXT:  # tracestate may come in parts (W3C Trace Context, 3.3.1)
                name, given = raw.decode(), value.decode("latin-1")
                carrier[name] = f"{carrier[name]},{given}" if name in carrier else given
        span = self._tracer.start_span(
            f"{method} {exchange.route}",
            context=self._w3c.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": exchange.route},
        )
        exchange.span = span
        exchange.trace_id = f"{span.get_span_context().trace_id:032x}"

    def attempt(self, exchange: Exchange, node: Node, headers: Headers) -> Headers:
        """A span for an attempt; ``headers`` with its context in the place of the client's."""
        server = urlsplit(node.url)
        span = self._tracer.start_span(
            f"{exchange.operation} {exchange.model}",
            context=set_span_in_context(exchange.span),
            kind=SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": exchange.operation,
                "gen_ai.provider.name": exchange.provider,
                "gen_ai.request.model": exchange.model,
                "server.address": server.hostname or "",
                "server.port": server.port or (443 if server.scheme == "https" else 80),
                "leaseway.node": node.id,
                "leaseway.attempt": exchange.attempts,
            },
        )
        exchange.attempt_span = span
        carrier: dict[str, str] = {}
        self._w3c.inject(carrier, set_span_in_context(span))
        others = [header for header in headers if header[0] not in _CONTEXT]
        return others + [(name.encode(), value.encode()) for name, value in carrier.items()]

    def attempt_ended(self, exchange: Exchange, outcome: Outcome, kind: str = "") -> None:
        """The present attempt is over; ``kind`` says how it failed."""
        span, exchange.attempt_span = exchange.attempt_span, None
        if span is not None:
            _end(span, outcome, kind, {})

    def ended(self, exchange: Exchange, outcome: Outcome, status: int) -> None:
        """The request is over, and its last attempt if one was running."""
        told: dict[str, Any] = {
            "gen_ai.usage.input_tokens": exchange.prompt_tokens,
            "gen_ai.usage.output_tokens": exchange.output_tokens,
            "leaseway.ttft_ms": round(exchange.ttft_s * 1000, 3),
        }
        if exchange.attempt_span is not None:
            span, exchange.attempt_span = exchange.attempt_span, None
            _end(span, outcome, str(status), told)
        told |= {
            "gen_ai.operation.name": exchange.operation,
            "gen_ai.request.model": exchange.model,
            "leaseway.request_id": exchange.request_id.decode("latin-1"),
            "leaseway.key": exchange.key or "",
            "leaseway.node": exchange.node,
            "leaseway.attempts": exchange.attempts,
            "leaseway.degraded": exchange.degraded,
            "http.response.status_code": status,
        }
        _end(exchange.span, outcome, str(status), told)

    def close(self) -> None:
        """Send what is left, for a bounded time: the SDK's own patience is half a minute."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_FLUSH_S)


def _end(span: Span, outcome: Outcome, error_type: str, told: dict[str, Any]) -> None:
    attributes = {name: value for name, value in told.items() if value or value is False}
    span.set_attributes({**attributes, "leaseway.outcome": outcome.value})
    if outcome is not Outcome.OK:
        span.set_attribute("error.type", error_type or outcome.value)
        if outcome not in _NOT_OUR_FAULT:
            span.set_status(StatusCode.ERROR)
    span.end()
