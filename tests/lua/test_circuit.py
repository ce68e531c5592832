"""The circuit: when it opens, for how long, and who may try (CASES G2, G3)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.lua.oracle import Lease, Oracle, Tuning
from tests.lua.pool import T0, Pool

if TYPE_CHECKING:
    import redis

CIRCUIT = (
    "circuit", "cause", "trial", "streak", "bad", "seen", "opens", "tripped_at_ms",
    "cooling_until_ms", "since_ms",
)  # fmt: skip


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
def test_the_first_open_time_is_exact_and_each_failed_trial_doubles_it_with_a_fifth_of_jitter(
    pool: Pool, chance: float
) -> None:
    opened(pool, chance)
    for seconds in (2, 4, 8, 16, 32, 60, 60):
        due = pool.due("a")
        assert due is not None
        assert isinstance(pool.now, int)
        wait = due - pool.now
        jitter = 0.2 * chance if seconds > 2 else 0  # up to the bound of 60 s, and over it
        assert wait == int(seconds * 1000 * (1 + jitter))
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


def test_a_trial_that_breaks_off_after_its_first_token_opens_again_for_longer(pool: Pool) -> None:
    opened(pool)
    for open_ms in (2000, 4000, 8000):
        assert isinstance(pool.now, int)
        assert pool.due("a") == pool.now + open_ms
        pool.later(open_ms)
        pool.acquire("trial")
        pool.first_token("trial", 20_000)
        assert circuit(pool) == "closed"
        pool.release("trial", "failed")
        assert circuit(pool) == "open"


@pytest.mark.parametrize("first", ["trial", "next"])
def test_the_first_whole_answer_after_a_trial_has_begun_ends_the_streak_for_good(
    pool: Pool, first: str
) -> None:
    opened(pool)
    pool.later(2000)
    pool.acquire("trial")
    pool.first_token("trial", 20_000)
    pool.acquire("next")
    pool.release("trial" if first == "next" else "next", "abandoned")
    pool.release(first, "ok")
    assert pool.record("a")["streak"] == "0"
    end(pool, "failed", "failed")
    assert circuit(pool) == "closed"
    end(pool, "failed")
    assert isinstance(pool.now, int)
    assert pool.due("a") == pool.now + 2000


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
    assert (pool.active("a"), pool.record("a")["tpot_us"]) == (0, "")


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


def test_a_lease_id_that_reads_like_a_number_is_a_trial_like_any_other(pool: Pool) -> None:
    """Ids are hexadecimal with a dash: 1234567e-3 happens."""
    for lease, outcome in (("1234567e-3", "failed"), ("77", "ok")):
        if circuit(pool) == "closed":
            opened(pool)
        pool.later(4000)
        assert pool.acquire(lease)[3] == "1"
        pool.release(lease, outcome)
    assert circuit(pool) == "closed"


# Failure rate


def flaky(pool: Pool, *outcomes: str) -> None:
    """One request after another, while the circuit is closed."""
    for outcome in outcomes:
        assert circuit(pool) == "closed"
        end(pool, outcome)


ALTERNATING = ["failed", "ok"] * 5


def test_failures_that_never_come_in_a_row_open_by_their_rate(pool: Pool) -> None:
    flaky(pool, *ALTERNATING)  # seen = (1 - 0.95^10) / 0.05 = 8.03: enough, but the last was good
    end(pool, "failed")
    record = pool.record("a")
    assert (record["circuit"], record["cause"], record["streak"]) == ("open", "rate", "1")
    assert float(record["seen"]) == pytest.approx((1 - 0.95**11) / 0.05, abs=1e-3)
    bad = sum(0.95 ** (10 - i) for i in range(0, 11, 2))
    assert float(record["bad"]) == pytest.approx(bad, abs=1e-3)
    assert pool.due("a") == T0 + 2000


def test_a_streak_opens_for_its_own_cause(pool: Pool) -> None:
    opened(pool)
    assert pool.record("a")["cause"] == "streak"


@pytest.mark.parametrize(("least", "opens_at"), [(1, 1), (3, 5), (8, 11), (15, 29)])
def test_the_rate_counts_from_the_least_number_of_outcomes_on(
    valkey: redis.Redis, least: int, opens_at: int
) -> None:
    pool = Pool(valkey, Tuning(min_samples=least))
    pool.register("a")
    outcomes = 0
    while pool.record("a")["circuit"] == "closed":
        end(pool, "ok" if outcomes % 2 else "failed")
        outcomes += 1
    assert outcomes == opens_at


@pytest.mark.parametrize(
    ("rate", "every", "opens"), [(0.25, 4, True), (0.25, 6, False), (0.5, 2, True), (0.5, 3, False)]
)
def test_the_circuit_opens_above_the_rate_and_not_below(
    valkey: redis.Redis, rate: float, every: int, *, opens: bool
) -> None:
    pool = Pool(valkey, Tuning(failure_rate=rate))
    pool.register("a")
    for i in range(100):
        if circuit(pool) == "closed":
            end(pool, "ok" if i % every else "failed")
    assert circuit(pool) == ("open" if opens else "closed")


def test_a_rate_of_one_leaves_only_the_streak(valkey: redis.Redis) -> None:
    pool = Pool(valkey, Tuning(failure_rate=1, threshold=25))
    pool.register("a")
    flaky(pool, *["failed"] * 24)
    end(pool, "failed")
    assert (circuit(pool), pool.record("a")["cause"]) == ("open", "streak")


def test_a_good_node_counts_nothing_and_a_failure_is_forgotten_after_59_good_answers(
    pool: Pool,
) -> None:
    end(pool, *["ok"] * 30)
    assert (pool.record("a")["bad"], pool.record("a").get("seen", "0")) == ("0.0000", "0")
    end(pool, "failed", *["ok"] * 58)
    assert float(pool.record("a")["bad"]) > 0
    end(pool, "ok")
    assert (pool.record("a")["bad"], pool.record("a")["seen"]) == ("0.0000", "0.0000")


@pytest.mark.parametrize("neutral", ["rejected", "abandoned", "saturated"])
def test_endings_that_say_nothing_of_the_node_do_not_water_the_rate(
    pool: Pool, neutral: str
) -> None:
    for outcome in ALTERNATING:
        end(pool, outcome, *[neutral] * 3)
    assert circuit(pool) == "closed"
    end(pool, "failed")
    assert circuit(pool) == "open"


def tried_after(pool: Pool, outcome: str) -> None:
    """Wait until the trial is due and let it end so."""
    due = pool.due("a")
    assert due is not None
    pool.now = int(due)
    assert pool.acquire("trial")[3] == "1"
    pool.release("trial", outcome)


def test_after_a_rate_the_next_failure_opens_again_for_longer(pool: Pool) -> None:
    flaky(pool, *ALTERNATING)
    for seconds in (2, 4, 8, 16, 32, 60, 60):
        end(pool, "failed")
        assert (circuit(pool), pool.record("a")["cause"]) == ("open", "rate")
        assert isinstance(pool.now, int)
        assert pool.due("a") == pool.now + seconds * 1000
        tried_after(pool, "ok")
        assert circuit(pool) == "closed"


def test_a_trial_that_fails_keeps_the_cause_and_doubles(pool: Pool) -> None:
    flaky(pool, *ALTERNATING, "failed")
    tried_after(pool, "failed")
    assert isinstance(pool.now, int)
    assert (pool.record("a")["cause"], pool.due("a")) == ("rate", pool.now + 4000)


def test_after_a_streak_a_good_trial_starts_anew(pool: Pool) -> None:
    opened(pool)
    tried_after(pool, "failed")
    tried_after(pool, "ok")
    record = pool.record("a")
    assert [float(record[name]) for name in ("bad", "seen", "opens", "streak")] == [0] * 4
    end(pool, "failed", "failed")
    assert circuit(pool) == "closed"


def test_the_back_off_starts_anew_once_the_failures_have_faded(pool: Pool) -> None:
    flaky(pool, *ALTERNATING, "failed")
    tried_after(pool, "ok")
    end(pool, *["ok"] * 90)
    assert (pool.record("a")["opens"], pool.record("a")["bad"]) == ("0", "0.0000")
    flaky(pool, *ALTERNATING)
    end(pool, "failed")
    assert isinstance(pool.now, int)
    assert pool.due("a") == pool.now + 2000


# Flaky nodes among good ones


def share_of(
    pool: Pool, luck: random.Random, requests: int, failing: dict[str, float], step_ms: int = 20
) -> list[tuple[str, bool]]:
    """Requests one after another: who got each, and whether any circuit was open then."""
    got = []
    for _ in range(requests):
        pool.later(step_ms)
        node = pool.acquired("x", chance=luck.random())
        bad = luck.random() < failing.get(node, 0)
        pool.release("x", "failed" if bad else "ok", chance=luck.random())
        got.append((node, pool.record("a")["circuit"] != "closed" if bad else False))
    return got


@pytest.mark.parametrize("step_ms", [5, 40])
def test_a_node_that_fails_three_in_ten_keeps_less_than_a_twentieth_and_returns_when_well(
    valkey: redis.Redis, step_ms: int
) -> None:
    pool, luck = Pool(valkey), random.Random(7)
    for node in "abc":
        pool.register(node)
    got = share_of(pool, luck, 3000, {"a": 0.3}, step_ms)
    first = next(i for i, (_, opened_now) in enumerate(got) if opened_now)
    assert first < 300
    after = [node for node, _ in got[first + 1 :]]
    assert 0 < after.count("a") < 0.05 * len(after)
    # Well again: after its open time, a minute at most, one good answer, and it has its share.
    pool.later(72_000)
    got = share_of(pool, luck, 450, {}, step_ms)
    assert 100 <= [node for node, _ in got].count("a") <= 200
    assert pool.record("a")["opens"] == "0"


def test_a_node_that_fails_three_in_a_hundred_stays_closed(valkey: redis.Redis) -> None:
    pool, luck = Pool(valkey), random.Random(3)
    for node in "abc":
        pool.register(node)
    got = share_of(pool, luck, 1500, {"a": 0.03})
    assert not any(opened_now for _, opened_now in got)
    assert pool.record("a").get("opens", "0") == "0"
    assert 400 <= [node for node, _ in got].count("a") <= 600


def outcomes_until_open(failing: float, luck: random.Random, most: int) -> int | None:
    """On the oracle, which the traces hold to the scripts: fast enough for many seeds."""
    oracle = Oracle(Tuning())
    oracle.register("a", ("m",), {"weight": "1", "capacity": "8"}, now=T0)
    ending = {"cool_ms": 0, "chance": 0.0, "tokens": 0, "decode_us": 0, "now": T0}
    for i in range(most):
        oracle.leases["r"] = {"x": Lease("a", T0, T0, 1)}
        outcome = "failed" if luck.random() < failing else "ok"
        oracle.release("x", "r", outcome=outcome, **ending)  # type: ignore[arg-type]
        if oracle.nodes["a"].circuit == "open":
            return i + 1
    return None


def test_over_many_seeds_flaky_nodes_open_soon_and_nearly_sound_ones_hardly_ever() -> None:
    luck = random.Random(11)
    flaky_ones = [outcomes_until_open(0.3, luck, 1000) for _ in range(200)]
    assert None not in flaky_ones
    assert sorted(flaky_ones)[100] <= 20  # type: ignore[type-var,operator]
    nearly_sound = [outcomes_until_open(0.03, luck, 100) for _ in range(400)]
    assert sum(at is not None for at in nearly_sound) <= 0.03 * 400
