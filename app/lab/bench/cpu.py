"""CPU time and core pinning, read and set through the kernel directly."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cores:
    """Where the measured proxy runs, and where everything else does. None: do not pin."""

    measured: int | None
    rest: int | None


def choose_cores() -> Cores:
    """The first two cores that this process may use; on one core pinning says nothing."""
    allowed = sorted(os.sched_getaffinity(0))
    return Cores(allowed[0], allowed[1]) if len(allowed) > 1 else Cores(None, None)


@contextmanager
def born_on(core: int | None) -> Iterator[None]:
    """Children started inside are pinned from their first instruction.

    Pinning a child after its start would miss the threads and workers that it already has.
    """
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def family(pid: int) -> tuple[int, ...]:
    """A process and all its descendants, as of now."""
    return (pid, *(member for child in _children(pid) for member in family(child)))


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []  # it ended while being looked at


def cpu_seconds(pids: tuple[int, ...]) -> float:
    """User + system time so far, summed over all threads of these processes."""
    return sum(map(_ticks, pids)) / TICKS_PER_S


def _ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    # The command name may hold spaces and brackets: fields are counted from its last bracket.
    fields = stat[stat.rindex(")") + 2 :].split()
    return int(fields[11]) + int(fields[12])
