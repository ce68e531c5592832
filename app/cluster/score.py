"""The shipped policies as plain arithmetic: no I/O, no clock, no chance.

Every policy keeps one `Profile` of each node and moves it with three O(1) steps, `leased`,
`first_token` and `ended`. `score` is the node's live score, highest wins, without knowing the
request; policy `work` also knows what one request would `cost` there. The degraded mode and the
simulator run this code, and the Lua scripts are checked against it: the order of every operation
is part of the contract, so that doubles come out the same, bit by bit.

Times are ms, on any clock (one that steps back makes samples younger, never a negative age);
sizes are tokens. Circuits, health and cool-downs are not here: they say who may be chosen at all.
"""

# ruff: noqa: ARG002 - one interface for all policies; few look at all of it

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from math import exp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.config import Scoring
    from app.model import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The numbers of the policies; times in ms, sizes in tokens."""

    # work: cost of a request on a node
    overhead_tokens: float = 128
    """What a first token costs beside its prompt, in tokens of prefill: a step and a half."""
    lease_tokens: float = 20
    """What a lease in flight costs whoever comes after it: its share of every step."""
    stall_share: float = 0.1
    """How much the stall counts that a prefill imposes on answers that are being decoded."""
    decode_share: float = 0.05
    """How much this request's own decoding time counts (lambda)."""
    error_price_ms: float = 1000
    """What one failed attempt costs the client: finding out and going elsewhere."""
    min_prompt_tokens: float = 16
    """A prompt wholly in the cache still costs as much."""
    mean_prompt_tokens: float = 512
    """Prompt of a request that nothing is known of."""
    mean_output_tokens: float = 100
    """Answer of a request that nothing is known of."""
    top_k: int = 4
    """Nodes, best by score, whose cost for the very request is worked out."""

    # work: what is learned of a node
    ttft_prior_ms: float = 100
    """Time to first token of an idle node of middle weight, before its first sample."""
    untried_times: float = 10
    """A node without a sample, for which nobody waits, is thought so many times as fast: it must be
    tried to be known, and one request at a time is enough."""
    tpot_prior_ms: float = 30
    """ms per token decoded, before the first sample."""
    keep: float = 0.98
    """Weight that older samples keep when one more comes: the last fifty count."""
    memory_ms: float = 5000
    """Weight of samples falls by e in this time (tw)."""
    recover_ms: float = 5000
    """A node that nobody waits for comes to be thought as good as its best in this time (tau)."""
    best_memory_ms: float = 300_000
    """The best that a node has been is forgotten in this time."""
    error_keep: float = 0.95
    """Weight that older outcomes keep when one more comes: the last twenty count."""
    error_memory_ms: float = 30_000
    """Failures are forgotten in this time."""
    hung_ms: float = 1000
    """While requests wait, a node may give no first token for so long, and ..."""
    hung_times: float = 3
    """... for so many times what a mean prompt takes there; after that, whoever comes is predicted
    to wait as long again."""
    least_ttft_ms: float = 1
    """No sample counts as shorter: a rate must stay finite."""

    # ttft
    alpha: float = 1.0
    baseline_ms: float = 50
    floor_ms: float = 10
    window: int = 50
    sample_max_age_ms: float = 300_000
    idle_after_ms: float = 10_000

    @classmethod
    def of(cls, scoring: Scoring) -> Constants:
        """The numbers of the settings."""
        return cls(
            overhead_tokens=scoring.overhead_tokens,
            lease_tokens=scoring.lease_tokens,
            stall_share=scoring.stall_share,
            decode_share=scoring.decode_share,
            error_price_ms=scoring.error_price_ms,
            min_prompt_tokens=scoring.min_prompt_tokens,
            mean_prompt_tokens=scoring.mean_prompt_tokens,
            mean_output_tokens=scoring.mean_output_tokens,
            top_k=scoring.top_k,
            ttft_prior_ms=scoring.ttft_prior_ms,
            untried_times=scoring.untried_times,
            tpot_prior_ms=scoring.tpot_prior_ms,
            memory_ms=scoring.memory_s * 1000,
            recover_ms=scoring.recover_s * 1000,
            best_memory_ms=scoring.best_memory_s * 1000,
            error_memory_ms=scoring.error_memory_s * 1000,
            hung_ms=scoring.hung_s * 1000,
            hung_times=scoring.hung_times,
            alpha=scoring.alpha,
            baseline_ms=scoring.ttft_baseline_ms,
            floor_ms=scoring.ttft_floor_ms,
            window=scoring.window,
            sample_max_age_ms=scoring.sample_max_age_s * 1000,
            idle_after_ms=scoring.idle_after_s * 1000,
        )

    def alone(self, replicas: int) -> Constants:
        """For a replica that knows its own requests only: its samples are so many times rarer."""
        share = max(1, replicas)
        return replace(self, memory_ms=self.memory_ms * share, recover_ms=self.recover_ms * share)


