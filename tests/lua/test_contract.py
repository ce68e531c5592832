"""The contract between Python and Lua, and between Lua and a server (CASES A3, A5, C4, D2)."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.crc import key_slot

from app.cluster.score import COLUMNS
from app.cluster.scripts import VERBS, Scripts, constants, lua_dir, text
from app.cluster.signals import Signals
from app.keys import pool_keys
from app.model import Node, Outcome
from tests.lua.oracle import Tuning
from tests.lua.pool import T0, Pool
from tests.support.servers import ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from app.config import Policy

PER_REQUEST = ("acquire", "move", "first_token", "release", "admit", "settle")
CONSTANTS = constants(Tuning().settings())
OF_THE_ROW = {name.upper() for name in COLUMNS} | {"ROW", "COLUMNS"}
PARAMETER = re.compile(r"^-- (KEYS|ARGV)\[(\d+)(\.\.\.)?\]\s+(\w+)", re.MULTILINE)


@dataclass
class Header:
    """What a script's header says."""

    keys: list[str]
    args: list[str]
    rest: bool  # whether the last of ``args`` stands for any number

    @classmethod
    def of(cls, verb: str) -> Header:
        """Parse; numbers must run from 1 without gaps."""
        source = (lua_dir() / f"{verb}.lua").read_text()
        found = PARAMETER.findall(source)
        names: dict[str, list[str]] = {"KEYS": [], "ARGV": []}
        for kind, number, rest, name in found:
            assert int(number) == len(names[kind]) + 1, f"{verb}: {kind}[{number}]"
            assert not rest or (kind, number) == found[-1][:2], f"{verb}: only the last may repeat"
            names[kind].append(name)
        return cls(names["KEYS"], names["ARGV"], bool(found[-1][2]))


def code(source: str) -> str:
    """Lua without its comments."""
    return re.sub(r"--.*", "", source)


def used(verb: str, kind: str) -> set[int]:
    """The indices that the script uses, in its body and in what it calls."""
    body = code((lua_dir() / f"{verb}.lua").read_text())
    if "grant(" in body:  # the shared step names the keys and arguments of acquire and move
        body += code((lua_dir() / "_grant.lua").read_text())
    body += code((lua_dir() / "_node.lua").read_text())
    indices = {int(i) for i in re.findall(rf"{kind}\[(\d+)\]", body)}
    if kind == "KEYS" and "read(ARGV[3])" in body:  # which builds the key of the record
        indices.add(Header.of(verb).keys.index("node") + 1)
    if kind == "ARGV":
        indices |= {int(i) for i in re.findall(r"(?:tried_from|known_outcome)\((\d+)\)", body)}
        indices |= {int(i) for i in re.findall(r"for i = (\d+), #ARGV", body)}
        for first, last in re.findall(r"whole\((\d+), (\d+)\)", body):
            indices |= set(range(int(first), int(last) + 1))
    return indices


