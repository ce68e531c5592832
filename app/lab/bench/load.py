"""The load generator: closed loop (`--connections`) or open loop (`--rate`), one JSON line out.

Its own process, so that its cost never lands on the process under test.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

import orjson
import uvloop

from app.lab.bench.lane import Exchange, Lane, Tally, open_lane
from app.lab.bench.workloads import WORKLOADS, Workload

DRAIN_S = 10.0  # answers still missing this long after the last request are errors
PAUSE_AFTER_ERROR_S = 0.02  # a peer that refuses everything must not turn into a busy loop


@dataclass(frozen=True, slots=True)
class Report:
    """What one run of the generator found."""

    requests: int
    errors: int
    seconds: float
    first_p50_ms: float
    first_p99_ms: float
    total_p50_ms: float
    total_p99_ms: float
    reasons: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tally: Tally, seconds: float) -> "Report":
        return cls(
            requests=len(tally.total_s),
            errors=tally.errors.total(),
            seconds=round(seconds, 3),
            first_p50_ms=_percentile_ms(tally.first_s, 0.50),
            first_p99_ms=_percentile_ms(tally.first_s, 0.99),
            total_p50_ms=_percentile_ms(tally.total_s, 0.50),
            total_p99_ms=_percentile_ms(tally.total_s, 0.99),
            reasons=dict(tally.errors),
        )


def _percentile_ms(seconds: Sequence[float], share: float) -> float:
    if not seconds:
        return 0.0
    ranked = sorted(seconds)
    return round(1000 * ranked[min(len(ranked) - 1, int(share * len(ranked)))], 3)


def exchange_with(url: str, workload: Workload, model: str) -> Exchange:
    """The bytes of the one request that a run repeats."""
    target = urlsplit(url)
    host, port = target.hostname or "127.0.0.1", target.port or 80
    body = workload.request_body(model)
    head = (
        f"POST {target.path.rstrip('/')}/v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
        f"user-agent: leaseway-bench\r\naccept: */*\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return Exchange(host, port, head.encode() + body, workload.answer_bytes)


async def closed_loop(
    exchange: Exchange, connections: int, seconds: float, ramp_s: float = 0.0
) -> Report:
    """Every connection asks again as soon as its answer is whole."""
    tally = Tally()
    started = perf_counter()
    deadline = started + seconds

    async def keep_asking(delay: float) -> None:
        await asyncio.sleep(delay)
        while perf_counter() < deadline:
            lane = await open_lane(exchange, tally)
            if lane is not None:
                await _run_and_close(lane, deadline)
            if perf_counter() < deadline:
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    # Spread over one answer's length: streams that start together would pulse together.
    delays = (ramp_s * n / connections for n in range(connections))
    tasks = [asyncio.create_task(keep_asking(delay)) for delay in delays]
    await _drain(tasks, tally, seconds + DRAIN_S)
    return Report.of(tally, perf_counter() - started)


async def open_loop(
    exchange: Exchange, connections: int, seconds: float, rate: float, seed: int
) -> Report:
    """Poisson arrivals that do not wait for answers, on connections that are already open."""
    tally = Tally()
    opened = [await open_lane(exchange, tally) for _ in range(connections)]
    idle = [lane for lane in opened if lane is not None]

    async def ask_once() -> None:
        lane = next((idle.pop(n) for n in reversed(range(len(idle))) if idle[n].usable), None)
        lane = lane or await open_lane(exchange, tally)
        if lane is not None:
            await lane.run(until=0.0)
            idle.append(lane)

    started = perf_counter()
    tasks = []
    chance = random.Random(seed)
    due = started + chance.expovariate(rate)
    while due < started + seconds:
        await asyncio.sleep(max(0.0, due - perf_counter()))
        tasks.append(asyncio.create_task(ask_once()))
        due += chance.expovariate(rate)
    await _drain(tasks, tally, DRAIN_S)
    for lane in idle:
        lane.close()
    return Report.of(tally, perf_counter() - started)


async def _run_and_close(lane: Lane, until: float) -> None:
    try:
        await lane.run(until)
    finally:
        lane.close()


async def _drain(tasks: list[asyncio.Task[None]], tally: Tally, timeout_s: float) -> None:
    """Wait for what is still being answered; what never is counts as an error."""
    if not tasks:
        return
    done, pending = await asyncio.wait(tasks, timeout=timeout_s)
    for task in pending:
        task.cancel()
        tally.errors["unanswered"] += 1
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()  # a fault of the generator itself must not look like a quiet run


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="base URL, without /v1/chat/completions")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="json")
    parser.add_argument("--connections", type=int, help="default: the workload's own number")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rate", type=float, help="open loop: requests a second, Poisson")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals of the open loop")
    return parser.parse_args()


def main() -> None:
    asked = _arguments()
    workload = WORKLOADS[asked.workload]
    exchange = exchange_with(asked.url, workload, asked.model)
    connections = asked.connections or workload.connections
    if asked.rate:
        run = open_loop(exchange, connections, asked.seconds, asked.rate, asked.seed)
    else:
        run = closed_loop(exchange, connections, asked.seconds, workload.answer_seconds)
    print(orjson.dumps(asdict(uvloop.run(run))).decode())


if __name__ == "__main__":
    main()
