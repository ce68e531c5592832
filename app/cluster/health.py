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
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import httpx

from app.cluster.engines import PAGE_TIMEOUTS, discover_models, probe
from app.cluster.names import Lookups
from app.cluster.registry import UnknownNode
from app.cluster.signals import scrape
from app.errors import RedisAway

if TYPE_CHECKING:
    from app.cluster.registry import Registry
    from app.cluster.scripts import Scripts
    from app.config import Health as HealthSettings
    from app.model import Node

log = logging.getLogger("leaseway.health")
_PROBES_AT_ONCE = 64


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
        self._interval_s = settings.interval_s
        self._timeout_s = settings.timeout_s
        self._signals = settings.signals
        self._signals_ms = int(3000 * settings.interval_s)  # two of them may be missed
        self._scripts = scripts
        self._registry = registry
        self._pulse = pulse
        self._closing = False
        self._lookups = Lookups()
        self._looked_up = 0.0
        self._said: dict[str, str] = {}
        self._told: dict[str, float] = {}  # node → when it was last reported alive from here
        self._pageless: set[str] = set()  # URLs of nodes that turned out to have no health page
        self._probing: dict[str, asyncio.Task[None]] = {}
        # A probe that waits for its turn has missed nothing: the places are kept here, not by
        # the client, whose wait for one would time out.
        self._places = asyncio.Semaphore(_PROBES_AT_ONCE)
        # No keep-alive: a probe also says that the node still takes connections, at the address
        # that its name has now.
        self._client = httpx.AsyncClient(
            timeout=settings.timeout_s,
            trust_env=False,
            verify=ssl.create_default_context(),  # trusts whom the forward path trusts
            limits=httpx.Limits(max_keepalive_connections=0, max_connections=None),
        )

    async def close(self) -> None:
        """End the probes that run, and close the probing client."""
        self._closing = True
        if self._probing:
            # They end by themselves: one that is cancelled while it connects leaves its socket.
            two_pages_s = 2 * PAGE_TIMEOUTS * self._timeout_s
            _, late = await asyncio.wait(list(self._probing.values()), timeout=two_pages_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._lookups.close()
        await self._client.aclose()

    async def tick(self) -> None:
        """Claim what is due and start to probe it; look up names; report what was seen.

        A node that hangs holds up its own probe and nothing else. Raises ``RedisAway``.
        """
        for node_id in await self._scripts.claim(interval_ms=int(self._interval_s * 1000)):
            if node_id not in self._probing:
                task = asyncio.create_task(self._probe(node_id), name=f"probe {node_id}")
                self._probing[node_id] = task
                task.add_done_callback(partial(self._probed, node_id))
        now = monotonic()
        if now - self._looked_up >= self._interval_s:
            self._looked_up = now
            self._lookups.start({node.url for node in self._registry.nodes.values()})
        await self._report(now)

    def _probed(self, node_id: str, _: asyncio.Task[None]) -> None:
        del self._probing[node_id]

    async def probed(self) -> None:
        """Wait until the probes that run now have ended."""
        if self._probing:
            await asyncio.wait(list(self._probing.values()))

    async def _probe(self, node_id: str) -> None:
        """Outermost: a probe that fails must not end anything else."""
        try:
            async with self._places:
                if self._closing:
                    return
                # Read anew: a heartbeat ago it may have had another URL, or not been there.
                await self._judge(await self._registry.fetch(node_id))
        except (RedisAway, UnknownNode) as exc:
            log.debug("probe of %s missed: %s", node_id, exc)
        except Exception:
            log.exception("the probe of node %s failed", node_id)

    async def _judge(self, node: Node) -> None:
        # One page is enough of a node that has proved itself, and has not been missed since.
        proven = node.health == "ok" and node.misses <= 0
        seen = await probe(
            self._client,
            replace(node, engine="generic") if node.url in self._pageless and proven else node,
            briefly=proven,
        )
        if seen.pageless:
            self._pageless.add(node.url)
        elif not proven:
            self._pageless.discard(node.url)
        if seen.verdict == "ready" and self._registry.undiscovered(node.id):
            await self._registry.discovered(node.id, await discover_models(self._client, node))
        before, after = await self._scripts.observe(node, seen.verdict)
        if self._signals and seen.verdict == "ready":
            signals = await scrape(self._client, node)
            if signals is not None:
                await self._scripts.signal(node, signals, valid_ms=self._signals_ms)
        if before != after or (after != "ok" and self._said.get(node.id) != seen.why):
            self._said[node.id] = seen.why  # once a reason, not once a probe
            level = logging.INFO if after == "ok" else logging.WARNING
            log.log(
                level, "node %s: health %s → %s; %s %s",
                node.id, before, after, seen.verdict, seen.why,
            )  # fmt: skip

    async def _report(self, now: float) -> None:
        for node in list(self._registry.nodes.values()):
            heard, told = self._pulse.heard.get(node.id, 0.0), self._told.get(node.id, 0.0)
            # Unasked, and well within each interval: the probe that is missed may be another
            # replica's, and what it says counts at once.
            if heard > told and now - told > self._interval_s / 2:
                self._told[node.id] = now
                await self._scripts.observe(node, "alive")
        for node_id, age_ms in self._pulse.oldest_wait_ms().items():
            known = self._registry.nodes.get(node_id)
            if known is not None and age_ms > max(1000, 3 * known.ttft_ms):
                await self._scripts.observe(known, "waiting", waiting_ms=age_ms, valid_ms=3000)
