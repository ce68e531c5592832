"""Which of the eligible nodes is chosen, and what is said when there is none (CASES E1, E3)."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.lua.oracle import Tuning
from tests.lua.pool import Pool

if TYPE_CHECKING:
    import redis

    from app.config import Policy

BY_CHANCE: list[Policy] = [
    "ttft", "random", "least_conn", "weighted_least_conn", "p2c", "peak_ewma",
]  # fmt: skip


def fleet(client: redis.Redis, nodes: int, tuning: Tuning | None = None, **fields: Any) -> Pool:
    """Equal nodes n00, n01 …"""
    pool = Pool(client, tuning)
    for i in range(nodes):
        pool.register(f"n{i:02}", **fields)
    return pool


def sequential(pool: Pool, requests: int, **how: Any) -> Counter[str]:
    """Requests one after another on an idle fleet: how many each node got."""
    luck = random.Random(20)
    got: Counter[str] = Counter()
    for _ in range(requests):
        got[pool.acquired("x", chance=luck.random(), **how)] += 1
        assert pool.release("x") == 1
    return got


@pytest.mark.parametrize("policy", [*BY_CHANCE, "round_robin"])
def test_of_four_equal_idle_nodes_each_gets_between_15_and_35_percent(
    valkey: redis.Redis, policy: Policy
) -> None:
    got = sequential(fleet(valkey, 4, Tuning(policy=policy)), 400)
    assert len(got) == 4
    assert all(60 <= times <= 140 for times in got.values()), got


@pytest.mark.parametrize("policy", ["ttft", "p2c"])
def test_of_a_hundred_equal_nodes_every_one_gets_some(valkey: redis.Redis, policy: Policy) -> None:
    got = sequential(fleet(valkey, 100, Tuning(policy=policy)), 1200)
    assert len(got) == 100
    assert max(got.values()) <= 40


def test_two_tried_of_four_equals_leave_the_other_two_a_fair_share(valkey: redis.Redis) -> None:
    got = sequential(fleet(valkey, 4), 200, tried=["n00", "n02"])
    assert got.keys() == {"n01", "n03"}
    assert min(got.values()) >= 50


@pytest.mark.parametrize("chance", [0.0, 0.25, 0.5, 0.999999999])
def test_only_the_best_is_chosen_where_there_is_one(valkey: redis.Redis, chance: float) -> None:
    pool = fleet(valkey, 5)
    pool.register("best", weight=3)
    assert pool.acquired("x", chance=chance) == "best"
    assert pool.acquired("y", chance=chance) == "best"  # 3/2 is still more than 1
    assert pool.acquired("z", chance=chance, tried=["best"]) != "best"


def test_eighty_requests_held_on_four_equal_nodes_are_twenty_each(valkey: redis.Redis) -> None:
    pool, luck = fleet(valkey, 4), random.Random(3)
    for i in range(80):
        pool.acquired(f"x{i}", replica=f"r{i % 2}", chance=luck.random())
    assert [pool.active(f"n{i:02}") for i in range(4)] == [20] * 4


def test_round_robin_takes_turns_exactly_whatever_chance_and_load(valkey: redis.Redis) -> None:
    pool, luck = fleet(valkey, 5, Tuning(policy="round_robin")), random.Random(4)
    order = [pool.acquired(f"x{i}", chance=luck.random()) for i in range(5)]
    assert len(set(order)) == 5
    for turn in range(4):
        assert order == [pool.acquired(f"y{turn}-{i}", chance=luck.random()) for i in range(5)]
        for i in range(turn):
            pool.release(f"x{i}")


def test_p2c_chooses_the_less_loaded_of_the_two_it_draws(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 3, Tuning(policy="p2c"))
    for i in range(3):
        pool.acquired(f"busy{i}", tried=["n01", "n02"])
    pool.acquired("one", tried=["n00", "n02"])
    got: Counter[str] = Counter()
    for i in range(300):
        got[pool.acquired("x", chance=i / 300)] += 1
        pool.release("x")
    assert got == {"n02": 200, "n01": 100}  # idle wins two pairs of three; the busiest none


def test_peak_ewma_chooses_the_faster_of_the_two_it_draws(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 3, Tuning(policy="peak_ewma"))
    for i, ttft_us in enumerate((300_000, 200_000, 20_000)):
        pool.acquired("warm", tried=[f"n{j:02}" for j in range(3) if j != i])
        pool.first_token("warm", ttft_us)
        pool.release("warm")
    got: Counter[str] = Counter()
    for i in range(300):
        got[pool.acquired("x", chance=i / 300)] += 1
        pool.release("x")
    assert got == {"n02": 200, "n01": 100}


@pytest.mark.parametrize("policy", [*BY_CHANCE, "round_robin"])
def test_a_tried_node_is_never_returned(valkey: redis.Redis, policy: Policy) -> None:
    pool, luck = fleet(valkey, 6, Tuning(policy=policy)), random.Random(5)
    names = [f"n{i:02}" for i in range(6)]
    for _ in range(60):
        tried = luck.sample(names, luck.randint(1, 5))
        assert pool.acquired("x", chance=luck.random(), tried=tried) not in tried
        pool.release("x")
    assert pool.acquire("x", tried=names) == ["spent", "0"]


def test_move_walks_over_all_nodes_once_and_holds_one_lease_at_a_time(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 4)
    tried = [pool.acquired("x0")]
    for i in range(1, 4):
        reply = pool.move(f"x{i}", f"x{i - 1}", tried=tried)
        tried.append(reply[1].split(" ")[0])
        assert valkey.hlen(pool.keys.leases("r1")) == 1
        assert [pool.active(f"n{j:02}") for j in range(4)].count(0) == 3
    assert len(set(tried)) == 4
    assert pool.move("x4", "x3", tried=tried) == ["spent", "0"]
    assert valkey.hlen(pool.keys.leases("r1")) == 0


def test_a_model_that_no_node_serves_is_unknown(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 1)
    assert pool.acquire("x", "other") == ["unknown", "0"]
    pool.unregister("n00")
    assert pool.acquire("x") == ["unknown", "0"]


def test_nodes_at_capacity_are_full_and_say_when_to_come_back(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 2, capacity=1)
    for lease in "xy":
        pool.acquired(lease)
    assert pool.acquire("z") == ["full", "1000"]
    pool.release("x")
    assert pool.acquire("z")[0] == "leased"


def test_nodes_that_are_out_are_down_until_the_first_of_them_is_due(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 2, Tuning(threshold=1))
    pool.acquired("x", tried=["n01"])
    pool.release("x", "failed")
    pool.later(300)
    pool.acquired("x")
    pool.release("x", "failed")
    assert pool.acquire("x") == ["down", "1700"]


def test_nodes_that_are_draining_are_down_and_say_one_second(valkey: redis.Redis) -> None:
    pool = fleet(valkey, 1)
    pool.register("n00", state="draining")
    assert pool.acquire("x") == ["down", "1000"]


@pytest.mark.parametrize("policy", [*BY_CHANCE, "round_robin"])
def test_capacity_holds_for_all_replicas_together(valkey: redis.Redis, policy: Policy) -> None:
    pool = fleet(valkey, 1, Tuning(policy=policy), capacity=4)
    replies = [pool.acquire(f"x{i}", replica=f"r{i % 2}", chance=i / 60) for i in range(60)]
    assert [reply[0] for reply in replies] == ["leased"] * 4 + ["full"] * 56
    assert pool.active("n00") == 4
