"""What the viewers of the dashboard see: the pools, read once a second for all of them together.

Nothing is read while nobody looks. A read of a large pool is long, so the pause after it grows
with it: all viewers together cost Redis and this replica a small part of their time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from time import monotonic
from typing import TYPE_CHECKING, Any

import orjson

from app.cluster.overview import overview
from app.errors import ApiError, LeasewayError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.cluster.overview import NodeView, Overview
    from app.cluster.replica import Replica

log = logging.getLogger("leaseway.dashboard")
_EVERY_S = 1.0
_REST = 9  # a read may take up to a tenth of the time
_MOST_VIEWERS = 100
_MOST_NODES = 200  # of a pool in one picture; its totals count all
_NODE_FIELDS = {
    "id", "models", "state", "health", "circuit", "weight", "capacity", "active", "samples",
    "tokens_per_s", "streak", "scores", "ttft_p50_ms", "ttft_p99_ms", "share",
}  # fmt: skip


class Feed:
    """``event`` is the last picture as a server-sent event, empty before the first one."""

    def __init__(self, replica: Replica) -> None:
        self.event = b""
        self._replica = replica
        self._viewers: set[asyncio.Event] = set()
        self._reading: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the replica leaves: viewers should look at another one."""
        return self._replica.leaving

    def require_place(self) -> None:
        """Raises ``ApiError`` 503 when nobody more may look."""
        if self.ended or len(self._viewers) >= _MOST_VIEWERS:
            why = "leaves" if self.ended else f"has {_MOST_VIEWERS} viewers already"
            raise ApiError(
                503,
                f"This replica {why}.",
                kind="server_error",
                code="no_place",
                headers=[(b"retry-after", b"1")],
            )

    @contextlib.contextmanager
    def viewed(self) -> Iterator[asyncio.Event]:
        """Look on: the event is set when there is something new."""
        news = asyncio.Event()
        self._viewers.add(news)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_on(), name="dashboard")
        elif self.event:
            news.set()
        try:
            yield news
        finally:
            self._viewers.remove(news)

    async def _read_on(self) -> None:
        # Ends a pause after the last viewer has left: who comes and goes costs no read of its own.
        while self._viewers:
            began = monotonic()
            self.event = await self._look()
            took_s = monotonic() - began
            for news in self._viewers:
                news.set()
            if self.ended:
                break
            await asyncio.sleep(max(_EVERY_S - took_s, _REST * took_s))
        self._reading, self.event = None, b""

    async def _look(self) -> bytes:
        try:
            seen = [
                await overview(pool.link, pool.scripts.keys, pool.name)
                for pool in self._replica.pools.values()
            ]
            return self._said("picture", pools=[_shown(one) for one in seen])
        except LeasewayError as exc:
            return self._said("away", why=str(exc))
        except Exception as exc:  # whatever a record holds that no replica has written
            log.debug("the dashboard cannot read its picture", exc_info=True)
            return self._said("away", why=f"the picture cannot be read: {exc!r}")

    def _said(self, event: str, **told: Any) -> bytes:
        data = orjson.dumps({"replica": self._replica.id, **told})
        return b"event: %b\ndata: %b\n\n" % (event.encode(), data)


def _shown(one: Overview) -> dict[str, Any]:
    nodes = sorted(one.nodes, key=_notable)[:_MOST_NODES]
    return {
        "pool": one.pool,
        "at_ms": one.at_ms,
        "total": {
            "nodes": len(one.nodes),
            "active": sum(node.active for node in one.nodes),
            "capacity": sum(node.capacity for node in one.nodes),
        },
        "nodes": [
            node.model_dump(include=_NODE_FIELDS) for node in sorted(nodes, key=lambda n: n.id)
        ],
        "replicas": [replica.model_dump(exclude={"pool"}) for replica in one.replicas],
    }


def _notable(node: NodeView) -> tuple[bool, int, str]:
    """In trouble first, then the busy ones."""
    well = (node.state, node.health, node.circuit) == ("active", "ok", "closed")
    return well, -node.active, node.id
