"""Scores worked out by hand, and the values that an operator sees with redis-cli."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.lua.oracle import Tuning
from tests.lua.pool import T0, Pool

if TYPE_CHECKING:
    import redis

    from app.config import Policy

# alpha, K, window in µs, leases in flight, score: K / ((C + 1) · (alpha · T / 50 + 1 - alpha))
TABLE = [
    pytest.param(1.0, 1, [], 0, 0.5, id="empty window: prior of 100 ms"),
    pytest.param(0.5, 1, [], 0, 2 / 3, id="empty window, alpha one half"),
    pytest.param(0.0, 1, [], 0, 1.0, id="alpha 0: weight only"),
    pytest.param(0.0, 3, [900_000], 2, 1.0, id="alpha 0: weight over load"),
    pytest.param(1.0, 1, [50_000], 0, 1.0, id="at the baseline"),
    pytest.param(1.0, 1, [5_000], 0, 5.0, id="floor of 10 ms"),
    pytest.param(0.5, 1, [5_000, 5_000], 1, 1 / (2 * 0.6), id="floor, alpha one half"),
    pytest.param(1.0, 2, [20_000, 60_000, 70_000], 3, 0.5, id="mean of three, weight 2"),
    pytest.param(0.5, 10, [150_000], 4, 1.0, id="slow, alpha one half, weight 10, four in flight"),
    pytest.param(1.0, 0.1, [400_000], 0, 0.0125, id="slow and light"),
]  # fmt: skip


def sampled(pool: Pool, *samples_us: int, size: int = 10) -> None:
    """Leave samples on the only node, one request each."""
    for i, sample_us in enumerate(samples_us):
        lease = f"sample-{pool.now}-{i}"
        pool.acquired(lease, size=size)
        assert pool.first_token(lease, sample_us) == 1
        assert pool.release(lease) == 1


def loaded(pool: Pool, leases: int) -> None:
    """Put leases on the only node."""
    for i in range(leases):
        pool.acquired(f"load-{i}")


@pytest.mark.parametrize(("alpha", "weight", "window_us", "load", "score"), TABLE)
def test_the_score_in_the_zset_is_the_score_worked_out_by_hand(
    valkey: redis.Redis, alpha: float, weight: float, window_us: list[int], load: int, score: float
) -> None:
    pool = Pool(valkey, Tuning(alpha=alpha))
    pool.register("a", weight=weight)
    sampled(pool, *window_us)
    loaded(pool, load)
    assert pool.score("a") == pytest.approx(score, rel=1e-9)
    assert pool.active("a") == load


@pytest.mark.parametrize(
    ("policy", "score"),
    [
        ("least_conn", 1 / 3),
        ("p2c", 1 / 3),
        ("weighted_least_conn", 4 / 3),
        ("random", 1.0),
        ("round_robin", 1 / 4),  # its third turn was the last
        ("peak_ewma", 1000 / (3 * 80)),
    ],
)
def test_a_baseline_scores_weight_4_two_in_flight_and_80_ms_as_published(
    valkey: redis.Redis, policy: Policy, score: float
) -> None:
    pool = Pool(valkey, Tuning(policy=policy))
    pool.register("a", weight=4)
    sampled(pool, 80_000)
    loaded(pool, 2)
    assert pool.score("a") == pytest.approx(score, rel=1e-9)


def test_peak_ewma_takes_a_peak_at_once_and_forgets_it_over_ten_seconds(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey, Tuning(policy="peak_ewma"))
    pool.register("a")
    assert pool.score("a") == pytest.approx(1000 / 100)
    sampled(pool, 50_000)
    sampled(pool, 400_000)
    assert pool.score("a") == pytest.approx(1000 / 400)
    pool.later(10_000)
    sampled(pool, 50_000)  # 400 · 1/e + 50 · (1 - 1/e) ms, kept in whole µs
    assert pool.score("a") == pytest.approx(1e6 / 178_758, rel=1e-9)


def test_redis_cli_shows_score_active_and_window_as_documented(valkey: redis.Redis) -> None:
    cli: Any = valkey.execute_command
    pool = Pool(valkey)
    pool.register("a", ["llama3", "other"])
    pool.acquired("x", "llama3", size=321)
    pool.later(25)
    pool.first_token("x", 25_000)
    assert cli("ZSCORE", "lw:{default}:score:llama3", "a") == pytest.approx(1.0)
    assert cli("ZSCORE", "lw:{default}:score:other", "a") == pytest.approx(1.0)
    assert cli("GET", "lw:{default}:active:a") == "1"
    assert cli("LRANGE", "lw:{default}:ttft:a", 0, -1) == [f"25000:321:{T0 + 25}"]
    record = cli("HGET", "lw:{default}:leases:r1", "x")
    assert record == f"a {T0} {T0} 321+"
    pool.release("x")
    assert cli("GET", "lw:{default}:active:a") == "0"


def test_the_window_keeps_the_newest_samples_and_drops_the_oldest(valkey: redis.Redis) -> None:
    pool = Pool(valkey, Tuning(window=3))
    pool.register("a")
    sampled(pool, 1_000_000, 40_000, 60_000, 50_000)
    window = valkey.lrange("lw:{default}:ttft:a", 0, -1)
    assert window == [f"{us}:10:{T0}" for us in (50_000, 60_000, 40_000)]
    assert pool.score("a") == pytest.approx(1.0)
    assert (pool.record("a")["sum_us"], pool.record("a")["samples"]) == ("150000", "3")


def test_a_window_made_smaller_shrinks_over_the_next_samples(valkey: redis.Redis) -> None:
    wide = Pool(valkey, Tuning(window=30))
    wide.register("a")
    sampled(wide, *[90_000] * 30)
    narrow = Pool(valkey, Tuning(window=2))
    lengths = []
    for i in range(5):
        narrow.acquired(f"n{i}")
        narrow.first_token(f"n{i}", 10_000)
        lengths.append(valkey.llen("lw:{default}:ttft:a"))
        narrow.release(f"n{i}")
    assert lengths == [23, 16, 9, 2, 2]
    assert narrow.record("a")["sum_us"] == "20000"
    assert narrow.score("a") == pytest.approx(5.0)


def test_an_old_sample_leaves_when_the_next_one_comes(valkey: redis.Redis) -> None:
    pool = Pool(valkey, Tuning(max_age_ms=60_000))
    pool.register("a")
    sampled(pool, 1_000_000)
    pool.later(40_000)
    sampled(pool, 50_000)
    pool.later(20_001)
    sampled(pool, 150_000)
    assert pool.record("a")["samples"] == "2"
    assert pool.score("a") == pytest.approx(50 / 100)


def test_a_window_of_nothing_but_old_samples_counts_as_empty(valkey: redis.Redis) -> None:
    pool = Pool(valkey, Tuning(max_age_ms=60_000, idle_after_ms=60_000))
    pool.register("a")
    sampled(pool, 1_000_000, 2_000_000)
    assert pool.score("a") == pytest.approx(50 / 1500)
    pool.later(60_000)
    pool.register("a")
    assert pool.score("a") == pytest.approx(50 / 1500)
    pool.later(1)
    pool.register("a")
    assert pool.score("a") == pytest.approx(50 / 100)
    sampled(pool, 25_000)
    assert pool.record("a")["sum_us"] == "25000"
    assert pool.score("a") == pytest.approx(2.0)


def test_the_last_place_takes_the_score_to_zero_and_a_free_one_brings_it_back(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    pool.register("a", capacity=2)
    scores = [pool.score("a")]
    for lease in "xy":
        pool.acquired(lease)
        scores.append(pool.score("a"))
    pool.release("x")
    assert [*scores, pool.score("a")] == pytest.approx([0.5, 0.25, 0, 0.25])


@pytest.mark.parametrize("state", ["draining", "disabled"])
def test_a_node_taken_out_by_hand_scores_zero_until_it_is_active_again(
    valkey: redis.Redis, state: str
) -> None:
    pool = Pool(valkey)
    pool.register("a")
    pool.acquired("x")
    pool.register("a", state=state)
    assert (pool.score("a"), pool.active("a")) == (0, 1)
    pool.release("x")
    assert (pool.score("a"), pool.active("a")) == (0, 0)
    pool.register("a", state="active")
    assert pool.score("a") == pytest.approx(0.5)


def test_an_open_and_a_half_open_node_score_zero_and_a_closed_one_does_not(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    pool.register("a")
    for i in range(3):
        pool.acquired(f"f{i}")
        assert pool.score("a") == pytest.approx(0.25)
        pool.release(f"f{i}", "failed")
    assert (pool.record("a")["circuit"], pool.score("a")) == ("open", 0)
    pool.later(2000)
    assert pool.acquire("trial")[3] == "1"
    assert (pool.record("a")["circuit"], pool.score("a"), pool.active("a")) == ("half_open", 0, 1)
    pool.release("trial", "ok")
    assert pool.record("a")["circuit"] == "closed"
    assert pool.score("a") == pytest.approx(0.5)


def test_decode_time_is_the_first_answer_then_moves_a_twentieth_of_the_way(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    pool.register("a")
    for lease, tokens, decode_us in [("x", 100, 2_000_000), ("y", 10, 600_000), ("z", 0, 99)]:
        pool.acquired(lease)
        pool.release(lease, tokens=tokens, decode_us=decode_us)
    assert pool.record("a")["tpot_us"] == "22000.0"


def test_the_clock_is_the_servers_when_none_is_given(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    pool.now = ""
    pool.register("a")
    seconds, micros = valkey.time()
    record = pool.acquire("x")[1].split(" ")
    later, more = valkey.time()
    assert seconds * 1000 + micros // 1000 <= int(record[2]) <= later * 1000 + more // 1000
