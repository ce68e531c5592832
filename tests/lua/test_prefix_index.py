"""The shared index of prompt prefixes: what a node is thought to hold, and what that is worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.cluster.score import COLUMNS
from tests.lua.oracle import Lease, Tuning
from tests.lua.pool import Pool

if TYPE_CHECKING:
    import redis

TOKENS = 128  # of a block here
ROOM = 2048  # the least that a node may be said to hold: 16 blocks
NODES = ("a", "b", "c")


def chain(conversation: int, depth: int) -> list[str]:
    """Hashes of a conversation: all share their first two blocks."""
    return [f"{(0 if i < 2 else conversation + 1):04x}{i:04x}" for i in range(depth)]


def text(hashes: list[str]) -> str:
    """As a request brings them."""
    return " ".join(f"{one} {(i + 1) * TOKENS}" for i, one in enumerate(hashes))


def following(valkey: redis.Redis, *nodes: str, room: int = ROOM) -> Pool:
    """A pool that follows prefixes."""
    pool = Pool(valkey, Tuning(policy="work", node_tokens=room))
    for node in nodes:
        pool.register(node)
    return pool


def asked(pool: Pool, lease: str, hashes: list[str], **how: object) -> Lease:
    """The lease of a prompt of these blocks and 40 tokens more."""
    size = len(hashes) * TOKENS + 40
    reply = pool.acquire(lease, size=size, blocks=text(hashes), **how)  # type: ignore[arg-type]
    assert reply[0] == "leased", reply
    return Lease.parse(reply[1])


def served(pool: Pool, lease: str, hashes: list[str], ttft_ms: int = 50, **how: object) -> Lease:
    """A whole answer."""
    record = asked(pool, lease, hashes, **how)
    pool.later(ttft_ms)
    pool.first_token(lease, ttft_ms * 1000)
    pool.later(50)
    pool.release(lease, tokens=2, decode_us=50_000)
    return record


@dataclass
class Held:
    """What one node holds, as plain Python: block → (last asked for, -place in its chain)."""

    used: dict[str, tuple[int, int]] = field(default_factory=dict)

    def hit(self, hashes: list[str]) -> int:
        """Tokens of the longest prefix that is here."""
        n = 0
        while n < len(hashes) and hashes[n] in self.used:
            n += 1
        return n * TOKENS

    def hold(self, hashes: list[str], now: int) -> None:
        """Now it holds these, and no more than fits."""
        for i, one in enumerate(hashes):
            self.used[one] = (now, -i)
        while len(self.used) * TOKENS > ROOM:
            del self.used[min(self.used, key=lambda one: self.used[one])]


def assert_index(pool: Pool, held: dict[str, Held]) -> None:
    """Both sides of the index and the sums say what the model says."""
    state = pool.state()
    holders = {
        one: set(value.split(" ")[1:-1]) for one, value in state.get(pool.keys.blocks, {}).items()
    }
    right: dict[str, set[str]] = {}
    for node, mine in held.items():
        assert set(state.get(pool.keys.cached(node), {})) == set(mine.used), node
        for one in mine.used:
            right.setdefault(one, set()).add(node)
    assert holders == right
    for node, mine in held.items():
        (row,) = pool.look(node)
        assert row[COLUMNS.index("cached")] == len(mine.used) * TOKENS


requests = st.tuples(
    st.integers(0, 4), st.integers(0, 12), st.floats(0, 1, exclude_max=True), st.booleans()
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(trace=st.lists(requests, min_size=5, max_size=40))
def test_a_node_holds_what_it_was_asked_for_last_and_a_lease_pays_for_the_rest_only(
    valkey: redis.Redis, trace: list[tuple[int, int, float, bool]]
) -> None:
    valkey.flushall()
    pool = following(valkey, *NODES)
    held = {node: Held() for node in NODES}
    for i, (conversation, depth, chance, whole) in enumerate(trace):
        hashes = chain(conversation, depth)
        pool.later(1 + int(chance * 3000))
        assert isinstance(pool.now, int)
        now = pool.now
        ask = served if whole else asked
        lease = ask(pool, f"x{i}", hashes, chance=chance)
        size, hit = len(hashes) * TOKENS + 40, held[lease.node].hit(hashes)
        assert lease.fresh == max(16, size - hit)
        held[lease.node].hold(hashes, now)
        assert_index(pool, held)


def test_a_conversation_stays_where_it_is_and_a_new_one_goes_elsewhere(
    valkey: redis.Redis,
) -> None:
    pool = following(valkey, *NODES, room=100_000)
    for node in NODES:  # all are known, and alike
        served(pool, f"first-{node}", [], tried=[n for n in NODES if n != node])
    homes = {}
    for conversation in range(3):
        homes[conversation] = asked(pool, f"c{conversation}", chain(conversation, 8)[2:]).node
    assert Counter(homes.values()) == dict.fromkeys(NODES, 1)
    for conversation, home in homes.items():
        pool.later(50)
        pool.first_token(f"c{conversation}", 50_000)
        pool.release(f"c{conversation}")
        for turn in range(4):
            grown = chain(conversation, 9 + turn)[2:]
            lease = served(pool, f"c{conversation}-{turn}", grown)
            assert (lease.node, lease.fresh) == (home, TOKENS + 40)


def test_a_prefix_is_left_behind_when_its_node_is_busier_than_it_saves(
    valkey: redis.Redis,
) -> None:
    pool = following(valkey, "a", "b", room=100_000)
    for node, other in (("a", "b"), ("b", "a")):
        served(pool, f"first-{node}", [], tried=[other])
    home = served(pool, "c", chain(1, 4)).node
    other = {"a": "b", "b": "a"}[home]
    assert asked(pool, "again", chain(1, 4)).node == home
    for i in range(8):  # 8 x 1000 tokens wait there
        pool.acquire(f"load-{i}", size=1000, tried=[other])
    assert asked(pool, "now", chain(1, 4)).node == other


def test_a_node_that_holds_the_prefix_is_looked_at_though_its_score_is_not_among_the_best(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey, Tuning(policy="work", node_tokens=100_000, top_k=1))
    for node in NODES:
        pool.register(node)
    for node in NODES:
        served(pool, f"first-{node}", [], tried=[n for n in NODES if n != node])
    served(pool, "c", chain(1, 30), ttft_ms=1200, tried=["a", "c"])
    pool.acquire("load", size=1000, tried=["a", "c"])
    b, *others = (pool.score(node) or 0 for node in ("b", "a", "c"))
    assert b < min(others)
    assert asked(pool, "again", chain(1, 30)).node == "b"
    assert asked(pool, "tried", chain(1, 30), tried=["b"]).node != "b"
    pool.register("b", state="draining")
    assert asked(pool, "draining", chain(1, 30)).node != "b"


@pytest.mark.parametrize("how", ["removed and added anew", "seen to come up again"])
def test_a_node_that_starts_anew_holds_nothing(valkey: redis.Redis, how: str) -> None:
    pool = following(valkey, "a", "b", room=100_000)
    served(pool, "c", chain(1, 600 // 8), tried=["b"])
    if how.startswith("removed"):
        pool.unregister("a")
        pool.register("a")
    else:
        pool.observe("a", "loading")
        pool.observe("a", "ready")
    assert_index(pool, {"a": Held(), "b": Held()})
    assert asked(pool, "again", chain(1, 5), tried=["b"]).fresh == 5 * TOKENS + 40


def test_the_cache_of_a_node_is_as_large_as_its_record_says(valkey: redis.Redis) -> None:
    pool = following(valkey, "a", room=100_000)
    pool.register("a", kv_tokens=10 * TOKENS)
    served(pool, "c", chain(1, 14))
    pool.later(1)
    assert asked(pool, "again", chain(1, 14)).fresh == 4 * TOKENS + 40


def test_a_pool_that_does_not_follow_prefixes_keeps_none(valkey: redis.Redis) -> None:
    pool = Pool(valkey, Tuning(policy="work"))
    pool.register("a")
    assert asked(pool, "c", chain(1, 9)).fresh == 9 * TOKENS + 40
    assert pool.keys.blocks not in pool.state()


def test_an_acquire_sent_again_holds_nothing_twice(valkey: redis.Redis) -> None:
    pool = following(valkey, *NODES)
    asked(pool, "x", chain(1, 5))
    state = pool.state()
    asked(pool, "x", chain(1, 5))
    assert pool.state() == state
