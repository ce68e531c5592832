"""One typed method for each Lua verb: the only place where Python and Lua meet.

A script's text is the shebang, the shared parts that its first line names (``#!lua _node
_grant``; in front of them ``_work``, when that is the policy) and the verb. The settings are
written into it as literals: they cost nothing per call. The SHA-1 of the text is its version, so
replicas of two releases or settings can run side by side. A server that does not know a digest is
sent the text by the call that noticed (``NOSCRIPT``).
"""

from __future__ import annotations

import hashlib
import random
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from app.cluster import score
from app.cluster.link import Argument, Link, NoScript
from app.cluster.score import COLUMNS
from app.keys import pool_keys
from app.model import Grant, Node, Outcome, Quota, Refusal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from app.cluster.signals import Signals
    from app.config import Settings

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
    "observe",
    "claim",
    "sweep",
    "admit",
    "settle",
    "look",
    "signal",
    "edit",
    "restore",
    "circuit",
)
_OF_WORK = (  # constants of the score that only this policy has
    "top_k", "mean_prompt_tokens", "mean_output_tokens", "min_prompt_tokens", "overhead_tokens",
    "lease_tokens", "stall_share", "decode_share", "error_price_ms", "tpot_prior_ms",
    "untried_times", "keep", "memory_ms", "recover_ms", "best_memory_ms", "error_keep",
    "error_memory_ms", "hung_ms", "hung_times", "least_ttft_ms",
)  # fmt: skip
_NAME = re.compile(r"\b[A-Z][A-Z_]+\b")
_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)
Constants = tuple[tuple[str, str], ...]
_UNLOADED = {"round_robin", "random"}  # policies whose score does not fall with load
_TWO_CHOICES = {"p2c", "peak_ewma"}


def lua_dir() -> Path:
    """The folder of the scripts: inside an installed package, at the top of a checkout."""
    packaged = Path(str(files("app"))) / "lua"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "lua"


def constants(settings: Settings, pool: str = "default") -> Constants:
    """Name → Lua literal: the settings, times in ms, and the columns of a row of policy `work`."""
    scoring, circuit, timeouts = settings.scoring, settings.circuit, settings.timeouts
    values: dict[str, str | float | bool] = {
        "POLICY": scoring.policy,
        "BY_LOAD": scoring.policy not in _UNLOADED,
        "TWO_CHOICES": scoring.policy in _TWO_CHOICES,
        "ALPHA": scoring.alpha,
        "BASELINE_MS": scoring.ttft_baseline_ms,
        "PRIOR_MS": scoring.ttft_prior_ms,
        "FLOOR_MS": scoring.ttft_floor_ms,
        "WINDOW": scoring.window,
        "SAMPLE_MAX_AGE_MS": int(scoring.sample_max_age_s * 1000),
        "IDLE_AFTER_MS": int(scoring.idle_after_s * 1000),
        "SLOW_START_MS": int(scoring.slow_start_s * 1000),
        "UNHEALTHY_AFTER": settings.health.unhealthy_after,
        "FAILURE_RATE": circuit.failure_rate,
        "MIN_SAMPLES": circuit.min_samples,
        "FAILURE_THRESHOLD": circuit.failure_threshold,
        "OPEN_MS": int(circuit.open_s * 1000),
        "OPEN_MAX_MS": int(circuit.open_max_s * 1000),
        "TRIAL_MS": int((timeouts.connect_s + timeouts.first_token_s) * 1000),
        "PREFIX": scoring.policy == "work" and pool in settings.prefix.pools,
        "NODE_TOKENS": settings.prefix.node_tokens,
        "COLUMNS": len(COLUMNS),
        "ROW": "<" + "d" * len(COLUMNS),
    }
    values |= {name.upper(): column for column, name in enumerate(COLUMNS, 1)}
    values |= {name.upper(): getattr(score.Constants.of(scoring), name) for name in _OF_WORK}
    return tuple((name, _literal(value)) for name, value in values.items())


def _literal(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}'" if isinstance(value, str) else repr(value)


@cache
def text(verb: str, constants: Constants) -> str:
    """The text that Redis runs for ``verb``."""
    folder, literals = lua_dir(), dict(constants)
    shebang, _, body = (folder / f"{verb}.lua").read_text().partition("\n")
    names = shebang.split()[1:]
    if literals["PREFIX"] == "true":
        names.insert(0, "_prefix")
    if literals["POLICY"] == "'work'":
        names.insert(0, "_work")
    parts = [(folder / f"{part}.lua").read_text() for part in names]
    source = _COMMENT.sub("", "".join([*parts, body]))
    source = _NAME.sub(lambda name: literals.get(name[0], name[0]), source)
    return "#!lua\n" + _without_unused(source)


