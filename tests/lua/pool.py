"""The verbs on a real server, one plain call each; time and chance are arguments.

Also reads the whole state back: ``Pool.state()`` is every key of the server, so that a test can
say "nothing else changed".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError

from app.cluster.scripts import VERBS, constants, text
from app.keys import pool_keys
from tests.lua.oracle import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import redis

T0 = 1_700_000_000_000  # a time in ms, to begin with
TTL_MS = 10_000
SORTED = {
    "cached",
    "score",
    "due",
    "replicas",
    "probes",
    "sweeps",
    "weights",
}  # kinds of keys that are ZSETs


class Pool:
    """A pool under one tuning. ``now`` is the time that calls see; tests move it."""

    def __init__(self, client: redis.Redis, tuning: Tuning | None = None) -> None:
        self.client: Any = client
        self.tuning = tuning or Tuning()
        self.keys = pool_keys("lw", "default")
        self.now: int | str = T0
        self._texts = {verb: text(verb, constants(self.tuning.settings())) for verb in VERBS}
        self._digests = {verb: self.client.script_load(body) for verb, body in self._texts.items()}

    def run(self, verb: str, keys: Sequence[str], *args: str | float) -> Any:
        """One call."""
        rest = (len(keys), *keys, self.now, self.keys.prefix, *args)
        try:
            return self.client.evalsha(self._digests[verb], *rest)
        except NoScriptError:
            return self.client.eval(self._texts[verb], *rest)

    def later(self, ms: int) -> None:
        """Let time pass."""
        assert isinstance(self.now, int)
        self.now += ms

    def _ask_keys(self, model: str, replica: str) -> tuple[str, ...]:
        keys = self.keys
        return keys.score(model), keys.due(model), keys.leases(replica), keys.replicas

    def acquire(
        self,
        lease: str,
        model: str = "m",
        *,
        replica: str = "r1",
        size: int = 10,
        output: int = 100,
        chance: float = 0.0,
        blocks: str = "",
        tried: Iterable[str] = (),
        ttl_ms: int = TTL_MS,
    ) -> list[str]:
        """The reply as it came."""
        reply: list[str] = self.run(
            "acquire", self._ask_keys(model, replica),
            lease, replica, ttl_ms, size, output, chance, blocks, *tried,
        )  # fmt: skip
        return reply

    def acquired(self, lease: str, model: str = "m", **how: Any) -> str:
        """The node that was leased; fails on a refusal."""
        reply = self.acquire(lease, model, **how)
        assert reply[0] == "leased", reply
        return reply[1].split(" ")[0]

    def move(
        self,
        lease: str,
        old: str,
        model: str = "m",
        *,
        replica: str = "r1",
        size: int = 10,
        output: int = 100,
        chance: float = 0.0,
        blocks: str = "",
        outcome: str = "failed",
        cool_ms: int = 0,
        tried: Iterable[str] = (),
        ttl_ms: int = TTL_MS,
    ) -> list[str]:
        """The reply as it came."""
        reply: list[str] = self.run(
            "move", self._ask_keys(model, replica),
            lease, replica, ttl_ms, size, output, chance, blocks, old, outcome, cool_ms, *tried,
        )  # fmt: skip
        return reply

    def first_token(self, lease: str, ttft_us: int, *, replica: str = "r1") -> int:
        """1 when a sample was taken."""
        return int(self.run("first_token", (self.keys.leases(replica),), lease, ttft_us))

    def release(
        self,
        lease: str,
        outcome: str = "ok",
        *,
        replica: str = "r1",
        cool_ms: int = 0,
        chance: float = 0.0,
        tokens: int = 0,
        decode_us: int = 0,
    ) -> int:
        """1 when this call ended the lease."""
        return int(
            self.run(
                "release", (self.keys.leases(replica),),
                lease, outcome, cool_ms, chance, tokens, decode_us,
            )
        )  # fmt: skip

    def renew(self, replica: str = "r1", ttl_ms: int = TTL_MS) -> tuple[int, int]:
        """(leases known, whether the replica was)."""
        leases, known = self.run(
            "renew", (self.keys.replicas, self.keys.leases(replica)), replica, ttl_ms
        )
        return leases, known

    def reassert(
        self, pairs: Iterable[tuple[str, str]], replica: str = "r1", ttl_ms: int = TTL_MS
    ) -> int:
        """How many were put back."""
        flat = [part for pair in pairs for part in pair]
        keys = (self.keys.leases(replica), self.keys.replicas)
        return int(self.run("reassert", keys, replica, ttl_ms, *flat))

    def reap(self, limit: int = 100) -> tuple[int, str, int]:
        """(ended, replica, more)."""
        ended, replica, more = self.run("reap", (self.keys.replicas,), limit)
        return ended, replica, more

    def register(
        self,
        node: str,
        models: Iterable[str] = ("m",),
        *,
        health: str = "ok",
        **fields: str | float,
    ) -> tuple[str, str]:
        """('added' | 'changed' | 'same', epoch); weight 1 and capacity 64 unless given."""
        everything = {"url": f"http://{node}", "weight": 1, "capacity": 64, **fields}
        flat = [part for pair in everything.items() for part in pair]
        keys = (self.keys.nodes, self.keys.node(node))
        said, epoch = self.run("register", keys, node, "\n".join(models), health, *flat)
        return said, epoch

    def unregister(self, node: str) -> int:
        """Leases still running on it, or -1."""
        return int(self.run("unregister", (self.keys.nodes, self.keys.node(node)), node))

    def observe(
        self,
        node: str,
        verdict: str,
        *,
        epoch: str | None = None,
        waiting_ms: int | str = "",
        valid_ms: int = 0,
    ) -> tuple[str, str]:
        """(health before, health now); of the node's present life unless ``epoch`` is given."""
        known = self.record(node)["epoch"] if epoch is None else epoch
        before, after = self.run(
            "observe", (self.keys.node(node),), node, known, verdict, waiting_ms, valid_ms
        )
        return before, after

    def signal(
        self, node: str, said: dict[str, float], *, epoch: str | None = None, valid_ms: int = 3000
    ) -> int:
        """What the engine says: engine_waiting, engine_running, kv_used, engine_slots,
        engine_kv_tokens. 1 when the node is known."""
        known = self.record(node)["epoch"] if epoch is None else epoch
        return int(self.run(
            "signal", (self.keys.node(node),), node, known, valid_ms, said["engine_waiting"],
            said["engine_running"], said["kv_used"], said["engine_slots"], said["engine_kv_tokens"],
        ))  # fmt: skip

    def claim(self, interval_ms: int = 5000, limit: int = 50) -> list[str]:
        """The ids of the nodes to probe."""
        ids: list[str] = self.run("claim", (self.keys.probes,), interval_ms, limit)
        return ids

    def sweep(self, interval_ms: int = 2000, limit: int = 50) -> tuple[int, int]:
        """(nodes swept, more)."""
        swept, more = self.run("sweep", (self.keys.sweeps,), interval_ms, limit)
        return swept, more

    def look(self, *nodes: str) -> list[list[float]]:
        """The row of each node, in the order of ``score.COLUMNS``."""
        told = self.run("look", (self.keys.work,), *nodes)
        return [[float(value) for value in text.split()] for text in told]

    def admit(
        self, key: str = "team", *, rpm: float = 0, tpm: float = 0, cost: float = 0
    ) -> list[Any]:
        """The reply as it came."""
        reply: list[Any] = self.run("admit", (self.keys.limit(key),), rpm, tpm, cost)
        return reply

    def settle(self, key: str = "team", *, rpm: float = 0, tpm: float, delta: float) -> int:
        """The tokens that are left."""
        return int(self.run("settle", (self.keys.limit(key),), rpm, tpm, delta))

    def edit(
        self, node: str, text: str, *, seen: int | str = 0, **fields: str | float
    ) -> tuple[str, int]:
        """('done' | 'stale' | 'unknown', version)."""
        flat = [part for pair in fields.items() for part in pair]
        keys = (self.keys.node(node), self.keys.edits, self.keys.changes)
        said, version = self.run("edit", keys, node, seen, text, *flat)
        return said, int(version)

    def restore(self, edits: dict[str, str]) -> int:
        """How many were put back."""
        flat = [part for pair in edits.items() for part in pair]
        return int(self.run("restore", (self.keys.edits, self.keys.changes), *flat))

    def circuit(self, node: str, state: str, open_ms: int | str = 0) -> tuple[str, str]:
        """(before, now)."""
        before, now = self.run("circuit", (self.keys.node(node),), node, state, open_ms)
        return before, now

    # What is stored

    def score(self, node: str, model: str = "m") -> float | None:
        """ZSCORE."""
        score: float | None = self.client.zscore(self.keys.score(model), node)
        return score

    def active(self, node: str) -> int:
        """GET active, 0 when there is none."""
        return int(self.client.get(self.keys.active(node)) or 0)

    def record(self, node: str) -> dict[str, str]:
        """HGETALL of the node."""
        record: dict[str, str] = self.client.hgetall(self.keys.node(node))
        return record

    def due(self, node: str, model: str = "m") -> float | None:
        """When the node may be looked at again."""
        at: float | None = self.client.zscore(self.keys.due(model), node)
        return at

    def state(self) -> dict[str, Any]:
        """Every key of the server with its value."""
        names = sorted(self.client.keys("*"))
        kinds = [name.removeprefix(self.keys.prefix).split(":")[0] for name in names]
        pipe = self.client.pipeline(transaction=False)
        for name, kind in zip(names, kinds, strict=True):
            if kind in SORTED:
                pipe.zrange(name, 0, -1, withscores=True)
            elif kind in {"prefix", "node", "leases", "limit", "edits"}:
                pipe.hgetall(name)
            elif kind == "ttft":
                pipe.lrange(name, 0, -1)
            elif kind == "nodes":
                pipe.smembers(name)
            elif kind == "work":
                pipe.hkeys(name)
            else:
                assert kind in {"active", "turn", "changes"}, f"unexpected key {name}"
                pipe.get(name)
        state = {
            name: {member: float(score) for member, score in value} if kind in SORTED else value
            for name, kind, value in zip(names, kinds, pipe.execute(), strict=True)
        }
        if known := state.get(self.keys.work):
            state[self.keys.work] = dict(zip(known, self.look(*known), strict=True))
        return state
