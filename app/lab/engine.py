"""Continuous batching as pure step logic: no I/O, no clock, no sleep.

Every step decodes one token of each sequence whose prompt is done and prefills up to
`chunk_tokens` of prompts, first come first served. The step that completes a prompt emits its
first token. Time and chance are arguments, so the fake node runs this in real time, the simulator
in virtual time, and tests in no time.

KV memory is reserved for prompt and whole answer when a sequence is admitted, as engines without
preemption do: nothing that runs is ever evicted, and a head of the line that does not fit waits
(and everybody behind it).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from app.lab.profiles import Profile, draw_output_tokens

if TYPE_CHECKING:
    from random import Random


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class PromptTooLong(ValueError):  # noqa: N818 - it reads as what happened
    """The prompt leaves no room in the whole KV cache for one token of answer."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine: sizes in tokens, times in ms on the caller's clock."""

    prompt_tokens: int
    output_tokens: int
    submitted_ms: float
    state: State = State.WAITING
    prefilled: int = 0
    emitted: int = 0
    first_token_ms: float | None = None
    ended_ms: float | None = None

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache reserved while it runs."""
        return self.prompt_tokens + self.output_tokens

    @property
    def ttft_ms(self) -> float | None:
        """Time from submission to first token, once there is one."""
        return None if self.first_token_ms is None else self.first_token_ms - self.submitted_ms


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step under way: what it processes and how long it takes."""

    duration_ms: float
    prefill: list[tuple[Sequence, int]]
    decode: list[Sequence]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that ended. Each sequence in `emitted` gained one token; `finished` is among them."""

    duration_ms: float
    emitted: list[Sequence]
    finished: list[Sequence]


class Engine:
    """The batch of one inference engine, advanced step by step."""

    def __init__(self, profile: Profile, chance: Random) -> None:
        self.profile = profile
        self._chance = chance
        # Insertion order is arrival order in all three: that is the whole FCFS policy.
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._kv_used = 0
        self._context = 0
        self._plan: StepPlan | None = None

    @property
    def waiting(self) -> int:
        """Sequences in line for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def kv_used(self) -> int:
        """Tokens of KV cache reserved by running sequences."""
        return self._kv_used

    def submit(
        self,
        prompt_tokens: int,
        max_tokens: int | None,
        now_ms: float,
        chance: Random | None = None,
    ) -> Sequence:
        """Put a request in line. It answers exactly `max_tokens`, or a drawn length if None.

        `chance` decides the drawn length in place of the engine's own, so that a caller can make
        it a property of the request. An answer longer than the KV cache allows is cut to fit.
        """
        if prompt_tokens < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError("prompt_tokens and max_tokens must be at least 1")
        room = self.profile.kv_tokens - prompt_tokens
        if room < 1:
            raise PromptTooLong(
                f"prompt of {prompt_tokens} tokens, the engine holds {self.profile.kv_tokens}"
            )
        if max_tokens is None:
            max_tokens = draw_output_tokens(chance or self._chance)
        sequence = Sequence(prompt_tokens, min(max_tokens, room), now_ms)
        self._waiting[sequence] = None
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence now; its slot and KV are free at once. Harmless if it has ended."""
        if sequence.state is State.WAITING:
            del self._waiting[sequence]
            sequence.state = State.CANCELLED
        elif sequence.state is State.RUNNING:
            self._retire(sequence, State.CANCELLED)

    def begin_step(self) -> StepPlan | None:
        """Fix the batch of the next step; None if there is nothing to do.

        Who arrives after this waits for the following step, as in a real engine.
        """
        if self._plan is not None:
            raise RuntimeError("a step is under way")
        decode = list(self._decoding)
        prefill = self._schedule_prefill()
        if not decode and not prefill:
            return None
        duration = self.profile.step_ms(
            sum(tokens for _, tokens in prefill), len(decode), self._context
        )
        self._plan = StepPlan(duration, prefill, decode)
        return self._plan

    def finish_step(self, now_ms: float) -> StepResult:
        """Apply the step under way, which ends at `now_ms`; whoever was cancelled is skipped."""
        plan, self._plan = self._plan, None
        if plan is None:
            raise RuntimeError("no step is under way")
        emitted = [sequence for sequence in plan.decode if sequence.state is State.RUNNING]
        self._context += len(emitted)
        for sequence, tokens in plan.prefill:
            if sequence.state is not State.RUNNING:
                continue
            sequence.prefilled += tokens
            if sequence.prefilled == sequence.prompt_tokens:
                self._start_decoding(sequence, now_ms)
                emitted.append(sequence)
        finished = []
        for sequence in emitted:
            sequence.emitted += 1
            if sequence.emitted == sequence.output_tokens:
                sequence.ended_ms = now_ms
                self._retire(sequence, State.FINISHED)
                finished.append(sequence)
        return StepResult(plan.duration_ms, emitted, finished)

    def step(self, now_ms: float) -> StepResult | None:
        """Run one whole step that starts at `now_ms`; None if idle. For virtual time."""
        plan = self.begin_step()
        return None if plan is None else self.finish_step(now_ms + plan.duration_ms)

    def _schedule_prefill(self) -> list[tuple[Sequence, int]]:
        """Share out the step's prefill budget: prompts begun earlier first, then the line."""
        budget = self.profile.chunk_tokens
        prefill = []
        for sequence in self._prefilling:
            tokens = min(budget, sequence.prompt_tokens - sequence.prefilled)
            prefill.append((sequence, tokens))
            budget -= tokens
        while budget > 0 and (admitted := self._admit_next()) is not None:
            tokens = min(budget, admitted.prompt_tokens)
            prefill.append((admitted, tokens))
            budget -= tokens
        return prefill

    def _admit_next(self) -> Sequence | None:
        """Give the head of the line a slot if slot and KV allow; nobody overtakes it."""
        if not self._waiting or self.running >= self.profile.slots:
            return None
        head = next(iter(self._waiting))
        if self._kv_used + head.kv_tokens > self.profile.kv_tokens:
            return None
        del self._waiting[head]
        head.state = State.RUNNING
        self._prefilling[head] = None
        self._kv_used += head.kv_tokens
        return head

    def _start_decoding(self, sequence: Sequence, now_ms: float) -> None:
        del self._prefilling[sequence]
        self._decoding[sequence] = None
        self._context += sequence.prompt_tokens + 1
        sequence.first_token_ms = now_ms

    def _retire(self, sequence: Sequence, state: State) -> None:
        if sequence in self._decoding:
            del self._decoding[sequence]
            self._context -= sequence.prompt_tokens + sequence.emitted
        else:
            del self._prefilling[sequence]
        self._kv_used -= sequence.kv_tokens
        sequence.state = state
