"""Whether the machine kept up with a run of the policy bench: only then do its figures count."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Final

from app.lab.bench.cpu import TICKS_PER_S, cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.lab.bench.policies_client import Clock

BEAT_S: Final = 0.02
MOST_LAG_MS: Final = 5.0
MOST_CPU: Final = 0.7
MOST_MACHINE: Final = 0.85


@dataclass(frozen=True, slots=True)
class Trust:
    """Whether the machine kept up. CPU in shares of one core, of the machine in [0, 1]."""

    lag_p99_ms: float
    """How late the client's own timers were, in real time."""
    busiest: str
    busiest_cpu: float
    machine_cpu: float

    @property
    def enough(self) -> bool:
        """Whether nothing but the fake nodes can have set the pace."""
        return (
            self.lag_p99_ms <= MOST_LAG_MS
            and self.busiest_cpu <= MOST_CPU
            and self.machine_cpu <= MOST_MACHINE
        )


def worst_of(several: Sequence[Trust]) -> Trust:
    """The worst of each."""
    busiest = max(several, key=lambda trust: trust.busiest_cpu)
    return Trust(
        lag_p99_ms=max(trust.lag_p99_ms for trust in several),
        busiest=busiest.busiest,
        busiest_cpu=busiest.busiest_cpu,
        machine_cpu=max(trust.machine_cpu for trust in several),
    )


async def beats_late_s(clock: Clock, until_s: float) -> list[float]:
    """How late this process gets to what is due, in real seconds."""
    late, due_s = [], clock.now_s()
    while (due_s := due_s + BEAT_S / clock.scale) < until_s:
        await clock.reach(due_s)
        late.append((clock.now_s() - due_s) * clock.scale)
    return late


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU time used so far, seconds; `machine` by everybody, over all cores."""

    at_s: float
    machine_s: float
    by_name: dict[str, float]

    @classmethod
    def now(cls, pids: dict[str, int]) -> Cpu:
        """As of this moment; this process is the client."""
        fields = [int(field) for field in Path("/proc/stat").read_text().split(None, 9)[1:9]]
        busy = sum(fields) - fields[3] - fields[4]  # idle, and idle while a disk works (proc(5))
        names = {**pids, "client": os.getpid()}
        used = {name: cpu_seconds((pid,)) for name, pid in names.items()}
        return cls(perf_counter(), busy / TICKS_PER_S, used)

    def until(self, later: Cpu, late_s: Sequence[float]) -> Trust:
        """What was used between the two."""
        passed_s = later.at_s - self.at_s
        used = {name: later.by_name[name] - self.by_name[name] for name in self.by_name}
        busiest = max(used, key=lambda name: used[name])
        cores = os.cpu_count() or 1
        return Trust(
            lag_p99_ms=1000 * quantiles(late_s, n=100)[98],
            busiest=busiest,
            busiest_cpu=used[busiest] / passed_s,
            machine_cpu=(later.machine_s - self.machine_s) / passed_s / cores,
        )