def _without_unused(source: str) -> str:
    """Leave out functions that nothing calls: a call of the script would make each of them."""
    for found in reversed(list(_FUNCTION.finditer(source))):
        rest = source[: found.start()] + source[found.end() :]
        if not re.search(rf"\b{found[1]}\b", rest):
            source = rest
    return source


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
        constants: Constants,
        clock: Callable[[], int | str] = lambda: "",
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._link = link
        self.keys = pool_keys(namespace, pool)
        self.policy = dict(constants)["POLICY"].strip("'")
        self._texts = {verb: text(verb, constants) for verb in VERBS}
        self._digests = {
            verb: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            for verb, source in self._texts.items()
        }
        self._clock = clock
        self._chance = chance
        self.timed: Callable[[str, float], None] = lambda _verb, _seconds: None
        link.on_connect.insert(0, self._load)

    def _load(self) -> None:
        """Ahead of all calls on a new connection: `first_token` is sent just before `release`, and
        would find its lease gone when it alone had to be sent again as text."""
        for source in self._texts.values():
            loaded = self._link.call("SCRIPT", "LOAD", source)
            loaded.add_done_callback(lambda f: f.cancelled() or f.exception())  # else: NOSCRIPT

    def send(self, verb: str, keys: Sequence[str], *args: Argument) -> asyncio.Future[Any]:
        """Send ``verb`` once by digest, not waiting for the answer."""
        return self._link.call(
            "EVALSHA", self._digests[verb], len(keys), *keys,
            self._clock(), self.keys.prefix, *args,
        )  # fmt: skip

    async def run(self, verb: str, keys: Sequence[str], *args: Argument) -> Any:
        """Send ``verb`` and wait; a server that lacks the script is given it.

        Raises ``RedisAway`` (no answer in time: the call may or may not have run) or
        ``ScriptError`` (a broken contract).
        """
        started = monotonic()
        try:
            reply = await self.send(verb, keys, *args)
        except NoScript:
            reply = await self._link.call(
                "EVAL", self._texts[verb], len(keys), *keys,
                self._clock(), self.keys.prefix, *args,
            )  # fmt: skip
        self.timed(verb, monotonic() - started)
        return reply

    async def acquire(
        self,
        lease_id: str,
        model: str,
        *,
        replica: str,
        ttl_ms: int,
        size: int,
        output: int,
        blocks: str = "",
        tried: Iterable[str] = (),
    ) -> Grant | Refusal:
        """Pick and lease; idempotent by ``lease_id``.

        ``size`` in prompt tokens, ``output`` in tokens of the answer; ``blocks`` of the prompt's
        prefix, ``hash tokens hash tokens …``, where the pool follows prefixes.
        """
        keys = self.keys
        reply = await self.run(
            "acquire",
            (keys.score(model), keys.due(model), keys.leases(replica), keys.replicas),
            lease_id, replica, ttl_ms, size, output, self._chance(), blocks, *tried,
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
        output: int,
        blocks: str = "",
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
            lease_id, replica, ttl_ms, size, output, self._chance(), blocks,
            old, outcome.value, cool_ms, *tried,
        )  # fmt: skip
        return _decode(lease_id, reply)

    def send_first_token(self, lease_id: str, *, replica: str, ttft_us: int) -> asyncio.Future[Any]:
        """Send ``first_token`` now; the future may end in ``NoScript``, which the caller heals."""
        return self.send("first_token", (self.keys.leases(replica),), lease_id, max(ttft_us, 1))

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
        self,
        node: Node,
        *,
        source: str = "admin",
        state: str | None = None,
        health: str = "ok",
    ) -> tuple[str, int]:
        """Put ``node`` into the registry: ('added' | 'changed' | 'same', epoch).

        ``source`` says who put it there: ``config`` or ``admin``; ``health`` is that of a node
        that is added: ``new`` gets no request before its first good probe.
        """
        fields: list[Argument] = [
            "url", node.url, "weight", node.weight, "capacity", node.capacity,
            "engine", node.engine, "api_key_env", node.api_key_env or "",
            "slots", node.slots or "", "kv_tokens", node.kv_tokens or "", "source", source,
        ]  # fmt: skip
        if state is not None:
            fields += ["state", state]
        said, epoch = await self.run(
            "register",
            (self.keys.nodes, self.keys.node(node.id)),
            node.id, "\n".join(node.models), health, *fields,
        )  # fmt: skip
        return str(said), int(epoch)

    async def unregister(self, node_id: str) -> int:
        """Take a node out: leases still running on it, or -1 when it was not known."""
        keys = self.keys
        return int(await self.run("unregister", (keys.nodes, keys.node(node_id)), node_id))

    async def observe(
        self, node: Node, verdict: str, *, waiting_ms: int | None = None, valid_ms: int = 0
    ) -> tuple[str, str]:
        """Fold what was seen of ``node`` into its record: (health before, health now)."""
        before, after = await self.run(
            "observe",
            (self.keys.node(node.id),),
            node.id, node.epoch, verdict, "" if waiting_ms is None else waiting_ms, valid_ms,
        )  # fmt: skip
        return str(before), str(after)

    async def signal(self, node: Node, signals: Signals, *, valid_ms: int) -> bool:
        """Keep what the engine of ``node`` says of itself; False when the node is not known."""
        used = "" if signals.kv_used is None else signals.kv_used
        return bool(
            await self.run(
                "signal",
                (self.keys.node(node.id),),
                node.id, node.epoch, valid_ms, signals.waiting, signals.running, used,
                signals.slots or 0, signals.kv_tokens or 0,
            )
        )  # fmt: skip

    async def look(self, node_ids: Sequence[str]) -> list[list[float]]:
        """What policy `work` has learned of each node (``score.COLUMNS``); [] without anything."""
        told = await self.run("look", (self.keys.work,), *node_ids)
        return [[float(value) for value in text.split()] for text in told]

    async def claim(self, *, interval_ms: int, limit: int = 50) -> list[str]:
        """Take the duty to probe the nodes that are due: their ids."""
        return [str(i) for i in await self.run("claim", (self.keys.probes,), interval_ms, limit)]

    async def sweep(self, *, interval_ms: int, limit: int = 50) -> tuple[int, bool]:
        """Rewrite the scores of nodes that are due: (how many, more waiting)."""
        swept, more = await self.run("sweep", (self.keys.sweeps,), interval_ms, limit)
        return int(swept), bool(more)

    async def admit(self, key: str, *, rpm: int, tpm: int, cost: int) -> Quota:
        """Count a request of the API key named ``key``, or say what refuses it; 0 is no limit."""
        said, *numbers = await self.run("admit", (self.keys.limit(key),), rpm, tpm, cost)
        return Quota("" if said == "admitted" else said, *map(int, numbers))

    def send_settle(self, key: str, *, rpm: int, tpm: int, delta: int) -> asyncio.Future[Any]:
        """Send ``settle`` now; the future may end in ``NoScript``, which the caller heals."""
        return self.send("settle", (self.keys.limit(key),), rpm, tpm, delta)

    async def settle(self, key: str, *, rpm: int, tpm: int, delta: int) -> int:
        """Add ``delta`` tokens to what the key has used: the tokens that are left."""
        return int(await self.run("settle", (self.keys.limit(key),), rpm, tpm, delta))

    async def edit(
        self, node_id: str, edit: str, *, seen: int, fields: Mapping[str, str] | None = None
    ) -> tuple[str, int]:
        """Put ``edit`` in the place of the one of version ``seen``, and ``fields`` in the record.

        ('done', version), ('stale', version of another edit) or ('unknown', 0).
        """
        keys, pairs = self.keys, [part for pair in (fields or {}).items() for part in pair]
        said, version = await self.run(
            "edit", (keys.node(node_id), keys.edits, keys.changes), node_id, seen, edit, *pairs
        )
        return str(said), int(version)

    async def restore(self, edits: Mapping[str, str]) -> int:
        """Put back edits, node → ``version edit``; returns how many were missing or older."""
        pairs = [part for pair in edits.items() for part in pair]
        return int(await self.run("restore", (self.keys.edits, self.keys.changes), *pairs))

    async def circuit(self, node_id: str, state: str, *, open_ms: int = 0) -> tuple[str, str]:
        """Open or close a circuit by hand: (before, now), empty when the node is not known."""
        before, after = await self.run(
            "circuit", (self.keys.node(node_id),), node_id, state, open_ms
        )
        return str(before), str(after)


def _decode(lease_id: str, reply: list[str]) -> Grant | Refusal:
    if reply[0] != "leased":
        return Refusal(reply[0], int(reply[1]))
    _, record, score, trial = reply
    node_id, epoch = record.split(" ", 2)[:2]
    return Grant(lease_id, node_id, int(epoch), record, float(score), trial == "1")
