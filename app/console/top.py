"""``leaseway top``: the cluster in a terminal, live, straight from Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.console.options import Config, Json  # noqa: TC001 - typer reads them at run time
from app.console.show import cell
from app.errors import RedisAway

if TYPE_CHECKING:
    from pathlib import Path

    from app.cluster.overview import NodeView, Overview

_WIDE = 150  # columns where there is no terminal to ask
_BAR, _CURVE = 8, 20
_LOOKS = {"active": "", "draining": "yellow", "disabled": "dim"}
_UNWELL = {"ok": "", "closed": "", "half_open": "yellow", "new": "yellow", "loading": "yellow"}


def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """The cluster, live: nodes, scores, load, TTFT, share, replicas; Ctrl-C ends it."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_top(config, interval_s=interval, once=once, as_json=as_json))


async def _top(config: Path | None, *, interval_s: float, once: bool, as_json: bool) -> None:
    from app.cluster.overview import overview
    from app.console.access import pools

    async with pools(config) as opened:

        async def look() -> list[Overview]:
            return [await overview(one.link, one.keys, one.pool) for one in opened]

        seen = await look()
        if once or as_json:
            while True:
                _print(seen, as_json=as_json, indent=2 if once else None)
                if once:
                    return
                await asyncio.sleep(interval_s)
                seen = await look()
        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            away = ""
            while True:
                live.update(frame(seen, live.console, away), refresh=True)
                await asyncio.sleep(interval_s)
                try:
                    seen, away = await look(), ""
                except RedisAway as exc:  # the link dials by itself
                    away = f"Redis is away, this is the last picture: {exc}"


def _print(seen: list[Overview], *, as_json: bool, indent: int | None) -> None:
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in seen], indent=indent), flush=True)
        return
    asked = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if asked else _WIDE)
    console.print(frame(seen, console))


def frame(seen: list[Overview], console: Console, away: str = "") -> Group:
    """One picture of all pools."""
    marks = Marks(plain=not console.encoding.lower().startswith("utf"))
    parts: list[Text | Table] = [Text(away, style="bold red")] if away else []
    for one in seen:
        parts += [_headline(one), _table(one, marks)]
    return Group(*parts)


def _headline(one: Overview) -> Text:
    in_flight, room = sum(n.active for n in one.nodes), sum(n.capacity for n in one.nodes)
    line = Text(f"pool {one.pool}   {len(one.nodes)} nodes   {in_flight}/{room} in flight   ")
    if not any(replica.expires_in_s > 0 for replica in one.replicas):
        return line.append("no replica alive", style="bold red")
    line.append("replicas ")
    for replica in one.replicas:
        silent = replica.expires_in_s <= 0
        said = f"{replica.replica} ({'silent' if silent else replica.leases})  "
        line.append(said, style="red" if silent else "green")
    return line


def _table(one: Overview, marks: Marks) -> Table:
    table = Table(
        "node", "state", "in flight", "score", "TTFT p50", "p99 ms", "window", "tok/s", "share",
        box=None, pad_edge=False, header_style="dim",
    )  # fmt: skip
    best = max((_score(node) for node in one.nodes), default=0.0)
    for node in one.nodes:
        score = _score(node)
        load = node.active / node.capacity
        table.add_row(
            node.id,
            _state(node),
            f"{marks.bar(load)} {node.active}/{node.capacity}",
            f"{marks.bar(score / best if best else 0)} {cell(score)}",
            cell(node.ttft_p50_ms),
            cell(node.ttft_p99_ms),
            marks.curve(node.ttft_recent_ms),
            cell(node.tokens_per_s),
            "-" if node.share is None else f"{node.share:.0%}",
        )
    return table


def _score(node: NodeView) -> float:
    return max(node.scores.values(), default=0.0)


def _state(node: NodeView) -> Text:
    """What keeps requests away, or ``ok``."""
    said = [(node.state, _LOOKS.get(node.state, ""))] if node.state != "active" else []
    said += [
        (word, _UNWELL.get(word, "red"))
        for word in (node.health, node.circuit)
        if word not in {"ok", "closed"}
    ]
    return Text(" ").join(Text(word, style) for word, style in said) or Text("ok", "green")


class Marks:
    """Bars and curves out of characters; ``plain`` ones for terminals without Unicode."""

    def __init__(self, *, plain: bool) -> None:
        self._full, self._empty = ("#", ".") if plain else ("█", "░")
        self._levels = "_.-=+*#" if plain else "▁▂▃▄▅▆▇█"

    def bar(self, share: float) -> str:
        """``share`` in [0, 1]; what is not nothing shows."""
        full = min(_BAR, max(round(share * _BAR), 1 if share > 0 else 0))
        return self._full * full + self._empty * (_BAR - full)

    def curve(self, values: list[float]) -> str:
        """The last values, each as high as its part of the highest."""
        last = values[-_CURVE:]
        top = max(last, default=0.0)
        highest = len(self._levels) - 1
        return "".join(self._levels[round(v / top * highest) if top else 0] for v in last)
