"""What the bench prints: tables for people, or JSON for whatever keeps the numbers."""

import platform
from collections.abc import Sequence
from dataclasses import asdict

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from app.lab.bench.cpu import Cores
from app.lab.bench.rows import Row

NARROWEST = 100  # a pipe reports 80 columns, which would break the figures in two


def print_json(rows: Sequence[Row], rounds: int, seconds: float, cores: Cores) -> None:
    report = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "pinned": cores.measured is not None,
        "rounds": rounds,
        "seconds": seconds,
        "rows": [asdict(row) for row in rows],
    }
    print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())


def print_tables(rows: Sequence[Row], baseline: str, rounds: int, cores: Cores) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    pinned = "pinned" if cores.measured is not None else "one core, NOT pinned"
    if loaded := [row for row in rows if row.cpu_us is not None]:
        title = (
            f"CPU per request, medians of {rounds} rounds, {pinned}; ratio to {baseline}; p50 / p99"
        )
        console.print(_cpu_table(title, loaded))
    if idle := [row for row in rows if row.cpu_us is None]:
        title = f"First byte at 50 streams a second, medians of {rounds} rounds; p50 / p99"
        console.print(_first_byte_table(title, idle))
    for row in rows:
        if row.errors:
            console.print(f"{row.workload} {row.peer}: {row.reasons}", style="red", markup=False)


def _cpu_table(title: str, rows: Sequence[Row]) -> Table:
    table = _table(
        title,
        ("workload", "peer"),
        ("CPU µs", "ratio", "range", "Redis µs", "req/s", "first byte ms", "errors"),
    )
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            row.workload,
            row.peer,
            _number(row.cpu_us, 1),
            _number(row.ratio, 2),
            f"{min(row.ratios):.2f} to {max(row.ratios):.2f}" if row.ratios else "-",
            _number(row.redis_us, 1),
            f"{row.requests_per_s:,.0f}",
            _pair(row.first_p50_ms, row.first_p99_ms),
            str(row.errors),
            end_section=following is None or following.workload != row.workload,
        )
    return table


def _first_byte_table(title: str, rows: Sequence[Row]) -> Table:
    numbers = ("requests", "first byte ms", "over direct ms", "errors")
    table = _table(title, ("peer",), numbers)
    for row in rows:
        table.add_row(
            row.peer,
            str(row.requests),
            _pair(row.first_p50_ms, row.first_p99_ms),
            _pair(row.added_p50_ms, row.added_p99_ms),
            str(row.errors),
        )
    return table


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for word in words:
        table.add_column(word)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _pair(p50: float | None, p99: float | None) -> str:
    return "-" if p50 is None else f"{p50:.2f} / {_number(p99, 2)}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
