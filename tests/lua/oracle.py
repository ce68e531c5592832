"""A pool as plain Python: what the scripts must answer and leave behind.

Written from DESIGN (state, score, circuit) and the headers of the scripts, not from their code.
Where the scripts keep counters and running sums, this model keeps the things that are counted:
leases in a dict, samples in a list; loads and means are worked out anew each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from app.cluster.score import COLUMNS, Constants, Terms, Work, cost
from app.config import Circuit, Health, Prefix, Scoring, Settings, Timeouts
from app.model import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from app.config import Policy

UNLOADED = {"random", "round_robin"}  # their score does not fall with load
TWO_CHOICES = {"p2c", "peak_ewma"}
LOOKED_AT = 16  # due nodes, or nodes of a refusal, that one call looks at
LEAVING = 8  # samples that one call drops from a window
LESS = 0.95  # what an outcome weighs after one more
FORGOTTEN = 0.05  # failures that weigh less are
BEST_MS = 300_000  # time over which the best mean of a node is forgotten


@dataclass(frozen=True)
class Tuning:
    """The settings that scripts know as constants; times in ms."""

    policy: Policy = "ttft"
    alpha: float = 1.0
    baseline_ms: float = 50
    prior_ms: float = 100
    floor_ms: float = 10
    window: int = 50
    max_age_ms: int = 300_000
    idle_after_ms: int = 10_000
    slow_start_ms: int = 0
    top_k: int = 4
    unhealthy_after: int = 3
    threshold: int = 3
    failure_rate: float = 0.25
    min_samples: int = 8
    open_ms: int = 2000
    open_max_ms: int = 60_000
    trial_ms: int = 121_000
    node_tokens: int | None = None  # follow prefixes; each node can hold so many tokens
    work: dict[str, float] = field(default_factory=dict)  # settings that only policy work has

    def settings(self) -> Settings:
        """The same as the application's settings."""
        return Settings(
            scoring=Scoring(
                policy=self.policy,
                alpha=self.alpha,
                ttft_baseline_ms=self.baseline_ms,
                ttft_prior_ms=self.prior_ms,
                ttft_floor_ms=self.floor_ms,
                window=self.window,
                sample_max_age_s=self.max_age_ms / 1000,
                idle_after_s=self.idle_after_ms / 1000,
                slow_start_s=self.slow_start_ms / 1000,
                top_k=self.top_k,
                **self.work,  # type: ignore[arg-type]
            ),
            prefix=Prefix(pools=["default"], node_tokens=self.node_tokens)
            if self.node_tokens
            else Prefix(),
            circuit=Circuit(
                failure_threshold=self.threshold,
                failure_rate=self.failure_rate,
                min_samples=self.min_samples,
                open_s=self.open_ms / 1000,
                open_max_s=self.open_max_ms / 1000,
            ),
            health=Health(unhealthy_after=self.unhealthy_after),
            timeouts=Timeouts(connect_s=1, first_token_s=self.trial_ms / 1000 - 1),
        )


@dataclass(frozen=True)
class Sample:
    """One first token."""

    ttft_us: int
    size: int
    at_ms: int

    def __str__(self) -> str:
        return f"{self.ttft_us}:{self.size}:{self.at_ms}"


@dataclass
class Lease:
    """A lease as written: ``heard`` once its sample was taken; ``ahead`` is the work that was
    before its first token, None when it was granted without policy work."""

    node: str
    epoch: int
    start_ms: int
    size: int
    heard: bool = False
    fresh: float = 0
    ahead: float | None = None
    held: float = 0

    @classmethod
    def parse(cls, record: str) -> Lease:
        """Read a record back."""
        node, epoch, start, size, *work = record.rstrip("+").split(" ")
        fresh, ahead, held = map(float, work) if work else (int(size), None, int(size))
        heard = record.endswith("+")
        return cls(node, int(epoch), int(start), int(size), heard, fresh, ahead, held)

    def __str__(self) -> str:
        work = ""
        if self.ahead is not None:
            work = f" {self.fresh:.14g} {self.ahead:.14g} {self.held:.14g}"
        mark = "+" if self.heard else ""
        return f"{self.node} {self.epoch} {self.start_ms} {self.size}{work}{mark}"


