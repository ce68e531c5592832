"""`leaseway bench policies`: the routing policies on a live fleet of three unequal fake nodes.

Real replicas, real Redis, real streaming requests. All policies are asked the same, in turn, a
round for each seed: what the machine does meanwhile hits all alike.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import uvloop
from rich.console import Console

from app.config import Policy
from app.errors import ConfigError
from app.lab.bench.policies_cluster import Entrant, running_cluster
from app.lab.bench.policies_load import loads_of
from app.lab.bench.policies_measure import WARM_UP_S, measure
from app.lab.bench.policies_report import as_json, as_markdown, print_tables
from app.lab.bench.policies_rows import row_of
from app.lab.bench.processes import BenchError
from app.lab.bench.run import unwinding_on_signals
from app.lab.simulate.experiment import seeds_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from app.lab.bench.policies_load import Load
    from app.lab.bench.policies_rows import Row

KNOWN = get_args(Policy)
USUAL = ("round_robin", "least_conn", "ttft", "work")


def main(
    policies: str,
    loads: str,
    seeds: str,
    *,
    seconds: float,
    replicas: int,
    one_replica: str,
    scale: float,
    json_out: bool,
    markdown_out: bool,
) -> None:
    """Run and print. Raises ``ConfigError`` for what cannot be run."""
    entrants = entrants_of(policies, replicas, one_replica)
    numbers, asked = seeds_of(seeds), loads_of(loads)
    progress = Console(stderr=True)
    rows: list[Row] = []
    try:
        with unwinding_on_signals():
            for row in rows_of(entrants, asked, numbers, seconds=seconds, scale=scale):
                rows.append(row)
                progress.print(_told(row), style="dim", markup=False, soft_wrap=True)
    except BenchError as problem:
        progress.print(str(problem), style="red", markup=False)
        raise SystemExit(1) from None
    about = (
        f"seeds {', '.join(map(str, numbers))}; {seconds:g} s each after {WARM_UP_S:g} s warm-up"
    )
    if scale != 1:
        about += f"; a second of the nodes takes {scale:g} s"
    if json_out:
        print(as_json(rows, asked, seeds=numbers, seconds=seconds, scale=scale))
    elif markdown_out:
        print(as_markdown(rows, asked, about))
    else:
        print_tables(rows, asked, about)


def entrants_of(policies: str, replicas: int, one_replica: str) -> list[Entrant]:
    """Who is compared. Raises ``ConfigError`` that names the policies there are."""
    chosen = [policy for policy in USUAL if policy in KNOWN]
    if policies:
        chosen = list(dict.fromkeys(policies.split(",")))
    alone = [one_replica] if one_replica else []
    for policy in [*chosen, *alone]:
        if policy not in KNOWN:
            raise ConfigError(f"no policy is called {policy!r}: {', '.join(KNOWN)}")
    if alone and (replicas == 1 or one_replica not in chosen):
        raise ConfigError(
            f"one-replica = {one_replica!r}: one of the policies that run on several replicas"
        )
    return [Entrant(policy, replicas) for policy in chosen] + [Entrant(p, 1) for p in alone]


def rows_of(
    entrants: Sequence[Entrant],
    loads: Sequence[Load],
    seeds: Sequence[int],
    *,
    seconds: float,
    scale: float,
) -> Iterator[Row]:
    """A row for every run, A B C A B C. Raises ``BenchError``."""
    for load in loads:
        nodes = load.scenario.specs
        slowest = min(nodes, key=lambda spec: spec.profile.prefill_tokens_per_s).name
        for seed in seeds:
            for entrant in entrants:
                with (
                    tempfile.TemporaryDirectory(prefix="leaseway-bench-") as scratch,
                    running_cluster(entrant, load, scale, Path(scratch)) as cluster,
                ):
                    run = uvloop.run(
                        measure(entrant, cluster, load, seed=seed, seconds=seconds, scale=scale)
                    )
                yield row_of(run, slowest)


def _told(row: Row) -> str:
    at_least = ">= " if row.at_least else ""
    return (
        f"{row.load} seed {row.seeds[0]}: {row.entrant} mean {at_least}{row.mean_ttft_ms:.1f} ms, "
        f"P99 {at_least}{row.p99_ttft_ms:.0f} ms, {row.counted} requests, {row.errors} errors"
    )
