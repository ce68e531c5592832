"""What people do to the nodes of a pool by hand, over the admin API or the command line.

Each change is first written down as an edit, then done; what comes between, any replica finishes
(``Registry.follow``). Whoever loses a race looks again, so two people may edit one node at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from app.cluster.edits import Edit, fields_of
from app.cluster.registry import UnknownNode
from app.errors import LeasewayError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from app.cluster.link import Link
    from app.cluster.scripts import Scripts
    from app.model import Node

    Said = Mapping[str, str]

_TRIES = 20


class NodeExists(LeasewayError):  # noqa: N818 - what the caller is told
    """A node of this id is there already."""


class Contended(LeasewayError):  # noqa: N818 - what the caller is told
    """Others have changed the node again and again meanwhile."""


class Operator:
    """The verbs, for one pool. All raise ``RedisAway``: then it may or may not have been done."""

    def __init__(self, link: Link, scripts: Scripts) -> None:
        self._link = link
        self._scripts = scripts

    async def knows(self, node_id: str) -> bool:
        """Whether the node is there: added, and not taken out."""
        key = self._scripts.keys.node(node_id)
        state, url = await self._link.call("HMGET", key, "state", "url")
        return url is not None and state != "removed"

    async def add(self, node: Node) -> None:
        """Put a node in; its first good probe lets requests in. Raises ``NodeExists``."""
        fields = fields_of(node)

        def added(old: Edit, file: Said) -> Edit:
            if old.kind != "removed":  # another call is at it
                raise NodeExists(node.id)
            # In a file: it was taken out by hand, and comes back with other values.
            return Edit(kind="set" if file else "added", fields=fields, over=file)

        edit = await self._edit(node.id, added, there=False)
        source = "admin" if edit.kind == "added" else "config"
        await self._scripts.register(node, source=source, state="active", health="new")

    async def change(self, node_id: str, fields: Said) -> None:
        """Set ``fields`` of the record (``edits.FIELDS`` and ``state``). Raises ``UnknownNode``.

        No models means that they are to be discovered: those known now are kept until then.
        """

        def changed(old: Edit, file: Said) -> Edit:
            if old.kind == "added":
                return Edit(kind="added", fields={**old.fields, **fields})
            over = {name: file[name] for name in fields if name in file}
            if old.kind == "set":
                return Edit(fields={**old.fields, **fields}, over={**old.over, **over})
            _demand_there(node_id, old, file)
            return Edit(fields=fields, over=over)

        record = {name: value for name, value in fields.items() if name != "models" or value}
        await self._edit(node_id, changed, there=True, record=record)

    async def remove(self, node_id: str) -> int:
        """Take a node out: leases still running on it. Raises ``UnknownNode``."""

        def removed(old: Edit, file: Said) -> Edit:
            _demand_there(node_id, old, file)
            return Edit(kind="removed", over=file)

        await self._edit(node_id, removed, there=True)
        return max(0, await self._scripts.unregister(node_id))

    async def circuit(self, node_id: str, state: str, *, open_ms: int = 0) -> None:
        """Open the circuit until a trial in ``open_ms``, or close it. Raises ``UnknownNode``."""
        before, _ = await self._scripts.circuit(node_id, state, open_ms=open_ms)
        if not before:
            raise UnknownNode(node_id)

    async def _edit(
        self,
        node_id: str,
        make: Callable[[Edit, Said], Edit],
        *,
        there: bool,
        record: Said | None = None,
    ) -> Edit:
        """Replace the edit of a node that is, or is not, there by what ``make`` makes of it and of
        what the settings file says of the node (empty: nothing)."""
        keys = self._scripts.keys
        for _ in range(_TRIES):
            seen = Edit.parse(await self._link.call("HGET", keys.edits, node_id))
            file = await self._link.call("HGET", keys.files, node_id)
            if await self.knows(node_id) is not there:
                raise UnknownNode(node_id) if there else NodeExists(node_id)
            edit = make(seen, orjson.loads(file) if file else {})
            said, _ = await self._scripts.edit(node_id, edit.text, seen=seen.version, fields=record)
            if said == "unknown":
                raise UnknownNode(node_id)
            if said == "done":
                return edit
        raise Contended(node_id)


def _demand_there(node_id: str, old: Edit, file: Said) -> None:
    """Raises ``UnknownNode`` when another call is just taking the node out."""
    if old.kind == "removed" and old.version and (old.over or not file):
        raise UnknownNode(node_id)