class Profile:
    """What is known of one node. The base of all policies only counts leases in flight.

    ``weight`` is K of the node, ``median_weight`` that of its pool and ``since_ms`` when the node
    came: both are for the prior of `Work`.
    """

    __slots__ = ("capacity", "constants", "inflight", "median_weight", "since_ms", "weight")

    def __init__(
        self,
        constants: Constants,
        *,
        weight: float = 1.0,
        capacity: int = 64,
        median_weight: float = 1.0,
        since_ms: float = 0.0,
    ) -> None:
        self.constants = constants
        self.weight = weight
        self.capacity = capacity
        self.median_weight = median_weight
        self.since_ms = since_ms
        self.inflight = 0
        self._know_nothing()

    def _know_nothing(self) -> None:
        """Set what a policy learns to what it is before the first event."""

    def leased(self, now_ms: float, fresh: float = 0, held: float = 0) -> float:
        """Count a lease; returns what `first_token` wants back (kept in the lease).

        ``fresh`` prompt tokens are to be prefilled; prompt and answer will come to ``held``.
        """
        self.inflight += 1
        return 0.0

    def first_token(self, now_ms: float, ttft_ms: float, fresh: float, ahead: float) -> None:
        """A lease saw its first token `ttft_ms` after it was taken."""

    def ended(
        self,
        now_ms: float,
        outcome: Outcome,
        *,
        heard: bool,
        fresh: float = 0,
        held: float = 0,
        tokens: int = 0,
        decode_ms: float = 0,
        stay_ms: float = 0,
    ) -> None:
        """A lease ended. `heard`: it had its first token; `decode_ms`: from there to its end;
        `stay_ms`: from the lease to its end."""
        self.inflight = max(0, self.inflight - 1)

    def score(self, now_ms: float) -> float:
        """Live score; 0 at capacity."""
        if self.inflight >= self.capacity:
            return 0.0
        return self.idle_score(now_ms) / (self.inflight + 1)

    def idle_score(self, now_ms: float) -> float:
        """Score without load."""
        return 1.0


COLUMNS = (
    "cost", "per_prompt", "per_output",
    "inflight", "waiting", "queued", "silent_since", "worked", "waited_ms", "sampled_at",
    "best_rate", "decoded", "decoding_ms", "best_tpot", "ended_at", "bad", "seen",
    "cached", "held", "stay_ms", "slots", "kv_tokens", "kv_used",
)  # fmt: skip
"""The row that the scripts keep of a node: its terms, then what `Work` keeps."""


Terms = tuple[float, float, float]
"""The cost of a request on a node is linear in it: ms, ms per fresh prompt token, and ms per token
of the answer. They are worked out at the node's events and each sweep, so that a pick has three
numbers to read of a candidate."""


def cost(terms: Terms, fresh: float, output: float) -> float:
    """Predicted ms that a request costs where the terms are of, from its tokens."""
    return terms[0] + terms[1] * fresh + terms[2] * output