@dataclass
class Node:
    """One node; ``idle`` is its score without load, as last worked out at ``rated_ms``."""

    id: str
    models: tuple[str, ...]
    epoch: int
    set_by_hand: dict[str, str] = field(default_factory=dict)
    removed: bool = False
    health: str = "ok"
    misses: int = 0
    since_ms: int = 0  # when it came, or came back
    waiting_ms: int = 0
    waiting_until_ms: int = 0
    probe_ms: int = 0
    sweep_ms: int = 0
    circuit: str = "closed"
    cause: str = ""
    trial: str = ""
    streak: int = 0
    bad: float = 0.0
    seen: float = 0.0
    opens: int = 0
    tripped_ms: int = 0
    cooling_ms: int = 0
    due_ms: int | None = None
    window: list[Sample] = field(default_factory=list)
    last_ms: int = 0  # when the newest sample was taken
    best_us: float = 0.0
    ewma_us: float = 0.0
    picked: int = 0
    tpot_us: float | None = None
    idle: float = 0.0
    rated_ms: int = 0
    work: Work = field(default_factory=lambda: Work(Constants()))
    terms: Terms = (0.0, 0.0, 0.0)
    stood_ms: int = 0
    signal: dict[str, float] = field(default_factory=dict)  # what its engine said last
    signal_until_ms: int = 0
    blind: float = 0.0  # its score for a request that nothing is known of, as last worked out

    @property
    def state(self) -> str:
        """What the operator wants of it."""
        return self.set_by_hand.get("state", "active")

    @property
    def row(self) -> list[float]:
        """What policy work keeps of it."""
        return [*self.terms, *(getattr(self.work, name) for name in COLUMNS[3:])]

    @property
    def weight(self) -> float:
        """K of the formula."""
        return float(self.set_by_hand["weight"])

    @property
    def capacity(self) -> int:
        """Most leases at once."""
        return int(self.set_by_hand["capacity"])

    def look_again(self, at_ms: int | None) -> None:
        """List it as due at ``at_ms``, in the lists of its models."""
        self.due_ms = at_ms if self.models else None


def expected_ms(node: Node, tuning: Tuning, now: int) -> float:
    """T of the formula."""
    t_ms, age = tuning.prior_ms, now - node.last_ms
    if node.window and age <= tuning.max_age_ms:
        t_ms = sum(sample.ttft_us for sample in node.window) / len(node.window) / 1000
        if age > tuning.idle_after_ms:  # the benefit of the doubt
            doubt = math.exp(-(age - tuning.idle_after_ms) / tuning.idle_after_ms)
            t_ms = t_ms * doubt + node.best_us / 1000 * (1 - doubt)
    if now < node.waiting_until_ms:
        t_ms = max(t_ms, node.waiting_ms)
    return max(t_ms, tuning.floor_ms)


def idle_score(node: Node, tuning: Tuning, now: int, *, whatever_probes_say: bool = False) -> float:
    """The published formula with C = 0; 0 for a node that must not be chosen."""
    usable = node.state == "active" and not node.removed and node.circuit == "closed"
    well = node.health == "ok" or (whatever_probes_say and node.health in {"down", "new"})
    if not usable or not well or node.cooling_ms > now:
        return 0.0
    if tuning.policy == "ttft":
        t_ms = expected_ms(node, tuning, now)
        score = node.weight / (tuning.alpha * t_ms / tuning.baseline_ms + (1 - tuning.alpha))
        up_ms = now - node.since_ms
        if 0 <= up_ms < tuning.slow_start_ms:
            score *= max(0.1, up_ms / tuning.slow_start_ms)
        return score
    ewma_ms = node.ewma_us / 1000 or tuning.prior_ms
    return {
        "work": 1.0,  # it has a score of its own
        "least_conn": 1.0,
        "p2c": 1.0,
        "random": 1.0,
        "weighted_least_conn": node.weight,
        "round_robin": 1 / (1 + node.picked),
        "peak_ewma": 1000 / ewma_ms,
    }[tuning.policy]


