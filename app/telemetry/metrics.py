"""Prometheus metrics with stable names and bounded labels (docs/telemetry.md lists them).

Label values are node ids and model names of the registry, names of configured keys, and closed
sets of words: nothing that a client can invent becomes a label. Times are seconds, as Prometheus
wants them. ``gen_ai_*`` have the names, labels and buckets, and some above them for longer waits,
of https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, disable_created_metrics

from app.telemetry.families import Counts, Timings

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.telemetry.exchange import Exchange

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 30, 60, 120)
_REQUEST_BUCKETS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
    163.84, 327.68,
)  # fmt: skip
_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    30.0, 60.0,
)  # fmt: skip
_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_CALL_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
_WAIT_BUCKETS_S = (*_CALL_BUCKETS_S, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_CLASSES = {n: f"{n}xx" for n in range(1, 6)}
_LOOK_S = 0.25
# When a counter was made says nothing, and would double the series.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one replica, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._count_requests()
        self._count_attempts()
        self._time_requests()
        self._show_the_replica()

    def _count_requests(self) -> None:
        self._requests = Counts(
            "leaseway_requests",
            "Requests answered, by model (or 'unknown') and status code.",
            ("model", "status"),
            registry=self.registry,
        )
        self._route_requests = Counts(
            "leaseway_route_requests",
            "Requests ended, by route ('other': no valid HTTP, 'control': all that is not "
            "forwarded), model, class of status ('none': the client left before any) and outcome.",
            ("route", "model", "status_class", "outcome"),
            registry=self.registry,
        )
        self.abandoned = Counter(
            "leaseway_requests_abandoned",
            "Requests whose client left before the answer was complete.",
            registry=self.registry,
        )
        self._tokens = Counts(
            "leaseway_tokens",
            "Tokens booked, by model and kind (prompt, output).",
            ("model", "kind"),
            registry=self.registry,
        )
        self._key_requests = Counts(
            "leaseway_key_requests",
            "Requests answered, by name of the API key and status code.",
            ("key", "status"),
            registry=self.registry,
        )
        self._key_tokens = Counts(
            "leaseway_key_tokens",
            "Tokens booked, by name of the API key and kind (prompt, output).",
            ("key", "kind"),
            registry=self.registry,
        )

    def _count_attempts(self) -> None:
        self._attempts = Counts(
            "leaseway_attempts",
            "Attempts on nodes, by node and outcome.",
            ("node", "outcome"),
            registry=self.registry,
        )
        self._retries = Counts(
            "leaseway_retries",
            "Requests moved away from a node, by that node and how its attempt failed.",
            ("node", "kind"),
            registry=self.registry,
        )
        self._failovers = Counts(
            "leaseway_failovers",
            "Requests answered well by another node than their first one, by model.",
            ("model",),
            registry=self.registry,
        )
        self._refusals = Counts(
            "leaseway_lease_refusals",
            "Requests that no node was found for: unknown (none serves the model), down (none is "
            "usable), full (all are at capacity), spent (all have been tried).",
            ("reason",),
            registry=self.registry,
        )
        for reason in ("unknown", "down", "full", "spent"):
            self._refusals.of(reason)  # from 0: a rate does not see a counter's first step

    def _time_requests(self) -> None:
        def timings(
            name: str, labels: tuple[str, ...], buckets_s: tuple[float, ...], documentation: str
        ) -> Timings:
            return Timings(name, documentation, labels, buckets_s=buckets_s, registry=self.registry)

        self._ttft = timings(
            "leaseway_ttft_seconds", ("node",), _TTFT_BUCKETS_S,
            "From the lease to the first generated token, by node.",
        )  # fmt: skip
        self._tpot = timings(
            "leaseway_tpot_seconds", ("node",), _TOKEN_BUCKETS_S,
            "Per output token after the first, by node.",
        )  # fmt: skip
        self._wait = timings(
            "leaseway_lease_wait_seconds", ("model",), _WAIT_BUCKETS_S,
            "From the whole request to a lease, by model: limits, line and pick.",
        )  # fmt: skip
        self._call = timings(
            "leaseway_redis_call_seconds", ("script",), _CALL_BUCKETS_S,
            "Round trips of the scripts whose answer is waited for, by script.",
        )  # fmt: skip
        self._took = timings(
            "gen_ai_server_request_duration_seconds", (*_GEN_AI, "error_type"), _REQUEST_BUCKETS_S,
            "From the head of a request to the last byte of its answer; error_type is the outcome "
            "unless it is ok.",
        )  # fmt: skip
        self._first = timings(
            "gen_ai_server_time_to_first_token_seconds", _GEN_AI, _FIRST_TOKEN_BUCKETS_S,
            "From the whole request to the first generated token: what the caller waits.",
        )  # fmt: skip
        self._each = timings(
            "gen_ai_server_time_per_output_token_seconds", _GEN_AI, _TOKEN_BUCKETS_S,
            "Per output token after the first, of answers that ended well.",
        )  # fmt: skip

    def _show_the_replica(self) -> None:
        self._info = Info(
            "leaseway_replica", "This replica: its id and version.", registry=self.registry
        )
        self.in_flight = Gauge(
            "leaseway_requests_in_flight",
            "Requests that this replica is serving now.",
            registry=self.registry,
        )
        self.leases_held = Gauge(
            "leaseway_leases_held", "Leases that this replica holds now.", registry=self.registry
        )
        self.reaped = Gauge(
            "leaseway_leases_reaped",
            "Leases of silent replicas that this replica has ended since its start.",
            registry=self.registry,
        )
        self.redis_up = Gauge(
            "leaseway_redis_up", "1 when shared state is in reach.", registry=self.registry
        )
        self.degraded_s = Counter(
            "leaseway_degraded_seconds",
            f"Time without shared state, to {_LOOK_S:g} s.",
            registry=self.registry,
        )

    def replica(self, replica: str) -> None:
        """Say whose metrics these are."""
        self._info.info({"replica": replica, "version": version("leaseway")})

    def request(self, model: str, status: int) -> None:
        """Count an answer."""
        self._requests.of(model, status)()

    def control(self, status: int) -> None:
        """Count an answer of the control plane."""
        outcome = "ok" if status < 400 else "rejected" if status < 500 else "failed"
        self._route_requests.of("control", "", _CLASSES.get(status // 100, "none"), outcome)()

    def attempt(self, node: str, outcome: str) -> None:
        """Count the end of an attempt."""
        self._attempts.of(node, outcome)()

    def retry(self, node: str, kind: str) -> None:
        """Count a request that was moved away from ``node``, whose attempt failed by ``kind``."""
        self._retries.of(node, kind)()

    def refusal(self, reason: str) -> None:
        """Count a request that no node was found for."""
        self._refusals.of(reason)()

    def first_token(self, node: str, seconds: float) -> None:
        """Observe a time to first token."""
        self._ttft.of(node)(seconds)

    def redis_call(self, script: str, seconds: float) -> None:
        """Observe the round trip of a script."""
        self._call.of(script)(seconds)

    def book_tokens(self, model: str, prompt: int, output: int) -> None:
        """Count the tokens of one answer."""
        if prompt:
            self._tokens.of(model, "prompt")(prompt)
        if output:
            self._tokens.of(model, "output")(output)

    def key_request(self, key: str, status: int) -> None:
        """Count an answer to the holder of an API key."""
        self._key_requests.of(key, status)()

    def key_tokens(self, key: str, prompt: int, output: int) -> None:
        """Count the tokens of one answer to the holder of an API key."""
        if prompt:
            self._key_tokens.of(key, "prompt")(prompt)
        if output:
            self._key_tokens.of(key, "output")(output)

    def ended(self, exchange: Exchange, outcome: str, status: int, took_s: float) -> None:
        """Count and time a request that has ended, however it did."""
        model = exchange.model or "unknown"
        well = outcome == "ok"
        status_class = _CLASSES.get(status // 100, "none")
        self._route_requests.of(exchange.route, model, status_class, outcome)()
        operation, provider = exchange.operation, exchange.provider
        if not operation:  # no valid HTTP
            return
        self._took.of(operation, provider, model, "" if well else outcome)(took_s)
        if exchange.leased:
            self._wait.of(model)(exchange.leased - exchange.received)
        if exchange.first_token:
            self._first.of(operation, provider, model)(exchange.ttft_s)
        if well:
            if tpot_s := exchange.tpot_s:
                self._each.of(operation, provider, model)(tpot_s)
                self._tpot.of(exchange.node)(tpot_s)
            if exchange.attempts > 1:
                self._failovers.of(model)()

    async def watch_degraded(self, up: Callable[[], bool]) -> None:
        """Add up the time during which ``up()`` is false. A scrape would miss what is short."""
        at = monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = monotonic()
            if not up():
                self.degraded_s.inc(now - at)
            at = now
