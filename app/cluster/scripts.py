"""One typed method for each Lua verb: the only place where Python and Lua meet.

A script's source is the shebang, the two shared parts (``_node``, ``_lease``) and the verb.
Its SHA-1 is its version: replicas of two releases can run side by side. A server that does not
know a digest is sent the source by the call that noticed (``NOSCRIPT``).
"""

from __future__ import annotations

import hashlib
import random
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from app.cluster.link import Argument, Link, NoScript
from app.keys import pool_keys
from app.model import Grant, Node, Outcome, Refusal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from app.config import Circuit, Scoring, Timeouts

VERBS = (
    "acquire",
    "move",
    "first_token",
    "release",
    "renew",
    "reassert",
    "reap",
    "register",
    "unregister",
)
_SHARED = ("_node", "_lease")


def lua_dir() -> Path:
    """The folder of the scripts: inside an installed package, at the top of a checkout."""
    packaged = Path(str(files("app"))) / "lua"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "lua"


@cache
def source(verb: str) -> str:
    """The text that Redis runs for ``verb``."""
    folder = lua_dir()
    shared = "".join((folder / f"{part}.lua").read_text() for part in _SHARED)
    return "#!lua\n" + shared + (folder / f"{verb}.lua").read_text().removeprefix("#!lua\n")


@cache
def digest(verb: str) -> str:
    """SHA-1 of the text, as ``EVALSHA`` wants it."""
    return hashlib.sha1(source(verb).encode(), usedforsecurity=False).hexdigest()


def scoring_json(scoring: Scoring, circuit: Circuit, timeouts: Timeouts) -> bytes:
    """The constants of ARGV[2], times in ms (see ``lua/_node.lua``)."""
    return orjson.dumps(
        {
            "policy": scoring.policy,
            "alpha": scoring.alpha,
            "baseline_ms": scoring.ttft_baseline_ms,
            "prior_ms": scoring.ttft_prior_ms,
            "floor_ms": scoring.ttft_floor_ms,
            "window": scoring.window,
            "sample_max_age_ms": int(scoring.sample_max_age_s * 1000),
            "failure_threshold": circuit.failure_threshold,
            "open_ms": int(circuit.open_s * 1000),
            "open_max_ms": int(circuit.open_max_s * 1000),
            "trial_ms": int((timeouts.connect_s + timeouts.first_token_s) * 1000),
        }
    )