def live_score(idle: float, load: int, capacity: int, policy: str) -> float:
    """The idle score with ``load`` leases in flight."""
    if load >= capacity:
        return 0.0
    return idle if policy in UNLOADED else idle / (load + 1)


class Oracle:
    """A pool. The methods are the verbs; ``now`` in ms, ``chance`` in [0, 1)."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.constants = Constants.of(tuning.settings().scoring)
        self.nodes: dict[str, Node] = {}
        self.leases: dict[str, dict[str, Lease]] = {}  # replica → lease id → lease
        self.replicas: dict[str, int] = {}
        self.turn = 0

    # What follows from the state

    def load(self, node_id: str) -> int:
        """Leases that name the node, over all replicas."""
        return sum(
            lease.node == node_id for held in self.leases.values() for lease in held.values()
        )

    def score(self, node: Node) -> float:
        """Live score."""
        if self.tuning.policy == "work":
            return node.blind
        return live_score(node.idle, self.load(node.id), node.capacity, self.tuning.policy)

    def serving(self, model: str) -> list[Node]:
        """Registered nodes of a model, best first; of equals the order of a ZSET backwards."""
        nodes = [n for n in self.nodes.values() if model in n.models and not n.removed]
        return sorted(nodes, key=lambda n: (self.score(n), n.id), reverse=True)

    def _rate(self, node: Node, now: int) -> None:
        node.idle, node.rated_ms = idle_score(node, self.tuning, now), now
        self._stand(node, now)

    def _stand(self, node: Node, now: int) -> None:
        """Policy work: the score that stands in the set until the node's next event."""
        node.work.inflight = self.load(node.id)
        usable = node.idle > 0 and node.work.inflight < node.capacity
        node.terms = node.work.terms(now)
        node.blind = node.work.score_of(node.terms) if usable else 0.0
        node.stood_ms = now

    def _limits(self, node: Node, now: int) -> None:
        """Policy work: what is known of the engine's limits, the operator's word first."""
        said, known = node.signal, node.set_by_hand
        node.work.slots = float(known.get("slots") or 0) or said.get("engine_slots", 0.0)
        room = float(known.get("kv_tokens") or 0)
        node.work.kv_tokens = room or said.get("engine_kv_tokens", 0.0)
        node.work.kv_used = said["kv_used"] if now < node.signal_until_ms else 0.0

    def signal(
        self, node_id: str, epoch: str, said: dict[str, float], *, valid_ms: int, now: int
    ) -> int:
        """1 when the node is known."""
        node = self.nodes.get(node_id)
        if node is None or node.removed or str(node.epoch) != epoch:
            return 0
        node.signal, node.signal_until_ms = said, now + valid_ms
        if self.tuning.policy == "work":
            self._limits(node, now)
        self._rate(node, now)
        return 1

    def _prior(self, node: Node) -> None:
        """What is thought of a node that has not given a sample yet."""
        if node.work.best_rate == 0:
            weights = [n.weight for n in self.nodes.values() if not n.removed]
            node.work.waited_ms = self.constants.ttft_prior_ms * median(weights) / node.weight

    # acquire, move

    def acceptable(self, model: str, tried: Collection[str], size: int, output: int) -> set[str]:
        """The nodes that may be chosen: the best untried; with two choices, all but the worst;
        with policy work, of the best few those that cost this request least."""
        eligible = [n for n in self.serving(model) if self.score(n) > 0]
        untried = [n for n in eligible if n.id not in tried]
        if self.tuning.policy == "work" and untried:
            few = untried[: self.constants.top_k]
            costs = {n.id: cost(n.terms, n.work.fresh(size), output) for n in few}
            least = min(costs.values())
            return {n for n, cost in costs.items() if math.isclose(cost, least, rel_tol=1e-12)}
        if self.tuning.policy in TWO_CHOICES and len(eligible) > len(tried) + 1:
            return {
                n.id
                for n in untried
                if any(o is not n and (o.id in tried or self.score(o) <= self.score(n))
                       for o in eligible)
            }  # fmt: skip
        best = max((self.score(n) for n in untried), default=0.0)
        return {n.id for n in untried if self.score(n) == best}

    def _trial(self, model: str, lease_id: str, tried: Collection[str], now: int) -> Node | None:
        """Look at due nodes, longest waiting first; the one that gets its trial."""
        due = [n for n in self.nodes.values() if model in n.models and n.due_ms is not None]
        due = [n for n in due if (n.due_ms or 0) <= now]
        for node in sorted(due, key=lambda n: (n.due_ms, n.id))[:LOOKED_AT]:
            if node.circuit == "closed":
                node.look_again(node.cooling_ms if node.cooling_ms > now else None)
                self._rate(node, now)
            elif (
                node.state != "active" or node.health != "ok" or self.load(node.id) >= node.capacity
            ):
                node.look_again(now + self.tuning.open_ms)
            elif node.id not in tried:
                node.circuit, node.trial = "half_open", lease_id
                node.look_again(now + self.tuning.trial_ms)
                self._rate(node, now)
                return node
        return None

    def _last_resort(self, model: str, tried: Collection[str], now: int) -> set[str]:
        """Nodes that only probes speak against, of those that one call looks at."""
        return {
            n.id
            for n in self.serving(model)[:LOOKED_AT]
            if n.id not in tried and n.health == "down" and self.load(n.id) < n.capacity
            and idle_score(n, self.tuning, now, whatever_probes_say=True) > 0
        }  # fmt: skip

    def _refusal(self, model: str, tried: Collection[str], now: int) -> tuple[str, int]:
        serving = self.serving(model)[:LOOKED_AT]
        untried = [n for n in serving if n.id not in tried]
        if not serving:
            return "unknown", 0
        if not untried:
            return "spent", 0
        if any(
            n.health == "new" and n.misses < 1 and self.load(n.id) < n.capacity
            and idle_score(n, self.tuning, now, whatever_probes_say=True) > 0
            for n in untried
        ):  # fmt: skip
            return "new", 20
        if any(idle_score(n, self.tuning, now) > 0 for n in untried):
            return "full", 1000
        due = [n.due_ms for n in self.nodes.values() if model in n.models and n.due_ms is not None]
        return "down", max(1, min(due) - now) if due else 1000

    def acquire(
        self,
        lease_id: str,
        model: str,
        replica: str,
        *,
        ttl_ms: int,
        size: int,
        output: int = 100,
        tried: Collection[str],
        now: int,
        witness: str,
    ) -> tuple[str, ...]:
        """The reply, as text. ``witness`` is the node that the script chose: among those that
        chance may choose it is taken, any other fails here."""
        self.replicas.setdefault(replica, now + ttl_ms)
        held = self.leases.setdefault(replica, {})
        if lease_id in held:
            return ("leased", str(held[lease_id]), "0", "0")
        node, before, trial = self._trial(model, lease_id, tried, now), 0.0, True
        if node is None:
            allowed, trial = self.acceptable(model, tried, size, output), False
            allowed = allowed or self._last_resort(model, tried, now)
            if not allowed:
                reason, retry_ms = self._refusal(model, tried, now)
                return (reason, str(retry_ms))
            assert witness in allowed, f"{witness} was chosen, right are {allowed}"
            node = self.nodes[witness]
            before = self.score(node)
        lease = Lease(node.id, node.epoch, now, size)
        if self.tuning.policy == "work":
            lease.fresh = node.work.fresh(size)
            lease.held = size + output
            lease.ahead = node.work.leased(now, lease.fresh, lease.held)
        held[lease_id] = lease
        self._turn(node)
        self._stand(node, now)
        return ("leased", str(held[lease_id]), repr(before), "1" if trial else "0")

    def _turn(self, node: Node) -> None:
        """Round robin: a node that got its turn goes behind all others."""
        if self.tuning.policy == "round_robin" and node.idle > 0:
            self.turn += 1
            node.picked = self.turn
            node.idle = 1 / (1 + self.turn)

    def move(
        self,
        lease_id: str,
        model: str,
        replica: str,
        *,
        ttl_ms: int,
        size: int,
        output: int = 100,
        tried: Collection[str],
        old: str,
        outcome: str,
        cool_ms: int,
        chance: float,
        now: int,
        witness: str,
    ) -> tuple[str, ...]:
        """End ``old``, then what acquire does."""
        if lease_id not in self.leases.get(replica, {}):
            self._end(replica, old, outcome, cool_ms, chance, now)
        return self.acquire(
            lease_id, model, replica, ttl_ms=ttl_ms, size=size, output=output, tried=tried,
            now=now, witness=witness,
        )  # fmt: skip

    # first_token, release

    def first_token(self, lease_id: str, replica: str, *, ttft_us: int, now: int) -> int:
        """1 when a sample was taken."""
        lease = self.leases.get(replica, {}).get(lease_id)
        node = self.nodes.get(lease.node) if lease else None
        if not lease or not node or node.removed or node.epoch != lease.epoch or lease.heard:
            return 0
        lease.heard = True
        last_ms = node.last_ms
        if last_ms < now - self.tuning.max_age_ms:
            node.window.clear()
        node.window.insert(0, Sample(ttft_us, lease.size, now))
        for _ in range(LEAVING):
            oldest = node.window[-1]
            too_old = oldest.at_ms < now - self.tuning.max_age_ms
            if too_old or len(node.window) > self.tuning.window:
                node.window.pop()
        calm = math.exp(-(now - last_ms) / 10_000)
        peak = ttft_us > node.ewma_us
        ewma = ttft_us if peak else node.ewma_us * calm + ttft_us * (1 - calm)
        node.ewma_us = math.floor(ewma + 0.5)
        mean = sum(sample.ttft_us for sample in node.window) / len(node.window)
        best = node.best_us
        if best == 0 or mean < best:
            node.best_us = float(f"{mean:.0f}")
        else:
            gone = 1 - math.exp((last_ms - now) / BEST_MS)
            node.best_us = float(f"{best + (ttft_us - best) * gone:.0f}")
        node.last_ms, node.waiting_until_ms = now, 0
        if lease.ahead is not None:
            node.work.first_token(now, ttft_us / 1000, lease.fresh, lease.ahead)
        else:
            node.work.answered(now, lease.fresh)
        if node.circuit == "half_open" and node.trial == lease_id:
            self._let_in(node, now)
        self._rate(node, now)
        return 1

    def release(
        self,
        lease_id: str,
        replica: str,
        *,
        outcome: str,
        cool_ms: int,
        chance: float,
        tokens: int,
        decode_us: int,
        now: int,
    ) -> int:
        """1 when this call ended the lease."""
        lease = self.leases.get(replica, {}).get(lease_id)
        if lease is None:
            return 0
        self._end(replica, lease_id, outcome, cool_ms, chance, now, tokens, decode_us)
        node = self.nodes.get(lease.node)
        learns = tokens and self.tuning.policy != "work"
        if learns and node and not node.removed and node.epoch == lease.epoch:
            per_token = decode_us / tokens
            old = node.tpot_us
            mean = per_token if old is None else old + (per_token - old) / 20
            node.tpot_us = float(f"{mean:.1f}")
        return 1

    def _end(
        self,
        replica: str,
        lease_id: str,
        outcome: str,
        cool_ms: int,
        chance: float,
        now: int,
        tokens: int = 0,
        decode_us: int = 0,
    ) -> bool:
        lease = self.leases.get(replica, {}).pop(lease_id, None)
        if lease is None:
            return False
        node = self.nodes.get(lease.node)
        if node is None:
            return True
        if node.removed:
            if self.load(node.id) == 0:
                del self.nodes[node.id]
            return True
        if node.epoch == lease.epoch:
            node.work.ended(
                now, Outcome(outcome), heard=lease.heard, fresh=lease.fresh, held=lease.held,
                stay_ms=max(0, now - lease.start_ms),
                tokens=tokens + 1 if tokens else 0, decode_ms=decode_us / 1000,
            )  # fmt: skip
        self._stand(node, now)
        unremarkable = outcome == "ok" and node.bad == 0
        if node.epoch == lease.epoch and not unremarkable:
            self._learn(node, lease_id, lease, outcome, cool_ms, chance, now)
            self._rate(node, now)
        return True

    def _learn(
        self,
        node: Node,
        lease_id: str,
        lease: Lease,
        outcome: str,
        cool_ms: int,
        chance: float,
        now: int,
    ) -> None:
        """What the ending says of the circuit."""
        on_trial = node.circuit == "half_open" and node.trial == lease_id
        if not on_trial and (node.circuit != "closed" or lease.start_ms < node.tripped_ms):
            return  # a late result
        if outcome == "ok":
            self._good(node, now, trial=on_trial)
        elif outcome == "failed":
            bad, seen = node.bad * LESS + 1, node.seen * LESS + 1
            node.bad, node.seen = round(bad, 4), round(seen, 4)
            node.streak += not on_trial
            often = seen >= self.tuning.min_samples and bad / seen > self.tuning.failure_rate
            if on_trial:
                self._trip(node, node.cause, chance, now)
            elif node.streak >= self.tuning.threshold:
                self._trip(node, "streak", chance, now)
            elif often:
                self._trip(node, "rate", chance, now)
        elif outcome == "saturated":
            node.cooling_ms = max(node.cooling_ms, now + cool_ms)
            if on_trial:
                node.circuit, node.trial = "open", ""
            node.look_again(node.cooling_ms)
        elif on_trial:  # rejected, abandoned: the place of the trial is free again
            node.circuit, node.trial = "open", ""
            node.look_again(now)

    def _good(self, node: Node, now: int, *, trial: bool) -> None:
        """A good answer: closes after a trial, ends the streak, lets failures fade."""
        if node.cause == "streak" and (trial or node.streak >= self.tuning.threshold):
            node.bad = 0.0  # the first whole answer since the circuit was open
        if trial:
            self._let_in(node, now)
        node.streak = 0
        faded = node.bad * LESS < FORGOTTEN
        node.bad = 0.0 if faded else round(node.bad * LESS, 4)
        node.seen = 0.0 if faded else round(node.seen * LESS + 1, 4)
        node.opens = 0 if faded else node.opens

    def _let_in(self, node: Node, now: int) -> None:
        """A trial answers: closed, though its streak stands until an answer was whole."""
        node.circuit, node.trial, node.since_ms = "closed", "", now
        node.look_again(node.cooling_ms if node.cooling_ms > now else None)

    def _trip(self, node: Node, cause: str, chance: float, now: int) -> None:
        """Open: 2 s, then doubled each time up to 60 s, and up to a fifth more by chance."""
        ms = min(self.tuning.open_ms * 2**node.opens, self.tuning.open_max_ms)
        more = 1 + 0.2 * chance if node.opens else 1.0
        node.circuit, node.cause, node.trial, node.tripped_ms = "open", cause, "", now
        node.opens += 1
        node.look_again(max(node.cooling_ms, now + math.floor(ms * more)))

    # renew, reassert, reap

    def renew(self, replica: str, *, ttl_ms: int, now: int) -> tuple[int, int]:
        """(leases known, whether the replica was)."""
        known = replica in self.replicas
        self.replicas[replica] = now + ttl_ms
        return len(self.leases.get(replica, {})), int(known)

    def reassert(
        self, replica: str, pairs: Iterable[tuple[str, str]], *, ttl_ms: int, now: int
    ) -> int:
        """How many leases were put back."""
        self.replicas.setdefault(replica, now + ttl_ms)
        held = self.leases.setdefault(replica, {})
        back = 0
        for lease_id, record in pairs:
            node = self.nodes.get(Lease.parse(record).node)
            if node is not None and not node.removed and lease_id not in held:
                held[lease_id] = lease = Lease.parse(record)
                if lease.heard:
                    node.work.held += lease.held
                else:
                    node.work.leased(now, lease.fresh, lease.held)
                self._turn(node)
                self._stand(node, now)
                back += 1
        return back

    def reap(self, *, limit: int, now: int, witness: Collection[str]) -> tuple[int, str, int]:
        """(ended, replica, more). ``witness``: which leases the script ended, any ``limit``."""
        dead = sorted((at, r) for r, at in self.replicas.items() if at <= now)
        if not dead:
            return 0, "", 0
        replica = dead[0][1]
        held = self.leases.get(replica, {})
        assert len(witness) == min(limit, len(held)), (witness, held)
        for lease_id in witness:
            assert self._end(replica, lease_id, "abandoned", 0, 0, now), lease_id
        if not self.leases.get(replica):
            del self.replicas[replica]
        more = any(at <= now for at in self.replicas.values())
        return len(witness), replica, int(more)

    # register, unregister

    def register(
        self,
        node_id: str,
        models: tuple[str, ...],
        fields: dict[str, str],
        *,
        now: int,
        health: str = "ok",
    ) -> tuple[str, str]:
        """('added' | 'changed' | 'same', epoch)."""
        node = self.nodes.get(node_id)
        if node is None or node.removed:
            epoch = max(now, node.epoch + 1 if node else 0)
            node = Node(
                node_id, models, epoch, dict(fields), health=health,
                since_ms=now, probe_ms=now, sweep_ms=now,
            )  # fmt: skip
            self.nodes[node_id] = node
            node.work = Work(self.constants, weight=node.weight, since_ms=now)
            said = "added"
        else:
            new = {"state": "active", **node.set_by_hand, **fields}
            old = {"state": "active", **node.set_by_hand}
            said = "same" if (new, models) == (old, node.models) else "changed"
            node.set_by_hand.update(fields)
            if models != node.models:
                again = node.due_ms
                node.models = models
                waits = node.circuit != "closed" or node.cooling_ms > now
                kept = max(now, node.cooling_ms) if again is None else again
                node.look_again(kept if waits else None)
        self._prior(node)
        self._limits(node, now)
        self._rate(node, now)
        return said, str(node.epoch)

    def unregister(self, node_id: str, *, now: int) -> int:
        """Leases still running on it, or -1."""
        node = self.nodes.get(node_id)
        if node is None:
            return -1
        node.removed, node.due_ms = True, None
        node.idle, node.rated_ms = 0.0, now
        running = self.load(node_id)
        if running == 0:
            del self.nodes[node_id]
        return running

    # observe, claim, sweep

    def observe(
        self,
        node_id: str,
        epoch: str,
        verdict: str,
        *,
        waiting_ms: int,
        valid_ms: int,
        now: int,
    ) -> tuple[str, str]:
        """(health before, health now)."""
        node = self.nodes.get(node_id)
        if node is None or node.removed or str(node.epoch) != epoch:
            return "", ""
        before = node.health
        if verdict == "waiting":
            node.waiting_ms, node.waiting_until_ms = waiting_ms, now + valid_ms
        elif verdict == "miss":
            node.misses += 1
            if node.misses >= self.tuning.unhealthy_after:
                node.health = {"ok": "down", "loading": "new"}.get(before, before)
        else:
            node.misses = -1 if verdict == "alive" else 0  # the next miss is excused
            node.health = {"ready": "ok", "loading": "loading", "alive": before}[verdict]
            if before != "ok" == node.health:
                node.since_ms = now
                open_ms = min(self.tuning.open_ms * 2 ** (node.opens - 1), self.tuning.open_max_ms)
                if node.circuit == "open" and now >= node.tripped_ms + open_ms:
                    node.look_again(max(now, node.cooling_ms))
        self._rate(node, now)
        return before, node.health

    def _due(self, clock: str, limit: int, now: int) -> list[Node]:
        """Registered nodes whose ``clock`` has come, longest waiting first."""
        due = [n for n in self.nodes.values() if not n.removed and getattr(n, clock) <= now]
        return sorted(due, key=lambda n: (getattr(n, clock), n.id))[:limit]

    def claim(self, *, interval_ms: int, limit: int, now: int) -> list[str]:
        """The ids of the nodes to probe."""
        due = self._due("probe_ms", limit, now)
        for node in due:
            node.probe_ms = now + interval_ms
        return [node.id for node in due]

    def sweep(self, *, interval_ms: int, limit: int, now: int) -> tuple[int, int]:
        """(nodes swept, more)."""
        due = self._due("sweep_ms", limit, now)
        for node in due:
            node.sweep_ms = now + interval_ms
            if now - node.last_ms > self.tuning.max_age_ms:
                node.window.clear()
            self._prior(node)
            self._limits(node, now)
            self._rate(node, now)
            if self.tuning.policy == "work":
                node.tpot_us = float(f"{node.work.tpot_ms(now) * 1000:.1f}")
        return len(due), int(bool(self._due("sweep_ms", 1, now)))
