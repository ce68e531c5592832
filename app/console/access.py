"""The way from the command line to the pools: straight to Redis, so that no replica is needed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar

from app.cluster import picture
from app.cluster.link import Link
from app.cluster.operator import Contended, NodeExists, Operator
from app.cluster.registry import UnknownNode
from app.cluster.scripts import Scripts, constants
from app.config import UP_PORT, load
from app.errors import LeasewayError, RedisAway
from app.keys import pool_keys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from app.cluster.picture import NodeRow
    from app.config import Settings

_BUDGET_S = 2.0
T = TypeVar("T")


class Access:
    """One pool, over a link of this process's own."""

    def __init__(self, settings: Settings, pool: str) -> None:
        url = settings.redis.url or f"redis://127.0.0.1:{UP_PORT}/0"
        self.pool = pool
        self.link = Link(url, budget_s=_BUDGET_S, name="leaseway-cli", tag=pool)
        self.keys = pool_keys(settings.redis.namespace, pool)
        self._settings = settings

    @property
    def operator(self) -> Operator:
        """The verbs that change nodes."""
        scripts = Scripts(
            self.link,
            namespace=self._settings.redis.namespace,
            pool=self.pool,
            constants=constants(self._settings, self.pool),
        )
        return Operator(self.link, scripts)

    async def node(self, node_id: str) -> NodeRow:
        """One node, live. Raises ``UnknownNode``."""
        row = await picture.node(self.link, self.keys, self.pool, node_id)
        if row is None:
            raise UnknownNode(node_id)
        return row


@contextlib.asynccontextmanager
async def pools(config: Path | None) -> AsyncIterator[list[Access]]:
    """The pools of the settings, connected. Errors become one line for people."""
    settings = load(config)
    names = sorted({"default"} | {node.pool for node in settings.nodes})
    opened = [Access(settings, name) for name in names]
    try:
        for access in opened:
            await access.link.start()
        yield opened
    except RedisAway as exc:
        raise LeasewayError(f"cannot read from Redis: {exc}") from exc
    except UnknownNode as exc:
        raise LeasewayError(f"there is no node {str(exc)!r}") from exc
    except NodeExists as exc:
        raise LeasewayError(f"there is a node {str(exc)!r} already") from exc
    except Contended as exc:
        raise LeasewayError(f"others change the node {str(exc)!r} just now; repeat") from exc
    finally:
        for access in opened:
            await access.link.close()


async def home(opened: list[Access], node_id: str) -> Access:
    """The pool of a node. Raises ``UnknownNode``."""
    for access in opened:
        if await access.operator.knows(node_id):
            return access
    raise UnknownNode(node_id)


def run(config: Path | None, work: Callable[[list[Access]], Awaitable[T]]) -> T:
    """Run ``work`` with the pools of the settings. Raises ``LeasewayError``."""

    async def connected() -> T:
        async with pools(config) as opened:
            return await work(opened)

    return asyncio.run(connected())
