"""What really was wrong, and when: the faults as they happened, to judge outcomes by."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from tests.chaos.schedule import EVERY_NODE, NODES

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class Window:
    """One fault in force, on the clock of ``monotonic``."""

    kind: str
    target: str
    start: float
    end: float = math.inf

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"


class Truth:
    """All faults so far."""

    def __init__(self) -> None:
        self.origin = monotonic()
        self.windows: list[Window] = []

    def since_start(self, at: float) -> float:
        """Seconds since the load began, for people."""
        return at - self.origin

    @contextlib.contextmanager
    def fault(self, kind: str, target: str) -> Iterator[Window]:
        """The fault is in force inside the block."""
        window = Window(kind, target, monotonic())
        self.windows.append(window)
        try:
            yield window
        finally:
            window.end = monotonic()

    def during(
        self, family: str, start: float, end: float, target: str | None = None
    ) -> list[Window]:
        """Faults of ``family`` (on ``target``) that were in force at some time in between."""
        return [
            w
            for w in self.windows
            if w.kind.startswith(family + ".")
            and w.start <= end
            and w.end >= start
            and (target is None or w.target in {target, EVERY_NODE})
        ]

    def faulty_nodes(self, start: float, end: float) -> set[str]:
        """Nodes that had a fault at some time in between."""
        return {node for node in NODES if self.during("node", start, end, node)}

    def redis_away(self, start: float, end: float, replica: str) -> bool:
        """Whether the replica may have been without shared state at some time in between."""
        return bool(self.during("redis", start, end) or self.during("relay", start, end, replica))

    def active(self, at: float) -> str:
        """The faults in force at ``at`` and within the second before, for a report."""
        return ", ".join(map(str, sorted(
            (w for w in self.windows if w.start <= at <= w.end + 1), key=lambda w: w.start
        ))) or "none"  # fmt: skip

    def counts(self) -> dict[str, int]:
        """How many faults of each kind."""
        return dict(sorted(Counter(w.kind for w in self.windows).items()))
