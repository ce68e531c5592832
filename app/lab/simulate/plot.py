"""Rows as a picture: mean and P99 of the time to first token, the best on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.errors import LeasewayError
from app.lab.simulate.policies import REFERENCE, VARIANTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from app.lab.simulate.report import Row

OURS = {"work", "ttft"}
OURS_COLOUR, OTHERS_COLOUR, REFERENCE_COLOUR = "#1f77b4", "#b0b0b0", "#2ca02c"
WIDEST_MS = 100_000  # what diverges would press all others into the margin


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG. Raises ``LeasewayError`` without matplotlib, or when it cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise LeasewayError("plots need matplotlib: pip install 'leaseway[plots]'") from exc
    ordered = sorted(rows, key=lambda row: -row.mean_ttft_ms)
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(ordered)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(ordered))
    axes.barh(
        places,
        [row.mean_ttft_ms for row in ordered],
        color=[_colour(row.policy) for row in ordered],
        label="mean",
    )
    axes.plot([row.p99_ttft_ms for row in ordered], places, "k|", markersize=9, label="P99")
    axes.set_xscale("log")
    axes.set_xlim(right=min(WIDEST_MS, 1.5 * max(row.p99_ttft_ms for row in rows)))
    axes.set_xlabel("time to first token, ms (simulated)")
    axes.set_yticks(places, [row.policy for row in ordered])
    axes.set_title(title, fontsize=8, loc="left", wrap=True)
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as exc:
        raise LeasewayError(f"{path}: cannot be written: {exc.strerror or exc}") from exc


def _colour(policy: str) -> str:
    if policy == REFERENCE:
        return REFERENCE_COLOUR
    ours = policy in VARIANTS and VARIANTS[policy].policy in OURS
    return OURS_COLOUR if ours else OTHERS_COLOUR
