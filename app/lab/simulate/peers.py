"""How others choose: re-implementations of published policies, from their sources.

Small on purpose, at the defaults that they document; none is their code. Each is given a whole
circuit and exact counts, which some of them do not have.
"""

# ruff: noqa: ARG002 - one interface for all policies; few look at all of it

from __future__ import annotations

from collections import defaultdict, deque
from math import exp, sqrt
from statistics import median
from typing import TYPE_CHECKING

from app.lab.simulate.router import Router
from app.model import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from app.lab.simulate.fleet import Fleet
    from app.lab.simulate.workload import Call


class Counting(Router):
    """Counts its own calls in flight."""

    def __init__(self, fleet: Fleet, chance: Random) -> None:
        super().__init__(fleet, chance)
        self.own = [0] * len(fleet.specs)

    def leased(self, now_ms: float, call: Call) -> None:
        self.own[call.node] += 1

    def ended(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        self.own[call.node] -= 1


class Linkerd(Router):
    """Peak EWMA of the round trip times load, the better of two by chance.

    From Finagle's PeakEwma.scala, on which Linkerd's is modelled; decay 10 s. As in Linkerd's proxy
    a request is pending until its first data. Reading the load decays it, also meanwhile.
    """

    DECAY_MS = 10_000
    PENALTY = 1e12

    def __init__(self, fleet: Fleet, chance: Random) -> None:
        super().__init__(fleet, chance)
        self._pending = [0] * len(fleet.specs)
        self._cost = [0.0] * len(fleet.specs)
        self._stamp = [0.0] * len(fleet.specs)

    def _observe(self, node: int, rtt_ms: float, now_ms: float) -> None:
        fade = exp(-(now_ms - self._stamp[node]) / self.DECAY_MS)
        cost = self._cost[node]
        self._cost[node] = rtt_ms if rtt_ms > cost else cost * fade + rtt_ms * (1 - fade)
        self._stamp[node] = now_ms

    def _load(self, node: int, now_ms: float) -> float:
        self._observe(node, 0.0, now_ms)
        if self._cost[node] == 0 and self._pending[node]:
            return self.PENALTY + self._pending[node]
        return self._cost[node] * (self._pending[node] + 1)

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        two = self.chance.sample(nodes, min(2, len(nodes)))
        return min(two, key=lambda node: self._load(node, now_ms))

    def leased(self, now_ms: float, call: Call) -> None:
        self._pending[call.node] += 1

    def heard(self, now_ms: float, call: Call) -> None:
        self._pending[call.node] -= 1
        self._observe(call.node, now_ms - call.leased_ms, now_ms)

    def ended(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        if call.first_ms is None:
            self._pending[call.node] -= 1
            self._observe(call.node, now_ms - call.leased_ms, now_ms)


class LiteLLM(Router):
    """Latency-based routing, from litellm/router_strategy/lowest_latency.py: TTFT over completion
    tokens, a list of ten of which the first nine stay, in-flight ignored."""

    LENGTH = 10

    def __init__(self, fleet: Fleet, chance: Random) -> None:
        super().__init__(fleet, chance)
        self._latencies: list[list[float]] = [[] for _ in fleet.specs]

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        means = {
            node: sum(self._latencies[node]) / max(1, len(self._latencies[node])) for node in nodes
        }
        least = min(means.values())
        return self.chance.choice([node for node in nodes if means[node] == least])

    def ended(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        if outcome == Outcome.OK and call.first_ms is not None:
            kept = self._latencies[call.node][: self.LENGTH - 1]
            self._latencies[call.node] = [*kept, (call.first_ms - call.leased_ms) / call.output]


class Higress(Counting):
    """AdaptiveScore, from the ai-load-balancer's cluster_metrics/lb_policy.go: weighted roots of
    moving averages of TTFT and total time, times in-flight, times failures."""

    BETA, TTFT_WEIGHT, TOTAL_WEIGHT, ERROR_PENALTY = 0.5, 0.7, 0.3, 3.0
    COOLDOWN_MS = 30_000

    def __init__(self, fleet: Fleet, chance: Random, choices: int = 2) -> None:
        super().__init__(fleet, chance)
        n = len(fleet.specs)
        self._choices = choices
        self._ttft: list[float | None] = [None] * n
        self._total: list[float | None] = [None] * n
        self._good, self._bad, self._row = [0] * n, [0] * n, [0] * n
        self._cool_until = [0.0] * n

    def _score(self, node: int, now_ms: float) -> float:
        inflight = self.own[node] + 1
        if self._cool_until[node] > now_ms:
            inflight += self._row[node] + 1
        total = self._total[node]
        ttft = total if self._ttft[node] is None else self._ttft[node]
        if ttft is None:
            return inflight
        total = ttft if total is None else total
        latency = self.TTFT_WEIGHT * sqrt(ttft + 1) + self.TOTAL_WEIGHT * sqrt(total + 1)
        outcomes = self._good[node] + self._bad[node]
        errors = self._bad[node] / outcomes if outcomes else 0.0
        return latency * inflight * (1 + self.ERROR_PENALTY * errors)

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        nodes = [node for node in nodes if self._cool_until[node] <= now_ms] or nodes
        sampled = self.chance.sample(nodes, min(self._choices, len(nodes)))
        return min(sampled, key=lambda node: self._score(node, now_ms))

    def heard(self, now_ms: float, call: Call) -> None:
        self._ttft[call.node] = self._ewma(self._ttft[call.node], now_ms - call.leased_ms)

    def ended(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        super().ended(now_ms, call, outcome)
        node = call.node
        self._total[node] = self._ewma(self._total[node], now_ms - call.leased_ms)
        if outcome == Outcome.OK:
            self._good[node] += 1
            self._row[node] = 0
        else:
            self._bad[node] += 1
            self._row[node] += 1
            self._cool_until[node] = now_ms + self.COOLDOWN_MS

    def _ewma(self, old: float | None, sample: float) -> float:
        return sample if old is None else self.BETA * old + (1 - self.BETA) * sample


class Servers:
    """What Prequal's servers know of themselves: TTFT by requests in flight on arrival."""

    KEPT = 16

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._times: list[defaultdict[int, deque[float]]] = [
            defaultdict(lambda: deque(maxlen=self.KEPT)) for _ in fleet.specs
        ]
        self.found: dict[int, int] = {}  # number of the call: in flight when it came

    def heard(self, call: Call, ttft_ms: float) -> None:
        """A server saw a first token leave."""
        self._times[call.node][self.found.pop(call.number)].append(ttft_ms)

    def probe(self, node: int) -> tuple[int, float]:
        """The answer to a probe: requests in flight, and the usual time at about so many."""
        inflight, times = self.fleet.inflight[node], self._times[node]
        if not times:
            return inflight, 0.0
        return inflight, median(times[min(times, key=lambda known: abs(known - inflight))])


class Prequal(Router):
    """Hot-cold lexicographic choice from a pool of probes, after the paper (NSDI 2024): three
    probes a request, pool of 16, probes age in a second, one is removed a request."""

    PROBES, POOL, AGE_MS, REMEMBERED = 3, 16, 1000.0, 128

    def __init__(self, fleet: Fleet, chance: Random, servers: Servers, q_rif: float = 0.84) -> None:
        super().__init__(fleet, chance)
        self._servers, self._q_rif = servers, q_rif
        self._pool: deque[list[float]] = deque(maxlen=self.POOL)  # [node, in flight, ms, when]
        self._seen: deque[int] = deque(maxlen=self.REMEMBERED)
        self._worst_next = False

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        while self._pool and self._pool[0][3] < now_ms - self.AGE_MS:
            self._pool.popleft()
        if not any(probe[0] in nodes for probe in self._pool):
            self._probe(now_ms, nodes)  # nothing to go by: this request waits for its probes
        hot = self._hot()
        usable = [probe for probe in self._pool if probe[0] in nodes]
        cold = [probe for probe in usable if probe[1] <= hot]
        chosen = min(cold, key=lambda p: p[2]) if cold else min(usable, key=lambda p: p[1])
        self._pool.remove(chosen)
        self._remove()
        self._probe(now_ms, nodes)
        return int(chosen[0])

    def _hot(self) -> float:
        """More in flight than this is hot."""
        if self._q_rif >= 1:
            return float("inf")
        ordered = sorted(self._seen)
        return ordered[min(len(ordered) - 1, int(self._q_rif * len(ordered)))]

    def _remove(self) -> None:
        if len(self._pool) <= 1:
            return
        self._worst_next = not self._worst_next
        if self._worst_next:
            self._pool.remove(max(self._pool, key=lambda probe: (probe[1], probe[2])))
        else:
            self._pool.popleft()

    def _probe(self, now_ms: float, nodes: Sequence[int]) -> None:
        for node in self.chance.sample(nodes, min(self.PROBES, len(nodes))):
            inflight, ms = self._servers.probe(node)
            self._pool.append([node, inflight, ms, now_ms])
            self._seen.append(inflight)

    def leased(self, now_ms: float, call: Call) -> None:
        self._servers.found[call.number] = self.fleet.inflight[call.node]

    def heard(self, now_ms: float, call: Call) -> None:
        self._servers.heard(call, now_ms - call.leased_ms)

    def ended(self, now_ms: float, call: Call, outcome: Outcome) -> None:
        self._servers.found.pop(call.number, None)


class LlmD(Router):
    """llm-d's inference scheduler: prefix 3, queue 2, KV 2, engine pages scraped every 50 ms."""

    SCRAPE_MS = 50.0

    def __init__(self, fleet: Fleet, chance: Random) -> None:
        super().__init__(fleet, chance)
        self._next_ms = 0.0
        self._load: list[tuple[int, float]] = []

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + self.SCRAPE_MS
            self._load = [(len(e.waiting), e.kv_share) for e in self.fleet.engines]
        queues = [self._load[node][0] for node in nodes]
        least, most = min(queues), max(queues)
        scores = {}
        for node in nodes:
            waiting, kv = self._load[node]
            queue = (most - waiting) / (most - least) if most > least else 1.0
            prefix = call.hits.get(node, 0) / call.prompt
            scores[node] = 3 * prefix + 2 * queue + 2 * (1 - kv)
        best = max(scores.values())
        return self.chance.choice([node for node in nodes if scores[node] == best])


class SGLang(Counting):
    """cache_aware of SGLang's router: shortest queue when out of balance (64 and 1.5 times), else
    the longest prefix when it is over 0.3 of the prompt, else the least load."""

    THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        loads = [self.own[node] for node in nodes]
        most, least = max(loads), min(loads)
        balanced = most - least <= self.BALANCE_ABS or most <= self.BALANCE_REL * least
        held = [node for node in nodes if call.hits.get(node, 0) > self.THRESHOLD * call.prompt]
        if balanced and held:
            return max(held, key=lambda node: call.hits[node])
        return self.chance.choice([node for node in nodes if self.own[node] == least])


class LoadAware(Counting):
    """vLLM production-stack's load-aware routing: matched share less relative load, beta 1."""

    BETA = 1.0

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        mean = sum(self.own[node] for node in nodes) / len(nodes)
        scores = {
            node: call.hits.get(node, 0) / call.prompt
            - self.BETA * (self.own[node] - mean) / max(1.0, mean)
            for node in nodes
        }
        best = max(scores.values())
        return self.chance.choice([node for node in nodes if scores[node] == best])