class Work(Profile):
    """Policy `work`: predicted cost of a request in ms, from the tokens that wait ahead of it.

    `rate` is tokens of outstanding work over ms of TTFT: each sample is divided by the work that
    was ahead of that very request, so load counts once. `weight` is only the prior of it.
    """

    __slots__ = (
        "bad",
        "best_rate",
        "best_tpot",
        "cached",
        "decoded",
        "decoding_ms",
        "ended_at",
        "held",
        "kv_tokens",
        "kv_used",
        "queued",
        "sampled_at",
        "seen",
        "silent_since",
        "slots",
        "stay_ms",
        "waited_ms",
        "waiting",
        "worked",
    )

    def _know_nothing(self) -> None:
        c = self.constants
        self.waiting = 0
        """W: leases without a first token."""
        self.queued = 0.0
        """Q: prompt tokens of those."""
        self.silent_since = self.since_ms
        """When somebody began to wait, or the last first token since."""
        self.worked = c.mean_prompt_tokens + c.overhead_tokens
        """RX: tokens of work, faded sum over samples."""
        self.waited_ms = c.ttft_prior_ms * self.median_weight / self.weight
        """RY: ms of TTFT, faded sum over samples."""
        self.sampled_at = self.since_ms
        self.best_rate = 0.0
        """The best that `rate` has been lately; 0 before the first sample."""
        self.decoded = 1.0
        """DX: tokens decoded, faded sum."""
        self.decoding_ms = c.tpot_prior_ms
        """DY: ms spent decoding them."""
        self.best_tpot = c.tpot_prior_ms
        self.ended_at = self.since_ms
        self.bad = 0.0
        """Failures, faded."""
        self.seen = 0.0
        """Outcomes, faded."""
        self.cached = 0.0
        """Prompt tokens that it is thought to hold in its KV cache (the scripts' alone)."""
        self.held = 0.0
        """Tokens of the leases in flight, prompts and expected answers."""
        self.stay_ms = 0.0
        """How long a request stays there, mean over the last twenty."""
        self.slots = 0.0
        """Requests that its engine runs at once; 0 where that is not known."""
        self.kv_tokens = 0.0
        """Tokens that its KV cache has room for; 0 where that is not known."""
        self.kv_used = 0.0
        """Share of the KV cache that the engine says is in use; 0 where it says nothing."""

    def load(self, row: Sequence[float]) -> None:
        """Take over a row of `COLUMNS`."""
        for name, value in zip(COLUMNS[3:], row[3:], strict=True):
            setattr(self, name, value)

    def fresh(self, prompt: float, hit: float = 0) -> float:
        """Tokens of a prompt that this node must prefill, `hit` of them being cached there."""
        return max(self.constants.min_prompt_tokens, prompt - hit)

    def ahead(self, fresh: float) -> float:
        """Work in tokens until a request with `fresh` tokens has its first one."""
        c = self.constants
        return self.queued + fresh + c.overhead_tokens + c.lease_tokens * self.inflight

    def leased(self, now_ms: float, fresh: float = 0, held: float = 0) -> float:
        x = self.ahead(fresh)
        self.held += held
        if self.waiting == 0:
            self.silent_since = now_ms
        self.inflight += 1
        self.waiting += 1
        self.queued += fresh
        return x

    def first_token(self, now_ms: float, ttft_ms: float, fresh: float, ahead: float) -> None:
        c = self.constants
        age = max(0.0, now_ms - self.sampled_at)
        keep = c.keep * exp(-age / c.memory_ms)
        if self.best_rate == 0:
            self.best_rate = self.worked / self.waited_ms  # the prior
        self.worked = self.worked * keep + ahead
        self.waited_ms = self.waited_ms * keep + max(c.least_ttft_ms, ttft_ms)
        rate = self.worked / self.waited_ms
        if rate > self.best_rate:
            self.best_rate = rate
        else:
            self.best_rate += (rate - self.best_rate) * (1 - exp(-age / c.best_memory_ms))
        self.sampled_at = now_ms
        self.answered(now_ms, fresh)

    def answered(self, now_ms: float, fresh: float) -> None:
        """A first token that says nothing of the rate: nobody knows what was ahead of it."""
        self.silent_since = now_ms
        self._answered(fresh)

    def ended(
        self,
        now_ms: float,
        outcome: Outcome,
        *,
        heard: bool,
        fresh: float = 0,
        held: float = 0,
        tokens: int = 0,
        decode_ms: float = 0,
        stay_ms: float = 0,
    ) -> None:
        c = self.constants
        self.inflight = max(0, self.inflight - 1)
        self.held = max(0.0, self.held - held) if self.inflight else 0.0
        if not heard:
            self._answered(fresh)
        if outcome not in ("ok", "failed"):
            return
        self.seen = self.seen * c.error_keep + 1
        self.bad = self.bad * c.error_keep
        if outcome == "failed":
            self.bad += 1
        else:
            self.stay_ms += (stay_ms - self.stay_ms) / 20 if self.stay_ms else stay_ms
            if tokens > 1:
                self._decoded(now_ms, tokens - 1, decode_ms)
        self.ended_at = now_ms

    def _answered(self, fresh: float) -> None:
        self.waiting = max(0, self.waiting - 1)
        self.queued = max(0.0, self.queued - fresh) if self.waiting else 0.0

    def _decoded(self, now_ms: float, tokens: int, decode_ms: float) -> None:
        c = self.constants
        age = max(0.0, now_ms - self.ended_at)
        keep = c.keep * exp(-age / c.memory_ms)
        self.decoded = self.decoded * keep + tokens
        self.decoding_ms = self.decoding_ms * keep + decode_ms
        per_token = self.decoding_ms / self.decoded
        if per_token < self.best_tpot:
            self.best_tpot = per_token
        else:
            self.best_tpot += (per_token - self.best_tpot) * (1 - exp(-age / c.best_memory_ms))

    def rate(self, now_ms: float) -> float:
        """Tokens of work per ms of TTFT; a node that nobody waits for recovers with time."""
        c = self.constants
        rate = self.worked / self.waited_ms
        if self.waiting == 0 and self.best_rate == 0:
            rate = rate * c.untried_times
        elif self.waiting == 0:
            fade = exp(-max(0.0, now_ms - self.sampled_at) / c.recover_ms)
            rate = self.best_rate + (rate - self.best_rate) * fade
        return rate

    def tpot_ms(self, now_ms: float) -> float:
        """ms per token decoded; recovers alike."""
        per_token = self.decoding_ms / self.decoded
        if self.waiting == 0:
            fade = exp(-max(0.0, now_ms - self.ended_at) / self.constants.recover_ms)
            per_token = self.best_tpot + (per_token - self.best_tpot) * fade
        return per_token

    def error_share(self, now_ms: float) -> float:
        """Recent share of failed attempts, in [0, 1): 0 without evidence."""
        fade = exp(-max(0.0, now_ms - self.ended_at) / self.constants.error_memory_ms)
        return self.bad * fade / (self.seen * fade + 2)

    def terms(self, now_ms: float) -> Terms:
        """Predicted ms that a request costs here: wait, stall of others, decoding, retries."""
        c = self.constants
        rate = self.rate(now_ms)
        base, prompt = self.ahead(0) / rate, 1 / rate
        if self.waiting > 0:  # a node that hangs gives no samples
            silence = now_ms - self.silent_since
            usual = (c.mean_prompt_tokens + c.overhead_tokens) / rate
            predicted = base + c.mean_prompt_tokens / rate
            if silence > c.hung_ms and silence > predicted and silence > c.hung_times * usual:
                base, prompt = silence, 0.0
        base += self._admission_ms()
        prompt += c.stall_share * max(0, self.inflight - self.waiting) / rate
        output = c.decode_share * self.tpot_ms(now_ms)
        failing = self.error_share(now_ms)
        tries = 1 / (1 - failing)
        return (base + failing * c.error_price_ms) * tries, prompt * tries, output * tries

    def _admission_ms(self) -> float:
        """How long the engine keeps one more request waiting for a slot and for room in its KV
        cache: as many stays as it is over its limits, where these are known."""
        c, over = self.constants, 0.0
        if self.slots > 0:
            over += max(0.0, self.inflight + 1 - self.slots) / self.slots
        if self.kv_tokens > 0:
            held = max(self.held, self.kv_used * self.kv_tokens)
            held += c.mean_prompt_tokens + c.mean_output_tokens
            over += max(0.0, held - self.kv_tokens) / self.kv_tokens
        return self.stay_ms * over

    def cost(self, now_ms: float, prompt: float, output: float, hit: float = 0) -> float:
        """What the terms of now make of one request, `hit` tokens of its prompt being cached."""
        return cost(self.terms(now_ms), self.fresh(prompt, hit), output)

    def score(self, now_ms: float) -> float:
        if self.inflight >= self.capacity:
            return 0.0
        return self.score_of(self.terms(now_ms))

    def score_of(self, terms: Terms) -> float:
        """Score, of the mean request, that these terms make."""
        c = self.constants
        return 1000 / cost(terms, self.fresh(c.mean_prompt_tokens), c.mean_output_tokens)


