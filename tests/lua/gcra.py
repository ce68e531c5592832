"""The limits of one API key as plain Python: what ``admit`` and ``settle`` must answer.

Written from https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm, in its first form: each
limit is a theoretical arrival time, kept as a fraction. The scripts use the second form, so what
agrees agrees by the arithmetic, not by the same code.
"""

from __future__ import annotations

import math
from fractions import Fraction

MINUTE_MS = 60_000


class Bucket:
    """One limit per minute with a burst of the whole limit; 0 is none. Times in ms."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._arrival = Fraction(0)

    def _ahead(self, now: int) -> Fraction:
        """How far the theoretical arrival time lies ahead."""
        return max(Fraction(0), self._arrival - now)

    def _worth(self, cost: int) -> Fraction:
        return Fraction(MINUTE_MS * cost, self.limit)

    def wait_ms(self, now: int, cost: int) -> int:
        """Ms until ``cost`` conforms; 0 when it does now."""
        if not self.limit:
            return 0
        return max(0, math.ceil(self._ahead(now) + self._worth(cost) - MINUTE_MS))

    def add(self, now: int, cost: int) -> None:
        """Charge ``cost``, or give it back below 0."""
        if self.limit:
            self._arrival = now + max(Fraction(0), self._ahead(now) + self._worth(cost))

    def left(self, now: int) -> tuple[int, int]:
        """(what is left, ms until nothing is used)."""
        if not self.limit:
            return 0, 0
        used = self._ahead(now) * self.limit / MINUTE_MS
        return max(0, math.floor(self.limit - used)), math.ceil(self._ahead(now))


class Key:
    """Both limits of a key."""

    def __init__(self, rpm: int, tpm: int) -> None:
        self.requests, self.tokens = Bucket(rpm), Bucket(tpm)

    def admit(self, now: int, cost: int) -> list[str | int]:
        """The reply of ``admit``: a request that is refused by one limit is counted by neither."""
        cost = min(cost, self.tokens.limit)
        waits = self.requests.wait_ms(now, 1), self.tokens.wait_ms(now, cost)
        said = "admitted"
        if any(waits):
            said = "requests" if waits[0] > waits[1] else "tokens"
        else:
            self.requests.add(now, 1)
            self.tokens.add(now, cost)
        return [said, max(waits), *self.requests.left(now), *self.tokens.left(now)]

    def settle(self, now: int, delta: int) -> int:
        """The reply of ``settle``."""
        self.tokens.add(now, delta)
        return self.tokens.left(now)[0]
