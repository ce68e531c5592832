"""Rows as a table for people, or as JSON for machines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic import BaseModel


def show(rows: Sequence[BaseModel], columns: Iterable[str], *, as_json: bool) -> None:
    """Print ``rows``; of a table, these ``columns``."""
    plain = [row.model_dump(mode="json") for row in rows]
    if as_json:
        print(json.dumps(plain, indent=2))
        return
    columns = tuple(columns)
    table = Table(*columns)
    for row in plain:
        table.add_row(*(cell(row[column]) for column in columns))
    Console().print(table)


def cell(value: Any) -> str:
    """A value as a table has it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items())
    return str(value)
