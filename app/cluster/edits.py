"""What operators have set of nodes by hand, beside what the settings file says of them.

An edit holds until the file says something else about the node than it said when the edit was
made: field by field, and for a node that was taken out, the whole entry. Admin state is no
matter of the file: it holds until it is changed, or the node leaves the file.

Redis holds the edits of a pool in one hash; every replica keeps a copy and puts back what Redis
has lost, so that a flush undoes nothing. Versions are unique in a pool and only grow.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import orjson

from app.model import Node

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.cluster.link import Link
    from app.cluster.scripts import Scripts

FIELDS = ("url", "weight", "capacity", "models", "engine", "api_key_env", "slots", "kv_tokens")
_NOTHING = "-"  # nothing is set by hand any more
_WEEK_MS = 7 * 86_400_000


def fields_of(node: Node) -> dict[str, str]:
    """What may be set of a node, as its record in Redis has it; models one a line."""
    return {
        "url": node.url,
        "weight": repr(float(node.weight)),
        "capacity": str(node.capacity),
        "models": "\n".join(node.models),
        "engine": node.engine,
        "api_key_env": node.api_key_env or "",
        "slots": str(node.slots or ""),
        "kv_tokens": str(node.kv_tokens or ""),
    }


def with_fields(node: Node, fields: Mapping[str, str]) -> Node:
    """``node`` with ``fields`` of its record over it."""
    given = {**fields_of(node), **{name: fields[name] for name in FIELDS if name in fields}}
    return replace(
        node,
        url=given["url"],
        weight=float(given["weight"]),
        capacity=int(given["capacity"]),
        models=tuple(name for name in given["models"].split("\n") if name),
        engine=given["engine"],
        api_key_env=given["api_key_env"] or None,
        slots=int(given["slots"]) if given["slots"] else None,
        kv_tokens=int(given["kv_tokens"]) if given["kv_tokens"] else None,
    )


@dataclass(frozen=True, slots=True)
class Edit:
    """All that is set by hand of one node.

    ``kind``: ``added`` (a node that is in no file), ``set`` (fields of one that is), ``removed``.
    ``fields`` may hold ``state``. ``over`` is what the file said of these fields, or of the node
    that was taken out.
    """

    version: int = 0
    kind: str = "set"
    fields: Mapping[str, str] = field(default_factory=dict)
    over: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """As Redis holds it, behind the version."""
        if not self.fields and not self.over and self.kind != "added":
            return _NOTHING
        return orjson.dumps([self.kind, dict(self.fields), dict(self.over)]).decode()

    @classmethod
    def parse(cls, text: str | None) -> Edit:
        """The edit behind ``version edit``; None is a node that was never edited."""
        version, _, rest = (text or "0 -").partition(" ")
        if rest == _NOTHING:
            return cls(int(version), "removed")
        kind, fields, over = orjson.loads(rest)
        return cls(int(version), kind, fields, over)

    @property
    def state(self) -> str | None:
        """The admin state that was set, if any."""
        return self.fields.get("state")

    def against(self, file: Node | None) -> Edit:
        """What is left of it where ``file`` is what the settings file says now."""
        if file is None:
            return self if self.kind == "added" else Edit(self.version, "removed")
        now = fields_of(file)
        if self.kind == "removed":
            # Of what a later release can set besides, this edit says nothing.
            same = bool(self.over) and all(now.get(n) == value for n, value in self.over.items())
            return self if same else Edit(self.version, "removed")
        kept = {
            name: value
            for name, value in self.fields.items()
            if name == "state" or self.over.get(name) == now[name]
        }
        over = {name: self.over[name] for name in kept if name != "state"}
        return Edit(self.version, "set", kept, over)


class Wanted(NamedTuple):
    """A node as it shall be: file and edits together."""

    node: Node
    source: str  # "config" or "admin"
    state: str | None


def overlay(pool: str, file: Mapping[str, Node], edits: Mapping[str, Edit]) -> dict[str, Wanted]:
    """The nodes of ``file`` with ``edits`` over them, by id, and those that edits have added."""
    found = {}
    for node_id, node in file.items():
        edit = edits.get(node_id, Edit()).against(node)
        if not (edit.kind == "removed" and edit.over):
            found[node_id] = Wanted(with_fields(node, edit.fields), "config", edit.state)
    for node_id, edit in edits.items():
        if edit.kind == "added" and node_id not in file:
            node = with_fields(Node(node_id, edit.fields["url"], pool), edit.fields)
            found[node_id] = Wanted(node, "admin", edit.state)
    return found


class Edits:
    """One replica's copy of the edits of a pool. ``by_id``: node → edit; read, do not write."""

    def __init__(self, link: Link, scripts: Scripts) -> None:
        self._link = link
        self._scripts = scripts
        self._version = 0
        self.by_id: dict[str, Edit] = {}

    async def refresh(self) -> bool:
        """Bring this copy and Redis in step; whether either knew something new.

        Raises ``RedisAway``.
        """
        keys = self._scripts.keys
        version = int(await self._link.call("GET", keys.changes) or 0)
        if version == self._version:
            return False
        flat = await self._link.call("HGETALL", keys.edits)
        theirs = {
            node_id: Edit.parse(text) for node_id, text in zip(flat[::2], flat[1::2], strict=True)
        }
        # Lost by Redis: flushed, or back as it was a while ago. Old news of nothing is dropped.
        ours = {
            node_id: edit
            for node_id, edit in self.by_id.items()
            if edit.version > theirs.get(node_id, Edit()).version
            and (edit.text != _NOTHING or edit.version > version - _WEEK_MS)
        }
        if ours:
            texts = {node_id: f"{edit.version} {edit.text}" for node_id, edit in ours.items()}
            await self._scripts.restore(texts)
        self.by_id = theirs | ours
        self._version = max([version, *(edit.version for edit in ours.values())])
        return True
