"""The circuit: when it opens, for how long, and who may try (CASES G2, G3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lua.oracle import Tuning
from tests.lua.pool import T0, Pool

if TYPE_CHECKING:
    import redis

CIRCUIT = ("circuit", "trial", "streak", "opens", "tripped_at_ms", "cooling_until_ms")


def end(pool: Pool, *outcomes: str, **how: float) -> None:
    """One request after another, each with its outcome."""
    for outcome in outcomes:
        pool.acquired("one")
        pool.release("one", outcome, **how)  # type: ignore[arg-type]


def circuit(pool: Pool, node: str = "a") -> str:
    """Its state."""
    return pool.record(node)["circuit"]


def learned(pool: Pool, node: str = "a") -> tuple[dict[str, str], float | None]:
    """All that outcomes write."""
    record = pool.record(node)
    return {name: record.get(name, "") for name in CIRCUIT}, pool.due(node)


@pytest.fixture
def pool(valkey: redis.Redis) -> Pool:
    """One node, three failures open it for 2 s."""
    pool = Pool(valkey)
    pool.register("a")
    return pool


def opened(pool: Pool, chance: float = 0.0) -> None:
    """Open the circuit of the only node."""
    end(pool, "failed", "failed", "failed", chance=chance)
    assert circuit(pool) == "open"


def test_the_circuit_opens_at_the_threshold_and_not_before(pool: Pool) -> None:
    end(pool, "failed", "failed")
    assert circuit(pool) == "closed"
    end(pool, "failed")
    assert circuit(pool) == "open"
    assert pool.acquire("next") == ["down", "2000"]
    pool.later(500)
    assert pool.acquire("next") == ["down", "1500"]


def test_a_good_answer_ends_the_streak(pool: Pool) -> None:
    end(pool, "failed", "failed", "ok", "failed", "failed")
    assert (circuit(pool), pool.record("a")["streak"]) == ("closed", "2")


@pytest.mark.parametrize("neutral", ["rejected", "abandoned"])
def test_the_clients_own_endings_neither_clear_nor_add_to_the_streak(
    pool: Pool, neutral: str
) -> None:
    end(pool, "failed", neutral, "failed", *[neutral] * 5)
    assert (circuit(pool), pool.record("a")["streak"]) == ("closed", "2")
    end(pool, "failed")
    assert circuit(pool) == "open"


def test_a_first_token_alone_does_not_end_the_streak(pool: Pool) -> None:
    for i in range(3):
        pool.acquired(f"x{i}")
        pool.first_token(f"x{i}", 20_000)
        pool.release(f"x{i}", "failed")
    assert circuit(pool) == "open"


def test_500_429_500_429_500_opens(pool: Pool) -> None:
    for outcome in ("failed", "saturated", "failed", "saturated", "failed"):
        end(pool, outcome, cool_ms=100)
        pool.later(100)
    assert circuit(pool) == "open"


def test_a_saturated_node_is_left_alone_for_as_long_as_it_asked(pool: Pool) -> None:
    end(pool, "saturated", cool_ms=7000)
    assert (pool.score("a"), circuit(pool)) == (0, "closed")
    assert pool.acquire("x") == ["down", "7000"]
    pool.later(6999)
    assert pool.acquire("x") == ["down", "1"]
    pool.later(1)
    assert pool.acquire("x")[3] == "0"


def test_a_shorter_cool_down_does_not_cut_a_longer_one(pool: Pool) -> None:
    for lease in "xy":
        pool.acquired(lease)
    pool.release("x", "saturated", cool_ms=7000)
    pool.release("y", "saturated", cool_ms=100)
    pool.later(6999)
    assert pool.acquire("z") == ["down", "1"]


def test_failures_during_a_cool_down_do_not_cut_it(pool: Pool) -> None:
    leases = "wxyz"
    for lease in leases:
        pool.acquired(lease)
    pool.release("w", "saturated", cool_ms=7000)
    for lease in leases[1:]:
        pool.release(lease, "failed")
    assert circuit(pool) == "open"
    pool.later(6999)
    assert pool.acquire("early") == ["down", "1"]
    pool.later(1)
    assert pool.acquire("trial")[3] == "1"


def test_a_change_by_the_operator_keeps_a_cool_down_and_its_end(pool: Pool) -> None:
    end(pool, "saturated", cool_ms=7000)
    pool.register("a", ["m", "n"], weight=2)
    for model in "mn":
        assert pool.acquire("x", model) == ["down", "7000"]
    pool.later(7000)
    assert pool.acquired("x") == "a"


def test_a_change_by_the_operator_brings_no_second_trial(pool: Pool) -> None:
    opened(pool)
    pool.later(2000)
    assert pool.acquire("trial")[3] == "1"
    pool.register("a", weight=2)
    assert pool.acquire("x")[0] == "down"
    pool.register("a", ["m", "n"])
    for model in "mn":
        assert pool.acquire("x", model)[0] == "down"


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999999])
def test_each_failed_trial_doubles_the_open_time_up_to_its_bound_with_a_fifth_of_jitter(
    pool: Pool, chance: float
) -> None:
    opened(pool, chance)
    for seconds in (2, 4, 8, 16, 32, 60, 60):
        due = pool.due("a")
        assert due is not None
        assert isinstance(pool.now, int)
        wait = due - pool.now
        assert seconds * 1000 <= wait <= seconds * 1200
        assert wait == int(seconds * 1000 * (1 + 0.2 * chance))
        pool.later(int(wait) - 1)
        assert pool.acquire("early")[0] == "down"
        pool.later(1)
        assert pool.acquire("trial")[3] == "1"
        pool.release("trial", "failed", chance=chance)


def test_a_trial_that_succeeds_closes_and_the_next_trip_starts_at_two_seconds(pool: Pool) -> None:
    opened(pool)
    pool.later(2000)
    pool.acquire("trial")
    pool.release("trial", "failed")
    pool.later(4000)
    pool.acquire("trial")
    pool.release("trial", "ok")
    assert learned(pool)[0]["circuit"] == "closed"
    assert learned(pool)[0]["streak"] == "0"
    opened(pool)
    assert isinstance(pool.now, int)
    assert pool.due("a") == pool.now + 2000


def test_a_trial_closes_the_circuit_with_its_first_token(pool: Pool) -> None:
    opened(pool)
    pool.later(2000)
    pool.acquire("trial")
    pool.first_token("trial", 20_000)
    assert (circuit(pool), pool.due("a")) == ("closed", None)
    assert pool.acquired("next") == "a"


def test_of_100_acquires_through_two_replicas_exactly_one_is_the_trial(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    pool.register("a", ["m", "n"])
    opened(pool)
    pool.register("b", ["m", "n"])
    pool.later(2050)
    replies = [
        pool.acquire(f"x{i}", "mn"[i // 2 % 2], replica=("r1", "r2")[i % 2], tried=["b"] * (i % 3))
        for i in range(100)
    ]
    on_a = [reply for reply in replies if reply[1].startswith("a ")]
    assert [reply[3] for reply in on_a] == ["1"]
    assert pool.active("a") == 1
    assert {reply[0] for reply in replies} <= {"leased", "down", "full"}


def test_late_failures_from_before_the_trip_change_nothing_and_do_not_extend(pool: Pool) -> None:
    late = [f"late-{i}" for i in range(20)]
    for lease in late:
        pool.acquired(lease)
    pool.later(10)
    opened(pool)
    before = learned(pool)
    outcomes = ("failed", "failed", "saturated", "ok", "abandoned")
    for i, lease in enumerate(late[:15]):
        pool.later(70)
        assert pool.release(lease, outcomes[i % 5], cool_ms=9000, chance=0.9) == 1
        assert learned(pool) == before
    pool.now = T0 + 2010
    assert pool.acquire("trial")[3] == "1"
    before = learned(pool)
    for i, lease in enumerate(late[15:]):
        pool.release(lease, outcomes[i % 5], cool_ms=9000)
        assert learned(pool) == before
    pool.release("trial", "ok")
    assert (circuit(pool), pool.active("a")) == ("closed", 0)


def test_a_failure_from_before_the_trip_does_not_count_after_the_recovery(pool: Pool) -> None:
    for i in range(5):
        pool.acquired(f"late-{i}")
    pool.later(10)
    opened(pool)
    pool.later(2000)
    pool.acquire("trial")
    pool.release("trial", "ok")
    for i in range(5):
        pool.release(f"late-{i}", "failed")
    assert (circuit(pool), pool.record("a")["streak"]) == ("closed", "0")


def test_a_result_of_a_former_life_of_the_node_says_nothing(pool: Pool) -> None:
    pool.acquired("old")
    pool.unregister("a")
    pool.later(5)
    pool.register("a")
    before = learned(pool)
    assert pool.first_token("old", 9_000_000) == 0
    assert pool.release("old", "failed", tokens=3, decode_us=9) == 1
    assert learned(pool) == before
    assert (pool.active("a"), pool.record("a").get("tpot_us")) == (0, None)


def test_a_lost_trial_is_replaced_when_its_time_is_over_and_its_late_result_is_ignored(
    valkey: redis.Redis,
) -> None:
    tuning = Tuning()
    pool = Pool(valkey, tuning)
    pool.register("a")
    opened(pool)
    pool.later(2000)
    assert pool.acquire("lost")[3] == "1"
    pool.later(tuning.trial_ms - 1)
    assert pool.acquire("early")[0] == "down"
    pool.later(1)
    assert pool.acquire("second")[3] == "1"
    before = learned(pool)
    pool.release("lost", "failed")
    assert learned(pool) == before
    pool.release("second", "ok")
    assert circuit(pool) == "closed"


@pytest.mark.parametrize("outcome", ["abandoned", "rejected"])
def test_a_trial_that_told_nothing_frees_its_place_at_once(pool: Pool, outcome: str) -> None:
    opened(pool)
    pool.later(2000)
    assert pool.acquire("trial")[3] == "1"
    assert pool.acquire("other")[0] == "down"
    pool.release("trial", outcome)
    assert pool.acquire("other")[3] == "1"


def test_the_trial_of_a_killed_replica_is_free_once_it_is_reaped(pool: Pool) -> None:
    opened(pool)
    pool.later(2000)
    assert pool.acquire("trial", replica="r9", ttl_ms=500)[3] == "1"
    pool.later(500)
    assert pool.reap() == (1, "r9", 0)
    assert pool.acquire("other")[3] == "1"


def test_a_saturated_trial_waits_for_the_cool_down_and_does_not_double(pool: Pool) -> None:
    opened(pool)
    pool.later(2000)
    pool.acquire("trial")
    pool.release("trial", "saturated", cool_ms=3000)
    assert (circuit(pool), pool.record("a")["opens"]) == ("open", "1")
    pool.later(2999)
    assert pool.acquire("early") == ["down", "1"]
    pool.later(1)
    assert pool.acquire("again")[3] == "1"


def test_an_open_node_that_is_also_draining_gets_no_trial(pool: Pool) -> None:
    opened(pool)
    pool.register("a", state="draining")
    pool.later(2000)
    assert pool.acquire("x")[0] == "down"
    pool.register("a", state="active")
    pool.later(2000)
    assert pool.acquire("x")[3] == "1"


def test_a_due_node_that_cannot_be_tried_does_not_hide_another_that_can(
    valkey: redis.Redis,
) -> None:
    """a was tried by this request, b is open and draining, c has just cooled and is idle."""
    pool = Pool(valkey, Tuning(threshold=1))
    for node in "abc":
        pool.register(node)
    for node, outcome in (("a", "saturated"), ("b", "failed"), ("c", "saturated")):
        others = [other for other in "abc" if other != node]
        assert pool.acquired(node, tried=others) == node
        pool.release(node, outcome, cool_ms=1990 if node == "a" else 2010)
    pool.register("b", state="draining")
    pool.later(2500)
    assert pool.acquired("x", tried=["a"]) == "c"
