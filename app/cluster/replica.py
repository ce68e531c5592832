"""This process as a member of the cluster: its link, its pools and its heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from typing import TYPE_CHECKING, Any, TypeVar, cast

from app.cluster.health import Health, Pulse
from app.cluster.leases import Leases
from app.cluster.link import Link
from app.cluster.local import Local
from app.cluster.registry import Registry
from app.cluster.scripts import Scripts, constants
from app.errors import RedisAway

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Iterable

    from app.config import Settings
    from app.model import Node

log = logging.getLogger("leaseway.replica")
_CALLS_A_TICK = 20
_SWEEP_MS = 1000
_LAST_ROUND_S = 5.0
_LONGEST_TICK_S = 0.5
T = TypeVar("T")


class Pool:
    """The nodes of one pool and this replica's leases on them, over a link of its own."""

    def __init__(self, settings: Settings, url: str, name: str, replica: str, boot: str) -> None:
        self.name = name
        self.link = Link(
            url,
            budget_s=settings.redis.call_timeout_ms / 1000,
            name=f"leaseway-{replica}",
            tag=name,
        )
        self.scripts = Scripts(
            self.link,
            namespace=settings.redis.namespace,
            pool=name,
            constants=constants(settings, name),
        )
        self.registry = Registry(
            self.link,
            self.scripts,
            pool=name,
            configured=[node.node() for node in settings.nodes if node.pool == name],
        )
        self.pulse = Pulse()
        self.leases = Leases(
            self.scripts,
            self.registry,
            self.pulse,
            Local(settings.circuit, settings.scoring, random.random),
            replica=replica,
            boot=boot,
            ttl_ms=int(settings.leases.ttl_s * 1000),
            verdict_s=_LONGEST_TICK_S + settings.health.timeout_s,
        )
        self.health = Health(settings.health, self.scripts, self.registry, self.pulse)

    async def beat(self) -> None:
        """One heartbeat: leases, registration, picture. Raises ``RedisAway``."""
        known = await self.leases.beat()
        # First beat, reaped, or flushed: what we own is put back. A lease asked for between the
        # flush and this beat has listed the replica again, so its nodes are looked for as well.
        # Reaped alone says nothing of the nodes: one that was removed meanwhile must stay away.
        lost = self.registry.untold or await self.registry.lost()
        if lost:
            await self.registry.register_configured(self.pulse.heard)
        if lost or not known:
            await self.leases.reconcile()
        await self.registry.refresh()

    async def tick(self) -> int:
        """Between heartbeats: edits, probes, sweeps, dead replicas. Leases reaped."""
        await self.registry.follow()
        await self.health.tick()
        for _ in range(_CALLS_A_TICK):
            if not (await self.scripts.sweep(interval_ms=_SWEEP_MS))[1]:
                break
        reaped = 0
        for _ in range(_CALLS_A_TICK):
            ended, replica, more = await self.scripts.reap()
            if ended:
                reaped += ended
                log.warning("reaped %d leases of the silent replica %s", ended, replica)
            if not more:
                break
        return reaped


