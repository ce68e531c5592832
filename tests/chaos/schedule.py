"""What goes wrong, when and for how long: drawn from one seed, so that a run can be repeated.

The plan holds planned times. A fault whose target is still busy with the one before it (a
replica that takes long to start) begins late, never out of order.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLICAS: Final = ("r0", "r1", "r2")
NODES: Final = ("n0", "n1", "n2", "n3")
EVERY_NODE: Final = "nodes"
REDIS: Final = "redis"
_MOST_AT_ONCE: Final = {"replica": 2, "node": 3, "redis": 1, "relay": 2}
_PAUSE_S: Final = (0.3, 1.8)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault: how often it is drawn, how long it lasts (s), how strong it is."""

    name: str
    weight: float
    seconds: tuple[float, float] = (0.0, 0.0)
    value: tuple[float, float] = (0.0, 0.0)

    @property
    def family(self) -> str:
        """What it strikes: replica, node, redis, relay."""
        return self.name.partition(".")[0]


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("replica.kill", 3, (0.1, 2.0)),  # SIGKILL; started again after so long
        Kind("replica.freeze_short", 3, (0.3, 1.2)),  # SIGSTOP, shorter than the lease ttl
        Kind("replica.freeze_long", 3, (2.6, 4.5)),  # longer: its leases are reaped meanwhile
        Kind("replica.term", 3, (0.1, 1.0)),  # SIGTERM; started again so long after its end
        Kind("node.kill", 3, (0.5, 4.0)),
        Kind("node.freeze", 2, (1.0, 4.0)),  # SIGSTOP: connections are taken, nothing answers
        Kind("node.hang", 2, (1.0, 4.0)),  # takes requests, health page fine
        Kind("node.slow", 2, (2.0, 5.0), (4, 10)),
        Kind("node.status", 3, (1.0, 4.0), (0, 4)),
        Kind("node.flaky", 2, (2.0, 5.0), (0.2, 0.7)),
        Kind("node.refuse", 1, (1.0, 3.0)),
        Kind("node.drop_before_headers", 2, (1.0, 3.0)),
        Kind("node.drop_mid_stream", 3, (1.0, 4.0), (0, 8)),
        Kind("node.error_event", 2, (1.0, 4.0), (0, 8)),
        Kind("node.stall", 2, (1.0, 3.0), (0, 8)),
        Kind("node.loading", 2, (1.0, 4.0)),
        Kind("node.blackout", 1, (0.5, 2.0)),  # 500 from every node at once
        Kind("redis.restart", 2, (0.1, 3.0)),  # SIGKILL; comes back empty
        Kind("redis.flush", 2),
        Kind("redis.script_flush", 2),
        Kind("redis.freeze", 2, (0.5, 4.0)),
        Kind("relay.delay", 3, (1.0, 4.0), (0.1, 0.4)),
        Kind("relay.pause", 3, (0.5, 4.0)),
        Kind("relay.reset", 2),
        Kind("relay.refuse", 2, (0.5, 3.0)),
        Kind("relay.cut", 2, (0.5, 1.0)),
        Kind("relay.lost_answers", 2, (1.0, 3.0), (2, 9)),  # reset after each n-th script
    )
}


@dataclass(frozen=True, slots=True)
class Step:
    """One fault of the plan. ``at_s`` counts from the start of the load."""

    at_s: float
    kind: str
    target: str
    seconds: float
    value: float

    def __str__(self) -> str:
        strength = f" {self.value:.2f}" if self.value else ""
        return f"{self.at_s:7.2f}s {self.kind} {self.target} for {self.seconds:.2f}s{strength}"


def plan(seed: int, seconds: float, only: str = "") -> list[Step]:
    """The faults of a run; all are over, as planned, when ``seconds`` have passed.

    ``only`` leaves the kinds whose name begins so.
    """
    chance = Random(seed)
    kinds = [kind for kind in KINDS.values() if kind.name.startswith(only)]
    weights = [kind.weight for kind in kinds]
    steps: list[Step] = []
    at = 1.0
    while at < seconds:
        kind = chance.choices(kinds, weights)[0]
        lasts, value = chance.uniform(*kind.seconds), chance.uniform(*kind.value)
        target = chance.choice(_targets(kind))
        step = Step(round(at, 3), kind.name, target, round(lasts, 3), round(value, 3))
        if at + lasts <= seconds and _fits(step, steps):
            steps.append(step)
        at += chance.uniform(*_PAUSE_S)
    return steps


def _targets(kind: Kind) -> Sequence[str]:
    if kind.name == "node.blackout":
        return (EVERY_NODE,)
    return {"node": NODES, "redis": (REDIS,)}.get(kind.family, REPLICAS)


def _fits(step: Step, steps: Sequence[Step]) -> bool:
    """Whether the target is free and its family not struck too often already at this time."""
    family = KINDS[step.kind].family
    running = [
        s for s in steps if KINDS[s.kind].family == family and s.at_s + s.seconds >= step.at_s
    ]
    if step.target == EVERY_NODE or any(s.target == EVERY_NODE for s in running):
        return not running
    return len(running) < _MOST_AT_ONCE[family] and step.target not in {s.target for s in running}