class Scripts:
    """The verbs over one link, for one pool.

    ``clock`` and ``chance`` are arguments so that tests own time and luck; production leaves
    the clock to Redis (an empty ARGV[1]) and draws luck here.
    """

    def __init__(
        self,
        link: Link,
        *,
        namespace: str,
        pool: str,
        scoring: bytes,
        clock: Callable[[], int | str] = lambda: "",
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._link = link
        self.keys = pool_keys(namespace, pool)
        self._scoring = scoring
        self._clock = clock
        self._chance = chance

    def send(self, verb: str, keys: Sequence[str], *args: Argument) -> asyncio.Future[Any]:
        """Send ``verb`` once by digest, not waiting for the answer."""
        return self._link.call(
            "EVALSHA", digest(verb), len(keys), *keys,
            self._clock(), self._scoring, self.keys.prefix, *args,
        )  # fmt: skip

    async def run(self, verb: str, keys: Sequence[str], *args: Argument) -> Any:
        """Send ``verb`` and wait; a server that lacks the script is given it.

        Raises ``RedisAway`` (no answer in time: the call may or may not have run) or
        ``ScriptError`` (a broken contract).
        """
        try:
            return await self.send(verb, keys, *args)
        except NoScript:
            return await self._link.call(
                "EVAL", source(verb), len(keys), *keys,
                self._clock(), self._scoring, self.keys.prefix, *args,
            )  # fmt: skip

    async def acquire(
        self,
        lease_id: str,
        model: str,
        *,
        replica: str,
        ttl_ms: int,
        size: int,
        tried: Iterable[str] = (),
    ) -> Grant | Refusal:
        """Pick and lease. ``size`` in prompt tokens; idempotent by ``lease_id``."""
        keys = self.keys
        reply = await self.run(
            "acquire",
            (keys.score(model), keys.due(model), keys.leases(replica), keys.replicas),
            lease_id, replica, ttl_ms, size, self._chance(), *tried,
        )  # fmt: skip
        return _decode(lease_id, reply)

    async def move(
        self,
        lease_id: str,
        model: str,
        *,
        replica: str,
        ttl_ms: int,
        size: int,
        old: str,
        outcome: Outcome,
        cool_ms: int,
        tried: Iterable[str],
    ) -> Grant | Refusal:
        """End lease ``old`` with ``outcome`` and lease another node as ``lease_id``."""
        keys = self.keys
        reply = await self.run(
            "move",
            (keys.score(model), keys.due(model), keys.leases(replica), keys.replicas),
            lease_id, replica, ttl_ms, size, self._chance(), old, outcome.value, cool_ms, *tried,
        )  # fmt: skip
        return _decode(lease_id, reply)

    async def first_token(self, lease_id: str, *, replica: str, ttft_us: int) -> bool:
        """Record a TTFT sample; False when the lease is gone."""
        reply = await self.run(
            "first_token", (self.keys.leases(replica),), lease_id, max(ttft_us, 1)
        )
        return bool(reply)

    async def release(
        self,
        lease_id: str,
        *,
        replica: str,
        outcome: Outcome,
        cool_ms: int = 0,
        tokens: int = 0,
        decode_us: int = 0,
    ) -> bool:
        """End a lease; False when it was already gone."""
        reply = await self.run(
            "release",
            (self.keys.leases(replica),),
            lease_id, outcome.value, cool_ms, self._chance(), tokens, decode_us,
        )  # fmt: skip
        return bool(reply)

    def send_release(
        self,
        lease_id: str,
        *,
        replica: str,
        outcome: Outcome,
        cool_ms: int = 0,
        tokens: int = 0,
        decode_us: int = 0,
    ) -> asyncio.Future[Any]:
        """Send ``release`` now; the future may end in ``NoScript``, which the caller heals."""
        return self.send(
            "release",
            (self.keys.leases(replica),),
            lease_id, outcome.value, cool_ms, self._chance(), tokens, decode_us,
        )  # fmt: skip

    async def listed(self, replica: str) -> set[str]:
        """The ids of the leases that Redis knows of ``replica``."""
        return set(await self._link.call("HKEYS", self.keys.leases(replica)))

    async def renew(self, *, replica: str, ttl_ms: int) -> tuple[int, bool]:
        """Heartbeat: (leases that Redis knows of this replica, whether it knew the replica)."""
        keys = self.keys
        leases, known = await self.run(
            "renew", (keys.replicas, keys.leases(replica)), replica, ttl_ms
        )
        return int(leases), bool(known)

    async def reassert(
        self, leases: Iterable[tuple[str, str]], *, replica: str, ttl_ms: int
    ) -> int:
        """Put back ``(lease id, record)`` pairs; returns how many were missing."""
        keys = self.keys
        flat = [part for pair in leases for part in pair]
        reply = await self.run(
            "reassert", (keys.leases(replica), keys.replicas), replica, ttl_ms, *flat
        )
        return int(reply)

    async def reap(self, *, limit: int = 100) -> tuple[int, str, bool]:
        """End leases of one dead replica: (ended, replica or "", more waiting)."""
        ended, replica, more = await self.run("reap", (self.keys.replicas,), limit)
        return int(ended), str(replica), bool(more)

    async def register(
        self, node: Node, *, source: str = "admin", state: str | None = None
    ) -> tuple[str, int]:
        """Put ``node`` into the registry: ('added' | 'changed' | 'same', epoch).

        ``source`` says who put it there: ``config`` or ``admin``.
        """
        fields: list[Argument] = [
            "url", node.url, "weight", node.weight, "capacity", node.capacity,
            "engine", node.engine, "api_key_env", node.api_key_env or "", "source", source,
        ]  # fmt: skip
        if state is not None:
            fields += ["state", state]
        said, epoch = await self.run(
            "register",
            (self.keys.nodes, self.keys.node(node.id)),
            node.id, "\n".join(node.models), *fields,
        )  # fmt: skip
        return str(said), int(epoch)

    async def unregister(self, node_id: str) -> int:
        """Take a node out: leases still running on it, or -1 when it was not known."""
        keys = self.keys
        return int(await self.run("unregister", (keys.nodes, keys.node(node_id)), node_id))


def _decode(lease_id: str, reply: list[str]) -> Grant | Refusal:
    if reply[0] == "leased":
        _, node, epoch, start_ms, score, trial = reply
        return Grant(lease_id, node, int(epoch), int(start_ms), float(score), trial == "1")
    return Refusal(reply[0], int(float(reply[1])))
