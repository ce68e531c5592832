"""Requests and tokens per minute of an API key: exact, shared, and never by halves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lua.gcra import MINUTE_MS, Key
from tests.lua.pool import T0, Pool

if TYPE_CHECKING:
    from tests.support.servers import ValkeyServer

LIMIT_KEY = "lw:{default}:limit:team"


def admitted(pool: Pool, **limits: Any) -> bool:
    """Whether one more request passes."""
    return bool(pool.admit(**limits)[0] == "admitted")


def passes(pool: Pool, **limits: Any) -> int:
    """How many requests pass now."""
    n = 0
    while admitted(pool, **limits):
        n += 1
    return n


# Against the oracle

limits = st.sampled_from((0, 1, 2, 3, 7, 60, 1000, 99_999))
step = st.one_of(
    st.tuples(
        st.just("wait"), st.sampled_from((0, 1, 7, 250, 8571, 8572, 20_000, 60_000, 200_000))
    ),
    st.tuples(st.just("admit"), st.sampled_from((0, 1, 2, 5, 59, 700, 10**6))),
    st.tuples(st.just("settle"), st.sampled_from((-(10**6), -700, -3, -1, 0, 1, 4, 700, 10**5))),
)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rpm=limits, tpm=limits, steps=st.lists(step, min_size=5, max_size=60))
def test_whatever_the_order_the_scripts_answer_what_the_oracle_says(
    valkey: redis.Redis, rpm: int, tpm: int, steps: list[tuple[str, int]]
) -> None:
    pool, key = fresh(valkey), Key(rpm, tpm)
    for what, number in steps:
        now = int(pool.now)
        if what == "wait":
            pool.later(number)
        elif what == "admit":
            assert pool.admit(rpm=rpm, tpm=tpm, cost=number) == key.admit(now, number)
        elif tpm:
            assert pool.settle(rpm=rpm, tpm=tpm, delta=number) == key.settle(now, number)


POOLS: dict[int, Pool] = {}


def fresh(client: redis.Redis) -> Pool:
    """The pool of this client with nothing used; scripts are loaded once."""
    pool = POOLS.get(id(client))
    if pool is None:
        POOLS.clear()
        pool = POOLS[id(client)] = Pool(client)
    client.delete(LIMIT_KEY)
    pool.now = T0
    return pool


# Exactly the limit


@pytest.mark.parametrize("rpm", [1, 7, 60, 997])
def test_exactly_the_limit_passes_at_once_and_one_more_with_each_interval(
    valkey: redis.Redis, rpm: int
) -> None:
    pool = Pool(valkey)
    assert passes(pool, rpm=rpm) == rpm
    # At the first ms of each further interval of 60 s / limit one passes, and not a ms sooner.
    for i in range(1, min(rpm, 20) + 1):
        due = -(-i * MINUTE_MS // rpm)
        pool.now = T0 + due - 1
        assert passes(pool, rpm=rpm) == 0
        pool.now = T0 + due
        assert passes(pool, rpm=rpm) == 1
    pool.later(MINUTE_MS)
    assert passes(pool, rpm=rpm) == rpm


def test_over_ten_minutes_of_trying_every_100_ms_ten_limits_and_the_burst_pass(
    valkey: redis.Redis,
) -> None:
    pool, n = Pool(valkey), 0
    for _ in range(6000):
        n += admitted(pool, rpm=70)
        pool.later(100)
    assert n == 70 + 699  # the last 100 ms of the tenth minute are not over yet


def test_clients_that_ask_at_once_get_exactly_the_limit_among_them(
    valkey: redis.Redis, valkey_server: ValkeyServer
) -> None:
    Pool(valkey)

    def asked(_: int) -> list[str]:
        with redis.Redis(port=valkey_server.port, decode_responses=True) as client:
            pool = Pool(client)
            return [pool.admit(rpm=100, tpm=900, cost=10)[0] for _ in range(40)]

    with ThreadPoolExecutor(4) as threads:
        said = [word for words in threads.map(asked, range(4)) for word in words]
    assert (said.count("admitted"), said.count("tokens")) == (90, 70)
    assert pool_requests(valkey) == 90


def pool_requests(client: Any) -> int:
    """Requests that are counted."""
    return int(client.hget(LIMIT_KEY, "requests")) // MINUTE_MS


@pytest.mark.parametrize(
    ("limit", "refusal"),
    [
        ({"rpm": 2, "tpm": 100, "cost": 10}, ["requests", 30_000, 0, 60_000, 80, 12_000]),
        ({"rpm": 60, "tpm": 100, "cost": 40}, ["tokens", 12_000, 58, 2000, 20, 48_000]),
    ],
)
def test_a_refused_request_changes_no_counter_of_either_limit(
    valkey: redis.Redis, limit: dict[str, Any], refusal: list[Any]
) -> None:
    pool = Pool(valkey)
    assert passes(pool, **limit) == 2
    state = pool.state()
    ttl = valkey.pexpiretime(LIMIT_KEY)
    for _ in range(50):
        assert pool.admit(**limit) == refusal
    assert pool.state() == state
    assert valkey.pexpiretime(LIMIT_KEY) == ttl


@pytest.mark.parametrize(
    "limit", [{"rpm": 7}, {"tpm": 1000, "cost": 333}, {"rpm": 11, "tpm": 77, "cost": 9}]
)
def test_the_wait_that_is_told_is_the_wait_that_there_is(
    valkey: redis.Redis, limit: dict[str, Any]
) -> None:
    pool = Pool(valkey)
    passes(pool, **limit)
    for _ in range(5):
        _, retry_ms, *_ = pool.admit(**limit)
        assert retry_ms > 0
        pool.later(retry_ms - 1)
        assert not admitted(pool, **limit)
        pool.later(1)
        assert admitted(pool, **limit)


def test_when_both_limits_are_reached_the_longer_wait_is_told(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    assert passes(pool, rpm=1, tpm=100, cost=99) == 1
    assert pool.admit(rpm=1, tpm=100, cost=99)[:2] == ["requests", 60_000]
    assert pool.admit(rpm=2, tpm=100, cost=99)[:2] == ["tokens", 58_800]


# More than a limit


def test_a_request_larger_than_the_whole_limit_passes_when_nothing_is_used_and_only_then(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    assert admitted(pool, tpm=1000, cost=1)
    assert pool.admit(tpm=1000, cost=5000) == ["tokens", 60, 0, 0, 999, 60]
    pool.later(60)
    assert pool.admit(tpm=1000, cost=5000) == ["admitted", 0, 0, 0, 0, 60_000]
    # It has cost one whole limit; what it used beyond that is charged when it ends.
    assert pool.settle(tpm=1000, delta=4000) == 0
    assert pool.admit(tpm=1000, cost=1) == ["tokens", 240_060, 0, 0, 0, 300_000]
    pool.later(240_060)
    assert admitted(pool, tpm=1000, cost=1)


# Settling


def test_what_was_not_used_is_given_back_and_what_was_used_beyond_is_charged(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    assert pool.admit(tpm=1000, cost=900)[4] == 100
    assert pool.settle(tpm=1000, delta=-850) == 950
    assert pool.admit(tpm=1000, cost=900)[4] == 50
    assert pool.settle(tpm=1000, delta=100) == 0
    assert pool.admit(tpm=1000, cost=1)[:2] == ["tokens", 3060]


def test_giving_back_never_makes_more_than_the_limit(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    pool.admit(tpm=100, cost=100)
    pool.later(59_000)
    assert pool.settle(tpm=100, delta=-100) == 100
    assert pool.settle(tpm=100, delta=-100) == 100
    assert passes(pool, tpm=100, cost=10) == 10


def test_settling_leaves_the_requests_that_are_counted(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    assert passes(pool, rpm=3, tpm=1000, cost=100) == 3
    pool.later(1000)
    pool.settle(rpm=3, tpm=1000, delta=-300)
    assert pool.admit(rpm=3, tpm=1000, cost=1)[:2] == ["requests", 19_000]


# Keys, changes, clocks


def test_keys_do_not_share_their_limits(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    assert passes(pool, rpm=5) == 5
    assert pool.admit("other", rpm=5)[0] == "admitted"
    assert set(pool.state()) == {"lw:{default}:limit:team", "lw:{default}:limit:other"}


def test_a_limit_that_is_changed_counts_what_was_used_before(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    assert passes(pool, rpm=10) == 10
    assert passes(pool, rpm=15) == 5
    assert passes(pool, rpm=3) == 0
    assert pool.admit(rpm=3)[1] == 13 * 20_000
    assert passes(pool, rpm=20, tpm=100, cost=50) == 2  # a limit that is added starts unused


def test_a_limit_that_was_taken_away_and_comes_back_starts_unused(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    assert passes(pool, rpm=60, tpm=100, cost=50) == 2
    assert admitted(pool, rpm=60)
    assert passes(pool, rpm=60, tpm=100, cost=50) == 2


def test_a_clock_that_goes_back_stops_no_key_for_longer_than_its_limits(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    assert passes(pool, rpm=6) == 6
    pool.later(-3_600_000)  # a failover to a server whose clock is an hour behind
    assert pool.admit(rpm=6)[:2] == ["requests", 10_000]
    pool.later(10_000)
    assert passes(pool, rpm=6) == 1
    pool.later(60_000)
    assert passes(pool, rpm=6) == 6


def test_a_key_that_is_not_used_leaves_redis_a_minute_after_its_limits_are_whole(
    valkey: redis.Redis,
) -> None:
    pool = Pool(valkey)
    pool.admit(rpm=60, tpm=100, cost=50)
    assert 80_000 < valkey.pttl(LIMIT_KEY) <= 90_000
    pool.settle(rpm=60, tpm=100, delta=150)
    assert 170_000 < valkey.pttl(LIMIT_KEY) <= 180_000
    pool.settle(rpm=60, tpm=100, delta=-10_000)
    assert 50_000 < valkey.pttl(LIMIT_KEY) <= 61_000


def test_an_operator_reads_levels_in_sixty_thousandths(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    pool.admit(rpm=60, tpm=10**9, cost=999_999_999)
    assert valkey.hgetall(LIMIT_KEY) == {
        "requests": "60000",
        "tokens": str(999_999_999 * 60_000),
        "at": str(T0),
    }


def test_the_clock_is_the_servers_when_none_is_given(valkey: redis.Redis) -> None:
    pool = Pool(valkey)
    pool.now = ""
    pool.admit(rpm=60)
    seconds, micros = valkey.time()
    at = int(valkey.hget(LIMIT_KEY, "at"))  # type: ignore[arg-type]
    assert 0 <= seconds * 1000 + micros // 1000 - at < 5000
