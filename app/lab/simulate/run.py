"""One run: a scenario, a policy and a seed. Deterministic; time is ms and only simulated."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any

from app.lab.simulate.engine import Job
from app.lab.simulate.fleet import Fleet
from app.lab.simulate.policies import REFERENCE, routers
from app.lab.simulate.prefix import Prefixes
from app.lab.simulate.workload import Sessions
from app.model import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.lab.simulate.scenarios import Fault, Scenario
    from app.lab.simulate.workload import Call

REDIS_MS = 0.5  # what a pick from shared state costs
ERROR_MS = 5.0  # a node that fails answers so fast
ATTEMPTS = 3  # nodes that one call may try
SHADOW = 0.85  # share of a node's KV memory that the gateway takes to hold prefixes
RETRY_MS = 100.0  # nobody may be chosen: look again then


class Run:
    """The event loop: calls come, steps of engines end, nodes fail. `calls` by arrival."""

    def __init__(self, scenario: Scenario, policy: str, seed: int) -> None:
        self.fleet = Fleet(scenario.specs)
        self.calls: list[Call] = []
        self._routers = routers(
            policy,
            self.fleet,
            sharing=scenario.sharing,
            replicas=scenario.replicas,
            seed=seed,
            constants=scenario.constants,
        )
        self._source = scenario.source(seed)
        self._pick_ms = 0.0 if scenario.sharing == "local" else REDIS_MS
        self._chance = Random(f"{seed}:failures")
        self._failing = [0.0] * len(scenario.specs)
        self._due = [0.0] * len(scenario.specs)  # the end of a leap that the events know of
        self._cached = [Prefixes(Sessions.SYSTEM) for _ in scenario.specs if scenario.sessions]
        self._shadow = [Prefixes(Sessions.SYSTEM) for _ in self._cached]
        self._known = self._cached if policy == REFERENCE else self._shadow
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._serial = 0
        for fault in scenario.faults:
            if fault.kind == "join":
                self.fleet.present[fault.node] = False
            self._at(fault.at_ms, self._strike, fault)

    def run(self) -> list[Call]:
        """Simulate to the end of the last answer."""
        for call in self._source.first():
            self._expect(call)
        events = self._events
        while events:
            now_ms, _, happen, what = heappop(events)
            happen(now_ms, what)
        return self.calls

    def _at(self, ms: float, happen: Callable[[float, Any], None], what: object) -> None:
        self._serial += 1
        heappush(self._events, (ms, self._serial, happen, what))

    def _expect(self, call: Call) -> None:
        self.calls.append(call)
        self._at(call.at_ms + self._pick_ms, self._pick, call)

    def _pick(self, now_ms: float, call: Call) -> None:
        """Choose, lease, forward: one step, as the gateway's scripts make it."""
        router = self._routers[call.replica % len(self._routers)]
        hits = ((node, known.hit(call)) for node, known in enumerate(self._known))
        call.hits = {node: hit for node, hit in hits if hit}
        node = router.pick(now_ms, call)
        if node is None:
            self._at(now_ms + RETRY_MS, self._pick, call)
            return
        call.node, call.leased_ms = node, now_ms
        router.leased(now_ms, call)
        self.fleet.inflight[node] += 1
        if self._failing[node] and self._chance.random() < self._failing[node]:
            self._at(now_ms + ERROR_MS, self._fail, call)
            return
        engine = self.fleet.engines[node]
        call.found_busy = engine.busy
        if self._cached:
            call.cached = self._cached[node].hit(call)
            self._shadow[node].add(call, call.prompt, SHADOW * engine.profile.kv_tokens)
        engine.submit(Job(call, call.cached), now_ms)
        self._watch(node)

    def _watch(self, node: int) -> None:
        """Expect the end of the leap that the engine is in now."""
        until_ms = self.fleet.engines[node].until
        if until_ms != self._due[node]:
            self._due[node] = until_ms
            if until_ms < float("inf"):
                self._at(until_ms, self._step, node)

    def _step(self, now_ms: float, node: int) -> None:
        engine = self.fleet.engines[node]
        if now_ms != engine.until:
            return  # that leap was cut short, or stretched
        started, ended = engine.advance()
        for job in started:
            job.call.first_ms = now_ms
            self._hold(job.call, node, job.prompt)
            self._routers[job.call.replica % len(self._routers)].heard(now_ms, job.call)
        for job in ended:
            self._hold(job.call, node, job.prompt + job.output)
            self._end(now_ms, job.call, Outcome.OK)
        self._watch(node)

    def _hold(self, call: Call, node: int, tokens: int) -> None:
        """A node keeps what it has computed, as long as there is room."""
        if self._cached:
            engine = self.fleet.engines[node]
            room = engine.profile.kv_tokens * (1 - engine.kv_share)
            self._cached[node].add(call, tokens, room)

    def _fail(self, now_ms: float, call: Call) -> None:
        call.tried.add(call.node)
        if len(call.tried) >= min(ATTEMPTS, len(self.fleet.specs)):
            call.failed = True
            self._end(now_ms, call, Outcome.FAILED)
            return
        self._leave(now_ms, call, Outcome.FAILED)
        self._pick(now_ms, call)

    def _leave(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        self.fleet.inflight[call.node] -= 1
        self._routers[call.replica % len(self._routers)].settle(now_ms, call, outcome)

    def _end(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        call.end_ms = now_ms
        self._leave(now_ms, call, outcome)
        follower = self._source.then(call, now_ms)
        if follower is not None:
            self._expect(follower)

    def _strike(self, now_ms: float, fault: Fault) -> None:
        engine = self.fleet.engines[fault.node]
        if fault.kind == "pause":
            engine.pause(now_ms, now_ms + fault.for_ms)
        elif fault.kind == "slow":
            engine.slow(now_ms, fault.value)
            self._at(now_ms + fault.for_ms, self._recover, fault)
        elif fault.kind == "fail":
            self._failing[fault.node] = fault.value
        else:
            self.fleet.present[fault.node] = True
            for router in self._routers:
                router.joined(now_ms, fault.node)
            engine.pause(now_ms, now_ms + fault.for_ms)
        self._watch(fault.node)

    def _recover(self, now_ms: float, fault: Fault) -> None:
        self.fleet.engines[fault.node].slow(now_ms, 1.0)
        self._watch(fault.node)
