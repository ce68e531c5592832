"""The engine of `app/lab/engine.py` in virtual time, by leaps.

The same rules and the same arithmetic, step for step: every step decodes one token of each
sequence whose prompt is done and prefills up to a chunk of prompts, first come first served, and
KV memory is reserved whole. But steps that only decode, until one of the answers ends, are done in
one leap, whose length is a closed form; whoever arrives meanwhile is let in after the step then
under way. A simulation so costs a few operations per request instead of a few per token.

Faults: a pause stretches the step under way, a slow-down begins with the next step.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.lab.profiles import Profile
    from app.lab.simulate.workload import Call


class Job:
    """A call inside an engine. `left` is what must still be prefilled, in tokens."""

    __slots__ = ("call", "left", "output", "prompt")

    def __init__(self, call: Call, cached: int = 0) -> None:
        self.call = call
        self.prompt = call.prompt
        self.output = call.output
        self.left = max(1, call.prompt - cached)

    def copy(self) -> Job:
        """The same, to be changed apart."""
        twin = Job(self.call)
        twin.output, twin.left = self.output, self.left
        return twin


class Engine:
    """The batch of one node. `until` is when the leap under way ends, infinite when idle."""

    __slots__ = (
        "_context",
        "_decoding",
        "_hold",
        "_kv_used",
        "_leap",
        "_plan",
        "_prefilling",
        "_serial",
        "_start",
        "_steps",
        "profile",
        "slowness",
        "until",
        "waiting",
    )

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.waiting: deque[Job] = deque()
        self.slowness = 1.0
        self.until = inf
        self._prefilling: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []  # a heap by the step that ends the answer
        self._plan: list[tuple[Job, int]] = []  # prefill of the step under way
        self._serial = 0
        self._steps = 0
        self._leap = 0  # steps under way, 0 when idle
        self._start = 0.0
        self._hold = 0.0  # nothing begins before
        self._context = 0
        self._kv_used = 0

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def kv_share(self) -> float:
        """Share of the KV cache that running sequences have reserved."""
        return self._kv_used / self.profile.kv_tokens

    @property
    def busy(self) -> bool:
        """Whether one who comes now finds a prompt before it, or no slot."""
        return bool(self.waiting or self._prefilling) or self.running >= self.profile.slots

    def submit(self, job: Job, now_ms: float) -> None:
        """Put a request in line; an answer that the whole KV cache cannot hold is cut to fit."""
        job.output = max(1, min(job.output, self.profile.kv_tokens - job.prompt))
        first = not self.waiting
        self.waiting.append(job)
        if not self._leap:
            self._begin(now_ms)
        elif first and self._fits(job):
            self._cut(now_ms)

    def advance(self) -> tuple[list[Job], list[Job]]:
        """End the leap under way at `until` and begin the next: (first tokens, ended answers)."""
        now = self.until
        decoding = self._decoding
        self._steps += self._leap
        self._context += len(decoding) * self._leap
        started: list[Job] = []
        ended: list[Job] = []
        for job, tokens in self._plan:
            job.left -= tokens
            if not job.left:
                started.append(job)
        while decoding and decoding[0][0] <= self._steps:
            ended.append(self._retire(heappop(decoding)[2]))
        for job in started:
            self._prefilling.remove(job)
            self._context += job.prompt + 1
            if job.output == 1:
                ended.append(self._retire(job))
            else:
                self._serial += 1
                heappush(decoding, (self._steps + job.output - 1, self._serial, job))
        self._begin(now)
        return started, ended

    def pause(self, now_ms: float, until_ms: float) -> None:
        """Nothing happens until then; the step under way ends so much later."""
        self._hold = max(self._hold, until_ms)
        if self._leap:
            self._cut(now_ms)
            self.until += until_ms - now_ms

    def slow(self, now_ms: float, slowness: float) -> None:
        """Every step that begins from now on takes so many times as long."""
        if self._leap:
            self._cut(now_ms)
        self.slowness = slowness

    def ttft_ms(self, call: Call, cached: int, now_ms: float, limit: float) -> float:
        """Exact time to first token of a call put in line now, if nobody came after it.

        Gives up, with infinity, once it is sure to be more than `limit`.
        """
        twin = self._twin()
        probe = Job(call, cached)
        twin.submit(probe, now_ms)
        while twin.until - now_ms <= limit:
            at = twin.until
            if probe in twin.advance()[0]:
                return at - now_ms
        return inf

    def _twin(self) -> Engine:
        """A copy that can be run ahead. What decodes is never changed, so it is shared."""
        twin = Engine(self.profile)
        copies = {job: job.copy() for job in self._prefilling}
        twin._prefilling = list(copies.values())
        twin.waiting = deque(job.copy() for job in self.waiting)
        twin._plan = [(copies[job], tokens) for job, tokens in self._plan]
        twin._decoding = self._decoding.copy()
        twin.slowness, twin.until = self.slowness, self.until
        twin._serial, twin._steps, twin._leap = self._serial, self._steps, self._leap
        twin._start, twin._hold = self._start, self._hold
        twin._context, twin._kv_used = self._context, self._kv_used
        return twin

    def _fits(self, job: Job) -> bool:
        return (
            len(self._prefilling) + len(self._decoding) < self.profile.slots
            and self._kv_used + job.prompt + job.output <= self.profile.kv_tokens
        )

    def _retire(self, job: Job) -> Job:
        self._context -= job.prompt + job.output
        self._kv_used -= job.prompt + job.output
        return job

    def _begin(self, now_ms: float) -> None:
        """Fix the batch of the next step, or of as many as nothing can change."""
        profile = self.profile
        budget = profile.chunk_tokens
        plan: list[tuple[Job, int]] = []
        for job in self._prefilling:
            tokens = min(budget, job.left)
            plan.append((job, tokens))
            budget -= tokens
        while budget > 0 and self.waiting and self._fits(self.waiting[0]):
            job = self.waiting.popleft()
            self._prefilling.append(job)
            self._kv_used += job.prompt + job.output
            tokens = min(budget, job.left)
            plan.append((job, tokens))
            budget -= tokens
        self._plan = plan
        if plan:
            self._leap = 1
        elif self._decoding:
            self._leap = self._decoding[0][0] - self._steps
        else:
            self._leap, self.until = 0, inf
            return
        self._start = max(now_ms, self._hold)
        self.until = self._start + self._duration_ms(self._leap)

    def _duration_ms(self, steps: int) -> float:
        """Of a leap of so many steps; the context grows by every answer's token in each."""
        profile, n = self.profile, len(self._decoding)
        prefill = sum(tokens for _, tokens in self._plan)
        each = profile.step_base_ms + n * profile.decode_ms_per_seq
        context = steps * self._context + n * (steps * (steps - 1) // 2)
        return self.slowness * (
            steps * each
            + prefill * 1000.0 / profile.prefill_tokens_per_s
            + context * profile.kv_ms_per_token
        )

    def _cut(self, now_ms: float) -> None:
        """Let the leap end with the step that is under way now."""
        if self._leap == 1:
            return
        elapsed = now_ms - self._start
        steps = int(self._leap * elapsed / (self.until - self._start)) + 1
        while self._duration_ms(steps) < elapsed:
            steps += 1
        while steps > 1 and self._duration_ms(steps - 1) >= elapsed:
            steps -= 1
        if steps < self._leap:
            self._leap = steps
            self.until = self._start + self._duration_ms(steps)
