"""What time alone changes: windows age, idle nodes recover, cool-downs, waits and ramps end."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.lua.oracle import Tuning
from tests.lua.pool import T0, Pool

if TYPE_CHECKING:
    import redis

INTERVAL_MS = 2000


def sampled(pool: Pool, *samples_us: int, node: str = "a") -> None:
    """Requests one after another that leave these samples on a node."""
    others = pool.client.smembers(pool.keys.nodes) - {node}
    for sample_us in samples_us:
        assert pool.acquired("sample", tried=others) == node
        pool.first_token("sample", sample_us)
        pool.release("sample")


def score_at(pool: Pool, ms: int) -> float:
    """The score of node a, idle, after a sweep at T0 + ``ms``."""
    pool.now = T0 + ms
    pool.sweep(1)
    score = pool.score("a")
    assert score is not None
    return score


def ttft_at(pool: Pool, ms: int) -> float:
    """T in ms, from the score after a sweep at T0 + ``ms``; weight 1 and alpha 1."""
    return 50 / score_at(pool, ms)


# Windows


def test_a_window_that_is_too_old_is_cleared_and_its_node_scores_with_the_prior(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey, Tuning(max_age_ms=60_000, idle_after_ms=60_000))
    pool.register("a")
    sampled(pool, 1_000_000, 3_000_000)
    assert ttft_at(pool, 60_000) == pytest.approx(2000)
    assert valkey.llen(pool.keys.ttft("a")) == 2
    assert ttft_at(pool, 60_001) == pytest.approx(100)
    assert valkey.exists(pool.keys.ttft("a")) == 0
    assert (pool.record("a")["samples"], pool.record("a")["sum_us"]) == ("0", "0")
    sampled(pool, 25_000)
    assert (pool.record("a")["samples"], pool.record("a")["sum_us"]) == ("1", "25000")
    assert pool.score("a") == pytest.approx(2.0)


def test_an_idle_node_decays_toward_its_best_and_then_to_the_prior(valkey: redis.Redis) -> None:
    pool = Pool(valkey, Tuning(window=2))
    pool.register("a")
    sampled(pool, 20_000, 2_000_000, 2_000_000)
    assert pool.record("a")["best_us"] == "20000"
    assert ttft_at(pool, 10_000) == pytest.approx(2000)
    for seconds in (0.001, 1, 10, 30):
        right = 20 + 1980 * math.exp(-seconds / 10)
        assert ttft_at(pool, round(10_000 + seconds * 1000)) == pytest.approx(right, rel=1e-9)
    assert ttft_at(pool, 300_000) == pytest.approx(20, rel=1e-6)
    assert ttft_at(pool, 300_001) == pytest.approx(100)
    assert pool.score("a") == pytest.approx(0.5)


def test_t_of_an_idle_node_falls_from_sweep_to_sweep_and_never_below_its_best(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey, Tuning(window=1))
    pool.register("a")
    sampled(pool, 30_000, 900_000)
    course = [ttft_at(pool, ms) for ms in range(0, 120_000, 2000)]
    assert course == sorted(course, reverse=True)
    assert course[:6] == pytest.approx([900] * 6)
    assert 30 < course[-1] < 31


def test_a_node_that_never_was_better_stays_what_it_is_until_the_window_is_old(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    pool.register("a")
    sampled(pool, 500_000)
    assert ttft_at(pool, 200_000) == pytest.approx(500)
    assert ttft_at(pool, 300_001) == pytest.approx(100)


def test_the_best_is_forgotten_over_five_minutes(valkey: redis.Redis) -> None:
    pool = Pool(valkey, Tuning(window=1))
    pool.register("a")
    sampled(pool, 20_000)
    pool.later(100_000)
    sampled(pool, 400_000)
    best = 20_000 + 380_000 * (1 - math.exp(-1 / 3))
    assert float(pool.record("a")["best_us"]) == pytest.approx(best, abs=1)
    sampled(pool, 400_000)  # at the same instant: nothing more
    assert float(pool.record("a")["best_us"]) == pytest.approx(best, abs=1)
    sampled(pool, 10_000)
    assert pool.record("a")["best_us"] == "10000"


@pytest.mark.parametrize("swept", [True, False])
def test_a_starved_node_gets_traffic_again_because_it_is_swept(
    valkey: redis.Redis, *, swept: bool
) -> None:
    """b was better than a, then had a bad minute; since then a gets everything."""
    pool, luck = Pool(valkey, Tuning(window=3)), random.Random(1)
    for node in "ab":
        pool.register(node)
        sampled(pool, 40_000, 40_000, 40_000, node=node)
    sampled(pool, 3_000_000, 3_000_000, 3_000_000, node="b")
    got: list[str] = []
    for _ in range(250):  # one request every two seconds
        pool.later(2000)
        if swept:
            pool.sweep(INTERVAL_MS)
        node = pool.acquired("x", chance=luck.random())
        pool.first_token("x", 60_000 if node == "a" else 40_000)  # b is well again
        pool.release("x")
        got.append(node)
    if not swept:
        assert "b" not in got
        return
    assert 5 <= got.index("b") <= 40  # the benefit of the doubt after about a minute
    assert got[-50:].count("b") >= 45  # its bad samples are gone after five


# Slow start


@pytest.fixture
def slow(valkey: redis.Redis) -> Pool:
    """Node a has just come; 30 s until it has its full score of 1/2."""
    pool = Pool(valkey, Tuning(slow_start_ms=30_000))
    pool.register("a")
    return pool


def assert_ramp(pool: Pool, start_ms: int) -> None:
    """A tenth at first, then in proportion to time, then the whole."""
    pool.now = T0 + start_ms
    shares = {0: 0.1, 3000: 0.1, 6000: 0.2, 15_000: 0.5, 29_700: 0.99, 30_000: 1, 90_000: 1}
    for ms, share in shares.items():
        assert score_at(pool, start_ms + ms) == pytest.approx(0.5 * share), ms


def test_a_node_that_comes_ramps_up(slow: Pool) -> None:
    assert slow.score("a") == pytest.approx(0.05)
    assert_ramp(slow, 0)


def test_a_node_that_is_well_again_ramps_up(slow: Pool) -> None:
    slow.later(60_000)
    for verdict in ("miss", "miss", "miss", "ready"):
        slow.observe("a", verdict)
    assert slow.score("a") == pytest.approx(0.05)
    assert_ramp(slow, 60_000)


def test_a_node_whose_circuit_closes_ramps_up(slow: Pool) -> None:
    slow.later(60_000)
    for _ in range(3):
        slow.acquired("x")
        slow.release("x", "failed")
    slow.later(2000)
    assert slow.acquire("trial")[3] == "1"
    slow.release("trial", "ok")
    assert slow.score("a") == pytest.approx(0.05)
    assert_ramp(slow, 62_000)


def test_good_answers_and_good_probes_do_not_start_the_ramp_again(slow: Pool) -> None:
    slow.later(15_000)
    slow.acquired("x")
    slow.release("x")
    slow.observe("a", "ready")
    assert slow.score("a") == pytest.approx(0.25)


def test_slow_start_is_off_unless_asked_for_even_when_the_clock_goes_back(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    pool.register("a", health="new")
    pool.observe("a", "ready")
    assert pool.score("a") == pytest.approx(0.5)
    pool.later(-5000)  # a Redis that took over, with a clock behind
    pool.observe("a", "ready")
    assert pool.score("a") == pytest.approx(0.5)


# What else ends by itself


def test_a_cool_down_ends_without_a_request(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    pool.register("a")
    pool.acquired("x")
    pool.release("x", "saturated", cool_ms=7000)
    assert [score_at(pool, ms) for ms in (6999, 7000)] == pytest.approx([0, 0.5])
    assert pool.acquire("y")[3] == "0"
    assert pool.due("a") is None


def test_a_sweep_makes_nothing_eligible_that_is_barred(valkey: redis.Redis) -> None:
    pool = Pool(valkey, Tuning(threshold=1))
    pool.register("new", health="new")
    pool.register("out", state="draining")
    pool.register("full", capacity=1)
    pool.register("open")
    assert pool.acquired("x", tried=["open"]) == "full"
    assert pool.acquired("y") == "open"
    pool.release("y", "failed")
    due = pool.due("open")
    for _ in range(50):
        pool.later(INTERVAL_MS)
        assert pool.sweep(INTERVAL_MS) == (4, 0)
        assert [pool.score(node) for node in ("new", "out", "full", "open")] == [0] * 4
    assert (pool.due("open"), pool.record("open")["circuit"]) == (due, "open")
    assert pool.acquire("trial")[3] == "1"


def test_a_sweep_of_a_fleet_where_nothing_changed_writes_only_when_it_was(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    for node in "ab":
        pool.register(node, ["m", "n"])
    sampled(pool, 40_000)
    pool.acquired("runs")
    pool.later(3000)
    before = pool.state()
    assert pool.sweep(INTERVAL_MS) == (2, 0)
    after = pool.state()
    assert after.pop(pool.keys.sweeps) == dict.fromkeys("ab", T0 + 5000)
    before.pop(pool.keys.sweeps)
    assert after == before


# Batches


def fleet(client: redis.Redis, nodes: int, **how: Any) -> Pool:
    """Nodes n0000, n0001 …"""
    pool = Pool(client, **how)
    for i in range(nodes):
        pool.register(f"n{i:04}")
    return pool


def test_a_sweep_is_bounded_and_says_when_more_are_due(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 120)
    assert [pool.sweep(INTERVAL_MS, 50) for _ in range(4)] == [(50, 1), (50, 1), (20, 0), (0, 0)]
    pool.later(INTERVAL_MS - 1)
    assert pool.sweep(INTERVAL_MS, 50) == (0, 0)
    pool.later(1)
    assert pool.sweep(INTERVAL_MS, 50) == (50, 1)


def test_a_node_is_swept_once_an_interval_however_many_replicas_call(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 9)
    swept = 0
    for _ in range(100):  # ten intervals, five replicas that call every 200 ms
        swept += sum(pool.sweep(INTERVAL_MS, 4)[0] for _ in range(5))
        pool.later(200)
    assert swept == 9 * 10


def test_those_that_wait_longest_are_swept_first_so_none_is_left_out(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 30)
    for _ in range(6):
        pool.later(1000)
        pool.sweep(INTERVAL_MS, 5)
    assert valkey.zcount(pool.keys.sweeps, "-inf", T0) == 0


def test_a_sweep_of_a_node_that_is_gone_takes_it_off_the_list(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 2)
    pool.acquired("x", tried=["n0001"])
    pool.unregister("n0000")
    valkey.zadd(pool.keys.sweeps, {"n0000": T0, "ghost": T0})
    pool.sweep(INTERVAL_MS)
    assert valkey.zrange(pool.keys.sweeps, 0, -1) == ["n0001"]
    assert pool.score("n0000") is None
    assert pool.score("ghost") is None
    assert valkey.exists(pool.keys.node("ghost")) == 0


def test_a_sweep_costs_the_same_with_20_and_1000_nodes_and_whatever_the_windows_hold(
    valkey: redis.Redis,
) -> None:
    costs = []
    for nodes, samples in ((20, 0), (1000, 0), (20, 50)):
        valkey.flushall()
        pool = fleet(valkey, nodes)
        sampled(pool, *[40_000] * samples, node="n0000")
        valkey.config_resetstat()
        assert pool.sweep(INTERVAL_MS, 10) == (10, 1)
        stats = valkey.info("commandstats")
        costs.append({name: of["calls"] for name, of in stats.items() if "config" not in name})
    assert costs[0] == costs[1] == costs[2]
