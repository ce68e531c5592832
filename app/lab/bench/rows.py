"""From single measurements to the rows of the table: medians, and ratios taken round by round."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from app.lab.bench.load import Report

DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Sample:
    """One peer under one workload in one round."""

    workload: str
    peer: str
    round: int
    report: Report
    cpu_us: float | None = None  # of the peer, per request
    redis_us: float | None = None  # of the peer's Redis, per request


@dataclass(frozen=True, slots=True)
class Row:
    """One peer under one workload, over all rounds. `ratio` is to the baseline's CPU."""

    workload: str
    peer: str
    cpu_us: float | None
    ratio: float | None
    ratios: tuple[float, ...]
    redis_us: float | None
    requests_per_s: float
    first_p50_ms: float
    first_p99_ms: float
    added_p50_ms: float | None  # first byte, over `direct` in the same round
    added_p99_ms: float | None
    requests: int
    errors: int
    reasons: dict[str, int]


def rows_of(samples: Sequence[Sample], baseline: str) -> list[Row]:
    """One row for each workload and peer, in the order in which they were first measured."""
    keys = dict.fromkeys((sample.workload, sample.peer) for sample in samples)
    return [_row(workload, peer, samples, baseline) for workload, peer in keys]


def _row(workload: str, peer: str, samples: Sequence[Sample], baseline: str) -> Row:
    here = {(s.peer, s.round): s for s in samples if s.workload == workload}
    mine = [sample for (name, _), sample in here.items() if name == peer]
    reports = [sample.report for sample in mine]
    # A round's two measurements are neighbours in time: their ratio cancels what the machine does.
    ratios = tuple(
        round(sample.cpu_us / other.cpu_us, 3)
        for sample in mine
        if (other := here.get((baseline, sample.round))) and sample.cpu_us and other.cpu_us
    )
    direct = [
        (sample.report, other.report)
        for sample in mine
        if peer != DIRECT and (other := here.get((DIRECT, sample.round)))
    ]
    reasons: Counter[str] = Counter()
    for report in reports:
        reasons.update(report.reasons)
    return Row(
        workload=workload,
        peer=peer,
        cpu_us=_median(sample.cpu_us for sample in mine),
        ratio=_median(ratios),
        ratios=ratios,
        redis_us=_median(sample.redis_us for sample in mine),
        requests_per_s=round(median(report.requests / report.seconds for report in reports), 1),
        first_p50_ms=round(median(report.first_p50_ms for report in reports), 3),
        first_p99_ms=round(median(report.first_p99_ms for report in reports), 3),
        added_p50_ms=_median(own.first_p50_ms - other.first_p50_ms for own, other in direct),
        added_p99_ms=_median(own.first_p99_ms - other.first_p99_ms for own, other in direct),
        requests=sum(report.requests for report in reports),
        errors=sum(report.errors for report in reports),
        reasons=dict(reasons),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 3) if known else None
