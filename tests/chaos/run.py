"""``python -m tests.chaos.run --seconds 600 --seed 1``: exit code 1 on any violation.

``CHAOS_SECONDS`` and ``CHAOS_SEED`` are the defaults of the options. ``--plan`` prints the
faults of a seed and ends. See ``schedule`` for what goes wrong and ``verdict`` for what must
hold all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import redis
import uvloop

from tests.chaos.bench import RECOVERY_S, TTL_S, Bench, until
from tests.chaos.clients import Exchange, Load, get
from tests.chaos.faults import Injector
from tests.chaos.schedule import NODES, plan
from tests.chaos.truth import Truth
from tests.chaos.verdict import Outcome, classify, explain
from tests.chaos.watch import WELL, CounterWatch, LivenessWatch, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.schedule import Step

USERS: Final = 40
_SHOWN_OF_A_KIND: Final = 30
_FAULTS_IN_LOG: Final = re.compile(
    r"Traceback|\bException\b|never awaited|was destroyed|never retrieved|ResourceWarning"
)


@dataclass(slots=True)
class Violation:
    """Something that must not happen: when (s since the start of the load), what, and amid what."""

    at_s: float
    kind: str
    text: str
    faults: str

    def __str__(self) -> str:
        return f"{self.at_s:7.2f}s {self.kind}: {self.text}\n         faults then: {self.faults}"


@dataclass(slots=True)
class Report:
    """The figures of a run."""

    seed: int
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            **self.figures,
            "outcomes": dict(sorted(self.outcomes.items())),
            "client_errors": dict(sorted(self.errors.items())),
            "violations": dict(Counter(v.kind for v in self.violations)),
        }

    def table(self) -> str:
        """The figures, one a line, and the violations."""
        rows = [(name, value) for name, value in self.to_json().items()]
        lines = [f"{name:24} {_shown(value)}" for name, value in rows]
        seen: Counter[str] = Counter()
        for violation in self.violations:
            seen[violation.kind] += 1
            if seen[violation.kind] <= _SHOWN_OF_A_KIND:
                lines.append(str(violation))
        return "\n".join(lines)


def _shown(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


class Chaos:
    """One run."""

    def __init__(self, seed: int, seconds: float, only: str = "") -> None:
        self.report = Report(seed, seconds)
        self._steps: list[Step] = plan(seed, seconds, only)
        self._truth = Truth()
        self._errors: list[tuple[Exchange, Outcome]] = []
        self._watch: CounterWatch

    async def run(self) -> Report:
        """Bring it up, load it, break it, heal it, judge it."""
        async with Bench() as bench:
            with CounterWatch(bench.valkey.port) as self._watch:
                ports = {name: replica.port for name, replica in bench.replicas.items()}
                self._truth.origin = monotonic()
                load = Load(ports, self.report.seed, self._judge)
                with LivenessWatch(ports, self._truth, self.violated) as liveness:
                    loading = asyncio.create_task(load.run(USERS))
                    await Injector(bench, self._truth, self.violated).run(self._steps)
                    await asyncio.sleep(self._truth.origin + self.report.seconds - monotonic())
                    load.stop()
                    await loading
                    healed = monotonic()
                    await self._heals(bench, load, healed)
                self._judge_errors()
                self._read_samples()
                self._figures(liveness)
            self._read_logs(bench)
        self.report.violations.sort(key=lambda violation: violation.at_s)
        return self.report

    def violated(self, kind: str, text: str, at: float | None = None) -> None:
        """Write a violation down."""
        at = monotonic() if at is None else at
        self.report.violations.append(
            Violation(self._truth.since_start(at), kind, text, self._truth.active(at))
        )

    def _judge(self, exchange: Exchange) -> None:
        outcome = classify(exchange)
        self.report.outcomes[outcome.kind] += 1
        if outcome.kind in {"garbage", "hang"}:
            self.violated(outcome.kind, f"{outcome.reason}: {exchange}", exchange.ended)
        elif outcome.is_error:
            self._errors.append((exchange, outcome))  # judged when all is known

    def _judge_errors(self) -> None:
        for exchange, outcome in self._errors:
            rule = explain(exchange, outcome, self._truth, self._watch)
            code = f" {outcome.reason}" if outcome.reason else ""
            self.report.errors[f"{outcome.kind}{code} [{rule or 'UNEXPLAINED'}]"] += 1
            if not rule:
                seen = self._watch.between(exchange.started - 0.1, exchange.ended + 0.1)
                states = "; ".join(dict.fromkeys(f"{s.nodes} {s.active}" for s in seen))
                text = f"{outcome.kind}{code}: {exchange}\n         seen: {states[:800]}"
                self.violated("unexplained", text, exchange.ended)

    # After the faults ----------------------------------------------------------------------------

    async def _heals(self, bench: Bench, load: Load, healed: float) -> None:
        """Every ejection has a way back, and nothing is left behind."""
        chance = Random(self.report.seed)

        async def well() -> bool:
            await asyncio.gather(*(load.one(chance, tokens=5) for _ in range(8)))
            return all(self._look().nodes.get(node) == WELL for node in NODES)

        async def settled() -> bool:
            self._leftover = await self._left_behind(bench)
            return not self._leftover

        try:
            await until(well, RECOVERY_S, "all nodes healthy, all circuits closed")
        except TimeoutError as exc:
            self.violated("no way back", f"{exc}: {self._look().nodes}")
        self.report.figures["healed_after_s"] = round(monotonic() - healed, 2)
        started = monotonic()
        try:
            await until(settled, TTL_S + 3, "nothing left behind")
        except TimeoutError:
            self.violated("left behind", "; ".join(self._leftover))
        self.report.figures["settled_after_s"] = round(monotonic() - started, 2)
        last = self._look()
        self.report.figures["leaked_leases"] = sum(last.owners.values())

    async def _left_behind(self, bench: Bench) -> list[str]:
        look = self._look()
        wrong = [] if look.settled else [f"leases {look.owners}, counters {look.active}"]
        living = await bench.ids()
        if sorted(living.values()) != sorted(look.replicas):
            wrong.append(f"listed replicas {look.replicas}, living {living}")
        wrong += [f"{n.name} works on {k}" for n in bench.nodes.values() if (k := await n.open())]
        for name, replica in bench.replicas.items():
            status, body = await get(replica.port, "/readyz")
            if status != 200 or b'"ok"' not in body:
                wrong.append(f"{name} is not ready: {status} {body!r}")
        return wrong

    def _look(self) -> Sample:
        try:
            return self._watch.look()
        except redis.RedisError as exc:
            self.violated("bench", f"Valkey is away after the faults: {exc}")
            raise

    # What was seen -------------------------------------------------------------------------------

    def _read_samples(self) -> None:
        """Invariants of shared state, at every instant that was looked at."""
        samples = self._watch.samples
        for kind, bad in (
            ("drift", [s for s in samples if s.drifted]),
            ("negative", [s for s in samples if s.negative]),
            ("ownerless", [s for s in samples if s.ownerless]),
        ):
            self.report.figures[f"{kind}_samples"] = len(bad)
            if bad:
                self.violated(kind, f"{len(bad)} of {len(samples)}, first {bad[0]}", bad[0].at)
        self.report.figures["samples"] = len(samples)
        self.report.figures["peak_active"] = max(
            (n for s in samples for n in s.active.values()), default=0
        )
        self._read_ejections(samples)

    def _read_ejections(self, samples: Sequence[Sample]) -> None:
        """A node without a fault for a while is neither taken out nor still out."""
        out: set[str] = set()
        ejected = 0
        for sample in samples:
            for node, said in sample.nodes.items():
                if said == WELL or self._excused(node, sample.at):
                    out.discard(node)
                elif node not in out:
                    out.add(node)
                    ejected += 1
                    self.violated("ejected", f"{node} is well, but listed {said}", sample.at)
        self.report.figures["healthy_nodes_ejected"] = ejected

    def _excused(self, node: str, at: float) -> bool:
        faulty = node in self._truth.faulty_nodes(at - RECOVERY_S, at)
        # A replica that starts on an empty Redis does not know that its nodes were well.
        return faulty or bool(self._truth.during("redis", at - 5, at))

    def _figures(self, liveness: LivenessWatch) -> None:
        report = self.report
        report.figures |= {
            "requests": sum(report.outcomes.values()),
            "hangs": report.outcomes["hang"],
            "liveness_answers": len(liveness.took_s),
            "liveness_p99_ms": round(liveness.quantile_s(0.99) * 1000, 1),
            "liveness_max_ms": round(liveness.quantile_s(1) * 1000, 1),
            "faults_planned": len(self._steps),
            "faults": self._truth.counts(),
        }

    def _read_logs(self, bench: Bench) -> None:
        errors = 0
        for name, replica in bench.replicas.items():
            log = replica.log
            errors += log.count("ERROR")
            if found := _FAULTS_IN_LOG.search(log):
                around = log[max(0, found.start() - 500) : found.end() + 2500]
                self.violated("log", f"replica {name}:\n{around}")
        self.report.figures["error_lines_in_logs"] = errors


def chaos(seed: int, seconds: float, only: str = "") -> Report:
    """Run it in an event loop of its own."""
    return uvloop.run(Chaos(seed, seconds, only).run())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=float(os.environ.get("CHAOS_SECONDS", "600"))
    )
    parser.add_argument("--seed", type=int, default=int(os.environ.get("CHAOS_SEED", "1")))
    parser.add_argument("--only", default="", help="kinds of faults that begin so, e.g. redis.")
    parser.add_argument("--plan", action="store_true", help="print the faults and end")
    given = parser.parse_args()
    if given.plan:
        print("\n".join(map(str, plan(given.seed, given.seconds, given.only))))
        return 0
    report = chaos(given.seed, given.seconds, given.only)
    print(report.table())
    print(json.dumps(report.to_json()))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
