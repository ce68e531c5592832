"""The data-plane bench: CPU-µs per request of the gateway beside nginx, interleaved, in one run."""

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import orjson
from rich.console import Console

from app.cluster.embedded import die_with_parent
from app.lab.bench.cpu import Cores, born_on, choose_cores, cpu_seconds
from app.lab.bench.load import DRAIN_S, Report
from app.lab.bench.nginx import nginx
from app.lab.bench.peers import Peer, backend, gateway
from app.lab.bench.processes import BenchError
from app.lab.bench.report import print_json, print_tables
from app.lab.bench.rows import DIRECT, Row, Sample, rows_of
from app.lab.bench.workloads import WORKLOADS

BASELINE = "nginx"
WARM_UP_S = 1.0
# Added time to first byte is asked at a rate that leaves every candidate idle most of the time:
# under full load it would be the length of the queue.
FIRST_BYTE = "ttfb"
FIRST_BYTE_LOAD = ("--workload", "paced", "--connections", "64", "--rate", "50")
ALL_WORKLOADS = (*WORKLOADS, FIRST_BYTE)


def run_gateway_bench(
    peers: Sequence[Peer],
    workloads: Sequence[str] = ALL_WORKLOADS,
    *,
    rounds: int = 3,
    seconds: float = 5.0,
    cores: Cores | None = None,
    baseline: str = BASELINE,
    on_sample: Callable[[Sample], None] = lambda _: None,
) -> list[Row]:
    """Measure running peers in turn, A B A B: what the machine does meanwhile hits all alike."""
    cores = cores or choose_cores()
    samples = []
    for workload in workloads:
        # Without a process to read there is no CPU figure: `direct` serves first bytes only.
        candidates = [peer for peer in peers if peer.pids or workload == FIRST_BYTE]
        for peer in candidates:
            _load(peer, workload, min(WARM_UP_S, seconds), cores, seed=0)
        for number in range(1, rounds + 1):
            for peer in candidates:
                sample = _measure(peer, workload, number, seconds, cores)
                on_sample(sample)
                samples.append(sample)
    return rows_of(samples, baseline)


def _measure(peer: Peer, workload: str, number: int, seconds: float, cores: Cores) -> Sample:
    before, redis_before = cpu_seconds(peer.pids), cpu_seconds(peer.redis_pids)
    report = _load(peer, workload, seconds, cores, seed=number)
    spent = cpu_seconds(peer.pids) - before
    redis_spent = cpu_seconds(peer.redis_pids) - redis_before
    if not report.requests:
        raise BenchError(f"{peer.name} answered no {workload} request rightly: {report.reasons}")

    def per_request(cpu_s: float, pids: tuple[int, ...]) -> float | None:
        # At fifty requests a second timers and probes would be most of it: no figure then.
        return 1e6 * cpu_s / report.requests if pids and workload != FIRST_BYTE else None

    cpu_us, redis_us = per_request(spent, peer.pids), per_request(redis_spent, peer.redis_pids)
    return Sample(workload, peer.name, number, report, cpu_us, redis_us)


def _load(peer: Peer, workload: str, seconds: float, cores: Cores, seed: int) -> Report:
    shape = FIRST_BYTE_LOAD if workload == FIRST_BYTE else ("--workload", workload)
    command = [sys.executable, "-m", "app.lab.bench.load", "--url", peer.url, *shape]
    command += ["--seconds", str(seconds), "--seed", str(seed)]
    with born_on(cores.rest):
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            process_group=0,
            preexec_fn=die_with_parent,
            timeout=seconds + DRAIN_S + 20,
        )
    if done.returncode:
        raise BenchError(f"the load generator failed:\n{done.stderr.decode(errors='replace')}")
    return Report(**orjson.loads(done.stdout))


@contextmanager
def started_peers(
    names: Sequence[str], cores: Cores, backend_port: int | None = None
) -> Iterator[list[Peer]]:
    """The backend, and the peers by name in front of it; `direct` is the backend itself."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leaseway-bench-")))
        direct = stack.enter_context(backend(scratch, cores, backend_port))
        peers: list[Peer] = []
        for name in names:
            if name == DIRECT:
                peers.append(direct)
            elif name == "gateway":
                peers.append(stack.enter_context(gateway(direct.url, scratch, cores)))
            elif name == BASELINE:
                again = sum(peer.name.startswith(BASELINE) for peer in peers)
                label = f"{BASELINE}-{again + 1}" if again else BASELINE
                peers.append(stack.enter_context(nginx(direct.url, scratch, cores, label)))
            else:
                raise BenchError(f"no peer is called {name!r}: gateway, nginx or direct")
        yield peers


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """Each way of being stopped unwinds the stack once; a second one cannot cut that short."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, _: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def main(
    workloads: list[str],
    rounds: int,
    seconds: float,
    json_out: bool,
    *,
    peers: Sequence[str] = ("gateway", BASELINE),
    others: Sequence[Peer] = (),
    backend_port: int | None = None,
) -> None:
    """Start everything, measure, print, end everything. `others` run already, by someone else."""
    progress = Console(stderr=True)

    def tell(sample: Sample) -> None:
        cpu = "" if sample.cpu_us is None else f"{sample.cpu_us:.1f} µs"
        progress.print(f"{sample.workload} round {sample.round}: {sample.peer} {cpu}", style="dim")

    wanted = workloads or list(ALL_WORKLOADS)
    names = [*peers, *([DIRECT] if FIRST_BYTE in wanted and DIRECT not in peers else [])]
    cores = choose_cores()
    try:
        _refuse_unknown(wanted)
        with unwinding_on_signals(), started_peers(names, cores, backend_port) as started:
            everyone = [*started, *others]
            rows = run_gateway_bench(
                everyone, wanted, rounds=rounds, seconds=seconds, cores=cores, on_sample=tell
            )
    except BenchError as problem:
        progress.print(str(problem), style="red", markup=False)
        raise SystemExit(1) from None
    if json_out:
        print_json(rows, rounds, seconds, cores)
    else:
        print_tables(rows, BASELINE, rounds, cores)


def _refuse_unknown(workloads: Sequence[str]) -> None:
    if unknown := set(workloads) - set(ALL_WORKLOADS):
        raise BenchError(f"unknown: {sorted(unknown)}; workloads are {', '.join(ALL_WORKLOADS)}")


def _other(text: str) -> Peer:
    """NAME=URL@PID[,PID...]: a proxy that someone else started."""
    name, _, rest = text.partition("=")
    url, _, pids = rest.rpartition("@")
    return Peer(name, url, tuple(int(pid) for pid in pids.split(",")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(ALL_WORKLOADS))
    parser.add_argument("--peers", default=f"gateway,{BASELINE}", help="gateway, nginx, direct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--other",
        type=_other,
        action="append",
        default=[],
        metavar="NAME=URL@PID[,PID]",
        help="a proxy that runs already, pinned by you, in front of --backend-port",
    )
    parser.add_argument("--backend-port", type=int, help="default: a free one")
    return parser.parse_args()


if __name__ == "__main__":
    asked = _arguments()
    main(
        asked.workloads.split(","),
        asked.rounds,
        asked.seconds,
        asked.json,
        peers=asked.peers.split(","),
        others=asked.other,
        backend_port=asked.backend_port,
    )
