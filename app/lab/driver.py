"""Runs an engine in real time: timers on one hand, receivers of tokens on the other.

Steps are placed on an absolute timeline (the next one starts when this one was *due*), so late
timers do not add up to drift.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from app.lab.engine import Engine, Sequence

MAX_LAG_S = 0.25
"""A process that was stopped for longer than this did no work meanwhile: it goes on from now."""


class Receiver(Protocol):
    """Who waits for the tokens of a sequence."""

    def token(self, sequence: Sequence) -> None:
        """One more token exists; it is the last if the sequence is finished."""


class Driver:
    """The clock of one engine. `time_scale` and `slowness()` stretch every step."""

    def __init__(self, engine: Engine, time_scale: float, slowness: Callable[[], float]) -> None:
        self._engine = engine
        self._time_scale = time_scale
        self._slowness = slowness
        self._loop = asyncio.get_running_loop()
        self._receivers: dict[Sequence, Receiver] = {}
        self._timer: asyncio.Handle | None = None

    def submit(
        self, prompt_tokens: int, max_tokens: int | None, chance: Random, receiver: Receiver
    ) -> Sequence:
        """Put a request in line; its tokens go to `receiver` as they are made."""
        now = self._loop.time()
        sequence = self._engine.submit(prompt_tokens, max_tokens, now * 1000, chance)
        self._receivers[sequence] = receiver
        if self._timer is None:
            self._begin(now)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Stop a sequence at once. Harmless if it has ended."""
        if self._receivers.pop(sequence, None) is not None:
            self._engine.cancel(sequence)

    def close(self) -> None:
        """Stop the clock for good."""
        if self._timer is not None:
            self._timer.cancel()
        self._receivers.clear()

    def _begin(self, start: float) -> None:
        plan = self._engine.begin_step()
        if plan is None:
            self._timer = None
            return
        due = start + plan.duration_ms / 1000 * self._time_scale * self._slowness()
        self._timer = self._loop.call_at(due, self._finish, due)

    def _finish(self, due: float) -> None:
        result = self._engine.finish_step(due * 1000)
        receivers = self._receivers
        for sequence in result.emitted:
            # A receiver may cancel others while it is told; those are no longer listed.
            receiver = receivers.get(sequence)
            if receiver is not None:
                receiver.token(sequence)
        for sequence in result.finished:
            receivers.pop(sequence, None)
        now = self._loop.time()
        self._begin(now if now - due > MAX_LAG_S else due)
