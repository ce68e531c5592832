"""The nodes of one pool as this replica knows them: a cache of the records in Redis.

Redis holds the truth; every pick happens there. The cache serves what must not cost a round
trip: a leased node's URL, the list of models, the pool that a model lives in.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from app.errors import LeasewayError
from app.model import Node

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from app.cluster.link import Link
    from app.cluster.scripts import Scripts

log = logging.getLogger("leaseway.registry")


class UnknownNode(LeasewayError):  # noqa: N818 - a race with removal, not a fault
    """A node was leased and removed before its record could be read."""


class Registry:
    """``nodes``: id → node, refreshed by every heartbeat and by any lease on a new one."""

    def __init__(self, link: Link, scripts: Scripts, *, pool: str, configured: list[Node]) -> None:
        self._link = link
        self._scripts = scripts
        self._pool = pool
        self._configured: dict[str, Node] = {}
        self._undiscovered: set[str] = set()
        self.replicas = 1  # living replicas at the last refresh
        self.nodes: dict[str, Node] = {}
        self.models: frozenset[str] = frozenset()
        self._lives: dict[str, int] = {}  # id → epoch at the last refresh
        self.configure(configured)

    def configure(self, nodes: list[Node]) -> None:
        """From now on these are the configured nodes.

        The cache follows at once, for the time without Redis; Redis is told by
        ``register_configured``, which is due while ``untold``.
        """
        before, self._configured = self._configured, {node.id: node for node in nodes}
        self._undiscovered = {node.id for node in nodes if not node.models}
        self.untold = True
        gone = before.keys() - self._configured.keys()
        kept = {node_id: node for node_id, node in self.nodes.items() if node_id not in gone}
        self._know(self._configured | kept)

    def known(self, node_id: str, epoch: int) -> Node | None:
        """The cached node, if it is of this epoch."""
        node = self.nodes.get(node_id)
        return node if node is not None and node.epoch == epoch else None

    async def fetch(self, node_id: str) -> Node:
        """Read one node's record now. Raises ``UnknownNode`` or ``RedisAway``."""
        flat = await self._link.call("HGETALL", self._scripts.keys.node(node_id))
        node = self._parse(node_id, dict(zip(flat[::2], flat[1::2], strict=True)))
        if node is None:
            raise UnknownNode(node_id)
        self.nodes[node_id] = node
        return node

    async def lost(self) -> bool:
        """Whether Redis has no node at all: flushed, or back empty. Raises ``RedisAway``."""
        return bool(self._configured) and not await self._link.call(
            "EXISTS", self._scripts.keys.nodes
        )

    async def forgot(self, model: str) -> bool:
        """Whether Redis did not know ``model`` for having lost its nodes. Raises ``RedisAway``.

        A replica may have put them back since, or be about to. A node that is there in the life
        it was last seen in tells that nothing was lost: the model was taken out.
        """
        there = await self._read()
        back = any(model in node.models for node in there.values())
        kept = any(self._lives.get(node.id) == node.epoch for node in there.values())
        return bool(self._configured) and (back or not kept)

    async def refresh(self) -> None:
        """Read all records. Raises ``RedisAway``; the cache then stays as it is."""
        nodes = await self._read()
        if nodes or not self._configured:  # none at all is a loss of Redis', not news
            self._know(nodes)

    async def _read(self) -> dict[str, Node]:
        ids = sorted(await self._link.call("SMEMBERS", self._scripts.keys.nodes))
        self.replicas = max(1, await self._link.call("ZCARD", self._scripts.keys.replicas))
        flats = await asyncio.gather(
            *(self._link.call("HGETALL", self._scripts.keys.node(node_id)) for node_id in ids)
        )
        nodes = {}
        for node_id, flat in zip(ids, flats, strict=True):
            node = self._parse(node_id, dict(zip(flat[::2], flat[1::2], strict=True)))
            if node is not None:
                nodes[node_id] = node
        return nodes

    def _know(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self._lives = {node.id: node.epoch for node in nodes.values()}
        self.models = frozenset(m for node in nodes.values() for m in node.models)

    def _parse(self, node_id: str, record: Mapping[str, str]) -> Node | None:
        if "url" not in record or "models" not in record:
            return None
        return Node(
            id=node_id,
            url=record["url"],
            pool=self._pool,
            weight=float(record.get("weight", 1)),
            capacity=int(record.get("capacity", 1)),
            models=tuple(m for m in record["models"].split("\n") if m),
            engine=record.get("engine", "auto"),
            api_key_env=record.get("api_key_env") or None,
            state=record.get("state", "active"),
            epoch=int(record.get("epoch", 0)),
            health=record.get("health", "ok"),
            misses=int(record.get("misses", 0)),
            ttft_ms=_mean_ms(record),
            base=float(record.get("base", 0)),
        )

    async def register_configured(self, heard: Collection[str] = ()) -> None:
        """Put the configured nodes into Redis; take out those a former configuration put in.

        What the fleet has learned of a node is kept (see ``lua/register.lua``). The replica
        that starts last has the last word on what is configured. A node that was known to be
        well before Redis lost everything comes back well, and so does one that has answered this
        replica (``heard``); a new one waits for its first probe. One that has yet to tell its
        models keeps those it had. Until all are there the cache stays as it is: requests are
        served from it.
        """
        there = await self._read()
        configured = self._configured
        for node in configured.values():
            known = self.nodes.get(node.id)
            proven = known is not None and (known.epoch > 0 or node.id in heard)
            well = proven and known is not None and known.health == "ok"
            served = node.models or (there.get(node.id) or node).models
            if served or node.id not in there:
                await self._register(replace(node, models=served), "ok" if well else "new")
        for node_id in there.keys() - configured.keys():
            source = await self._link.call("HGET", self._scripts.keys.node(node_id), "source")
            if source == "config":
                running = await self._scripts.unregister(node_id)
                log.warning(
                    "node %s is no longer configured: removed, %d leases still running on it",
                    node_id,
                    running,
                )
        self.untold = self._configured is not configured  # changed meanwhile: once more
        await self.refresh()

    async def _register(self, node: Node, health: str) -> None:
        said, _ = await self._scripts.register(node, source="config", health=health)
        if said != "same":
            log.info("node %s %s: %s, models %s", node.id, said, node.url, list(node.models))

    def undiscovered(self, node_id: str) -> bool:
        """Whether the node is configured with ``models: discovered`` and has not told them yet."""
        return node_id in self._undiscovered

    async def discovered(self, node_id: str, models: tuple[str, ...]) -> None:
        """Register what a node has said that it serves."""
        configured = self._configured.get(node_id)  # None: taken out while it was asked
        if models and configured is not None:
            node = replace(configured, models=models)
            self._configured[node_id] = node
            self._undiscovered.discard(node_id)
            await self._register(node, "new")
            await self.refresh()


def _mean_ms(record: Mapping[str, str]) -> float:
    samples = int(record.get("samples", 0))
    return int(record["sum_us"]) / samples / 1000 if samples else 0.0
