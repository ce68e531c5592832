"""A scenario with all its policies and seeds: what `leaseway simulate` runs."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.cluster.embedded import die_with_parent
from app.errors import ConfigError
from app.lab.simulate.fleet import read
from app.lab.simulate.plot import draw
from app.lab.simulate.policies import ALL, REFERENCE, usual
from app.lab.simulate.report import Row, markdown, mean_of, row_of, table, title_of
from app.lab.simulate.run import Run
from app.lab.simulate.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from app.lab.simulate.scenarios import Scenario

WORKERS = 2
SMALL = 10_000  # requests in all that are simulated sooner than a second process starts

Job = tuple["Scenario", str, int]


def main(
    name: str,
    policies: Sequence[str],
    seeds: str,
    *,
    load: float | None = None,
    requests: int | None = None,
    replicas: int | None = None,
    sharing: str | None = None,
    alpha: float = 1.0,
    fleet: Path | None = None,
    as_json: bool = False,
    as_markdown: bool = False,
    plot: Path | None = None,
) -> None:
    """Run and print. None: as the scenario has it. Raises ``LeasewayError``."""
    scenario = known_scenario(name)
    changes: dict[str, Any] = {
        "load": load,
        "requests": requests,
        "replicas": replicas,
        "sharing": sharing and checked_sharing(sharing),
        "specs": fleet and read(fleet),
        "about": fleet and f"the fleet of {fleet.name}",
        "constants": replace(scenario.constants, alpha=alpha),
    }
    scenario = replace(scenario, **{key: value for key, value in changes.items() if value})
    numbers = seeds_of(seeds)
    rows = rows_of(scenario, policies_of(policies, scenario), numbers)
    title = title_of(scenario, numbers)
    if plot is not None:
        draw(title, rows, plot)
    if as_json:
        print(json.dumps({"rows": [row.public() for row in rows]}, indent=2))
    elif as_markdown:
        print(markdown(title, rows, scenario))
    else:
        Console().print(table(title, rows, scenario))


def seeds_of(text: str) -> list[int]:
    """`1,2,3` as numbers."""
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError as exc:
        raise ConfigError(f"seeds = {text!r}: whole numbers with commas between, as 1,2,3") from exc


def checked_sharing(text: str) -> str:
    """How replicas share state, or ``ConfigError``."""
    if text not in {"global", "local"} and not text.isdecimal():
        raise ConfigError(f"sharing = {text!r}: global, local, or the age in ms of a copy")
    return "global" if text.strip("0") == "" else text


def known_scenario(name: str) -> Scenario:
    """The scenario. Raises ``ConfigError`` that names those there are."""
    if name not in SCENARIOS:
        raise ConfigError(f"no scenario is called {name!r}: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def policies_of(asked: Sequence[str], scenario: Scenario) -> list[str]:
    """The policies to run; the reference always, so that a row has something to be held against."""
    if unknown := [policy for policy in asked if policy not in ALL]:
        raise ConfigError(f"no policy is called {unknown[0]!r}: {', '.join(ALL)}")
    chosen = list(dict.fromkeys(asked)) or usual(sessions=scenario.sessions)
    return [policy for policy in chosen if policy != REFERENCE] + [REFERENCE]


def rows_of(scenario: Scenario, policies: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """One row per policy, in their order."""
    jobs = [(scenario, policy, seed) for policy in policies for seed in seeds]
    rows = list(_watched(_done(jobs), len(jobs)))
    return [mean_of(rows[i : i + len(seeds)]) for i in range(0, len(rows), len(seeds))]


def simulated(job: Job) -> Row:
    """One run. At the top of a module, so that a worker process can be told to do it."""
    scenario, policy, seed = job
    return row_of(policy, scenario, Run(scenario, policy, seed).run())


def _done(jobs: Sequence[Job]) -> Iterator[Row]:
    workers = min(WORKERS, os.cpu_count() or 1, len(jobs))
    if workers == 1 or sum(scenario.requests for scenario, _, _ in jobs) <= SMALL:
        yield from map(simulated, jobs)
        return
    # Spawned: a fork would copy the locks of whatever threads the caller runs.
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=die_with_parent) as pool:
        try:
            yield from pool.map(simulated, jobs)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _watched(rows: Iterable[Row], total: int) -> Iterator[Row]:
    """Show progress on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("simulating", total=total)
        for row in rows:
            bar.update(task, advance=1, description=row.policy)
            yield row
