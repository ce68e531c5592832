"""Whatever happens, in whatever order: the scripts answer and leave behind what the oracle says.

Hypothesis draws a tuning and a trace of calls, repeats and stale calls included, and each step
runs on a real server and on ``oracle.Oracle``. After every step the whole content of the server
is compared, and the invariants of DESIGN, section 3, are worked out from that content alone.

``HYPOTHESIS_PROFILE=large`` runs many more and longer traces, drawn anew each time.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.cluster.score import COLUMNS
from tests.lua.oracle import Lease, Oracle, Tuning, live_score
from tests.lua.pool import T0, TTL_MS, Pool

if TYPE_CHECKING:
    import redis

    from app.config import Policy
    from tests.lua.oracle import Node

NODES, MODELS, REPLICAS = ("a", "b", "c"), ("m", "n"), ("r1", "r2")
OUTCOMES = ("ok", "failed", "saturated", "rejected", "abandoned")
POLICIES: tuple[Policy, ...] = (
    "work", "ttft", "round_robin", "random", "least_conn", "weighted_least_conn", "p2c",
    "peak_ewma",
)  # fmt: skip
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
PROFILES = {
    "default": settings(max_examples=18, stateful_step_count=60, derandomize=True, **COMMON),  # type: ignore[arg-type]
    "large": settings(max_examples=400, stateful_step_count=100, **COMMON),  # type: ignore[arg-type]
}


def tunings(policy: Policy) -> st.SearchStrategy[Tuning]:
    """Tunings of a policy, with small numbers: limits are to be met."""
    return st.builds(
        Tuning,
        policy=st.just(policy),
        alpha=st.sampled_from((0.0, 0.3, 0.5, 1.0)),
        window=st.sampled_from((1, 2, 3, 50)),
        max_age_ms=st.sampled_from((20_000, 300_000)),
        idle_after_ms=st.sampled_from((500, 10_000)),
        slow_start_ms=st.sampled_from((0, 0, 5000)),
        top_k=st.sampled_from((1, 2, 4)),
        unhealthy_after=st.sampled_from((1, 2, 3)),
        threshold=st.sampled_from((1, 1, 2, 3, 50)),
        failure_rate=st.sampled_from((0.25, 0.5)),
        min_samples=st.sampled_from((1, 3, 8)),
    )


lots = st.integers(min_value=0, max_value=10**6)  # draws one of what there is, modulo its number
chances = st.floats(min_value=0, max_value=1, exclude_max=True)
subsets = st.sets(st.sampled_from(NODES), max_size=3).map(sorted)
cools = st.sampled_from((0, 1, 700, 7000))
asks = st.fixed_dictionaries(
    {
        "model": st.sampled_from(("m", "m", "m", "m", "n", "unheard")),
        "size": st.sampled_from((0, 12, 512, 4096)),
        "output": st.sampled_from((0, 100, 800)),
        "ttl_ms": st.sampled_from((TTL_MS, 500)),
    }
)


class Traces(RuleBasedStateMachine):
    """One trace. ``leased`` remembers every lease ever granted: id → (replica, record)."""

    client: redis.Redis
    policy: Policy

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """An empty server and two nodes to begin with."""
        tuning = data.draw(tunings(self.policy))
        self.client.flushall()
        self.pool, self.oracle = Pool(self.client, tuning), Oracle(tuning)
        self.minted = 0
        self.leased: dict[str, tuple[str, str]] = {}
        self.again: dict[str, tuple[str, dict[str, Any]]] = {}
        self.register("a", ["m", "n"], 1.0, 2, None, slots=1, kv_tokens=700)
        self.register("b", ["m"], 1.0, 3, None)

    def teardown(self) -> None:
        """Leave nothing for the next trace."""
        self.client.flushall()

    @property
    def now(self) -> int:
        """The present."""
        assert isinstance(self.pool.now, int)
        return self.pool.now

    def one_of(self, lot: int) -> tuple[str, str, str]:
        """(lease id, replica, record): mostly one that runs, else any ever granted."""
        running = sorted(i for held in self.oracle.leases.values() for i in held)
        ids = running if running and lot % 8 else sorted(self.leased)[-12:]
        if not ids:
            return "never", "r1", f"a {T0} {T0} 1"
        lease_id = ids[lot % len(ids)]
        return lease_id, *self.leased[lease_id]

    def mint(self) -> str:
        """A new lease id."""
        self.minted += 1
        return f"lease-{self.minted:04}"

    # Steps

    @rule(ms=st.sampled_from((1, 30, 400, 2400, 2400, 7000, 10_001, 21_000, 130_000)))
    def wait(self, ms: int) -> None:
        """Time passes."""
        self.pool.later(ms)

    @rule(
        node=st.sampled_from(NODES),
        models=st.sampled_from((["m"], ["m"], ["m", "n"], ["n"], [])),
        weight=st.sampled_from((0.1, 1.0, 10.0)),
        capacity=st.sampled_from((1, 2, 3, 64)),
        state=st.sampled_from((None, None, None, "active", "draining", "disabled")),
        health=st.sampled_from(("ok", "ok", "new")),
        slots=st.sampled_from((None, None, "", 1, 2)),
        kv_tokens=st.sampled_from((None, None, "", 700, 5000)),
    )
    def register(
        self,
        node: str,
        models: list[str],
        weight: float,
        capacity: int,
        state: str | None,
        health: str = "ok",
        slots: str | int | None = None,
        kv_tokens: str | int | None = None,
    ) -> None:
        """A node comes, or the operator changes it."""
        fields: dict[str, Any] = {"weight": weight, "capacity": capacity}
        limits = {"slots": slots, "kv_tokens": kv_tokens}
        fields |= {name: value for name, value in limits.items() if value is not None}
        if state is not None:
            fields["state"] = state
        said = self.pool.register(node, models, health=health, **fields)
        fields["url"] = f"http://{node}"
        texts = {name: str(value) for name, value in fields.items()}
        right = self.oracle.register(node, tuple(models), texts, now=self.now, health=health)
        assert tuple(said) == right
        self.check()

    @rule(node=st.sampled_from(NODES))
    def unregister(self, node: str) -> None:
        """A node goes."""
        assert self.pool.unregister(node) == self.oracle.unregister(node, now=self.now)
        self.check()

    def _granted(self, lease_id: str, replica: str, reply: list[str], right: Any) -> None:
        assert (reply[0], reply[1]) == right[:2]
        if reply[0] == "leased":
            assert float(reply[2]) == pytest.approx(float(right[2]), rel=1e-9)
            assert reply[3] == right[3]
            self.leased.setdefault(lease_id, (replica, reply[1]))
        self.check()

    def _acquire(self, lease_id: str, chance: float, how: dict[str, Any]) -> None:
        reply = self.pool.acquire(lease_id, chance=chance, **how)
        right = self.oracle.acquire(lease_id, **how, now=self.now, witness=reply[1].split()[0])
        self._granted(lease_id, how["replica"], reply, right)

    @rule(ask=asks, replica=st.sampled_from(REPLICAS), tried=subsets, chance=chances)
    def acquire(self, ask: dict[str, Any], replica: str, tried: list[str], chance: float) -> None:
        """A request comes; most have tried nothing before."""
        how = {**ask, "replica": replica, "tried": tried if chance < 0.3 else []}
        lease_id = self.mint()
        self.again[lease_id] = ("acquire", how)
        self._acquire(lease_id, chance, how)

    def _move(self, lease_id: str, chance: float, how: dict[str, Any]) -> None:
        reply = self.pool.move(lease_id, chance=chance, **how)
        right = self.oracle.move(
            lease_id, **how, chance=chance, now=self.now, witness=reply[1].split()[0]
        )
        self._granted(lease_id, how["replica"], reply, right)

    @rule(
        ask=asks,
        lot=lots,
        outcome=st.sampled_from(("failed", "failed", "saturated")),
        cool_ms=cools,
        chance=chances,
        more=subsets,
    )
    def move(
        self, ask: dict[str, Any], lot: int, outcome: str, cool_ms: int, chance: float,
        more: list[str],
    ) -> None:  # fmt: skip
        """An attempt fails and goes elsewhere."""
        old, replica, record = self.one_of(lot)
        tried = {record.split()[0], *(more if chance < 0.2 else ())}
        how = {
            **ask, "replica": replica, "old": old, "outcome": outcome, "cool_ms": cool_ms,
            "tried": sorted(tried),
        }  # fmt: skip
        lease_id = self.mint()
        self.again[lease_id] = ("move", how)
        self._move(lease_id, chance, how)

    @precondition(lambda self: self.leased)
    @rule(lot=lots, chance=chances)
    def ask_again(self, lot: int, chance: float) -> None:
        """The answer of an acquire or a move was lost: the same call, while the lease runs."""
        lease_id, replica, _ = self.one_of(lot)
        if lease_id in self.oracle.leases.get(replica, {}):
            verb, how = self.again[lease_id]
            (self._acquire if verb == "acquire" else self._move)(lease_id, chance, how)

    @rule(
        ask=asks, replica=st.sampled_from(REPLICAS), ms=st.sampled_from((0, 3000)), chance=chances
    )
    def ask_twice(self, ask: dict[str, Any], replica: str, ms: int, chance: float) -> None:
        """The same, at once: nothing may depend on what became due meanwhile."""
        self.acquire(ask, replica, [], chance)
        self.pool.later(ms)
        if f"lease-{self.minted:04}" in self.oracle.leases.get(replica, {}):
            self._acquire(
                f"lease-{self.minted:04}", chance, self.again[f"lease-{self.minted:04}"][1]
            )

    @rule(
        ask=asks,
        replica=st.sampled_from(REPLICAS),
        chance=chances,
        ttft_ms=st.sampled_from((1, 40, 900)),
        decode_ms=st.sampled_from((0, 300)),
        tokens=st.sampled_from((0, 7, 100)),
    )
    def serve(
        self, ask: dict[str, Any], replica: str, chance: float, ttft_ms: int, decode_ms: int,
        tokens: int,
    ) -> None:  # fmt: skip
        """A whole answer, from the lease to a good end."""
        self.acquire(ask, replica, [], chance)
        lease_id = f"lease-{self.minted:04}"
        if lease_id not in self.oracle.leases.get(replica, {}):
            return
        self.pool.later(ttft_ms)
        took = self.pool.first_token(lease_id, ttft_ms * 1000, replica=replica)
        right = self.oracle.first_token(lease_id, replica, ttft_us=ttft_ms * 1000, now=self.now)
        assert took == right
        self.check()
        self.pool.later(decode_ms)
        how: dict[str, Any] = {
            "outcome": "ok", "cool_ms": 0, "chance": chance, "tokens": tokens,
            "decode_us": decode_ms * 1000,
        }  # fmt: skip
        ended = self.pool.release(lease_id, replica=replica, **how)
        assert ended == self.oracle.release(lease_id, replica, **how, now=self.now)
        self.check()

    @rule(node=st.sampled_from(NODES), spared=st.integers(0, 2), chance=chances)
    def node_breaks(self, node: str, spared: int, chance: float) -> None:
        """What runs on a node fails, but for a few that will be heard of later."""
        on_it = [
            (lease_id, replica)
            for replica, held in sorted(self.oracle.leases.items())
            for lease_id, lease in sorted(held.items())
            if lease.node == node
        ]
        self.pool.later(1)
        for lease_id, replica in on_it[spared:]:
            how = {"outcome": "failed", "cool_ms": 0, "chance": chance, "tokens": 0, "decode_us": 0}
            self.pool.release(lease_id, replica=replica, **how)  # type: ignore[arg-type]
            self.oracle.release(lease_id, replica, **how, now=self.now)  # type: ignore[arg-type]
        self.check()

    @rule(lot=lots, ttft_us=st.sampled_from((1, 5000, 40_000, 90_000, 3_000_001)))
    def first_token(self, lot: int, ttft_us: int) -> None:
        """A first token, or the same again, or one of a lease that is gone."""
        lease_id, replica, _ = self.one_of(lot)
        took = self.pool.first_token(lease_id, ttft_us, replica=replica)
        assert took == self.oracle.first_token(lease_id, replica, ttft_us=ttft_us, now=self.now)
        self.check()

    @rule(
        lot=lots,
        outcome=st.sampled_from((*OUTCOMES, "failed", "ok")),
        cool_ms=cools,
        chance=chances,
        tokens=st.sampled_from((0, 0, 7, 100)),
        decode_us=st.sampled_from((1, 1_000_000)),
    )
    def release(self, lot: int, **how: Any) -> None:
        """A lease ends, with any outcome; or ends again."""
        lease_id, replica, _ = self.one_of(lot)
        ended = self.pool.release(lease_id, replica=replica, **how)
        assert ended == self.oracle.release(lease_id, replica, **how, now=self.now)
        self.check()

    @rule(replica=st.sampled_from(REPLICAS), ttl_ms=st.sampled_from((0, TTL_MS)))
    def renew(self, replica: str, ttl_ms: int) -> None:
        """A heartbeat; one of 0 ms signs off."""
        known = self.pool.renew(replica, ttl_ms)
        assert tuple(known) == self.oracle.renew(replica, ttl_ms=ttl_ms, now=self.now)
        self.check()

    @rule(limit=st.sampled_from((1, 2, 100)))
    def reap(self, limit: int) -> None:
        """Whose heartbeat ran out loses its leases."""
        reply = self.pool.reap(limit)
        left = self.client.hkeys(self.pool.keys.leases(reply[1])) if reply[1] else []
        gone = self.oracle.leases.get(reply[1], {}).keys() - set(left)
        assert tuple(reply) == self.oracle.reap(limit=limit, now=self.now, witness=sorted(gone))
        self.check()

    @rule(replica=st.sampled_from(REPLICAS), from_lot=lots)
    def reassert(self, replica: str, from_lot: int) -> None:
        """A replica puts back what it was granted: what was reaped, and what is still there."""
        own = [
            (i, record) for i, (owner, record) in sorted(self.leased.items()) if owner == replica
        ]
        pairs = own[from_lot % (len(own) + 1) :][:4]
        back = self.pool.reassert(pairs, replica)
        assert back == self.oracle.reassert(replica, pairs, ttl_ms=TTL_MS, now=self.now)
        self.check()

    @rule(
        node=st.sampled_from(NODES),
        verdicts=st.sampled_from((
            ["ready"], ["ready"], ["loading"], ["miss"], ["miss"] * 3, ["alive"], ["waiting"],
            ["miss", "alive", "miss"],
        )),
        late=st.integers(0, 5),
        waiting_ms=st.sampled_from((0, 2000, 90_000)),
        valid_ms=st.sampled_from((0, 3000)),
    )  # fmt: skip
    def observe(
        self, node: str, verdicts: list[str], late: int, waiting_ms: int, valid_ms: int
    ) -> None:
        """Probes and replicas see something of a node, or, too late, of its former life."""
        known = self.oracle.nodes.get(node)
        epoch = str(known.epoch - (late == 0)) if known else "1"
        for verdict in verdicts:
            seen = self.pool.observe(
                node, verdict, epoch=epoch, waiting_ms=waiting_ms, valid_ms=valid_ms
            )
            assert tuple(seen) == self.oracle.observe(
                node, epoch, verdict, waiting_ms=waiting_ms, valid_ms=valid_ms, now=self.now
            )
        self.check()

    @rule(
        node=st.sampled_from(NODES),
        late=st.integers(0, 5),
        said=st.fixed_dictionaries({
            "engine_waiting": st.integers(0, 3),
            "engine_running": st.integers(0, 3),
            "kv_used": st.sampled_from((0, 0.25, 0.99, 1)),
            "engine_slots": st.sampled_from((0, 1, 3)),
            "engine_kv_tokens": st.sampled_from((0, 900, 20_000)),
        }),
        valid_ms=st.sampled_from((0, 3000)),
    )  # fmt: skip
    def signal(self, node: str, late: int, said: dict[str, float], valid_ms: int) -> None:
        """An engine says how full it is."""
        known = self.oracle.nodes.get(node)
        epoch = str(known.epoch - (late == 0)) if known else "1"
        right = self.oracle.signal(node, epoch, said, valid_ms=valid_ms, now=self.now)
        assert self.pool.signal(node, said, epoch=epoch, valid_ms=valid_ms) == right
        self.check()

    @rule(interval_ms=st.sampled_from((1, 5000)), limit=st.sampled_from((1, 2, 50)))
    def claim(self, interval_ms: int, limit: int) -> None:
        """A replica asks which nodes it is to probe."""
        right = self.oracle.claim(interval_ms=interval_ms, limit=limit, now=self.now)
        assert self.pool.claim(interval_ms, limit) == right
        self.check()

    @rule(interval_ms=st.sampled_from((1, 2000)), limit=st.sampled_from((1, 50, 50)))
    def sweep(self, interval_ms: int, limit: int) -> None:
        """Scores are brought up to date."""
        right = self.oracle.sweep(interval_ms=interval_ms, limit=limit, now=self.now)
        assert tuple(self.pool.sweep(interval_ms, limit)) == right
        self.check()

    # What must hold after every step

    def check(self) -> None:
        """The content of the server is what the oracle says, and consistent in itself."""
        state = self.pool.state()
        assert_invariants(self.pool, state, self.oracle)
        assert_same(self.pool, state, self.oracle)


def assert_invariants(pool: Pool, state: dict[str, Any], oracle: Oracle) -> None:
    """DESIGN, section 3, from what is stored. The oracle only tells when a score was worked out
    last: a window that has aged since is weighed at the next event."""
    keys = pool.keys
    held = [Lease.parse(record) for name, value in state.items()
            if name.startswith(keys.leases_prefix) for record in value.values()]  # fmt: skip
    owners = {n.removeprefix(keys.leases_prefix) for n in state if n.startswith(keys.leases_prefix)}
    assert owners <= state.get(keys.replicas, {}).keys(), "a lease without a known owner"
    for name, value in state.items():
        if name.startswith(keys.active("")):
            node_id = name.removeprefix(keys.active(""))
            assert int(value) == sum(lease.node == node_id for lease in held), name
    for node_id in {lease.node for lease in held} | state.get(keys.nodes, set()):
        assert keys.active(node_id) in state, f"nothing counts the leases of {node_id}"
    for node_id in state.get(keys.nodes, ()):
        record = state[keys.node(node_id)]
        window = state.get(keys.ttft(node_id), [])
        load = int(state.get(keys.active(node_id), 0))
        node = oracle.nodes[node_id]
        right = published(record, window, load, pool.tuning, node.rated_ms)
        if pool.tuning.policy == "work" and right:
            row = dict(zip(COLUMNS, state[keys.work][node_id], strict=True))
            assert row["inflight"] == load
            right = published_work(row, node.stood_ms)
        for model in record["models"].split():
            stored = state[keys.score(model)][node_id]
            assert stored == pytest.approx(right, rel=1e-9), (node_id, model, record)


def published(
    record: dict[str, str], window: list[str], load: int, tuning: Tuning, at_ms: int
) -> float:
    """The score as README states it, of one stored record."""
    barred = (
        load >= int(record["capacity"])
        or record["state"] != "active"
        or record["health"] != "ok"
        or record["circuit"] != "closed"
        or int(record.get("cooling_until_ms", 0)) > at_ms
    )
    if barred:
        return 0.0
    k = float(record["weight"])
    if tuning.policy == "ttft":
        t, age = tuning.prior_ms, at_ms - int(record.get("last_sample_ms", 0))
        if window and age <= tuning.max_age_ms:
            t = sum(int(sample.split(":")[0]) for sample in window) / len(window) / 1000
            idle = max(0, age - tuning.idle_after_ms) / tuning.idle_after_ms
            best = int(record["best_us"]) / 1000
            t = best + (t - best) / math.exp(idle)
        if int(record.get("waiting_until_ms", 0)) > at_ms:
            t = max(t, int(record["waiting_ms"]))
        t = max(t, tuning.floor_ms)
        if at_ms - int(record["since_ms"]) < tuning.slow_start_ms:
            k *= max(0.1, (at_ms - int(record["since_ms"])) / tuning.slow_start_ms)
        return k / ((load + 1) * (tuning.alpha * t / tuning.baseline_ms + (1 - tuning.alpha)))
    ewma_ms = int(record.get("ewma_us", 0)) / 1000 or tuning.prior_ms
    return {
        "work": 1.0,
        "least_conn": 1 / (load + 1),
        "p2c": 1 / (load + 1),
        "weighted_least_conn": k / (load + 1),
        "random": 1.0,
        "round_robin": 1 / (1 + int(record.get("picked", 0))),
        "peak_ewma": 1000 / ((load + 1) * ewma_ms),
    }[tuning.policy]


def published_work(row: dict[str, float], at_ms: int) -> float:
    """The score of policy work as docs/routing.md states it, of one stored row and the defaults:
    of a prompt of 512 tokens and an answer of 100."""
    rate, tpot = row["worked"] / row["waited_ms"], row["decoding_ms"] / row["decoded"]
    if row["waiting"] == 0:
        idle = math.exp((row["sampled_at"] - at_ms) / 5000)
        rate = row["best_rate"] * (1 - idle) + rate * idle if row["best_rate"] else 10 * rate
        idle = math.exp((row["ended_at"] - at_ms) / 5000)
        tpot = row["best_tpot"] * (1 - idle) + tpot * idle
    ttft = (row["queued"] + 512 + 128 + 20 * row["inflight"]) / rate
    silence = at_ms - row["silent_since"] if row["waiting"] else 0
    if silence > max(1000, ttft, 3 * 640 / rate):
        ttft = silence
    stall = 0.1 * (row["inflight"] - row["waiting"]) * 512 / rate
    over = 0.0
    if row["slots"]:
        over = max(0, row["inflight"] + 1 - row["slots"]) / row["slots"]
    if room := row["kv_tokens"]:
        over += max(0, max(row["held"], room * row["kv_used"]) + 612 - room) / room
    cost = ttft + stall + over * row["stay_ms"] + 0.05 * 100 * tpot
    lately = math.exp((row["ended_at"] - at_ms) / 30_000)
    failing = row["bad"] * lately / (row["seen"] * lately + 2)
    return 1000 * (1 - failing) / (cost + failing * 1000)


def assert_same(pool: Pool, state: dict[str, Any], oracle: Oracle) -> None:
    """Every key of the server, against the oracle; no key more, none less."""
    keys, nodes = pool.keys, oracle.nodes.values()
    listed = {node.id for node in nodes if not node.removed}
    right: dict[str, Any] = {keys.nodes: listed, keys.replicas: dict(oracle.replicas)}
    right[keys.probes] = {n.id: n.probe_ms for n in nodes if not n.removed}
    right[keys.sweeps] = {n.id: n.sweep_ms for n in nodes if not n.removed}
    if oracle.turn:
        right["lw:{default}:turn"] = str(oracle.turn)
    for replica, held in oracle.leases.items():
        right[keys.leases(replica)] = {i: str(lease) for i, lease in held.items()}
    if pool.tuning.policy == "work":
        right[keys.work] = {node.id: node.row for node in nodes}
        right["lw:{default}:weights"] = {n.id: n.weight for n in nodes if not n.removed}
    for node in nodes:
        right[keys.ttft(node.id)] = [str(sample) for sample in node.window]
        right[keys.active(node.id)] = str(oracle.load(node.id))
        right[keys.node(node.id)] = record_of(node)
    for model in MODELS:
        right[keys.score(model)] = {n.id: oracle.score(n) for n in oracle.serving(model)}
        due = {n.id: n.due_ms for n in nodes if model in n.models and n.due_ms is not None}
        right[keys.due(model)] = due
    found = {name: numbers(value) if name.startswith(keys.node("")) else value
             for name, value in state.items()}  # fmt: skip
    for name, value in right.items():
        if value:
            assert_close(found.pop(name, None), value, name)
    assert not found, "keys that should not be there"


def assert_close(found: Any, right: Any, name: str) -> None:
    """Equal, floats within 1e-9."""
    if found == right:
        return
    assert isinstance(found, dict), (name, found, right)
    assert found.keys() == right.keys(), name
    off = {
        key: (value, right[key])
        for key, value in found.items()
        if value != right[key] and value != pytest.approx(right[key], rel=1e-9)
    }
    assert not off, f"{name} (found, right): {off}"


def record_of(node: Node) -> dict[str, Any]:
    """The fields of a node's record; times and counts that are 0 may be absent."""
    return {
        **{name: number(value) for name, value in node.set_by_hand.items()},
        "models": "\n".join(node.models),
        "state": "removed" if node.removed else node.state,
        "health": node.health,
        "misses": node.misses,
        "since_ms": node.since_ms,
        "waiting_ms": node.waiting_ms,
        "waiting_until_ms": node.waiting_until_ms,
        "circuit": node.circuit,
        "cause": node.cause,
        "bad": node.bad,
        "seen": node.seen,
        "trial": node.trial,
        "streak": node.streak,
        "opens": node.opens,
        "tripped_at_ms": node.tripped_ms,
        "cooling_until_ms": node.cooling_ms,
        "sum_us": sum(sample.ttft_us for sample in node.window),
        "samples": len(node.window),
        "last_sample_ms": node.last_ms,
        "best_us": node.best_us,
        "ewma_us": node.ewma_us,
        "picked": node.picked,
        "tpot_us": -1 if node.tpot_us is None else node.tpot_us,
        "epoch": node.epoch,
        "base": node.idle,
        "signal_until_ms": node.signal_until_ms,
        **node.signal,
    }


