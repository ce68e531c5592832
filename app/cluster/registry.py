"""The nodes of one pool as this replica knows them: a cache of the records in Redis.

Redis holds the truth; every pick happens there. The cache serves what must not cost a round
trip: a leased node's URL, the list of models, the pool that a model lives in.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from app.cluster.engines import discover_models
from app.errors import LeasewayError
from app.model import Node

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        self._configured = {node.id: node for node in configured}
        self._undiscovered = {node.id for node in configured if not node.models}
        self.nodes: dict[str, Node] = {}
        self.models: frozenset[str] = frozenset()

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

    async def refresh(self) -> None:
        """Read all records. Raises ``RedisAway``; the cache then stays as it is."""
        ids = sorted(await self._link.call("SMEMBERS", self._scripts.keys.nodes))
        flats = await asyncio.gather(
            *(self._link.call("HGETALL", self._scripts.keys.node(node_id)) for node_id in ids)
        )
        nodes = {}
        for node_id, flat in zip(ids, flats, strict=True):
            node = self._parse(node_id, dict(zip(flat[::2], flat[1::2], strict=True)))
            if node is not None:
                nodes[node_id] = node
        self.nodes = nodes
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
        )

    async def register_configured(self) -> None:
        """Put the configured nodes into Redis; take out those a former configuration put in.

        What the fleet has learned of a node is kept (see ``lua/register.lua``). The replica
        that starts last has the last word on what is configured.
        """
        await self.refresh()
        for node in self._configured.values():
            if node.models or node.id not in self.nodes:
                await self._register(node)
        for node_id in self.nodes.keys() - self._configured.keys():
            source = await self._link.call("HGET", self._scripts.keys.node(node_id), "source")
            if source == "config":
                running = await self._scripts.unregister(node_id)
                log.warning(
                    "node %s is no longer configured: removed, %d leases still running on it",
                    node_id,
                    running,
                )
        await self.refresh()

    async def _register(self, node: Node) -> None:
        said, _ = await self._scripts.register(node, source="config")
        if said != "same":
            log.info("node %s %s: %s, models %s", node.id, said, node.url, list(node.models))

    async def discover(self) -> None:
        """Ask nodes with ``models: discovered`` for their models, until each has answered once."""
        for node_id in sorted(self._undiscovered):
            node = self._configured[node_id]
            models = await discover_models(node)
            if models:
                await self._scripts.register(_with_models(node, models), source="config")
                self._configured[node_id] = _with_models(node, models)
                self._undiscovered.discard(node_id)
                log.info("node %s serves %s", node_id, list(models))
                await self.refresh()


def _with_models(node: Node, models: tuple[str, ...]) -> Node:
    return Node(
        id=node.id,
        url=node.url,
        pool=node.pool,
        weight=node.weight,
        capacity=node.capacity,
        models=models,
        engine=node.engine,
        api_key_env=node.api_key_env,
    )
