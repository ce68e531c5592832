"""Choosing nodes without Redis: the last known picture, this replica's share of each capacity.

Fail open: requests keep flowing while shared state is away. Every replica scores on its own
leases alone and takes the others for its like, so that together they stay near the caps: load is
`own · replicas`, capacity divided by the last known number of replicas. Scores are those of the
policy: `base / (load + 1)`, and for `work` the cost of the very request from the last known row.
"""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING

from app.cluster.score import Constants, Work
from app.model import Ask, Node, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from app.config import Circuit, Scoring


class Local:
    """One replica's own view of a pool, told of all its leases, always."""

    def __init__(
        self,
        circuit: Circuit,
        scoring: Scoring,
        chance: Callable[[], float],
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._constants = Constants.of(scoring)
        self._threshold = circuit.failure_threshold
        self._open_s = circuit.open_s
        self._open_max_s = circuit.open_max_s
        self._chance = chance
        self._now = now
        self._streak: Counter[str] = Counter()
        self._open_until: dict[str, float] = {}
        self._cooling_until: dict[str, float] = {}
        self._own: Counter[str] = Counter()  # leases by node
        self._waiting: Counter[str] = Counter()  # those without a first token
        self._queued: Counter[str] = Counter()  # prompt tokens of these
        self._unheard: dict[str, tuple[str, int]] = {}  # lease id → node, prompt tokens

    def leased(self, lease_id: str, node_id: str, prompt_tokens: int) -> None:
        """This replica holds a lease, whoever granted it."""
        self._own[node_id] += 1
        self._waiting[node_id] += 1
        self._queued[node_id] += prompt_tokens
        self._unheard[lease_id] = (node_id, prompt_tokens)

    def heard(self, lease_id: str) -> None:
        """It has had its first token."""
        node_id, prompt_tokens = self._unheard.pop(lease_id, ("", 0))
        if node_id:
            self._waiting[node_id] -= 1
            self._queued[node_id] -= prompt_tokens

    def ended(self, lease_id: str, node_id: str) -> None:
        """It holds it no longer."""
        self.heard(lease_id)
        self._own[node_id] -= 1

    def pick(
        self, ask: Ask, nodes: Iterable[Node], replicas: int, tried: Collection[str]
    ) -> Node | Refusal:
        """The best usable node for ``model``, or why there is none.

        Health is the last known verdict and only a preference: a probe cannot be repeated now.
        """
        serving = [n for n in nodes if ask.model in n.models and n.state == "active"]
        if not serving:
            return Refusal("unknown", 0)
        untried = [n for n in serving if n.id not in tried]
        if not untried:
            return Refusal("spent", 0)
        now = self._now()
        closed = [n for n in untried if self._back_at(n.id) <= now]
        if not closed:
            until = min(self._back_at(n.id) for n in untried)
            return Refusal("down", int((until - now) * 1000) + 1)
        share = max(1, replicas)
        free = [n for n in closed if self._own[n.id] < max(1, n.capacity // share)]
        if not free:
            return Refusal("full", 1000)
        well = [n for n in free if n.health == "ok"] or free
        return max(well, key=lambda n: (self._score(n, ask, share), self._chance()))

    def _score(self, node: Node, ask: Ask, replicas: int) -> float:
        load = self._own[node.id] * replicas
        if not node.row:
            return (node.base or node.weight) / (load + 1)
        known = Work(self._constants)
        known.load(node.row)
        known.inflight, known.waiting = load, self._waiting[node.id] * replicas
        known.queued = self._queued[node.id] * replicas
        # As of the last event there: how long it has been silent since, nobody can tell now.
        then_ms = known.silent_since = max(known.sampled_at, known.ended_at)
        return 1000 / known.cost(then_ms, ask.prompt_tokens, ask.output_tokens)

    def _back_at(self, node_id: str) -> float:
        return max(self._open_until.get(node_id, 0.0), self._cooling_until.get(node_id, 0.0))

    def failed(self, node_id: str) -> None:
        """Count a failure that Redis cannot count now; a streak opens the circuit here."""
        self._streak[node_id] += 1
        over = self._streak[node_id] - self._threshold
        if over >= 0:
            open_s = min(self._open_s * 2**over, self._open_max_s)
            self._open_until[node_id] = self._now() + open_s * (1 + 0.2 * self._chance())

    def cool(self, node_id: str, seconds: float) -> None:
        """A saturated node is left alone for as long as it asked; neither failure nor success."""
        until = self._now() + seconds
        self._cooling_until[node_id] = max(until, self._cooling_until.get(node_id, 0.0))

    def answered(self, node_id: str) -> None:
        """A good answer ends the streak."""
        self._streak.pop(node_id, None)
        self._open_until.pop(node_id, None)

    def forget(self) -> None:
        """Shared state is back: its circuits count, these do not."""
        self._streak.clear()
        self._open_until.clear()
        self._cooling_until.clear()