class Replica:
    """One gateway process. ``id`` is minted at boot unless the operator gives one.

    An id that is given must be unique among living replicas. After a crash the next process
    with the same id finds the old leases under its name and ends them at its first heartbeat.
    """

    def __init__(self, settings: Settings, redis_url: str, replica_id: str | None = None) -> None:
        boot = secrets.token_hex(4)
        self.settings = settings  # those in force: `control/reload.py` puts new ones here
        self.id = replica_id or f"replica-{boot}"
        self.reaped = 0
        self.in_touch = False  # the last heartbeat's scripts ran, on the links that stand now
        self.leaving = False
        self._beat_s = settings.leases.ttl_s / 3
        # Often enough that a dead replica's leases are back within a second of their time, and
        # that a probe duty is taken over within its interval.
        self._tick_s = min(_LONGEST_TICK_S, self._beat_s, settings.health.interval_s / 4)
        names = {"default"} | {node.pool for node in settings.nodes}
        self.pools = {
            name: Pool(settings, redis_url, name, self.id, boot) for name in sorted(names)
        }
        self._tasks: list[asyncio.Task[None]] = []
        self._now = asyncio.Event()
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Join: connect, register the configured nodes, probe once, then keep beating."""
        try:
            await _all(pool.link.start() for pool in self.pools.values())
            await self._beat()
            await self._tick()
            await _all(pool.health.probed() for pool in self.pools.values())
            await _all(pool.registry.refresh() for pool in self.pools.values())
        except RedisAway as exc:
            log.warning("starting without Redis, on the configured nodes alone: %s", exc)
        for pool in self.pools.values():
            pool.link.on_connect.append(self._connected)
            pool.leases.on_lost = self._now.set
        self._tasks = [
            asyncio.create_task(self._beat_until_the_end(), name="heartbeat"),
            asyncio.create_task(self._tick_until_the_end(), name="tick"),
        ]

    async def stop(self) -> None:
        """Leave: end the heartbeat, sign off, close the links."""
        self.leaving = True
        self._ended.set()
        self._now.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_LAST_ROUND_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for pool in self.pools.values():
            try:
                await pool.leases.leave()
            except RedisAway as exc:
                log.warning("left without signing off, a reaper will do it: %s", exc)
            await pool.health.close()
            await pool.link.close()

    def configure(self, nodes: list[Node]) -> set[str]:
        """Take over a changed list of nodes; a heartbeat tells Redis at once.

        Returns the pools that are new: their nodes wait for a restart.
        """
        for pool in self.pools.values():
            pool.registry.configure([node for node in nodes if node.pool == pool.name])
        self._now.set()
        return {node.pool for node in nodes} - self.pools.keys()

    @property
    def up(self) -> bool:
        """Whether shared state is in reach, for every pool."""
        return self.in_touch and all(pool.link.up for pool in self.pools.values())

    def pool_of(self, model: str) -> Pool:
        """The pool that serves ``model``; the default pool when none is known to."""
        for pool in self.pools.values():
            if model in pool.registry.models:
                return pool
        return self.pools["default"]

    @property
    def models(self) -> list[str]:
        """Models of all nodes in all pools, sorted."""
        return sorted({m for pool in self.pools.values() for m in pool.registry.models})

    @property
    def nodes(self) -> list[Node]:
        """All known nodes, by pool and id."""
        return [
            pool.registry.nodes[node_id]
            for pool in self.pools.values()
            for node_id in sorted(pool.registry.nodes)
        ]

    def _connected(self) -> None:
        # A link that came back may lead to a server that knows nothing of us: a heartbeat tells.
        self.in_touch = False
        self._now.set()

    async def _beat(self) -> None:
        done = False
        try:
            await _all(pool.beat() for pool in self.pools.values())
            done = True
        finally:
            self.in_touch = done

    async def _tick(self) -> None:
        # Links that are up, not `self.up`: a pool out of reach must not stop the others' upkeep.
        up = [pool for pool in self.pools.values() if pool.link.up]
        self.reaped += sum(await _all(pool.tick() for pool in up))

    async def _beat_until_the_end(self) -> None:
        while not self._ended.is_set():
            await _guarded(self._beat(), "heartbeat")
            await _happens(self._now, within_s=self._beat_s)
            self._now.clear()

    async def _tick_until_the_end(self) -> None:
        # Spread over the fleet: replicas that started together do not tick together.
        while not await _happens(self._ended, within_s=self._tick_s * random.uniform(0.5, 1.0)):
            await _guarded(self._tick(), "tick")


async def _happens(event: asyncio.Event, *, within_s: float) -> bool:
    """Whether ``event`` is set by then. Not ``wait_for``: before Python 3.12 it loses a
    cancellation that comes with the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
    return event.is_set()


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run each to its end; then raise the first failure, or return all results."""
    ended = await asyncio.gather(*work, return_exceptions=True)
    for failure in ended:
        if isinstance(failure, BaseException):
            raise failure
    return cast("list[T]", ended)


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> None:
    """Outermost: one failed round must not end the loop."""
    try:
        await work
    except RedisAway as exc:
        log.debug("%s missed: %s", name, exc)  # the link logs the change of state
    except Exception:
        log.exception("%s failed; the next one goes on", name)