def numbers(record: dict[str, str]) -> dict[str, Any]:
    """A stored record with its numbers as numbers and what may be absent. A word that is not
    there may also be written as 0."""
    words = {name: "" for name in ("trial", "cause") if record.get(name, "0") == "0"}
    absent = {
        "opens": 0, "tripped_at_ms": 0, "cooling_until_ms": 0, "sum_us": 0, "seen": 0,
        "samples": 0, "last_sample_ms": 0, "best_us": 0, "ewma_us": 0, "picked": 0, "tpot_us": -1,
        "misses": 0, "waiting_ms": 0, "waiting_until_ms": 0, "signal_until_ms": 0,
    }  # fmt: skip
    found = {name: number(value) for name, value in record.items()}
    if found.get("tpot_us") == "":  # a node that has not decoded yet
        del found["tpot_us"]
    return {**absent, **found, **words}


def number(text: str) -> float | str:
    """``text`` as a number when it is one."""
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("policy", POLICIES)
def test_every_trace_of_calls_leaves_the_state_that_the_oracle_leaves(
    valkey: redis.Redis, policy: Policy
) -> None:
    machine = type(f"Traces_{policy}", (Traces,), {"client": valkey, "policy": policy})
    profile = PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "default")]
    run_state_machine_as_test(machine, settings=profile)


def test_the_oracle_itself_gives_the_score_of_the_published_example() -> None:
    """K = 2, C = 3, T = 100 ms, T_base = 50 ms, alpha = 0.5: 2 / (4 · 1.5)."""
    oracle = Oracle(Tuning(alpha=0.5))
    oracle.register("a", ("m",), {"weight": "2", "capacity": "8"}, now=T0)
    for lease in "xyz":
        oracle.acquire(lease, "m", "r", ttl_ms=1, size=1, tried=(), now=T0, witness="a")
    assert oracle.score(oracle.nodes["a"]) == pytest.approx(1 / 3)
    assert live_score(1.0, 3, 3, "ttft") == 0
