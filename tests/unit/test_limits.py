"""What limits say and settle, on a server and alone; the counting itself is in tests/lua."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.admission.keys import hash_key
from app.admission.limits import Alone, Limits, _duration
from app.cluster.link import Link
from app.cluster.scripts import Scripts, constants
from app.config import KeySettings, Settings
from app.errors import ApiError
from tests.lua.gcra import Key
from tests.lua.pool import T0

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import redis

    from tests.support.servers import ValkeyServer

HASH = hash_key("sk-of-a-test")
BOTH = KeySettings(name="both", hash=HASH, rpm=60, tpm=1000)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"), (1, "1ms"), (120, "120ms"), (999, "999ms"), (1000, "1s"), (1001, "1.001s"),
        (8640, "8.64s"), (59_999, "59.999s"), (60_000, "1m0s"), (86_400, "1m26.4s"),
        (360_000, "6m0s"), (3_599_999, "59m59.999s"), (3_600_000, "1h0m0s"),
        (90_061_500, "25h1m1.5s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_openai_writes_them(ms: int, text: str) -> None:
    assert _duration(ms) == text


# Alone

step = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from((0, 1, 250, 8571, 8572, 60_000, 200_000))),
    st.tuples(st.just("admit"), st.sampled_from((0, 1, 5, 59, 700, 10**6))),
    st.tuples(st.just("settle"), st.sampled_from((-(10**6), -700, -3, 0, 4, 700, 10**5))),
)
limits = st.sampled_from((0, 1, 2, 7, 60, 1000, 99_999))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rpm=limits, tpm=limits, steps=st.lists(step, min_size=5, max_size=60))
def test_a_replica_alone_answers_what_the_scripts_would(
    rpm: int, tpm: int, steps: list[tuple[str, int]]
) -> None:
    now = 1_000_000
    alone, key = Alone(lambda: 1, lambda: now), Key(rpm, tpm)
    for what, number in steps:
        if what == "wait":
            now += number
        elif what == "admit":
            quota = alone.admit("team", rpm=rpm, tpm=tpm, cost=number)
            assert [
                quota.reached or "admitted", quota.retry_ms, quota.requests, quota.requests_ms,
                quota.tokens, quota.tokens_ms,
            ] == key.admit(now, number)  # fmt: skip
        else:
            alone.settle("team", rpm=rpm, tpm=tpm, delta=number)
            key.settle(now, number)


@pytest.mark.parametrize(
    ("limit", "replicas", "share"),
    [(0, 3, 0), (60, 1, 60), (60, 3, 20), (10, 3, 3), (1, 3, 1), (7, 0, 7)],
)
def test_a_replica_alone_grants_its_share_and_never_nothing(
    limit: int, replicas: int, share: int
) -> None:
    assert Alone(lambda: replicas, lambda: 0).share(limit) == share


# On a server


@pytest.fixture
async def link(valkey: redis.Redis, valkey_server: ValkeyServer) -> AsyncIterator[Link]:
    """A connected link to an empty server."""
    link = Link(valkey_server.url, budget_s=5, name="test")
    await link.start()
    yield link
    await link.close()


def limits_over(link: Link, *, replicas: int = 1) -> Limits:
    """Limits whose clocks stand still."""
    scripts = Scripts(
        link, namespace="lw", pool="default", constants=constants(Settings()), clock=lambda: T0
    )
    for hook in link.on_connect:  # as when it connects: the server knows the scripts
        hook()
    return Limits(scripts, lambda: replicas, lambda: T0)


async def used(link: Link, key: str = "both") -> tuple[int, int]:
    """(requests, tokens) that are counted."""
    found = await link.call("HMGET", f"lw:{{default}}:limit:{key}", "requests", "tokens")
    requests, tokens = (int(level or 0) / 60_000 for level in found)
    return int(requests), int(tokens)


async def test_a_key_without_limits_costs_no_call_and_gets_no_header(link: Link) -> None:
    limits = limits_over(link)
    await link.close()  # a call would find nobody
    for key in (None, KeySettings(name="free", hash=HASH)):
        with await limits.admit(key, 10**9) as admission:
            admission.settle(5)
            headers = [(b"x-ratelimit-limit-requests", b"of the node")]
            admission.mark(headers)
            assert headers == [(b"x-ratelimit-limit-requests", b"of the node")]


async def test_the_headers_of_a_good_answer_replace_the_nodes(link: Link) -> None:
    admission = await limits_over(link).admit(BOTH, 400)
    headers = [(b"x-ratelimit-remaining-tokens", b"7"), (b"x-other", b"1")]
    admission.mark(headers)
    assert headers == [
        (b"x-other", b"1"),
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"59"),
        (b"x-ratelimit-reset-requests", b"1s"),
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"600"),
        (b"x-ratelimit-reset-tokens", b"24s"),
    ]


async def test_a_refusal_is_a_429_that_tells_the_wait_and_counts_nothing(link: Link) -> None:
    limits = limits_over(link)
    await limits.admit(BOTH, 900)
    with pytest.raises(ApiError) as caught:
        await limits.admit(BOTH, 133)
    error = caught.value
    assert (error.status, error.kind) == (429, "rate_limit_error")
    assert error.code == "rate_limit_exceeded"
    assert error.retry_after_s == 1.98  # 33 tokens at 1000 a minute
    assert "1000 tokens per minute" in error.message
    assert "1.98s" in error.message
    assert dict(error.headers)[b"x-ratelimit-remaining-tokens"] == b"100"
    assert dict(error.headers)[b"x-ratelimit-reset-tokens"] == b"54s"
    assert await used(link) == (1, 900)


async def test_a_limit_that_a_key_does_not_have_has_no_header(link: Link) -> None:
    limits = limits_over(link)
    with await limits.admit(KeySettings(name="r", hash=HASH, rpm=60), 400) as admission:
        assert [name for name, _ in admission.headers] == [
            b"x-ratelimit-limit-requests",
            b"x-ratelimit-remaining-requests",
            b"x-ratelimit-reset-requests",
        ]
    assert await used(link, "r") == (1, 0)


@pytest.mark.parametrize(
    ("expected", "really", "left"),
    [(400, 250, 250), (400, 900, 900), (400, None, 0), (5000, 4000, 4000), (0, 7, 7)],
)
async def test_what_was_charged_is_put_right_once_at_the_end(
    link: Link, expected: int, really: int | None, left: int
) -> None:
    with await limits_over(link).admit(BOTH, expected) as admission:
        assert await used(link) == (1, min(expected, 1000))
        if really is not None:
            admission.settle(really)
            admission.settle(really + 1)
    assert await used(link) == (1, left)


async def test_a_settlement_reaches_a_server_that_forgot_the_scripts(
    link: Link, valkey: redis.Redis
) -> None:
    with await limits_over(link).admit(BOTH, 400) as admission:
        valkey.script_flush()
        admission.settle(100)
    for _ in range(500):  # nobody waits for it
        if await used(link) == (1, 100):
            break
        await asyncio.sleep(0.01)
    assert await used(link) == (1, 100)


async def test_without_redis_a_replica_lets_its_share_through_and_settles_it_here(
    link: Link,
) -> None:
    limits = limits_over(link, replicas=3)
    await link.close()
    for _ in range(2):
        with await limits.admit(BOTH, 200) as admission:
            admission.settle(100)
    running = await limits.admit(BOTH, 133)  # of 333 tokens
    with pytest.raises(ApiError, match="tokens per minute"):
        await limits.admit(BOTH, 1)
    running.settle(0)
    for _ in range(17):  # of 20 requests
        with await limits.admit(BOTH, 1):
            pass
    with pytest.raises(ApiError, match="requests per minute"):
        await limits.admit(BOTH, 1)
