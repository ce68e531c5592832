"""One request and its answer as facts and times, and what is made of them when it ends.

The path of the request fills an ``Exchange`` in; metrics, the access line and the trace are read
off it, once, at the end. Nothing of the content of a request or an answer is in it, and no key.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from app.model import Outcome

if TYPE_CHECKING:
    from app.config import TelemetrySettings
    from app.errors import ApiError, AttemptFailed
    from app.model import Node
    from app.telemetry.access import AccessLog
    from app.telemetry.metrics import Metrics
    from app.telemetry.tracing import Tracing

Headers = list[tuple[bytes, bytes]]


class Exchange:
    """What is known of one request so far.

    ``key`` is the name of the caller's API key; ``model`` is set once it is known that it is
    served, ``node`` to the last one asked. Times are monotonic seconds, 0.0 until they are known:
    ``started`` (the head is here), ``received`` (the body too), ``leased`` (the first node is
    found), ``first_token``, ``last_token``. ``outcome`` is that of the request as a whole.
    """

    __slots__ = (
        "attempt_span", "attempts", "degraded", "first_token", "key", "last_token", "leased",
        "model", "node", "operation", "outcome", "output_tokens", "prompt_tokens", "provider",
        "received", "request_id", "route", "span", "started", "stream", "trace_id",
    )  # fmt: skip

    def __init__(self, request_id: bytes, route: str, operation: str, provider: str) -> None:
        self.request_id = request_id
        self.route = route
        self.operation = operation
        self.provider = provider
        self.key: str | None = None
        self.model = ""
        self.node = ""
        self.stream = self.degraded = False
        self.attempts = self.prompt_tokens = self.output_tokens = 0
        self.received = self.leased = self.first_token = self.last_token = 0.0
        self.outcome: Outcome | None = None
        self.trace_id = ""
        self.span: Any = None
        self.attempt_span: Any = None
        self.started = monotonic()

    def leased_as(self, model: str, at: float, *, degraded: bool) -> None:
        """A first node has been found for ``model``."""
        self.model, self.leased, self.degraded = model, at, degraded

    def read(self, prompt_tokens: int, output_tokens: int, last_heard: float) -> None:
        """What was seen of the answer, as far as it got; ``last_heard`` when its last byte came."""
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.last_token = last_heard

    @property
    def ttft_s(self) -> float:
        """From the whole request to the first token: the caller's wait; 0.0: there was none."""
        return self.first_token - self.received if self.first_token else 0.0

    @property
    def tpot_s(self) -> float:
        """Per output token after the first; 0.0 when it cannot be told."""
        rest = self.output_tokens - 1
        took = self.last_token - self.first_token
        return took / rest if rest > 0 and self.first_token and took > 0 else 0.0


class Telemetry:
    """What the path of a request calls: ``begin``, ``attempt`` for each node, ``ended``."""

    def __init__(self, settings: TelemetrySettings, metrics: Metrics, replica: str) -> None:
        """Raises ``ConfigError`` when tracing is asked for and its packages are missing."""
        self.metrics = metrics
        self._access: AccessLog | None = None
        self._tracing: Tracing | None = None
        if settings.access_log == "json":
            from app.telemetry.access import AccessLog

            self._access = AccessLog(replica)
        if settings.tracing:  # not even imported otherwise
            from app.telemetry.tracing import Tracing

            self._tracing = Tracing(settings, replica)

    def begin(self, exchange: Exchange, method: str, headers: Headers) -> None:
        """A request has come; ``headers`` are the client's."""
        if self._tracing is not None:
            self._tracing.begin(exchange, method, headers)
        elif self._access is not None:
            exchange.trace_id = self._access.trace_id(headers)

    def attempt(self, exchange: Exchange, node: Node, headers: Headers) -> Headers:
        """``node`` is about to be asked: the headers for it, with the attempt's trace context."""
        exchange.attempts += 1
        exchange.node = node.id
        if self._tracing is None:
            return headers
        return self._tracing.attempt(exchange, node, headers)

    def attempt_failed(self, exchange: Exchange, failure: AttemptFailed) -> None:
        """The attempt is over, and another node may be asked."""
        self.metrics.attempt(exchange.node, failure.outcome.value)
        if self._tracing is not None:
            self._tracing.attempt_ended(exchange, failure.outcome, failure.kind)

    def ended(self, exchange: Exchange, *, status: int, bytes_in: int, bytes_out: int) -> None:
        """The exchange is over. ``status`` is 0 when the client has not been told any."""
        outcome = exchange.outcome or Outcome.FAILED
        took_s = monotonic() - exchange.started
        self.metrics.ended(exchange, outcome.value, status, took_s)
        if self._tracing is not None:
            self._tracing.ended(exchange, outcome, status)
        if self._access is not None:
            self._access.write(exchange, outcome.value, status, took_s, bytes_in, bytes_out)

    def close(self) -> None:
        """Hand over what has not left yet. May wait for a collector: call it in a thread."""
        if self._tracing is not None:
            self._tracing.close()
        if self._access is not None:
            self._access.close()


def outcome_of(status: int) -> Outcome:
    """The outcome of a request that a node answered with ``status`` and no more to tell."""
    if status < 400:
        return Outcome.OK
    if status == 429:
        return Outcome.SATURATED
    return Outcome.FAILED if status >= 500 else Outcome.REJECTED


def outcome_of_error(error: ApiError) -> Outcome:
    """The outcome of a request that the gateway itself answered. A caller over its own limit was
    refused; that the nodes are full is another matter."""
    if error.code == "at_capacity":
        return Outcome.SATURATED
    return Outcome.FAILED if error.status >= 500 else Outcome.REJECTED
