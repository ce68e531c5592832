"""Child processes of the bench: started pinned, watched until ready, always ended by pid."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from app.cluster.embedded import die_with_parent
from app.lab.bench.cpu import born_on, family

START_S = 20.0
STOP_S = 10.0


class BenchError(Exception):
    """The bench cannot run or cannot be trusted; the message is for the person who ran it."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running process of the bench, with what it wrote to stdout and stderr."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def tail(self, lines: int = 15) -> str:
        written = self.log.read_text(errors="replace").splitlines()
        return "\n".join(written[-lines:]) or "(it wrote nothing)"

    def wait_until(self, ready: Callable[[], bool], what: str, within_s: float = START_S) -> None:
        """Poll `ready`; a child that exits or stays unready ends the bench with its last words."""
        deadline = time.monotonic() + within_s
        while not ready():
            if self.process.poll() is not None:
                problem = f"exited with {self.process.returncode} before {what}"
            elif time.monotonic() > deadline:
                problem = f"no {what} within {within_s:.0f} s"
            else:
                time.sleep(0.05)
                continue
            raise BenchError(f"{self.name}: {problem}. Its last lines:\n{self.tail()}")


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    scratch: Path,
    core: int | None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """A child for the length of the block, in a process group of its own.

    Its own group, so that Ctrl-C reaches only the bench, which then ends its children in order;
    a bench that is itself killed outright leaves ending them to the kernel.
    """
    log = scratch / f"{name}.log"
    with log.open("wb") as out, born_on(core):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            process_group=0,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call, no locks taken
        )
    try:
        yield Child(name, process, log)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, then insist: on its descendants too, which a killed parent leaves behind."""
    if process.poll() is not None:
        return
    descendants = family(process.pid)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def accepts(port: int) -> bool:
    """Whether someone listens on this loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
