"""What a fake node has served, for tests to assert on.

At every moment started = completed + rejected + aborted + faulted + open.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


class End(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """Answered with 4xx because of what it asked."""
    ABORTED = "aborted"
    """The client left before the end."""
    FAULTED = "faulted"
    """A fault on demand ended it."""


@dataclass(slots=True)
class Ledger:
    """Counts of model requests, and of whatever a fault took, since the last reset."""

    started: int = 0
    completed: int = 0
    rejected: int = 0
    aborted: int = 0
    faulted: int = 0
    open: int = 0
    max_open: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    faults_served: Counter[str] = field(default_factory=Counter)
    """Times that each fault mode struck; reset connections count here and nowhere else."""

    def begin(self) -> None:
        """A request is here in full."""
        self.started += 1
        self.open += 1
        self.max_open = max(self.max_open, self.open)

    def end(self, how: End) -> None:
        """A request is over. Once for each `begin`."""
        self.open -= 1
        setattr(self, how.value, getattr(self, how.value) + 1)

    def reset(self) -> None:
        """Forget the past; what is open now stays open and counts as started."""
        fresh = Ledger(started=self.open, open=self.open, max_open=self.open)
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def to_json(self) -> dict[str, Any]:
        """Give every count as plain data."""
        # Not asdict: it would rebuild the Counter from pairs, and so count the pairs.
        counts = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**counts, "faults_served": dict(self.faults_served)}
