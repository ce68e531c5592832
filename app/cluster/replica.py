"""This process as a member of the cluster: its link, its pools and its heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from typing import TYPE_CHECKING

from app.cluster.leases import Leases
from app.cluster.link import Link
from app.cluster.registry import Registry
from app.cluster.scripts import Scripts, constants
from app.errors import RedisAway

if TYPE_CHECKING:
    from app.config import Settings
    from app.model import Node

log = logging.getLogger("leaseway.replica")
_REAP_CALLS_A_BEAT = 20


class Pool:
    """The nodes of one pool and this replica's leases on them."""

    def __init__(self, link: Link, settings: Settings, name: str, replica: str, boot: str) -> None:
        self.name = name
        self.scripts = Scripts(
            link,
            namespace=settings.redis.namespace,
            pool=name,
            constants=constants(settings.scoring, settings.circuit, settings.timeouts),
        )
        self.registry = Registry(
            link,
            self.scripts,
            pool=name,
            configured=[node.node() for node in settings.nodes if node.pool == name],
        )
        self.leases = Leases(
            self.scripts,
            self.registry,
            replica=replica,
            boot=boot,
            ttl_ms=int(settings.leases.ttl_s * 1000),
        )


class Replica:
    """One gateway process. ``id`` is minted at boot unless the operator gives one.

    An id that is given must be unique among living replicas. After a crash the next process
    with the same id finds the old leases under its name and ends them at its first heartbeat.
    """

    def __init__(self, settings: Settings, redis_url: str, replica_id: str | None = None) -> None:
        boot = secrets.token_hex(4)
        self.id = replica_id or f"replica-{boot}"
        self.reaped = 0
        self.in_touch = False  # the last heartbeat's scripts ran
        self.leaving = False
        self._beat_s = settings.leases.ttl_s / 3
        self.link = Link(
            redis_url,
            budget_s=settings.redis.call_timeout_ms / 1000,
            name=f"leaseway-{self.id}",
        )
        names = {"default"} | {node.pool for node in settings.nodes}
        self.pools = {
            name: Pool(self.link, settings, name, self.id, boot) for name in sorted(names)
        }
        self._task: asyncio.Task[None] | None = None
        self._now = asyncio.Event()

    async def start(self) -> None:
        """Join: connect, register the configured nodes, beat once, then keep beating."""
        try:
            await self.link.start()
            await self._beat()
        except RedisAway as exc:
            log.warning("starting without Redis, it is tried again in the background: %s", exc)
        self.link.on_connect.append(self._now.set)
        self._task = asyncio.create_task(self._beat_for_ever(), name="heartbeat")

    async def stop(self) -> None:
        """Leave: end the heartbeat, sign off, close the link."""
        self.leaving = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for pool in self.pools.values():
            try:
                await pool.leases.leave()
            except RedisAway as exc:
                log.warning("left without signing off, a reaper will do it: %s", exc)
        await self.link.close()

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

    async def _beat_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                # Spread over the fleet: replicas that started together do not reap together.
                await asyncio.wait_for(self._now.wait(), self._beat_s * random.uniform(0.8, 1.0))
            self._now.clear()
            try:
                await self._beat()
            except RedisAway as exc:
                self.in_touch = False
                log.debug("heartbeat missed: %s", exc)  # the link logs the change of state
            except Exception:
                self.in_touch = False
                log.exception("heartbeat failed; the next one goes on")

    async def _beat(self) -> None:
        for pool in self.pools.values():
            known = await pool.leases.beat()
            if not known:  # first beat, reaped, or flushed: what we own is put back
                await pool.registry.register_configured()
                await pool.leases.beat()  # after a flush no lease could go back before its node
            for _ in range(_REAP_CALLS_A_BEAT):
                ended, replica, more = await pool.scripts.reap()
                if ended:
                    self.reaped += ended
                    log.warning("reaped %d leases of the silent replica %s", ended, replica)
                if not more:
                    break
            await pool.registry.refresh()
        self.in_touch = True
        for pool in self.pools.values():
            await pool.registry.discover()
