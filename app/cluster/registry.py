"""The nodes of one pool as this replica knows them: a cache of the records in Redis.

Redis holds the truth; every pick happens there. The cache serves what must not cost a round
trip: a leased node's URL, the list of models, the pool that a model lives in.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from app.cluster.edits import Edits, Wanted, fields_of, overlay
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
        self._told: dict[str, tuple[str, ...]] = {}  # nodes that were asked → models they serve
        self._edits = Edits(link, scripts)
        self._wanted: dict[str, Wanted] = {}  # the configured nodes with what was set by hand
        self._registering = asyncio.Lock()
        self._behind = False  # edits are known that have not been seen to be done
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
        self.untold = True
        self._overlay()
        gone = before.keys() - self._wanted.keys()
        kept = {node_id: node for node_id, node in self.nodes.items() if node_id not in gone}
        self._know({node_id: one.node for node_id, one in self._wanted.items()} | kept)

    def _overlay(self) -> None:
        now = overlay(self._pool, self._configured, self._edits.by_id)
        self._told = {i: m for i, m in self._told.items() if now.get(i) == self._wanted.get(i)}
        self._wanted = now

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
        """Whether Redis has lost the nodes: flushed, or back empty. Raises ``RedisAway``.

        One that was added by hand since then does not hide it: what the settings file says is
        there as well, once a replica has put all of it back.
        """
        keys = self._scripts.keys
        wanted = (keys.nodes, keys.files) if self._configured else (keys.nodes,)
        return bool(self._wanted) and await self._link.call("EXISTS", *wanted) < len(wanted)

    async def forgot(self, model: str) -> bool:
        """Whether Redis did not know ``model`` for having lost its nodes. Raises ``RedisAway``.

        A replica may have put them back since, or be about to. A node that is there in the life
        it was last seen in tells that nothing was lost: the model was taken out.
        """
        there = await self._read()
        back = any(model in node.models for node in there.values())
        kept = any(self._lives.get(node.id) == node.epoch for node in there.values())
        return bool(self._wanted) and (back or not kept)

    async def refresh(self) -> None:
        """Read all records. Raises ``RedisAway``; the cache then stays as it is."""
        nodes = await self._read()
        if nodes or not self._wanted:  # none at all is a loss of Redis', not news
            self._know(nodes)

    async def _read(self) -> dict[str, Node]:
        ids = sorted(await self._link.call("SMEMBERS", self._scripts.keys.nodes))
        self.replicas = max(1, await self._link.call("ZCARD", self._scripts.keys.replicas))
        flats = await asyncio.gather(
            *(self._link.call("HGETALL", self._scripts.keys.node(node_id)) for node_id in ids)
        )
        rows = await self._scripts.look(ids) if self._scripts.policy == "work" else [[]] * len(ids)
        nodes = {}
        for node_id, flat, row in zip(ids, flats, rows, strict=True):
            node = self._parse(node_id, dict(zip(flat[::2], flat[1::2], strict=True)))
            if node is not None:
                nodes[node_id] = replace(node, row=tuple(row))
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
            slots=int(record.get("slots") or 0) or None,
            kv_tokens=int(record["kv_tokens"]) if record.get("kv_tokens") else None,
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
        async with self._registering:
            self._behind, configured = True, self._configured
            await self._edits.refresh()
            await self._overrule()
            self._overlay()
            there = await self._read()
            for one in self._wanted.values():
                node = one.node
                known = self.nodes.get(node.id)
                proven = known is not None and (known.epoch > 0 or node.id in heard)
                well = proven and known is not None and known.health == "ok"
                served = self._models(node) or (there.get(node.id) or node).models
                if served or node.id not in there:
                    await self._register(one, served, "ok" if well else "new")
            await self._tell_file()
            for node_id in there.keys() - self._wanted.keys():
                if await self._source(node_id) == "config":
                    running = await self._scripts.unregister(node_id)
                    log.warning(
                        "node %s is no longer configured: removed, %d leases still running on it",
                        node_id,
                        running,
                    )
            self.untold = self._configured is not configured  # changed meanwhile: once more
            await self._edits.refresh()  # and what was registered may have been removed meanwhile
            await self._catch_up()

    async def _source(self, node_id: str) -> str | None:
        source: str | None = await self._link.call(
            "HGET", self._scripts.keys.node(node_id), "source"
        )
        return source

    async def _overrule(self) -> None:
        """End the edits that the settings file has overruled by saying something new."""
        for node_id, edit in self._edits.by_id.items():
            left = edit.against(self._configured.get(node_id))
            if left.text != edit.text:
                log.info("node %s: the settings file overrules what was set by hand", node_id)
                await self._scripts.edit(node_id, left.text, seen=edit.version)
        await self._edits.refresh()

    async def _tell_file(self) -> None:
        """Keep in Redis what the settings file says: edits are measured against it."""
        key = self._scripts.keys.files
        flat = await self._link.call("HGETALL", key)
        said = dict(zip(flat[::2], flat[1::2], strict=True))
        mine = {i: orjson.dumps(fields_of(node)).decode() for i, node in self._configured.items()}
        if new := [part for i, text in mine.items() if said.get(i) != text for part in (i, text)]:
            await self._link.call("HSET", key, *new)
        if gone := said.keys() - mine.keys():
            await self._link.call("HDEL", key, *gone)

    async def follow(self) -> None:
        """Take over what operators have changed since the last look. Raises ``RedisAway``."""
        async with self._registering:
            if await self._edits.refresh():
                self._behind = True
            if self._behind:
                await self._catch_up()

    async def _catch_up(self) -> None:
        self._overlay()
        await self._mend()
        self._behind = False
        await self.refresh()

    async def _mend(self) -> None:
        """Finish what whoever made an edit may not have: he writes it down first.

        A record that differs was put back from an older picture after a loss of Redis'.
        """
        there = await self._read()
        if not there:
            return  # Redis has lost everything: the heartbeat puts it back
        for node_id, edit in self._edits.by_id.items():
            one, record = self._wanted.get(node_id), there.get(node_id)
            if one is None and record is not None and edit.kind == "removed":
                if edit.over or await self._source(node_id) == "admin":
                    await self._scripts.unregister(node_id)
            elif one is not None and record is None and edit.kind != "removed":
                await self._register(one, self._models(one.node), "new")
            elif one is not None and record is not None:
                now = {**fields_of(record), "state": record.state}
                missed = {
                    name: value
                    for name, value in edit.against(self._configured.get(node_id)).fields.items()
                    if now[name] != value and (name != "models" or value)
                }
                if missed:
                    await self._scripts.edit(node_id, edit.text, seen=edit.version, fields=missed)

    async def _register(self, one: Wanted, models: tuple[str, ...], health: str) -> None:
        node = replace(one.node, models=models)
        said, _ = await self._scripts.register(
            node, source=one.source, state=one.state, health=health
        )
        if said != "same":
            log.info("node %s %s: %s, models %s", node.id, said, node.url, list(models))

    def _models(self, node: Node) -> tuple[str, ...]:
        return node.models or self._told.get(node.id, ())

    def undiscovered(self, node_id: str) -> bool:
        """Whether the node's models are to be discovered, and it has not told them yet."""
        one = self._wanted.get(node_id)
        return one is not None and not self._models(one.node)

    async def discovered(self, node_id: str, models: tuple[str, ...]) -> None:
        """Register what a node has said that it serves."""
        one = self._wanted.get(node_id)  # None: taken out while it was asked
        if models and one is not None:
            self._told[node_id] = models
            await self._register(one, self._models(one.node), "new")
            await self.refresh()


def _mean_ms(record: Mapping[str, str]) -> float:
    samples = int(record.get("samples", 0))
    return int(record["sum_us"]) / samples / 1000 if samples else 0.0
