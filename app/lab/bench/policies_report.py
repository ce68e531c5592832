"""What the policy bench prints: two tables for each load, for people, a document or a program."""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from app.lab.bench.policies_rows import mean_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.lab.bench.policies_cluster import Entrant
    from app.lab.bench.policies_load import Load
    from app.lab.bench.policies_rows import Row

PUBLISHED: Final[dict[str, dict[str, float]]] = {
    "round_robin": {"mean_ttft_ms": 184.2, "p99_ttft_ms": 1420, "backlog": 0.684,
                    "tokens_per_s": 382},
    "least_conn": {"mean_ttft_ms": 92.6, "p99_ttft_ms": 640, "backlog": 0.241,
                   "tokens_per_s": 610},
    "ttft": {"mean_ttft_ms": 41.5, "p99_ttft_ms": 112, "backlog": 0.012, "tokens_per_s": 945},
}  # fmt: skip
"""The three-node table that the classic score was published with (its `adaptive` is `ttft`)."""
CANNOT_MATCH: Final = (
    "In brackets the published figures. Their load was not published, so it is inferred, and their "
    "mean of 41.5 ms is that of GPUs on which nobody ever waits, which an engine that batches "
    "cannot show at 945 tokens/s: order, ratios, tails and shares can be matched, that mean "
    "cannot. The nodes here are models of engines, not hardware."
)
FIGURES: Final = ("policy", "mean TTFT", "P50", "P99", "CPU backlog", "tokens/s", "shares")
HEAVY: Final = "heavy on the fastest"
CHECKS: Final = (
    "policy", "sent", "whole", "cut", "unheard", "errors", "moved", "astray", "leases left",
    "client lag P99", "busiest process", "machine", "trust",
)  # fmt: skip
LEGEND: Final = (
    "Means over {about}. TTFT in ms, from when a request was due to its first token. CPU backlog: "
    "share of the slowest node's requests that found one before them there, waiting. cut, unheard: "
    "given up when the run ended, with and without a token; the unheard count with the time they "
    "had waited, and a >= says so. moved: second attempts; astray: requests on which nodes and "
    "clients disagree. Busiest process in shares of a core."
)
NARROWEST: Final = 150  # a pipe reports 80 columns, which would break the figures in two

Cells = list[tuple[str, ...]]


def as_json(
    rows: Sequence[Row], loads: Sequence[Load], *, seeds: Sequence[int], seconds: float,
    scale: float,
) -> str:  # fmt: skip
    """Everything, with the rows of every seed."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "seeds": list(seeds),
        "seconds": seconds,
        "scale": scale,
        "loads": {load.name: load.about for load in loads},
        "rows": [row.public() for row in means(rows)],
        "by_seed": [row.public() for row in rows],
        "published": PUBLISHED,
        "note": CANNOT_MATCH,
    }
    return json.dumps(report, indent=2)


def print_tables(rows: Sequence[Row], loads: Sequence[Load], about: str) -> None:
    """For a terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    for load in loads:
        here = [row for row in rows if row.load == load.name]
        console.print(_table(load.about, *_figures(here, load)))
        console.print(_table("Can it be trusted?", CHECKS, _checks(here)))
        for line in verdicts(here):
            console.print(line, markup=False)
    console.print(f"\n{LEGEND.format(about=about)}\n{CANNOT_MATCH}", markup=False, style="dim")


def as_markdown(rows: Sequence[Row], loads: Sequence[Load], about: str) -> str:
    """For a document."""
    lines: list[str] = []
    for load in loads:
        here = [row for row in rows if row.load == load.name]
        lines += [f"**{load.about[0].upper()}{load.about[1:]}**", ""]
        lines += _pipes(*_figures(here, load))
        lines += _pipes(CHECKS, _checks(here))
        lines += [f"- {line}" for line in verdicts(here)] + [""]
    return "\n".join([*lines, LEGEND.format(about=about), "", CANNOT_MATCH])


def means(rows: Sequence[Row]) -> list[Row]:
    """One row for each load and entrant, in the order in which they were first measured."""
    keys = dict.fromkeys((row.load, row.entrant) for row in rows)
    return [mean_of([row for row in rows if (row.load, row.entrant) == key]) for key in keys]


