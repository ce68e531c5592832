"""Prometheus metrics with stable names and bounded labels.

Label values are node ids and model names of the registry, names of configured keys, and closed
sets of words: nothing that a client can invent becomes a label. Times are seconds, as Prometheus
wants them.
"""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 30, 60, 120)


class Metrics:
    """The metrics of one replica, in a registry of their own.

    What a request touches is reached through ``request``, ``attempt``, ``first_token`` and
    ``book_tokens``: looking a label up costs more than counting, so children are kept.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = Counter(
            "leaseway_requests",
            "Requests answered, by model (or 'unknown') and status code.",
            ("model", "status"),
            registry=self.registry,
        )
        self.abandoned = Counter(
            "leaseway_requests_abandoned",
            "Requests whose client left before the answer was complete.",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "leaseway_requests_in_flight",
            "Requests that this replica is serving now.",
            registry=self.registry,
        )
        attempts = Counter(
            "leaseway_attempts",
            "Attempts on nodes, by node and outcome.",
            ("node", "outcome"),
            registry=self.registry,
        )
        ttft_s = Histogram(
            "leaseway_ttft_seconds",
            "From the lease to the first generated token, by node.",
            ("node",),
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        tokens = Counter(
            "leaseway_tokens",
            "Tokens booked, by model and kind (prompt, output).",
            ("model", "kind"),
            registry=self.registry,
        )
        key_requests = Counter(
            "leaseway_key_requests",
            "Requests answered, by name of the API key and status code.",
            ("key", "status"),
            registry=self.registry,
        )
        key_tokens = Counter(
            "leaseway_key_tokens",
            "Tokens booked, by name of the API key and kind (prompt, output).",
            ("key", "kind"),
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
        self._request = cache(lambda model, status: requests.labels(model, str(status)).inc)
        self._attempt = cache(lambda node, outcome: attempts.labels(node, outcome).inc)
        self._ttft = cache(lambda node: ttft_s.labels(node).observe)
        self._tokens = cache(lambda model, kind: tokens.labels(model, kind).inc)
        self._key_request = cache(lambda key, status: key_requests.labels(key, str(status)).inc)
        self._key_tokens = cache(lambda key, kind: key_tokens.labels(key, kind).inc)

    def request(self, model: str, status: int) -> None:
        """Count an answer."""
        self._request(model, status)()

    def attempt(self, node: str, outcome: str) -> None:
        """Count the end of an attempt."""
        self._attempt(node, outcome)()

    def first_token(self, node: str, seconds: float) -> None:
        """Observe a time to first token."""
        self._ttft(node)(seconds)

    def book_tokens(self, model: str, prompt: int, output: int) -> None:
        """Count the tokens of one answer."""
        if prompt:
            self._tokens(model, "prompt")(prompt)
        if output:
            self._tokens(model, "output")(output)

    def key_request(self, key: str, status: int) -> None:
        """Count an answer to the holder of an API key."""
        self._key_request(key, status)()

    def key_tokens(self, key: str, prompt: int, output: int) -> None:
        """Count the tokens of one answer to the holder of an API key."""
        if prompt:
            self._key_tokens(key, "prompt")(prompt)
        if output:
            self._key_tokens(key, "output")(output)
