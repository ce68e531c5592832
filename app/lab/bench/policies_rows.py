"""From runs to the rows of the policy bench: one run's figures, and their means over the seeds."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from statistics import fmean
from typing import TYPE_CHECKING, Any

from app.lab.bench.policies_trust import Trust, worst_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from app.lab.bench.policies_client import Answer
    from app.lab.bench.policies_cluster import Entrant
    from app.lab.bench.policies_measure import Counts, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One entrant under one load: of one run, or the mean over its seeds. Shares are in [0, 1]."""

    entrant: Entrant
    load: str
    seeds: tuple[int, ...]
    mean_ttft_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    tokens_per_s: float
    share: dict[str, float]
    """Of the requests that were due while it counted, by node, by the nodes' own counters."""
    heavy_share: dict[str, float]
    """The same of the generations; empty where there are none. By the clients' word."""
    backlog: float | None
    """Of the slowest node's requests, that found one before them there, waiting; None of none."""
    at_least: bool
    """Some of these never got a token: the TTFT figures are lower bounds."""
    counted: int
    """Requests that the figures above are of."""
    sent: int
    """In all, the warm-up too: whole + cut + unheard + errors."""
    whole: int
    cut: int
    """Given up in the middle of the answer when the run ended."""
    unheard: int
    """Given up before any token: their TTFT counts as the time they have waited, so it is more."""
    errors: int
    reasons: dict[str, int]
    moved: int
    """Attempts on a second node or further."""
    degraded: int
    astray: int
    """Requests on which the nodes' counters and the clients do not agree."""
    leases_left: int
    trust: Trust

    def public(self) -> dict[str, Any]:
        """What `--json` prints."""
        fields = asdict(self)
        entrant = fields.pop("entrant")
        return {**entrant, **fields}


def row_of(run: Run, slowest: str) -> Row:
    """The figures of one run."""
    answers = placed(run, slowest)
    counted = [a for a in answers if run.begin_s <= a.due_s < run.end_s and not a.fault]
    ttft_ms = sorted(1000 * ((a.first_s or run.given_up_s) - a.due_s) for a in counted)
    cut = sum(1 for a in answers if not a.whole and not a.fault and a.first_s is not None)
    unheard = sum(1 for a in answers if not a.whole and not a.fault and a.first_s is None)
    reasons = Counter(a.fault for a in answers if a.fault)
    tokens = sum(run.begin_s <= at < run.end_s for a in answers for at in a.token_s)
    return Row(
        entrant=run.entrant,
        load=run.load,
        seeds=(run.seed,),
        mean_ttft_ms=fmean(ttft_ms) if ttft_ms else 0.0,
        p50_ttft_ms=percentile(ttft_ms, 0.50),
        p99_ttft_ms=percentile(ttft_ms, 0.99),
        tokens_per_s=tokens / (run.end_s - run.begin_s),
        share=shares({n: run.after[n].started - run.before[n].started for n in run.after}),
        heavy_share=shares(_on_nodes(run.after, [a for a in counted if a.question.heavy])),
        backlog=backlog([a for a in answers if a.node == slowest], run.begin_s, run.end_s),
        at_least=any(a.first_s is None for a in counted),
        counted=len(counted),
        sent=len(answers),
        whole=sum(a.whole for a in answers),
        cut=cut,
        unheard=unheard,
        errors=reasons.total(),
        reasons=dict(reasons),
        moved=sum(max(0, a.attempts - 1) for a in answers),
        degraded=sum(a.degraded for a in answers),
        astray=astray(answers, run.final),
        leases_left=run.leases_left,
        trust=run.trust,
    )


def placed(run: Run, slowest: str) -> list[Answer]:
    """The answers, those without a token on the slowest node if that is where they all waited.

    A client hears of its node with the first token; till then the node alone knows of it.
    """
    left = [a for a in run.answers if not a.whole and not a.fault]
    silent = sum(a.first_s is None for a in left)
    cut_there = sum(a.first_s is not None and a.node == slowest for a in left)
    if run.given_up[slowest].open - cut_there < silent:
        return list(run.answers)
    return [
        replace(a, node=slowest) if a.first_s is None and not a.fault else a for a in run.answers
    ]


def percentile(ranked: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed (nearest rank); 0 of none."""
    return ranked[max(0, ceil(share * len(ranked)) - 1)] if ranked else 0.0


def shares(numbers: dict[str, int]) -> dict[str, float]:
    """Each as a share of their sum; empty when that is 0."""
    total = sum(numbers.values())
    return {name: number / total for name, number in numbers.items()} if total else {}


def backlog(there: Sequence[Answer], begin_s: float, end_s: float) -> float | None:
    """Share of one node's requests that found another before them there, without a first token.

    Of those that were due from `begin_s` to `end_s`. One that never got a token still waits.
    """
    ranked = sorted((a.due_s, inf if a.first_s is None else a.first_s) for a in there)
    found, of, latest_first_s = 0, 0, -inf
    for due_s, first_s in ranked:
        if begin_s <= due_s < end_s:
            of += 1
            found += latest_first_s > due_s
        latest_first_s = max(latest_first_s, first_s)
    return found / of if of else None


def astray(answers: Sequence[Answer], final: dict[str, Counts]) -> int:
    """Requests that the nodes have counted and no client knows of, or the other way round.

    What a client gave up, the node may have ended in the same moment. A refusal names no node, so
    after errors only whole answers are compared.
    """
    whole = _on_nodes(final, [a for a in answers if a.whole])
    maybe = _on_nodes(final, [a for a in answers if not a.whole])
    apart = 0
    for node, counts in final.items():
        most = whole[node] + maybe[node]
        apart += max(0, whole[node] - counts.completed, counts.completed - most)
    if not any(a.fault for a in answers):
        started = sum(counts.started for counts in final.values())
        apart += abs(started - sum(max(1, a.attempts) for a in answers))
    return apart


def _on_nodes(names: Iterable[str], answers: Sequence[Answer]) -> dict[str, int]:
    by_node = Counter(a.node for a in answers)
    return {name: by_node[name] for name in names}


def mean_of(rows: Sequence[Row]) -> Row:
    """One entrant under one load over several seeds: figures are means, counts are sums.

    Of what says how much to trust them, the worst.
    """
    backlogs = [row.backlog for row in rows if row.backlog is not None]
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row.reasons)
    means = ("mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms", "tokens_per_s")
    sums = ("counted", "sent", "whole", "cut", "unheard", "errors", "moved", "degraded", "astray",
            "leases_left")  # fmt: skip
    figures: dict[str, Any] = {
        **{name: fmean(getattr(row, name) for row in rows) for name in means},
        **{name: sum(getattr(row, name) for row in rows) for name in sums},
    }
    return replace(
        rows[0],
        seeds=tuple(seed for row in rows for seed in row.seeds),
        share=_mean_shares([row.share for row in rows]),
        heavy_share=_mean_shares([row.heavy_share for row in rows]),
        backlog=fmean(backlogs) if backlogs else None,
        at_least=any(row.at_least for row in rows),
        reasons=dict(reasons),
        trust=worst_of([row.trust for row in rows]),
        **figures,
    )


def _mean_shares(all_shares: Sequence[dict[str, float]]) -> dict[str, float]:
    known = [one for one in all_shares if one]
    return {name: fmean(one[name] for one in known) for name in known[0]} if known else {}
