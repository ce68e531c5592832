"""From calls to rows, and rows for people and programs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.lab.simulate.scenarios import Scenario
    from app.lab.simulate.workload import Call

COLUMNS = (
    "policy",
    "mean TTFT",
    "P99 TTFT",
    "end to end",
    "tokens/s",
    "shares",
    "waits on slowest",
)
DIVERGED_MS = 5000.0  # a mean above this is a line that only grows


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one scenario, the mean over its seeds. Shares are in [0, 1]."""

    policy: str
    mean_ttft_ms: float
    p99_ttft_ms: float
    e2e_ms: float
    tokens_per_s: float
    share: dict[str, float]
    """Of the answers, by node."""
    backlog: float
    """Of those on the slowest node, that found it with a prompt waiting or no slot."""
    failed: float
    cached: float
    """Of all prompt tokens."""

    def public(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "policy": self.policy,
            "mean_ttft_ms": round(self.mean_ttft_ms, 3),
            "p99_ttft_ms": round(self.p99_ttft_ms, 3),
            "e2e_ms": round(self.e2e_ms, 3),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "share": {name: round(share, 6) for name, share in self.share.items()},
        }


def row_of(policy: str, scenario: Scenario, calls: Sequence[Call]) -> Row:
    """The figures of one run, without its warm-up."""
    counted = sorted(calls, key=lambda call: call.at_ms)[int(len(calls) * scenario.warm_up) :]
    good = [call for call in counted if not call.failed]
    ttfts = sorted(call.first_ms - call.at_ms for call in good if call.first_ms is not None)
    begin_ms, end_ms = counted[0].at_ms, counted[-1].at_ms
    tokens = sum(
        call.output
        for call in calls
        if not call.failed and call.end_ms is not None and begin_ms <= call.end_ms <= end_ms
    )
    specs = scenario.specs
    slowest = min(range(len(specs)), key=lambda i: specs[i].profile.prefill_tokens_per_s)
    there = [call for call in good if call.node == slowest]
    return Row(
        policy=policy,
        mean_ttft_ms=fmean(ttfts),
        p99_ttft_ms=ttfts[int(0.99 * len(ttfts))],
        e2e_ms=fmean(call.end_ms - call.at_ms for call in good if call.end_ms is not None),
        tokens_per_s=tokens / (end_ms - begin_ms) * 1000,
        share={
            spec.name: sum(call.node == i for call in good) / len(good)
            for i, spec in enumerate(specs)
        },
        backlog=fmean(call.found_busy for call in there) if there else 0.0,
        failed=1 - len(good) / len(counted),
        cached=sum(call.cached for call in good) / sum(call.prompt for call in good),
    )


def mean_of(rows: Sequence[Row]) -> Row:
    """One row of the same policy over several seeds."""
    return Row(
        policy=rows[0].policy,
        share={name: fmean(row.share[name] for row in rows) for name in rows[0].share},
        **{
            figure: fmean(getattr(row, figure) for row in rows)
            for figure in (
                "mean_ttft_ms", "p99_ttft_ms", "e2e_ms", "tokens_per_s", "backlog", "failed",
                "cached",
            )
        },
    )  # fmt: skip


def title_of(scenario: Scenario, seeds: Sequence[int]) -> str:
    """What was simulated, in one line."""
    load = f"{scenario.clients} clients" if scenario.clients else f"load {scenario.load:.0%}"
    seeded = "seed" if len(seeds) == 1 else "seeds"
    return (
        f"{scenario.name}: {scenario.about}; {load}, {scenario.requests} requests, "
        f"{scenario.replicas} replicas, state {scenario.sharing}, {seeded} "
        f"{', '.join(map(str, seeds))}"
    )


def table(title: str, rows: Sequence[Row], scenario: Scenario) -> Table:
    """For a terminal, the best first."""
    shown = Table(title=title, title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in {"policy", "shares"} else "right")
    for row in _ordered(rows):
        shown.add_row(*_cells(row, scenario))
    return shown


def markdown(title: str, rows: Sequence[Row], scenario: Scenario) -> str:
    """For a document, the best first."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- | ---: | ---: | ---: | ---: | --- | ---: |"]
    lines += (f"| {' | '.join(_cells(row, scenario))} |" for row in _ordered(rows))
    return "\n".join([f"{title}.", "", *lines, "", "Times in ms; simulated, not measured."])


def _ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.mean_ttft_ms)


def _cells(row: Row, scenario: Scenario) -> tuple[str, ...]:
    kinds: defaultdict[str, float] = defaultdict(float)
    for spec in scenario.specs:
        kinds[spec.profile.name] += row.share[spec.name]
    diverges = row.mean_ttft_ms > DIVERGED_MS
    return (
        row.policy,
        "diverges" if diverges else f"{row.mean_ttft_ms:.1f}",
        "" if diverges else f"{row.p99_ttft_ms:.0f}",
        "" if diverges else f"{row.e2e_ms:.0f}",
        f"{row.tokens_per_s:.0f}",
        ", ".join(f"{kind} {share:.1%}" for kind, share in kinds.items()),
        f"{row.backlog:.1%}",
    )
