"""The policies as arithmetic: numbers worked out by hand, and what must hold for every trace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.cluster.score import POLICIES, Constants, PeakEwma, Profile, RoundRobin, Ttft, Work
from app.model import Outcome
from tests.lua.oracle import Oracle, Tuning, idle_score, live_score

if TYPE_CHECKING:
    from app.config import Policy

C = Constants()


def work(weight: float = 1.0, median_weight: float = 1.0, **changes: float) -> Work:
    constants = replace(C, **changes)  # type: ignore[arg-type]
    return Work(constants, weight=weight, median_weight=median_weight)


def tried(rate: float = 10.0, decode_ms: float = 20.0) -> Work:
    """A node that is known: so many tokens of work per ms, best and now."""
    node = work()
    node.worked, node.waited_ms, node.best_rate = rate * 100, 100.0, rate
    node.decoded, node.decoding_ms, node.best_tpot = 10.0, decode_ms * 10, decode_ms
    return node


# work, by hand


def test_the_cost_of_a_request_is_the_published_sum() -> None:
    node = tried(rate=10.0, decode_ms=20.0)
    node.inflight, node.waiting, node.queued = 5, 2, 700.0
    # ahead = 700 + (500 - 100) + 128 + 20 * 5 = 1328 tokens, at 10 tokens/ms
    # stall = 0.1 * (5 - 2) * 400 / 10 = 12 ms; decoding = 0.05 * 60 * 20 = 60 ms
    assert node.ahead(400) == 1328
    assert node.cost(0.0, prompt=500, output=60, hit=100) == pytest.approx(132.8 + 12 + 60)


def test_the_price_of_errors_is_added_per_expected_retry() -> None:
    node = tried()
    plain = node.cost(0.0, 512, 100)
    for outcome in (Outcome.FAILED, Outcome.OK, Outcome.OK):
        node.leased(0.0, 512)
        node.ended(0.0, outcome, heard=False, fresh=512)
    # bad = ((1 * 0.95) * 0.95) = 0.9025; seen = (1 * 0.95 + 1) * 0.95 + 1 = 2.8525
    share = 0.9025 / (2.8525 + 2)
    assert node.error_share(0.0) == pytest.approx(share)
    assert node.cost(0.0, 512, 100) == pytest.approx((plain + share * 1000) / (1 - share))


def test_a_sample_is_the_work_that_was_ahead_over_the_time_that_it_took() -> None:
    node = work(weight=4, median_weight=2)
    assert (node.worked, node.waited_ms) == (640, 50)  # 512 + 128 tokens; 100 ms * 2 / 4
    ahead = node.leased(1000.0, 300)
    assert ahead == 300 + 128
    node.first_token(1040.0, ttft_ms=40.0, fresh=300, ahead=ahead)
    keep = 0.98 * math.exp(-1040 / 5000)
    assert node.worked == 640 * keep + 428
    assert node.waited_ms == 50 * keep + 40
    assert node.best_rate == pytest.approx(
        12.8 + (node.worked / node.waited_ms - 12.8) * (1 - math.exp(-1040 / 300_000))
    )
    assert (node.inflight, node.waiting, node.queued) == (1, 0, 0)


def test_decoding_is_learned_from_the_tokens_after_the_first() -> None:
    node = work()
    node.leased(0.0, 100)
    node.first_token(50.0, 50.0, 100, 228)
    node.ended(1050.0, Outcome.OK, heard=True, fresh=100, tokens=51, decode_ms=1000.0)
    keep = 0.98 * math.exp(-1050 / 5000)
    assert node.decoded == keep + 50
    assert node.decoding_ms == 30 * keep + 1000
    assert node.tpot_ms(1050.0) == pytest.approx((30 * keep + 1000) / (keep + 50))
    assert node.best_tpot == node.decoding_ms / node.decoded


def test_the_score_is_a_thousand_over_the_cost_of_the_mean_request() -> None:
    node = tried()
    assert node.score(0.0) == 1000 / node.cost(0.0, 512, 100)
    node.capacity = 1
    node.leased(0.0, 512)
    assert node.score(0.0) == 0


def test_load_is_counted_once_the_rate_of_a_node_does_not_depend_on_its_queue() -> None:
    """A node that always works at 8 tokens/ms is seen at 8, alone or behind forty others."""
    idle, loaded = tried(rate=8.0), tried(rate=8.0)
    loaded.inflight, loaded.waiting, loaded.queued = 40, 40, 20_000.0
    for node in (idle, loaded):
        for i in range(60):
            ahead = node.leased(i * 10.0, 512)
            node.first_token(i * 10.0 + 5, ahead / 8, 512, ahead)
            node.ended(i * 10.0 + 5, Outcome.OK, heard=True, fresh=512)
    assert idle.worked / idle.waited_ms == pytest.approx(8)
    assert loaded.worked / loaded.waited_ms == pytest.approx(8)


def test_a_node_that_nobody_waits_for_comes_back_to_its_best_and_a_waiting_one_does_not() -> None:
    node = tried(rate=20.0)
    node.waited_ms, node.sampled_at = 1000.0, 10_000.0  # now at 2 tokens/ms
    assert node.rate(10_000.0) == 2
    assert node.rate(15_000.0) == pytest.approx(20 - 18 / math.e)
    assert node.rate(60_000.0) == pytest.approx(20, rel=1e-3)
    node.leased(60_000.0, 512)
    assert node.rate(60_000.0) == 2


def test_the_best_is_forgotten_over_minutes() -> None:
    node = tried(rate=20.0)
    now = 0.0
    for _ in range(600):
        now += 1000
        ahead = node.leased(now, 512)
        node.first_token(now, ahead / 5, 512, ahead)
        node.ended(now, Outcome.OK, heard=True, fresh=512)
    assert node.best_rate == pytest.approx(5 + 15 * math.exp(-2), rel=0.05)


def test_a_silent_node_costs_its_silence() -> None:
    node = tried(rate=10.0)
    node.leased(0.0, 512)
    usual = node.cost(0.0, 512, 100)
    assert node.cost(1000.0, 512, 100) == usual  # not over the second
    assert node.cost(20_000.0, 512, 100) > 20_000
    node.first_token(20_000.0, 20_000.0, 512, 640)
    node.ended(20_000.0, Outcome.OK, heard=True, fresh=512)
    assert node.cost(40_000.0, 512, 100) == pytest.approx(usual, rel=0.25)  # nobody waits any more


def test_silence_that_the_line_accounts_for_costs_nothing() -> None:
    node = tried(rate=1.0)
    for _ in range(4):
        node.leased(0.0, 1000)
    assert node.ahead(512) == 4720  # ms as well, at 1 token/ms
    assert node.cost(4000.0, 512, 100) == node.cost(0.0, 512, 100)
    assert node.cost(9000.0, 512, 100) == node.cost(0.0, 512, 100) + 9000 - 4720


def test_a_slow_node_may_be_silent_for_longer() -> None:
    """Three times what a mean prompt takes: 1.9 s at 1 token/ms, for however short a request."""
    node = tried(rate=1.0)
    node.leased(0.0, 16)
    assert node.cost(1900.0, 16, 0) == node.cost(0.0, 16, 0)
    assert node.cost(1930.0, 16, 0) == 1930


def test_a_first_token_of_anybody_ends_the_silence() -> None:
    node = tried(rate=10.0)
    node.leased(0.0, 512)
    node.leased(0.0, 512)
    node.first_token(20_000.0, 100.0, 512, 640)
    assert node.cost(20_500.0, 512, 100) < 1000


def test_failures_are_forgotten_with_time_and_with_successes() -> None:
    node = tried()
    for _ in range(3):
        node.leased(0.0, 16)
        node.ended(0.0, Outcome.FAILED, heard=False, fresh=16)
    at_once = node.error_share(0.0)
    assert at_once > 0.4
    assert node.error_share(60_000.0) < at_once / 3
    for _ in range(100):
        node.leased(0.0, 16)
        node.ended(0.0, Outcome.OK, heard=False, fresh=16)
    assert node.error_share(0.0) < 0.01


@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.REJECTED, Outcome.ABANDONED])
def test_what_says_nothing_of_the_node_teaches_nothing(outcome: Outcome) -> None:
    node = tried()
    node.leased(0.0, 512)
    node.ended(0.0, Outcome.FAILED, heard=False, fresh=512)
    before = node.cost(5000.0, 512, 100)
    for heard in (False, True):
        ahead = node.leased(1000.0, 512)
        if heard:
            node.first_token(1000.0, ahead / 10, 512, ahead)
        node.ended(4000.0, outcome, heard=heard, fresh=512, tokens=500, decode_ms=60_000.0)
    assert node.cost(5000.0, 512, 100) == pytest.approx(before)


def test_the_weight_is_a_prior_and_no_more() -> None:
    """Weights wrong four times: after some samples the costs are those of the right ones."""
    costs = []
    for weight in (0.25, 1.0, 4.0):
        node = work(weight=weight)
        now = 0.0
        for _ in range(100):
            now += 500
            ahead = node.leased(now, 512)
            node.first_token(now, ahead / 10, 512, ahead)
            node.ended(now, Outcome.OK, heard=True, fresh=512, tokens=101, decode_ms=2000.0)
        node.leased(now, 512)
        costs.append(node.cost(now, 512, 100))
    assert costs == pytest.approx([costs[1]] * 3, rel=0.01)
    assert work(weight=4).score(0.0) > work(weight=1).score(0.0) > work(weight=0.25).score(0.0)


def test_an_untried_node_is_asked_once_and_not_stampeded() -> None:
    """It looks better than a good known one, until one request waits there."""
    good, untried = tried(rate=20.0), work()
    assert untried.cost(0.0, 512, 8) < good.cost(0.0, 512, 8)
    untried.leased(0.0, 512)
    assert untried.cost(0.0, 512, 8) > good.cost(0.0, 512, 8)


def test_a_bad_first_sample_does_not_starve_a_node_that_warms_up() -> None:
    node = work()
    ahead = node.leased(0.0, 512)
    node.first_token(10_000.0, 10_000.0, 512, ahead)
    node.ended(10_000.0, Outcome.OK, heard=True, fresh=512)
    assert node.best_rate == pytest.approx(6.4, rel=0.05)  # the prior
    assert node.rate(30_000.0) == pytest.approx(6.4, rel=0.05)


def test_a_replica_alone_keeps_its_rarer_samples_for_longer() -> None:
    alone = C.alone(16)
    assert (alone.memory_ms, alone.recover_ms) == (80_000, 80_000)
    assert replace(alone, memory_ms=C.memory_ms, recover_ms=C.recover_ms) == C
    assert C.alone(0) == C


# work, for every trace


@dataclass
class Held:
    """A lease as its owner knows it."""

    fresh: float
    ahead: float
    since_ms: float
    heard: bool = False


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["lease", "token", "end"]),
        st.integers(0, 5000),  # ms since the step before
        st.integers(0, 8000),  # prompt tokens
        st.integers(0, 8000),  # of them cached
        st.sampled_from(list(Outcome)),
        st.integers(0, 50),  # which lease
    ),
    max_size=80,
)


def walked(profile: Profile, steps: list[tuple[str, int, int, int, Outcome, int]]) -> list[Held]:
    """Take the steps; the leases that are left."""
    now, held = 0.0, list[Held]()
    for step, gap, prompt, hit, outcome, which in steps:
        now += gap
        waiting = [lease for lease in held if not lease.heard]
        if step == "lease":
            fresh = profile.fresh(prompt, hit) if isinstance(profile, Work) else float(prompt)
            held.append(Held(fresh, profile.leased(now, fresh), now))
        elif step == "token" and waiting:
            lease = waiting[which % len(waiting)]
            profile.first_token(now, now - lease.since_ms, lease.fresh, lease.ahead)
            lease.heard = True
        elif step == "end" and held:
            lease = held.pop(which % len(held))
            profile.ended(
                now, outcome, heard=lease.heard, fresh=lease.fresh, tokens=which, decode_ms=gap
            )
        assert math.isfinite(profile.score(now))
        assert profile.score(now) >= 0
    return held


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_counts_are_those_of_the_leases_and_scores_are_always_finite(
    steps: list[tuple[str, int, int, int, Outcome, int]],
) -> None:
    node = work()
    held = walked(node, steps)
    waiting = [lease for lease in held if not lease.heard]
    assert node.inflight == len(held)
    assert node.waiting == len(waiting)
    assert node.queued == sum(lease.fresh for lease in waiting)
    assert node.rate(1e7) > 0
    assert 0 <= node.error_share(1e7) < 1


@given(STEPS, st.floats(0, 20_000), st.floats(1, 5000), st.floats(0, 2000), st.floats(0, 5000))
@settings(max_examples=150, deadline=None)
def test_more_work_never_costs_less_and_a_cached_prefix_never_more(
    steps: list[tuple[str, int, int, int, Outcome, int]],
    prompt: float,
    more: float,
    output: float,
    hit: float,
) -> None:
    node = work()
    walked(node, steps)
    now = 1e6
    cost = node.cost(now, prompt, output)
    assert 0 < cost < math.inf
    assert node.cost(now, prompt + more, output) >= cost
    assert node.cost(now, prompt, output + more) >= cost
    assert node.cost(now, prompt, output, hit) <= cost
    if node.waiting:  # else a lease also ends the benefit of the doubt, or begins a silence
        node.leased(now, 512)
        assert node.cost(now, prompt, output) >= cost * (1 - 1e-12)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(steps=STEPS)
@settings(max_examples=30, deadline=None)
def test_every_policy_takes_every_trace(
    policy: str, steps: list[tuple[str, int, int, int, Outcome, int]]
) -> None:
    profile = POLICIES[policy](C, weight=3.0, capacity=5)
    held = walked(profile, steps)
    assert profile.inflight == len(held)
    assert (profile.score(1e7) == 0) == (len(held) >= 5)


# The classic and the baselines: the same as the model that the scripts are checked against

NODE = {"url": "http://h:1", "weight": "3", "capacity": "64"}
SAMPLES = st.lists(st.tuples(st.integers(0, 400_000), st.integers(1, 60_000_000)), max_size=70)


@pytest.mark.parametrize(
    "policy", ["ttft", "peak_ewma", "least_conn", "weighted_least_conn", "random"]
)
@given(samples=SAMPLES, alpha=st.sampled_from([0.0, 0.5, 1.0]), later=st.integers(0, 700_000))
@settings(max_examples=60, deadline=None)
def test_scores_are_those_of_the_oracle(
    policy: Policy, samples: list[tuple[int, int]], alpha: float, later: int
) -> None:
    tuning = Tuning(policy=policy, alpha=alpha, window=7)
    oracle = Oracle(tuning)
    now = 1_000_000
    oracle.register("a", models=("m",), health="ok", fields=NODE, now=now)
    profile = POLICIES[policy](replace(C, alpha=alpha, window=7), weight=3.0)
    for number, (gap, ttft_us) in enumerate(samples):
        now += gap
        oracle.acquire(f"l{number}", "m", "r", ttl_ms=1, size=1, tried=(), now=now, witness="a")
        oracle.first_token(f"l{number}", "r", ttft_us=ttft_us, now=now)
        profile.leased(now)
        profile.first_token(now, ttft_us / 1000, 0, 0)
    node, now = oracle.nodes["a"], now + later
    expected = live_score(idle_score(node, tuning, now), len(samples), 64, policy)
    assert profile.score(now) == pytest.approx(expected, rel=1e-12)


def test_round_robin_prefers_who_was_picked_longest_ago() -> None:
    first, second = RoundRobin(C), RoundRobin(C)
    first.picked, second.picked = 7, 6
    assert second.score(0.0) > first.score(0.0)
    second.leased(0.0)
    assert second.score(0.0) == 1 / 7  # load does not count


def test_a_window_keeps_the_newest_samples_only() -> None:
    profile = Ttft(replace(C, window=3))
    for ttft_ms in (1000, 1000, 100, 200, 300):
        profile.first_token(0.0, ttft_ms, 0, 0)
    assert profile.ttft_ms(0.0) == 200


def test_a_peak_counts_at_once_and_calm_takes_its_time() -> None:
    profile = PeakEwma(C)
    profile.first_token(0.0, 50, 0, 0)
    profile.first_token(0.0, 900, 0, 0)
    assert profile.idle_score(0.0) == pytest.approx(1000 / 900)
    profile.first_token(10_000.0, 50, 0, 0)
    assert profile.idle_score(0.0) == pytest.approx(
        1000 / (900 / math.e + 50 * (1 - 1 / math.e)), rel=1e-4
    )
