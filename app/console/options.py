"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="The settings file (config/leaseway.yaml).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