def verdicts(here: Sequence[Row]) -> list[str]:
    """What the rows of one load say: who is before whom, and what more replicas cost."""
    most = max(row.entrant.replicas for row in here)
    full = [row for row in here if row.entrant.replicas == most]
    lines = []
    for name, figure in (("mean", _mean_ttft_ms), ("P99", _p99_ttft_ms)):
        ranked = _ranked(full, figure)
        by_seed = [
            _ranked([row for row in full if row.seeds == seeds], figure)
            for seeds in dict.fromkeys(row.seeds for row in full)
        ]
        same = sum(order == ranked for order in by_seed)
        if len(ranked) > 1:
            bounds = {row.entrant.policy for row in full if row.at_least}
            said = (f"{policy}{' (at least)' * (policy in bounds)}" for policy in ranked)
            lines.append(f"{name}: {' < '.join(said)}, in {same} of {len(by_seed)} seeds")
    fewer = dict.fromkeys(row.entrant for row in here if row.entrant.replicas < most)
    return lines + [_cost_of_more(here, entrant, most) for entrant in fewer]


def _mean_ttft_ms(row: Row) -> float:
    return row.mean_ttft_ms


def _p99_ttft_ms(row: Row) -> float:
    return row.p99_ttft_ms


def _ranked(rows: Sequence[Row], figure: Callable[[Row], float]) -> list[str]:
    return [row.entrant.policy for row in sorted(means(rows), key=figure)]


def _cost_of_more(here: Sequence[Row], few: Entrant, most: int) -> str:
    several = mean_of(
        [r for r in here if (r.entrant.policy, r.entrant.replicas) == (few.policy, most)]
    )
    alone = mean_of([row for row in here if row.entrant == few])
    apart = [
        f"{name} TTFT {figure(several) / figure(alone) - 1:+.1%}"
        for name, figure in (("mean", _mean_ttft_ms), ("P99", _p99_ttft_ms))
    ]
    return f"{few.policy}, {most} replicas instead of {few.replicas}: {', '.join(apart)}"


def _figures(here: Sequence[Row], load: Load) -> tuple[tuple[str, ...], Cells]:
    closed = bool(load.clients)
    fastest = max(load.scenario.specs, key=lambda spec: spec.profile.prefill_tokens_per_s).name
    cells: Cells = []
    for row in means(here):
        published = PUBLISHED.get(row.entrant.policy, {}) if closed else {}
        bound = ">= " if row.at_least else ""
        line: tuple[str, ...] = (
            str(row.entrant),
            bound + _beside(row.mean_ttft_ms, ".1f", published.get("mean_ttft_ms")),
            f"{row.p50_ttft_ms:.1f}",
            bound + _beside(row.p99_ttft_ms, ".0f", published.get("p99_ttft_ms")),
            "-" if row.backlog is None else _beside(row.backlog, ".1%", published.get("backlog")),
            _beside(row.tokens_per_s, ".0f", published.get("tokens_per_s")),
            ", ".join(f"{name} {share:.1%}" for name, share in row.share.items()),
        )
        cells.append(line if closed else (*line, f"{row.heavy_share.get(fastest, 0.0):.1%}"))
    return FIGURES if closed else (*FIGURES, HEAVY), cells


def _checks(here: Sequence[Row]) -> Cells:
    return [
        (
            str(row.entrant),
            *(str(n) for n in (row.sent, row.whole, row.cut, row.unheard)),
            f"{row.errors} {row.reasons}" if row.errors else "0",
            *(str(n) for n in (row.moved, row.astray, row.leases_left)),
            f"{row.trust.lag_p99_ms:.1f} ms",
            f"{row.trust.busiest} {row.trust.busiest_cpu:.0%}",
            f"{row.trust.machine_cpu:.0%}",
            "yes" if _trusted(row) else "NO",
        )
        for row in means(here)
    ]


def _trusted(row: Row) -> bool:
    return row.trust.enough and not (row.errors or row.astray or row.degraded or row.leases_left)


def _beside(value: float, form: str, published: float | None) -> str:
    return f"{value:{form}}" if published is None else f"{value:{form}} ({published:{form}})"


def _table(title: str, columns: Sequence[str], cells: Cells) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in {"policy", "shares"} else "right")
    for line in cells:
        table.add_row(*line)
    return table


def _pipes(columns: Sequence[str], cells: Cells) -> list[str]:
    lines = [columns, ["---"] * len(columns), *cells]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]
