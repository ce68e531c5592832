"""The engine model by its invariants, in virtual time: no test here sleeps."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.lab.engine import Engine, PromptTooLong, Sequence, State
from app.lab.profiles import (
    A100,
    IDEAL,
    OUTPUT_CAP,
    PROFILES,
    RTX4090,
    XEON,
    Profile,
    draw_output_tokens,
)

GPUS = (A100, RTX4090, XEON)
TINY = Profile(
    name="tiny",
    prefill_tokens_per_s=1000,
    slots=3,
    kv_tokens=100,
    step_base_ms=5,
    decode_ms_per_seq=1,
    kv_ms_per_token=0.01,
    chunk_tokens=16,
)


def make(profile: Profile, seed: int = 1) -> Engine:
    return Engine(profile, Random(seed))


def drain(engine: Engine, now_ms: float = 0.0, limit: int = 100_000) -> float:
    """Step until idle; the virtual time after that."""
    for _ in range(limit):
        result = engine.step(now_ms)
        if result is None:
            return now_ms
        now_ms += result.duration_ms
    raise AssertionError(f"the engine is still busy after {limit} steps")


@pytest.mark.parametrize(("profile", "ttft_ms"), [(A100, 35), (RTX4090, 80), (XEON, 300)])
def test_idle_ttft_of_512_tokens_is_the_stated_one(profile: Profile, ttft_ms: float) -> None:
    engine = make(profile)
    sequence = engine.submit(512, 8, now_ms=1000.0)
    drain(engine, 1000.0)
    assert sequence.ttft_ms == pytest.approx(ttft_ms, abs=1e-9)


@pytest.mark.parametrize(("profile", "per_s"), [(A100, 12.5), (RTX4090, 3.94), (XEON, 0.354)])
def test_saturated_throughput_of_the_bimodal_mix(profile: Profile, per_s: float) -> None:
    chance, engine, now_ms, done = Random(7), make(profile), 0.0, 0
    while done < 2000:
        while engine.waiting < profile.slots:
            engine.submit(*bimodal(chance), now_ms)
        result = engine.step(now_ms)
        assert result is not None
        now_ms += result.duration_ms
        done += len(result.finished)
    assert done / now_ms * 1000 == pytest.approx(per_s, rel=0.1)


def bimodal(chance: Random) -> tuple[int, int]:
    """Prompt and answer length of the bimodal mix: classification or generation."""
    if chance.random() < 0.5:
        return max(1, round(chance.gauss(200, 40))), chance.randint(1, 16)
    prompt = round(chance.lognormvariate(math.log(600), 0.8))
    answer = round(chance.lognormvariate(math.log(150), 0.6))
    return min(6000, max(16, prompt)), min(800, max(1, answer))


@pytest.mark.parametrize("profile", GPUS, ids=lambda profile: profile.name)
def test_decode_slows_with_load(profile: Profile) -> None:
    def step_ms(sequences: int) -> float:
        engine = make(profile)
        for _ in range(sequences):
            engine.submit(16, 100, 0.0)
        engine.step(0.0)  # all prompts fit in one chunk
        result = engine.step(0.0)
        assert result is not None
        assert len(result.emitted) == sequences
        return result.duration_ms

    durations = [step_ms(n) for n in range(1, profile.slots + 1)]
    assert durations == sorted(set(durations))
    assert durations[-1] > durations[0] * 1.5


def test_slots_are_never_exceeded_and_are_all_used() -> None:
    engine = make(A100)
    for _ in range(100):
        engine.submit(10, 5, 0.0)
    engine.begin_step()
    assert (engine.running, engine.waiting) == (40, 60)
    engine.finish_step(0.0)
    drain(engine)
    assert (engine.running, engine.waiting, engine.kv_used) == (0, 0, 0)


def test_first_come_first_served() -> None:
    engine = make(TINY)
    sequences = [engine.submit(size, 2, 0.0) for size in (30, 1, 40, 5, 20, 1)]
    drain(engine)
    firsts = [sequence.first_token_ms or 0.0 for sequence in sequences]
    assert firsts == sorted(firsts)
    assert firsts[0] > 0


def test_a_small_request_does_not_overtake_one_that_waits_for_kv() -> None:
    engine = make(TINY)
    engine.submit(40, 20, 0.0)
    big = engine.submit(50, 10, 0.0)
    small = engine.submit(1, 1, 0.0)
    for _ in range(4):
        engine.step(0.0)
    assert (big.state, small.state) == (State.WAITING, State.WAITING)
    drain(engine)
    assert (big.state, small.state) == (State.FINISHED, State.FINISHED)


def test_a_step_prefills_at_most_its_chunk() -> None:
    engine = make(TINY)
    first, second = engine.submit(20, 1, 0.0), engine.submit(20, 1, 0.0)
    steps = []
    while (plan := engine.begin_step()) is not None:
        steps.append([tokens for _, tokens in plan.prefill])
        engine.finish_step(0.0)
    assert steps == [[16], [4, 12], [8]]
    assert (first.emitted, second.emitted) == (1, 1)


def test_who_arrives_during_a_step_waits_for_the_next() -> None:
    engine = make(A100)
    engine.submit(512, 2, 0.0)
    engine.begin_step()
    late = engine.submit(512, 2, 10.0)
    engine.finish_step(35.0)
    assert (late.state, late.prefilled) == (State.WAITING, 0)


def test_cancel_frees_slot_and_kv_at_once() -> None:
    engine = make(TINY)
    running = [engine.submit(10, 10, 0.0) for _ in range(3)]
    waiting = engine.submit(10, 10, 0.0)
    for _ in range(3):
        engine.step(0.0)
    assert (engine.running, engine.waiting, engine.kv_used) == (3, 1, 60)
    engine.cancel(running[0])
    assert (engine.running, engine.kv_used) == (2, 40)
    engine.step(0.0)
    assert waiting.state is State.RUNNING
    for sequence in (*running, waiting):
        engine.cancel(sequence)
        engine.cancel(sequence)  # harmless
    assert (engine.running, engine.waiting, engine.kv_used) == (0, 0, 0)
    assert engine.step(0.0) is None


def test_cancelled_during_a_step_emits_nothing() -> None:
    engine = make(A100)
    decoding = engine.submit(10, 5, 0.0)
    engine.step(0.0)
    prefilling = engine.submit(10, 5, 0.0)
    engine.begin_step()
    engine.cancel(decoding)
    engine.cancel(prefilling)
    result = engine.finish_step(0.0)
    assert (result.emitted, result.finished) == ([], [])
    assert (decoding.emitted, prefilling.emitted, engine.kv_used) == (1, 0, 0)


def test_context_cost_returns_to_nothing() -> None:
    """The context that decodes pay for is what is running, whatever ended before."""
    engine = make(replace(A100, kv_ms_per_token=1.0))
    for tokens in (3, 9, 4):
        engine.cancel(engine.submit(100, tokens, 0.0))
        engine.submit(100, tokens, 0.0)
    drain(engine)
    engine.submit(7, 3, 0.0)
    engine.step(0.0)
    plan = engine.begin_step()
    assert plan is not None
    assert plan.duration_ms == pytest.approx(A100.step_base_ms + A100.decode_ms_per_seq + 8)


def test_answers_are_cut_to_the_cache_and_longer_prompts_refused() -> None:
    engine = make(TINY)
    assert engine.submit(90, 50, 0.0).output_tokens == 10
    with pytest.raises(PromptTooLong):
        engine.submit(100, 1, 0.0)
    for prompt_tokens, max_tokens in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            engine.submit(prompt_tokens, max_tokens, 0.0)


def test_a_seed_fixes_every_length() -> None:
    def lengths(seed: int) -> list[int]:
        engine = make(IDEAL, seed)
        return [engine.submit(10, None, 0.0).output_tokens for _ in range(200)]

    assert lengths(3) == lengths(3)
    assert lengths(3) != lengths(4)
    own = [make(IDEAL, seed).submit(10, None, 0.0, Random(9)).output_tokens for seed in (1, 2)]
    assert own[0] == own[1]


@given(st.integers())
def test_drawn_lengths_stay_in_range(seed: int) -> None:
    assert 1 <= draw_output_tokens(Random(seed)) <= OUTPUT_CAP


def test_ideal_takes_no_time() -> None:
    engine = make(IDEAL)
    for _ in range(5000):
        engine.submit(100_000, 3, 0.0)
    assert drain(engine) == 0.0
    assert set(PROFILES) == {"a100", "rtx4090", "xeon", "ideal"}


SUBMIT = st.tuples(st.just("submit"), st.integers(1, 99), st.integers(1, 120))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 50), st.just(0))
BEGIN_OR_FINISH = st.tuples(st.just("step"), st.just(0), st.just(0))


@settings(deadline=None)
@given(st.lists(st.one_of(SUBMIT, CANCEL, BEGIN_OR_FINISH, BEGIN_OR_FINISH), max_size=120))
def test_any_trace_keeps_the_limits_and_ends(trace: list[tuple[str, int, int]]) -> None:
    engine = make(TINY)
    sequences: list[Sequence] = []
    under_way = False
    for verb, first, second in trace:
        if verb == "submit":
            sequences.append(engine.submit(first, second, 0.0))
        elif verb == "cancel" and sequences:
            engine.cancel(sequences[first % len(sequences)])
        elif verb == "step":
            if under_way:
                engine.finish_step(0.0)
            under_way = not under_way and engine.begin_step() is not None
        check_limits(engine, sequences)
    if under_way:
        engine.finish_step(0.0)
    drain(engine)
    check_limits(engine, sequences)
    for sequence in sequences:
        assert sequence.state in {State.FINISHED, State.CANCELLED}
        assert (sequence.emitted == sequence.output_tokens) is (sequence.state is State.FINISHED)
    assert (engine.running, engine.waiting, engine.kv_used) == (0, 0, 0)


def check_limits(engine: Engine, sequences: list[Sequence]) -> None:
    running = [s for s in sequences if s.state is State.RUNNING]
    assert engine.running == len(running) <= TINY.slots
    assert engine.kv_used == sum(s.kv_tokens for s in running) <= TINY.kv_tokens
    assert engine.waiting == sum(s.state is State.WAITING for s in sequences)
    assert all(s.prefilled <= s.prompt_tokens for s in sequences)