class Ttft(Profile):
    """Policy `ttft`, the classic: K / ((C + 1) (alpha T / T_base + 1 - alpha)).

    Slow start and the waits that replicas report are the scripts' alone.
    """

    __slots__ = ("best_us", "sampled_at", "samples", "sum_us")

    def _know_nothing(self) -> None:
        self.samples: deque[tuple[int, float]] = deque()  # (TTFT in µs, when), newest first
        self.sum_us = 0
        self.sampled_at = 0.0
        self.best_us = 0

    def first_token(self, now_ms: float, ttft_ms: float, fresh: float, ahead: float) -> None:
        c = self.constants
        horizon = now_ms - c.sample_max_age_ms
        ttft_us = round(ttft_ms * 1000)
        if self.sampled_at < horizon:
            self.samples.clear()
            self.sum_us = 0
        self.samples.appendleft((ttft_us, now_ms))
        self.sum_us += ttft_us
        for _ in range(8):  # as the script: bounded, what is left over leaves with later calls
            tail_us, taken = self.samples[-1]
            if len(self.samples) <= c.window and taken >= horizon:
                break
            self.samples.pop()
            self.sum_us -= tail_us
        best = self.sum_us / len(self.samples)
        if 0 < self.best_us <= best:
            gone = 1 - exp((self.sampled_at - now_ms) / c.best_memory_ms)
            best = self.best_us + (ttft_us - self.best_us) * gone
        self.best_us = round(best)
        self.sampled_at = now_ms

    def ttft_ms(self, now_ms: float) -> float:
        """T: mean of the window; of an idle node it decays toward its best."""
        c = self.constants
        t, age = c.ttft_prior_ms, now_ms - self.sampled_at
        if self.samples and age <= c.sample_max_age_ms:
            t = self.sum_us / len(self.samples) / 1000
            if age > c.idle_after_ms and self.best_us > 0:
                best = self.best_us / 1000
                t = best + (t - best) * exp(-(age - c.idle_after_ms) / c.idle_after_ms)
        return max(t, c.floor_ms)

    def idle_score(self, now_ms: float) -> float:
        c = self.constants
        return self.weight / (c.alpha * self.ttft_ms(now_ms) / c.baseline_ms + 1 - c.alpha)


