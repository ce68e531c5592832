"""Active probes, and what replicas see of nodes by serving them.

The duty to probe is claimed in Redis, node by node and interval by interval, so the whole
cluster makes one probe where every replica would make its own, and a dead prober is replaced one
interval later. A verdict is folded into the record by ``observe`` with hysteresis.

Probes alone lie in two ways, and replicas that carry requests correct them: a busy node answers
its health page late but delivers bytes (``alive``), and a hung one keeps its requests waiting
though its page is fine (``waiting``).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from time import monotonic
from typing import TYPE_CHECKING

import httpx

from app.cluster.engines import discover_models, probe

if TYPE_CHECKING:
    from app.cluster.registry import Registry
    from app.cluster.scripts import Scripts
    from app.config import Health as HealthSettings
    from app.model import Node

log = logging.getLogger("leaseway.health")
_PROBES_AT_ONCE = 16


class Pulse:
    """What this replica sees of each node while it serves requests, in memory only.

    ``heard[node]`` is when the last byte of an answer came; ``waiting[lease]`` when a request was
    sent that has not had its first token yet.
    """

    __slots__ = ("heard", "waiting")

    def __init__(self) -> None:
        self.heard: dict[str, float] = {}
        self.waiting: dict[str, tuple[str, float]] = {}

    def oldest_wait_ms(self) -> dict[str, int]:
        """Node → age of its oldest request without a first token, in ms."""
        now, ages = monotonic(), dict[str, int]()
        for node_id, since in self.waiting.values():
            ages[node_id] = max(ages.get(node_id, 0), int((now - since) * 1000))
        return ages


class Health:
    """Probes of one pool, made by this replica when it holds the duty."""

    def __init__(
        self, settings: HealthSettings, scripts: Scripts, registry: Registry, pulse: Pulse
    ) -> None:
        self._interval_ms = int(settings.interval_s * 1000)
        self._scripts = scripts
        self._registry = registry
        self._pulse = pulse
        self._said: dict[str, str] = {}
        # No keep-alive: a probe also says that the node still takes connections, at the address
        # that its name has now.
        self._client = httpx.AsyncClient(
            timeout=settings.timeout_s,
            trust_env=False,
            verify=ssl.create_default_context(),  # trusts whom the forward path trusts
            limits=httpx.Limits(max_keepalive_connections=0, max_connections=_PROBES_AT_ONCE),
        )

    async def close(self) -> None:
        """Close the probing client."""
        await self._client.aclose()

    async def tick(self) -> None:
        """Claim what is due, probe it, report what was seen. Raises ``RedisAway``."""
        due = await self._scripts.claim(interval_ms=self._interval_ms)
        nodes = [n for i in due if (n := self._registry.nodes.get(i)) is not None]
        await asyncio.gather(*(self._probe(node) for node in nodes), self._report())

    async def _probe(self, node: Node) -> None:
        verdict, why = await probe(self._client, node)
        if verdict == "ready" and self._registry.undiscovered(node.id):
            models = await discover_models(self._client, node)
            await self._registry.discovered(node.id, models)
        before, after = await self._scripts.observe(node, verdict)
        if before != after or (after != "ok" and self._said.get(node.id) != why):
            self._said[node.id] = why  # once a reason, not once a probe
            level = logging.INFO if after == "ok" else logging.WARNING
            log.log(level, "node %s: health %s → %s; %s %s", node.id, before, after, verdict, why)

    async def _report(self) -> None:
        horizon = monotonic() - self._interval_ms / 1000
        for node in list(self._registry.nodes.values()):
            if node.misses and self._pulse.heard.get(node.id, 0.0) > horizon:
                await self._scripts.observe(node, "alive")
        for node_id, age_ms in self._pulse.oldest_wait_ms().items():
            known = self._registry.nodes.get(node_id)
            if known is not None and age_ms > max(1000, 3 * known.ttft_ms):
                await self._scripts.observe(known, "waiting", waiting_ms=age_ms, valid_ms=3000)
