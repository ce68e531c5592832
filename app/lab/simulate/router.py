"""Choosing nodes in the simulation: what every policy shares, and the shipped ones.

All get the same circuit, so that a table compares scores only: three failures in a row take a node
out for five seconds, then one trial at a time. (The gateway's own circuit also backs off and knows
rates; that is tested elsewhere.)
"""

from __future__ import annotations

from collections import deque
from copy import copy
from heapq import nlargest
from typing import TYPE_CHECKING, cast

from app.cluster.score import (
    POLICIES,
    TWO_CHOICES,
    Constants,
    Profile,
    RoundRobin,
    Terms,
    Ttft,
    Work,
    cost,
)
from app.model import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from app.lab.simulate.fleet import Fleet, Spec
    from app.lab.simulate.workload import Call

THRESHOLD = 3  # failures in a row that open a circuit
OPEN_MS = 5000.0
SWEEP_MS = 1000.0  # an untouched node's score in the sorted set is at most so old


class Router:
    """One replica's, or the whole cluster's, way to choose. `choose` is the policy."""

    def __init__(self, fleet: Fleet, chance: Random) -> None:
        self.fleet = fleet
        self.chance = chance
        self._everyone = list(range(len(fleet.specs)))
        self._streak = [0] * len(fleet.specs)
        self._open_until: dict[int, float] = {}
        self._trials: dict[int, int] = {}  # node: number of the call that tries it

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        """The node for a call, of those that may be chosen."""
        raise NotImplementedError

    def leased(self, now_ms: float, call: Call) -> None:
        """The call goes to `call.node`."""

    def heard(self, now_ms: float, call: Call) -> None:
        """The call has its first token."""

    def ended(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        """The call has ended on `call.node`."""

    def joined(self, now_ms: float, node: int) -> None:
        """A node has come; nothing is known of it."""

    def pick(self, now_ms: float, call: Call) -> int | None:
        """A node, or None when there is none to choose from now."""
        for node, until_ms in self._open_until.items():
            if until_ms <= now_ms and node not in self._trials and node not in call.tried:
                self._trials[node] = call.number
                return node
        nodes: Sequence[int] = self._everyone
        if self._open_until or call.tried or not self.fleet.free():
            nodes = [n for n in nodes if n not in self._open_until and self.fleet.takes(n)]
            nodes = [n for n in nodes if n not in call.tried] or nodes
        return self.choose(now_ms, call, nodes) if nodes else None

    def settle(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        """Move the circuit, then tell the policy."""
        node = call.node
        if self._trials.get(node) == call.number:
            del self._trials[node]
            del self._open_until[node]
            self._streak[node] = THRESHOLD - 1  # a failed trial opens it again
        if outcome == Outcome.OK:
            self._streak[node] = 0
        else:
            self._streak[node] += 1
            if self._streak[node] >= THRESHOLD and node not in self._open_until:
                self._open_until[node] = now_ms + OPEN_MS
        self.ended(now_ms, call, outcome)


class Shipped(Router):
    """A policy of `app/cluster/score.py`, as the gateway runs it.

    Scores stand in a sorted set; they, and the terms of policy `work`, change with the events of
    their node and are at most a sweep old. Policy `work` re-ranks the best for the very request.
    """

    def __init__(
        self,
        policy: str,
        fleet: Fleet,
        chance: Random,
        constants: Constants,
        *,
        sees_prefix: bool = True,
        knows_limits: bool = False,
    ) -> None:
        super().__init__(fleet, chance)
        self.knows_limits = knows_limits
        self.policy = policy
        self.constants = constants
        self.sees_prefix = sees_prefix
        self.two_choices = policy in TWO_CHOICES
        self.profiles = [self._new(spec, 0.0) for spec in fleet.specs]
        self.scores = [0.0] * len(self.profiles)
        self.terms: list[Terms] = [(0.0, 0.0, 0.0)] * len(self.profiles)
        self._sweep(0.0)
        self._swept_ms = 0.0
        self._turn = 0

    def _new(self, spec: Spec, now_ms: float) -> Profile:
        profile = POLICIES[self.policy](
            self.constants,
            weight=spec.weight,
            capacity=spec.capacity,
            median_weight=self.fleet.median_weight,
            since_ms=now_ms,
        )
        if self.knows_limits and isinstance(profile, Work):
            profile.slots = spec.profile.slots
            profile.kv_tokens = spec.profile.kv_tokens
        return profile

    def _rate(self, now_ms: float, node: int) -> None:
        profile = self.profiles[node]
        self.scores[node] = profile.score(now_ms)
        if isinstance(profile, Work):
            self.terms[node] = profile.terms(now_ms)

    def _sweep(self, now_ms: float) -> None:
        for node in range(len(self.profiles)):
            self._rate(now_ms, node)

    def joined(self, now_ms: float, node: int) -> None:
        self.profiles[node] = self._new(self.fleet.specs[node], now_ms)
        self._rate(now_ms, node)

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        if now_ms - self._swept_ms >= SWEEP_MS:
            self._swept_ms = now_ms
            self._sweep(now_ms)
        if self.two_choices and len(nodes) > 2:
            nodes = self.chance.sample(nodes, 2)
        elif isinstance(self.profiles[0], Work):
            return self._cheapest(call, nodes)
        best = max(self.scores[node] for node in nodes)
        return self.chance.choice([node for node in nodes if self.scores[node] == best])

    def _cheapest(self, call: Call, nodes: Sequence[int]) -> int:
        """Of the best few, and of those that hold the prefix, the one of least cost."""
        few = nodes
        if len(nodes) > self.constants.top_k:
            few = nlargest(self.constants.top_k, nodes, key=self.scores.__getitem__)
            few += [node for node in nodes if self._hit(call, node) and node not in few]
        costs = [self._cost(call, node) for node in few]
        least = min(costs)
        return self.chance.choice([n for n, cost in zip(few, costs, strict=True) if cost == least])

    def _cost(self, call: Call, node: int) -> float:
        profile = cast("Work", self.profiles[node])
        fresh = profile.fresh(call.told_prompt, self._hit(call, node))
        return cost(self.terms[node], fresh, call.told_output)

    def _hit(self, call: Call, node: int) -> int:
        return call.hits.get(node, 0) if self.sees_prefix else 0

    def leased(self, now_ms: float, call: Call) -> None:
        profile = self.profiles[call.node]
        if isinstance(profile, Work):
            call.fresh = profile.fresh(call.told_prompt, self._hit(call, call.node))
        elif isinstance(profile, RoundRobin):
            self._turn += 1
            profile.picked = self._turn
        held = call.told_prompt + call.told_output
        call.ahead = profile.leased(now_ms, call.fresh, held)
        self._rate(now_ms, call.node)

    def heard(self, now_ms: float, call: Call) -> None:
        profile = self.profiles[call.node]
        profile.first_token(now_ms, now_ms - call.leased_ms, call.fresh, call.ahead)
        self._rate(now_ms, call.node)

    def ended(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        profile = self.profiles[call.node]
        heard = call.first_ms is not None
        profile.ended(
            now_ms,
            outcome,
            heard=heard,
            fresh=call.fresh,
            held=call.told_prompt + call.told_output,
            tokens=call.output,
            stay_ms=now_ms - call.leased_ms,
            decode_ms=now_ms - call.first_ms if call.first_ms is not None else 0.0,
        )
        self._rate(now_ms, call.node)


class Stale(Shipped):
    """A replica that sees the shared state as it was at its last refresh, and its own steps."""

    def __init__(self, source: Shipped, refresh_ms: float, chance: Random) -> None:
        super().__init__(
            source.policy,
            source.fleet,
            chance,
            source.constants,
            sees_prefix=source.sees_prefix,
            knows_limits=source.knows_limits,
        )
        self._source = source
        self._refresh_ms = refresh_ms
        self._next_ms = chance.uniform(0, refresh_ms)

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + self._refresh_ms
            self.profiles = [_copied(profile) for profile in self._source.profiles]
            self.scores = self._source.scores.copy()
            self.terms = self._source.terms.copy()
        return super().choose(now_ms, call, nodes)

    def joined(self, now_ms: float, node: int) -> None:
        super().joined(now_ms, node)
        self._source.joined(now_ms, node)

    def leased(self, now_ms: float, call: Call) -> None:
        super().leased(now_ms, call)
        self._source.leased(now_ms, call)

    def heard(self, now_ms: float, call: Call) -> None:
        super().heard(now_ms, call)
        self._source.heard(now_ms, call)

    def ended(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        super().ended(now_ms, call, outcome)
        self._source.ended(now_ms, call, outcome)


def _copied(profile: Profile) -> Profile:
    twin = copy(profile)
    if isinstance(twin, Ttft):
        twin.samples = deque(twin.samples)
    return twin