class LeastConn(Profile):
    """Fewest leases in flight; also what `p2c` compares of two nodes drawn by chance."""

    __slots__ = ()


class WeightedLeastConn(Profile):
    """Most weight per lease."""

    __slots__ = ()

    def idle_score(self, now_ms: float) -> float:
        return self.weight


class Random(Profile):
    """All the same, whatever the load; ties are broken by chance."""

    __slots__ = ()

    def score(self, now_ms: float) -> float:
        return 0.0 if self.inflight >= self.capacity else 1.0


class RoundRobin(Profile):
    """Whoever was picked longest ago. `picked` is set by the picker: the pool's turn."""

    __slots__ = ("picked",)

    def _know_nothing(self) -> None:
        self.picked = 0

    def score(self, now_ms: float) -> float:
        return 0.0 if self.inflight >= self.capacity else 1 / (1 + self.picked)


class PeakEwma(Profile):
    """Moving average of TTFT that rises at once and falls over ten seconds, times load."""

    __slots__ = ("ewma_us", "sampled_at")

    def _know_nothing(self) -> None:
        self.ewma_us = 0
        self.sampled_at = 0.0

    def first_token(self, now_ms: float, ttft_ms: float, fresh: float, ahead: float) -> None:
        ttft_us = round(ttft_ms * 1000)
        fade = exp(-(now_ms - self.sampled_at) / 10000)
        if ttft_us > self.ewma_us:
            self.ewma_us = ttft_us
        else:
            self.ewma_us = int(self.ewma_us * fade + ttft_us * (1 - fade) + 0.5)
        self.sampled_at = now_ms

    def idle_score(self, now_ms: float) -> float:
        return 1000 / (self.ewma_us / 1000 if self.ewma_us > 0 else self.constants.ttft_prior_ms)


POLICIES: dict[str, type[Profile]] = {
    "work": Work,
    "ttft": Ttft,
    "round_robin": RoundRobin,
    "random": Random,
    "least_conn": LeastConn,
    "weighted_least_conn": WeightedLeastConn,
    "p2c": LeastConn,
    "peak_ewma": PeakEwma,
}
TWO_CHOICES = {"p2c", "peak_ewma"}