class FakeLink:
    """A link that remembers what it was asked to send."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.on_connect: list[Any] = []
        self.reply: Any = None

    def call(self, *args: Any) -> asyncio.Future[Any]:
        """Remember and answer."""
        self.sent.append(args)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_result(self.reply)
        return answer


NODE = Node(
    "node-1", "http://n", weight=2.5, capacity=7, models=("m {x}", "n"), engine="vllm", epoch=77
)
SIGNALS = Signals(waiting=1, running=6, kv_used=0.5, slots=8, kv_tokens=4096)
WORDS: dict[str, Any] = {  # what each name in a header stands for in the calls below
    "now": T0, "prefix": "ns:{pool}:", "lease": "lease-2", "replica": "replica-1", "ttl": 9000,
    "size": 33, "output": 44, "chance": 0.25, "old": "lease-1", "outcome": "saturated",
    "cool": 700, "tokens": 5, "decode": 6000, "limit": 50, "ttft": 81_000, "id": "node-1",
    "models": "m {x}\nn", "blocks": "0a 9", "waiting": 1, "running": 6, "used": 0.5, "slots": 8,
    "room": 4096,
    "health": "new", "epoch": 77, "verdict": "waiting", "value": 4000, "valid": 3000,
    "interval": 5000, "rpm": 60, "tpm": 9000, "cost": 120, "delta": -30,
    "version": 41, "edit": "-", "state": "open", "open": 60_000,
}  # fmt: skip
REST = {
    "acquire": ["a", "b"],
    "move": ["a", "b"],
    "look": ["a", "b"],
    "reassert": ["x", "a 1 2 3"],
    "edit": ["weight", "2.0"],
    "restore": ["node-1", "41 -"],
}


async def sent(verb: str, pool: str = "pool") -> tuple[list[str], list[Any]]:
    """(KEYS, ARGV) of the call that ``Scripts`` makes for a verb."""
    link = FakeLink()
    scripts = Scripts(
        link,  # type: ignore[arg-type]
        namespace="ns", pool=pool, constants=CONSTANTS, clock=lambda: T0, chance=lambda: 0.25,
    )  # fmt: skip
    ask: dict[str, Any] = {
        "replica": "replica-1",
        "ttl_ms": 9000,
        "size": 33,
        "output": 44,
        "blocks": "0a 9",
        "tried": ["a", "b"],
    }
    busy: dict[str, Any] = {"outcome": Outcome.SATURATED, "cool_ms": 700}
    refused = ["unknown", "0"]
    calls: dict[str, tuple[Any, Callable[[], Any]]] = {
        "acquire": (refused, lambda: scripts.acquire("lease-2", "m {x}", **ask)),
        "move": (refused, lambda: scripts.move("lease-2", "m {x}", old="lease-1", **ask, **busy)),
        "first_token": (
            1, lambda: scripts.first_token("lease-2", replica="replica-1", ttft_us=81_000)),
        "release": (1, lambda: scripts.release(
            "lease-2", replica="replica-1", tokens=5, decode_us=6000, **busy)),
        "renew": ([0, 1], lambda: scripts.renew(replica="replica-1", ttl_ms=9000)),
        "reassert": (1, lambda: scripts.reassert(
            [("x", "a 1 2 3")], replica="replica-1", ttl_ms=9000)),
        "reap": ([0, "", 0], lambda: scripts.reap(limit=50)),
        "register": (["same", "1"], lambda: scripts.register(
            NODE, state="draining", health="new")),
        "unregister": (0, lambda: scripts.unregister("node-1")),
        "observe": (["ok", "ok"], lambda: scripts.observe(
            NODE, "waiting", waiting_ms=4000, valid_ms=3000)),
        "claim": (["node-1"], lambda: scripts.claim(interval_ms=5000, limit=50)),
        "sweep": ([1, 0], lambda: scripts.sweep(interval_ms=5000, limit=50)),
        "admit": (["admitted", 0, 59, 1000, 1, 2], lambda: scripts.admit(
            "team-a", rpm=60, tpm=9000, cost=120)),
        "settle": (1, lambda: scripts.settle("team-a", rpm=60, tpm=9000, delta=-30)),
        "edit": (["done", "42"], lambda: scripts.edit(
            "node-1", "-", seen=41, fields={"weight": "2.0"})),
        "restore": (1, lambda: scripts.restore({"node-1": "41 -"})),
        "circuit": (["closed", "open"], lambda: scripts.circuit(
            "node-1", "open", open_ms=60_000)),
    }  # fmt: skip
    calls["signal"] = (1, lambda: scripts.signal(NODE, SIGNALS, valid_ms=3000))
    calls["look"] = ([""], lambda: scripts.look(["a", "b"]))
    link.reply, call = calls[verb]
    await call()
    [(command, _, count, *rest)] = link.sent
    assert command == "EVALSHA"
    return list(rest[:count]), list(rest[count:])


# Text


def test_every_script_is_a_verb_of_the_wrapper_and_the_other_way_round() -> None:
    files = {path.stem for path in lua_dir().glob("*.lua") if not path.stem.startswith("_")}
    assert files == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_first_line_is_the_shebang_in_the_file_and_in_what_is_sent(verb: str) -> None:
    source = (lua_dir() / f"{verb}.lua").read_text()
    assert source.startswith("#!lua _node")
    assert source.splitlines()[1].startswith(f"-- {verb}: ")
    assert text(verb, CONSTANTS).splitlines()[0] == "#!lua"
    assert "-- Returns " in source


@pytest.mark.parametrize("verb", VERBS)
def test_the_header_names_exactly_the_keys_and_arguments_that_the_code_uses(verb: str) -> None:
    header = Header.of(verb)
    assert used(verb, "KEYS") == set(range(1, len(header.keys) + 1))
    assert used(verb, "ARGV") == set(range(1, len(header.args) + 1))


@pytest.mark.parametrize("verb", VERBS)
async def test_the_wrapper_sends_what_the_header_names_in_its_order(verb: str) -> None:
    header = Header.of(verb)
    keys, args = await sent(verb)
    named = pool_keys("ns", "pool")
    right = {
        "score": named.score("m {x}"), "due": named.due("m {x}"), "nodes": named.nodes,
        "leases": named.leases("replica-1"), "replicas": named.replicas,
        "node": named.node("node-1"), "probes": named.probes, "sweeps": named.sweeps,
        "limit": named.limit("team-a"), "edits": named.edits, "changes": named.changes,
        "work": named.work,
    }  # fmt: skip
    assert keys == [right[name] for name in header.keys]
    fixed = header.args[:-1] if header.rest else header.args
    assert args[: len(fixed)] == [WORDS[name] for name in fixed]
    if verb in REST:
        assert args[len(fixed) :] == REST[verb]
    elif header.rest:  # pairs: field, value
        fields = dict(zip(args[len(fixed) :: 2], args[len(fixed) + 1 :: 2], strict=True))
        assert fields.pop("url") == "http://n"
        assert fields.keys() == {
            "weight", "capacity", "engine", "api_key_env", "slots", "kv_tokens", "source", "state",
        }  # fmt: skip
    else:
        assert len(args) == len(fixed)


@pytest.mark.parametrize("pool", ["default", "gpu.eu-1"])
@pytest.mark.parametrize("verb", VERBS)
async def test_all_keys_of_a_call_live_in_the_slot_of_the_pool(verb: str, pool: str) -> None:
    keys, args = await sent(verb, pool)
    assert {key_slot(key.encode()) for key in keys} == {key_slot(pool.encode())}
    assert key_slot((args[1] + "node:any").encode()) == key_slot(pool.encode())
    assert [arg for arg in args if str(arg).startswith("ns:")] == [f"ns:{{{pool}}}:"]


@pytest.mark.parametrize("verb", VERBS)
def test_no_script_walks_over_all_there_is(verb: str) -> None:
    called = set(re.findall(r"redis\.call\('(\w+)'", code(text(verb, CONSTANTS))))
    assert not called & {"KEYS", "SCAN", "SMEMBERS", "HKEYS", "HVALS", "SORT", "EVAL"}
    if verb in PER_REQUEST:
        assert not called & {"LRANGE", "HSCAN", "SSCAN", "ZSCAN", "ZUNION", "HLEN"}


def test_the_one_hash_that_is_read_whole_is_the_record_of_one_node() -> None:
    sources = {path.stem: code(path.read_text()) for path in lua_dir().glob("*.lua")}
    assert [name for name, source in sources.items() if "HGETALL" in source] == ["_node"]
    read = sources["_node"].partition("local function read(id)")[2].partition("\nend\n")[0]
    assert sources["_node"].count("HGETALL") == read.count("redis.call('HGETALL', key)") == 1
    assert "local key = prefix .. 'node:' .. id\n" in read


def test_every_setting_of_the_score_the_circuit_and_health_reaches_the_scripts() -> None:
    found = dict(CONSTANTS)
    tuned = Tuning(
        alpha=0.7, baseline_ms=51, prior_ms=101, floor_ms=11, window=52, max_age_ms=301_000,
        idle_after_ms=12_500, slow_start_ms=2500, unhealthy_after=4, threshold=5,
        failure_rate=0.4, min_samples=9, open_ms=2500, open_max_ms=61_500, trial_ms=99_000,
        top_k=3, work={
            "mean_prompt_tokens": 500, "mean_output_tokens": 99, "min_prompt_tokens": 8,
            "overhead_tokens": 120, "lease_tokens": 21, "stall_share": 0.2, "decode_share": 0.06,
            "error_price_ms": 900, "tpot_prior_ms": 31, "untried_times": 9, "memory_s": 6,
            "recover_s": 7, "best_memory_s": 200, "error_memory_s": 20, "hung_s": 1.5,
            "hung_times": 4,
        },
    )  # fmt: skip
    changed = {name: value for name, value in constants(tuned.settings()) if name not in OF_THE_ROW}
    assert changed == {
        "POLICY": "'ttft'", "BY_LOAD": "true", "TWO_CHOICES": "false", "ALPHA": "0.7",
        "BASELINE_MS": "51.0", "PRIOR_MS": "101.0", "FLOOR_MS": "11.0", "WINDOW": "52",
        "SAMPLE_MAX_AGE_MS": "301000", "IDLE_AFTER_MS": "12500", "SLOW_START_MS": "2500",
        "UNHEALTHY_AFTER": "4", "FAILURE_RATE": "0.4", "MIN_SAMPLES": "9",
        "FAILURE_THRESHOLD": "5", "OPEN_MS": "2500", "OPEN_MAX_MS": "61500", "TRIAL_MS": "99000",
        "TOP_K": "3", "MEAN_PROMPT_TOKENS": "500", "MEAN_OUTPUT_TOKENS": "99",
        "MIN_PROMPT_TOKENS": "8", "OVERHEAD_TOKENS": "120.0", "LEASE_TOKENS": "21.0",
        "STALL_SHARE": "0.2", "DECODE_SHARE": "0.06", "ERROR_PRICE_MS": "900.0",
        "TPOT_PRIOR_MS": "31.0", "UNTRIED_TIMES": "9.0", "MEMORY_MS": "6000.0",
        "RECOVER_MS": "7000.0", "BEST_MEMORY_MS": "200000.0", "ERROR_MEMORY_MS": "20000.0",
        "HUNG_MS": "1500.0", "HUNG_TIMES": "4.0", "KEEP": "0.98", "ERROR_KEEP": "0.95",
        "LEAST_TTFT_MS": "1", "PREFIX": "false", "NODE_TOKENS": "100000",
    }  # fmt: skip
    for name in found:
        used_in = [path.stem for path in lua_dir().glob("*.lua")
                   if re.search(rf"\b{name}\b", code(path.read_text()))]  # fmt: skip
        assert used_in, f"{name} is written and never read"


# Idempotence


@pytest.fixture(params=["ttft", "work"])
def pool(valkey: redis.Redis, request: pytest.FixtureRequest) -> Pool:
    """Nodes a and b, one lease old on a."""
    pool = Pool(valkey, Tuning(policy=request.param, threshold=1))
    pool.register("a", ["m", "n"], capacity=2)
    pool.register("b", capacity=1)
    pool.acquired("old", "n", size=20)
    pool.later(100)
    return pool


FULL = {"engine_waiting": 3, "engine_running": 8, "kv_used": 1.0, "engine_slots": 8,
        "engine_kv_tokens": 4096}  # fmt: skip

REPEATED: dict[str, Callable[[Pool], Any]] = {
    "acquire": lambda pool: pool.acquire("new", chance=0.9),
    "acquire of the last place": lambda pool: pool.acquire("new", tried=["a"]),
    "move": lambda pool: pool.move("new", "old", tried=["a"]),
    "move when there is no other": lambda pool: pool.move("new", "old", tried=["a", "b"]),
    "first_token": lambda pool: pool.first_token("old", 70_000),
    "release ok": lambda pool: pool.release("old", tokens=3, decode_us=900),
    "release failed": lambda pool: pool.release("old", "failed"),
    "release saturated": lambda pool: pool.release("old", "saturated", cool_ms=500),
    "release of nothing": lambda pool: pool.release("never"),
    "renew": lambda pool: pool.renew(),
    "reassert": lambda pool: pool.reassert([("lost", f"b {T0} {T0} 9")], "r2"),
    "register": lambda pool: pool.register("a", ["n"], weight=3),
    "register of a new node": lambda pool: pool.register("z", health="new"),
    "observe ready": lambda pool: pool.observe("a", "ready"),
    "observe loading": lambda pool: pool.observe("a", "loading"),
    "observe alive": lambda pool: pool.observe("a", "alive"),
    "observe waiting": lambda pool: pool.observe("a", "waiting", waiting_ms=9, valid_ms=9),
    "observe of nothing": lambda pool: pool.observe("never", "miss", epoch="1"),
    "claim": lambda pool: pool.claim(),
    "sweep": lambda pool: pool.sweep(),
    "signal": lambda pool: pool.signal("a", FULL),
    "unregister while it runs": lambda pool: pool.unregister("a"),
    "unregister": lambda pool: pool.unregister("b"),
    "edit": lambda pool: pool.edit("a", "[1]", weight=3, models="n"),
    "edit of no record": lambda pool: pool.edit("z", "[1]"),
    "restore": lambda pool: pool.restore({"a": "5 [1]"}),
    "circuit open": lambda pool: pool.circuit("a", "open", 500),
    "circuit closed": lambda pool: pool.circuit("a", "closed"),
}


@pytest.mark.parametrize("call", REPEATED.values(), ids=REPEATED.keys())
def test_a_call_sent_twice_leaves_what_one_leaves(pool: Pool, call: Callable[[Pool], Any]) -> None:
    call(pool)
    state = pool.state()
    call(pool)
    assert pool.state() == state


@pytest.mark.parametrize("verb", ["acquire of the last place", "acquire", "move"])
def test_a_grant_asked_for_again_is_the_same_record(pool: Pool, verb: str) -> None:
    reply = REPEATED[verb](pool)
    assert reply[0] == "leased"
    assert REPEATED[verb](pool)[:2] == reply[:2]


def test_an_acquire_sent_again_takes_no_trial_that_became_due_meanwhile(pool: Pool) -> None:
    pool.release("old", "failed")
    assert pool.acquired("new") == "b"
    pool.later(2000)
    state = pool.state()
    assert pool.acquired("new") == "b"
    assert pool.state() == state
    assert pool.acquire("other")[3] == "1"


def test_a_reap_sent_twice_ends_leases_once(pool: Pool) -> None:
    pool.acquired("x", replica="r2", ttl_ms=50)
    pool.later(50)
    assert pool.reap() == (1, "r2", 0)
    state = pool.state()
    assert pool.reap() == (0, "", 0)
    assert pool.state() == state


# Arguments

MALFORMED: dict[str, Callable[[Pool], Any]] = {
    "size": lambda pool: pool.acquire("x", size=-1),
    "blocks": lambda pool: pool.acquire("x", blocks="x-y"),
    "output": lambda pool: pool.acquire("x", output=-1),
    "size of a float": lambda pool: pool.acquire("x", size=1.5),  # type: ignore[arg-type]
    "ttl": lambda pool: pool.acquire("x", ttl_ms="soon"),  # type: ignore[arg-type]
    "chance": lambda pool: pool.acquire("x", chance="x"),  # type: ignore[arg-type]
    "chance of one": lambda pool: pool.acquire("x", chance=1.0),
    "move's size": lambda pool: pool.move("x", "old", size=-1),
    "move's chance": lambda pool: pool.move("x", "old", chance=2),
    "move's outcome": lambda pool: pool.move("x", "old", outcome="bad"),
    "move's cool": lambda pool: pool.move("x", "old", outcome="saturated", cool_ms=-5),
    "ttft": lambda pool: pool.first_token("old", -1),
    "outcome": lambda pool: pool.release("old", "fine"),
    "outcome of two words": lambda pool: pool.release("old", "ok failed"),
    "cool": lambda pool: pool.release("old", "saturated", cool_ms="x"),  # type: ignore[arg-type]
    "release's chance": lambda pool: pool.release("old", "failed", chance="x"),  # type: ignore[arg-type]
    "tokens": lambda pool: pool.release("old", tokens=-1),
    "decode": lambda pool: pool.release("old", tokens=1, decode_us="x"),  # type: ignore[arg-type]
    "renew's ttl": lambda pool: pool.renew("r2", ttl_ms=-1),
    "record": lambda pool: pool.reassert([("x", f"a {T0} {T0} 1"), ("y", "a 1")], "r2"),
    "reassert's ttl": lambda pool: pool.reassert([], "r2", ttl_ms=-1),
    "limit": lambda pool: pool.reap(limit=-1),
    "health": lambda pool: pool.register("z", health="down"),
    "used": lambda pool: pool.signal("a", {**FULL, "kv_used": 1.5}),
    "slots": lambda pool: pool.signal("a", {**FULL, "engine_slots": -1}),
    "room": lambda pool: pool.signal("a", {**FULL, "engine_kv_tokens": 0.5}),
    "epoch": lambda pool: pool.observe("a", "ready", epoch="soon"),
    "verdict": lambda pool: pool.observe("a", "fine"),
    "verdict of two words": lambda pool: pool.observe("a", "ready miss"),
    "wait": lambda pool: pool.observe("a", "waiting", valid_ms=3000),
    "wait's end": lambda pool: pool.observe("a", "waiting", waiting_ms=9, valid_ms=-1),
    "claim's interval": lambda pool: pool.claim(interval_ms=-1),
    "claim's limit": lambda pool: pool.claim(limit=-1),
    "sweep's interval": lambda pool: pool.sweep(interval_ms="x"),  # type: ignore[arg-type]
    "sweep's limit": lambda pool: pool.sweep(limit=-1),
    "rpm": lambda pool: pool.admit(rpm=-1, tpm=9, cost=1),
    "tpm": lambda pool: pool.admit(rpm=1, tpm=1.5, cost=1),
    "cost": lambda pool: pool.admit(rpm=1, tpm=9, cost=-1),
    "settle's rpm": lambda pool: pool.settle(rpm=-1, tpm=9, delta=1),
    "settle's tpm": lambda pool: pool.settle(tpm=-9, delta=1),
    "delta": lambda pool: pool.settle(tpm=9, delta=1.5),
    "delta that is no number": lambda pool: pool.settle(tpm=9, delta="x"),  # type: ignore[arg-type]
    "id": lambda pool: pool.register("a node"),
    "edit's id": lambda pool: pool.edit("a b", "-"),
    "version": lambda pool: pool.edit("a", "-", seen="new"),
    "edit's field without value": lambda pool: pool.run(
        "edit", (pool.keys.node("a"), pool.keys.edits, pool.keys.changes), "a", 0, "-", "url"),
    "edit without version": lambda pool: pool.restore({"b": "7 -", "a": "-"}),
    "edit without text": lambda pool: pool.run(
        "restore", (pool.keys.edits, pool.keys.changes), "a"),
    "circuit": lambda pool: pool.circuit("a", "half_open"),
    "open": lambda pool: pool.circuit("a", "open", "soon"),
    "field without value": lambda pool: pool.run(
        "register", (pool.keys.nodes, pool.keys.node("z")), "z", "m", "url"),
}  # fmt: skip


@pytest.mark.parametrize("call", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_argument_is_refused_before_anything_is_written(
    pool: Pool, call: Callable[[Pool], Any]
) -> None:
    state = pool.state()
    with pytest.raises(redis.ResponseError, match="LEASEWAY bad ARGV"):
        call(pool)
    assert pool.state() == state


# Leases without their owner, damage from outside


def test_a_dead_replica_with_many_leases_is_reaped_to_the_last_in_bounded_calls(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    pool.register("a", capacity=9999)
    record = f"a {T0} {T0} 1"
    pool.reassert([(f"x{i:05}", record) for i in range(3000)], "dead", ttl_ms=1)
    pool.acquired("alive")
    assert pool.active("a") == 3001
    pool.later(1)
    ended: list[int] = []
    more = 1
    while more:
        count, who, more = pool.reap(limit=10)
        assert (who, 0 < count <= 10) == ("dead", True), f"no progress after {sum(ended)}"
        ended.append(count)
    assert sum(ended) == 3000
    assert (pool.active("a"), valkey.exists(pool.keys.leases("dead"))) == (1, 0)


def test_a_reaped_replica_puts_back_what_it_still_carries_and_nothing_counts_twice(
    pool: Pool,
) -> None:
    record = pool.acquire("x", replica="r2", ttl_ms=50)[1]
    before = pool.state()
    pool.later(50)
    pool.reap()
    assert pool.renew("r2") == (0, 0)
    assert pool.reassert([("x", record)], "r2") == 1
    assert pool.reassert([("x", record)], "r2") == 0
    after = pool.state()
    same = ("active", "leases", "score", "ttft", "nodes")
    for name in before:
        if name.removeprefix(pool.keys.prefix).split(":")[0] in same:
            assert after[name] == before[name], name
    assert pool.release("x", replica="r2") == 1
    assert pool.release("x", replica="r2") == 0


def test_a_lease_of_a_removed_node_stays_away_and_no_trace_of_the_node_remains(pool: Pool) -> None:
    record = pool.acquire("x", replica="r2", tried=["b"])[1]
    assert pool.unregister("a") == 2
    pool.later(10_000)
    pool.client.zrem(pool.keys.replicas, "r1")
    pool.reap()
    assert pool.reassert([("x", record)], "r2") == 0
    pool.release("old")
    assert not [name for name in pool.state() if name.endswith(":a")]
    assert pool.score("a") is None
    assert pool.acquire("y", "n") == ["unknown", "0"]


def test_a_counter_that_was_deleted_under_running_leases_never_goes_below_zero(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    for node in "abcd":
        pool.register(node)
    for i in range(3):
        pool.acquired(f"x{i}", tried=["b", "c", "d"])
    valkey.delete(pool.keys.active("a"))
    for i in range(3):
        pool.release(f"x{i}")
        assert pool.active("a") == 0
    assert pool.score("a") == pool.score("b")


def test_a_negative_counter_does_not_attract_requests(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    for node in "abcd":
        pool.register(node)
    valkey.set(pool.keys.active("a"), -5)
    for i in range(40):
        pool.acquired(f"x{i}", chance=i / 40)
    assert all(pool.active(node) == 10 for node in "abcd")


def test_scores_written_by_hand_are_mended_and_do_not_hang_the_server(pool: Pool) -> None:
    pool.client.zadd(pool.keys.score("m"), {"ghost": 99, "b": 50})
    pool.acquired("x", tried=["a"])
    assert pool.score("ghost") is None
    pool.client.zadd(pool.keys.score("other"), {"b": 50})  # full, and serves another model
    assert pool.acquire("y", "other") == ["unknown", "0"]


# On servers


def test_a_server_that_forgot_the_scripts_is_told_again_by_the_caller(pool: Pool) -> None:
    pool.client.script_flush()
    assert pool.acquired("x") in {"a", "b"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """One server in cluster mode that owns all slots."""
    file: Path = tmp_path_factory.mktemp("cluster") / "nodes.conf"
    with (
        ValkeyServer("--cluster-enabled", "yes", "--cluster-config-file", str(file)) as server,
        redis.Redis(port=server.port, decode_responses=True) as client,
    ):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(
            lambda: "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO")),
            what="cluster_state:ok",
        )
        yield client


@pytest.mark.parametrize("policy", ["round_robin", "work"])
def test_every_verb_runs_on_a_cluster_without_a_key_of_another_slot(
    cluster: redis.Redis, policy: Policy
) -> None:
    cluster.flushall()
    pool = Pool(cluster, Tuning(policy=policy, threshold=1))
    for node in "abc":
        pool.register(node, ["m {x}", "n"])
    record = pool.acquire("x", "m {x}", tried=["b", "c"])[1]
    pool.first_token("x", 30_000)
    assert pool.move("y", "x", "m {x}", tried=["a"])[0] == "leased"
    pool.release("y", "saturated", cool_ms=5)
    pool.later(2000)
    assert pool.acquire("z", "n")[3] == "1"
    assert len(pool.look("a")[0]) == (len(COLUMNS) if policy == "work" else 0)
    assert sorted(pool.claim()) == ["a", "b", "c"]
    assert tuple(pool.observe("b", "loading")) == ("ok", "loading")
    assert pool.sweep() == (3, 0)
    assert pool.renew("r1", ttl_ms=0) == (1, 1)
    assert pool.reap() == (1, "r1", 0)
    assert pool.reassert([("x", record)]) == 1
    assert pool.unregister("b") == 0
    assert pool.unregister("a") == 1
    assert pool.release("x") == 1
    assert pool.acquired("w", "n") == "c"
    assert pool.admit(rpm=60, tpm=100, cost=40) == ["admitted", 0, 59, 1000, 60, 24_000]
    assert pool.settle(rpm=60, tpm=100, delta=-10) == 70


def test_the_shebang_makes_a_server_refuse_keys_of_two_slots(cluster: redis.Redis) -> None:
    pool = Pool(cluster)
    foreign = pool_keys("lw", "another")
    assert key_slot(foreign.nodes.encode()) != key_slot(pool.keys.nodes.encode())
    with pytest.raises(redis.ResponseError, match="slot"):
        pool.run("unregister", (foreign.nodes, foreign.node("a")), "a")


def calls_of(client: Any, work: Callable[[], Any]) -> dict[str, int]:
    """INFO commandstats: how often each command ran during ``work``."""
    client.config_resetstat()
    work()
    stats = client.info("commandstats")
    return {name: of["calls"] for name, of in stats.items() if "config" not in name}


@pytest.mark.parametrize("policy", ["work", "ttft", "p2c", "round_robin"])
def test_a_request_costs_the_same_number_of_commands_with_10_and_with_1000_nodes(
    valkey: redis.Redis, policy: Any
) -> None:
    def request(pool: Pool) -> None:
        pool.acquired("x", chance=0.37)
        reply = pool.move("y", "x", tried=["n0001"], chance=0.37)
        assert reply[0] == "leased"
        pool.first_token("y", 20_000)
        pool.release("y")

    costs = []
    for nodes in (10, 1000):
        valkey.flushall()
        pool = Pool(valkey, Tuning(policy=policy))
        for i in range(nodes):
            pool.register(f"n{i:04}")
        costs.append(calls_of(valkey, partial(request, pool)))
    assert costs[0] == costs[1]


def test_a_refusal_looks_at_a_bounded_number_of_nodes(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    for i in range(200):
        pool.register(f"n{i:03}", state="disabled")
    cost = calls_of(valkey, lambda: pool.acquire("x"))
    assert sum(cost.values()) <= 30
