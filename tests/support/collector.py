"""An OTLP/HTTP collector in a thread of the test: what is exported to it, decoded."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Exported:
    """One span; ids in hex. ``resource`` are the attributes of who made it."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector:
    """``with Collector() as collector:`` takes spans at ``url``."""

    def __init__(self) -> None:
        self.raw = b""  # all bodies
        self.headers: list[dict[str, str]] = []
        self._spans: list[Exported] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                collector.headers.append({k.lower(): v for k, v in self.headers.items()})
                collector.take(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def take(self, body: bytes) -> None:
        """Decode one export."""
        self.raw += body
        for of in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(of.resource.attributes)
            for scope in of.scope_spans:
                self._spans += [
                    Exported(
                        span.name,
                        span.kind,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.status.code,
                        _attributes(span.attributes),
                        resource,
                    )
                    for span in scope.spans
                ]

    @property
    def spans(self) -> list[Exported]:
        """All so far."""
        return list(self._spans)

    def of(self, trace_id: str) -> list[Exported]:
        """The spans of one trace, the request's first, then its attempts in order."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: int(span.attributes.get("leaseway.attempt", 0)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
