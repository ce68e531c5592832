"""Changes by hand: edits are kept and versioned, records and scores follow in the same step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.lua.oracle import Tuning
from tests.lua.pool import T0, Pool

if TYPE_CHECKING:
    import redis

WEEK_MS = 7 * 86_400_000


@pytest.fixture(params=["ttft", "work"])
def pool(valkey: redis.Redis, request: pytest.FixtureRequest) -> Pool:
    """Node a of the models m and n, node b of m."""
    pool = Pool(valkey, Tuning(policy=request.param, threshold=1))
    pool.register("a", ["m", "n"], capacity=2)
    pool.register("b", ["m"])
    return pool


def rest(pool: Pool) -> dict[str, Any]:
    """The whole state but for edits and when nodes are swept."""
    mine = {pool.keys.edits, pool.keys.changes, pool.keys.sweeps}
    return {name: value for name, value in pool.state().items() if name not in mine}


def test_an_edit_changes_record_and_score_at_once_and_is_kept(pool: Pool) -> None:
    before = pool.score("a") or 0
    said, version = pool.edit("a", "[w]", weight=3)
    assert (said, version) == ("done", T0)
    assert pool.sweep(limit=9)[0] == 2  # due at once: the editor may have other settings
    again = Pool(pool.client, pool.tuning)
    again.register("a", ["m", "n"], capacity=2, weight=3)  # as if it had been so from the start
    assert pool.score("a") == again.score("a")
    assert (pool.score("a") or 0) > before
    assert pool.score("a", "n") == pool.score("a")
    assert pool.record("a")["weight"] == "3"
    assert pool.client.hgetall(pool.keys.edits) == {"a": f"{T0} [w]"}
    assert pool.client.get(pool.keys.changes) == str(T0)


def test_versions_only_grow_whatever_the_clock_does(pool: Pool) -> None:
    first = pool.edit("a", "[1]")[1]
    second = pool.edit("b", "[1]")[1]
    pool.later(-60_000)
    third = pool.edit("a", "[2]", seen=first)[1]
    assert first < second < third
    pool.later(120_000)
    assert pool.edit("b", "[2]", seen=second)[1] == pool.now


def test_of_two_edits_of_what_was_seen_once_the_second_changes_nothing(pool: Pool) -> None:
    _, seen = pool.edit("a", "[1]", weight=2)
    assert pool.edit("a", "[2]", seen=seen, weight=3)[0] == "done"
    state = pool.state()
    assert pool.edit("a", "[3]", seen=seen, weight=4)[0] == "stale"
    assert pool.edit("a", "[3]", weight=4)[0] == "stale"
    assert pool.state() == state


def test_a_record_that_is_not_there_is_not_made(pool: Pool) -> None:
    state = pool.state()
    assert pool.edit("z", "[1]", weight=2) == ("unknown", 0)
    assert pool.state() == state
    pool.acquired("x", "n")
    pool.unregister("a")  # is leaving: its lease still runs
    state = pool.state()
    assert pool.edit("a", "[1]", weight=2) == ("unknown", 0)
    assert pool.state() == state


def test_an_intent_alone_touches_no_record(pool: Pool) -> None:
    before = rest(pool)
    assert pool.edit("z", "[1]")[0] == "done"
    assert rest(pool) == before


def test_draining_ends_new_leases_and_enabling_brings_the_score_back(pool: Pool) -> None:
    pool.acquired("x", "n")
    before = rest(pool)
    _, seen = pool.edit("a", "[d]", state="draining")
    assert (pool.score("a"), pool.score("a", "n"), pool.active("a")) == (0, 0, 1)
    assert pool.acquire("y", "n")[0] == "down"
    pool.edit("a", "[]", seen=seen, state="active")
    assert rest(pool) == before
    assert pool.acquired("y", "n") == "a"


def test_a_node_that_is_let_in_again_starts_slowly(valkey: redis.Redis) -> None:
    pool = Pool(valkey, Tuning(slow_start_ms=10_000))
    pool.register("a")
    pool.later(60_000)
    _, seen = pool.edit("a", "[d]", state="draining")
    pool.later(60_000)
    pool.edit("a", "[]", seen=seen, state="active")
    slow = pool.score("a") or 0
    pool.later(10_000)
    pool.sweep()
    assert pool.score("a") == pytest.approx(slow * 10)


def test_models_that_change_leave_nothing_behind(pool: Pool) -> None:
    pool.edit("a", "[m]", models="n\no")
    assert (pool.score("a", "m"), pool.score("a", "n")) == (None, pool.score("a", "o"))
    assert pool.acquired("x", "o") == "a"


def test_models_that_change_keep_an_open_circuit_on_its_time(pool: Pool) -> None:
    pool.acquired("x", "n")
    pool.release("x", "failed")
    at = pool.due("a")
    assert at is not None
    pool.edit("a", "[m]", models="o\nn")
    assert (pool.due("a", "m"), pool.due("a", "n"), pool.due("a", "o")) == (None, at, at)
    assert pool.score("a", "o") == 0


def test_a_smaller_capacity_counts_at_once(pool: Pool) -> None:
    pool.acquired("x", "n")
    pool.edit("a", "[c]", capacity=1)
    assert pool.acquire("y", "n")[0] == "full"


def test_lost_edits_come_back_and_the_newer_of_two_stays(pool: Pool) -> None:
    _, a = pool.edit("a", "[a]")
    _, b = pool.edit("b", "[b]")
    pool.client.flushall()
    assert pool.restore({"a": f"{a} [a]"}) == 1
    assert pool.client.get(pool.keys.changes) == str(a)
    assert pool.restore({"a": f"{a - 1} [old]", "b": f"{b} [b]"}) == 1
    assert pool.client.hgetall(pool.keys.edits) == {"a": f"{a} [a]", "b": f"{b} [b]"}
    assert pool.client.get(pool.keys.changes) == str(b)
    assert pool.edit("c", "[c]")[1] > b


def test_what_is_set_no_more_is_forgotten_after_a_week(pool: Pool) -> None:
    pool.edit("gone", "-")
    pool.edit("kept", "[1]")
    pool.later(WEEK_MS)
    pool.edit("late", "-")
    pool.later(1)
    for n in range(200):
        if not pool.client.hexists(pool.keys.edits, "gone"):
            break
        pool.edit(f"more-{n}", "[1]")
    assert set(pool.client.hkeys(pool.keys.edits)) >= {"kept", "late"}
    assert not pool.client.hexists(pool.keys.edits, "gone")


# Circuits


def test_a_circuit_that_is_opened_by_hand_lets_one_trial_in_when_its_time_is_over(
    pool: Pool,
) -> None:
    pool.acquired("before", "n")
    assert pool.circuit("a", "open", 5000) == ("closed", "open")
    assert (pool.score("a"), pool.due("a"), pool.due("a", "n")) == (0, T0 + 5000, T0 + 5000)
    pool.later(1)
    pool.release("before")  # leased before: says nothing
    assert pool.record("a")["circuit"] == "open"
    assert pool.acquire("x", "n")[0] == "down"
    pool.later(5000)
    assert pool.acquire("trial", "n")[::3] == ["leased", "1"]
    assert pool.acquire("y", "n")[0] == "down"
    pool.release("trial")
    assert pool.record("a")["circuit"] == "closed"
    assert pool.score("a") == pool.score("b")


def test_a_circuit_that_is_closed_by_hand_counts_at_once_and_forgets_what_was(
    pool: Pool,
) -> None:
    pool.acquired("late", "n")
    pool.acquired("x", "n")
    pool.release("x", "failed")
    pool.later(1)
    assert pool.circuit("a", "closed") == ("open", "closed")
    assert (pool.due("a"), pool.due("a", "n")) == (None, None)
    pool.later(1)
    assert pool.acquired("y", "n") == "a"
    pool.release("late", "failed")  # of the bad spell
    assert pool.record("a")["circuit"] == "closed"
    pool.release("y", "failed")  # a new one: the threshold is one
    assert pool.record("a")["circuit"] == "open"
    assert pool.due("a", "n") == T0 + 2 + Tuning().open_ms  # the first time again


def test_a_cooling_node_is_let_in_by_closing_its_circuit(pool: Pool) -> None:
    pool.acquired("x", "n")
    pool.release("x", "saturated", cool_ms=60_000)
    assert pool.acquire("y", "n")[0] == "down"
    pool.circuit("a", "closed")
    assert pool.acquired("y", "n") == "a"


def test_a_node_that_is_not_there_has_no_circuit(pool: Pool) -> None:
    state = pool.state()
    assert pool.circuit("z", "open", 5) == ("", "")
    assert pool.state() == state
