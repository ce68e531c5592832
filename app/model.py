"""The words of the project as plain values (docs: README, "Words")."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How one attempt on one node ended; the scripts know the same words."""

    OK = "ok"
    FAILED = "failed"  # connect error, reset, 5xx, stall, malformed, truncated, error event
    SATURATED = "saturated"  # 429, or 503 that says busy: cool down, not broken
    REJECTED = "rejected"  # any other 4xx: the client's mistake, passed through
    ABANDONED = "abandoned"  # the client left


@dataclass(frozen=True, slots=True)
class Node:
    """One inference server, as the registry knows it.

    ``url`` is the base without a trailing slash and without ``/v1``. ``epoch`` changes when a
    node is added anew under the same id. ``weight`` is K of the score, ``capacity`` the
    cluster-wide cap on in-flight leases, ``slots`` the requests that its engine runs at once and
    ``kv_tokens`` the size of its KV cache, where the operator says. The last five are the picture
    at the last refresh: health verdict, probes missed in a row, mean TTFT (0: no samples), score
    when idle, and what policy `work` has learned (``score.COLUMNS``; empty for other policies).
    """

    id: str
    url: str
    pool: str = "default"
    weight: float = 1.0
    capacity: int = 64
    models: tuple[str, ...] = ()
    engine: str = "auto"
    api_key_env: str | None = None
    slots: int | None = None
    kv_tokens: int | None = None
    state: str = "active"
    epoch: int = 0
    health: str = "ok"
    misses: int = 0
    ttft_ms: float = 0.0
    base: float = 0.0
    row: tuple[float, ...] = ()


# Made for every request, so not frozen: a frozen dataclass costs four times as much to make.
@dataclass(slots=True)
class Ask:
    """What routing needs to know of a request: model, prompt size, whether tokens are streamed,
    how many are likely to come (0: the answer is not generated token by token), and the blocks of
    the prompt's prefix as the scripts read them (empty where they are not followed)."""

    model: str
    prompt_tokens: int = 0
    stream: bool = False
    output_tokens: int = 0
    blocks: str = ""


@dataclass(slots=True)
class Grant:
    """The answer of ``acquire`` or ``move`` that carries a lease.

    ``record`` is the lease as Redis holds it; ``score`` is the score that won, before this
    lease counted; ``trial`` marks the single half-open request of a node whose circuit is open;
    ``degraded`` says that the replica chose alone, without Redis.
    """

    lease_id: str
    node_id: str
    epoch: int
    record: str
    score: float
    trial: bool
    degraded: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer of ``acquire`` or ``move`` without a lease.

    ``reason``: ``unknown`` (no node serves the model), ``down`` (nodes serve it, none is
    usable), ``new`` (the first probe of one is on its way; never the last word), ``full`` (usable
    nodes are at capacity), ``spent`` (every usable node was tried).
    ``degraded`` says that the replica decided alone, without Redis.
    """

    reason: str
    retry_ms: int
    degraded: bool = False


@dataclass(slots=True)
class Quota:
    """The answer of ``admit``: whether an API key's limits let one request pass, and what is left.

    ``reached`` is the limit that refused it, ``requests`` or ``tokens`` (empty: it was counted),
    ``retry_ms`` the time after which it would pass. Of each limit: what is left, and the ms until
    none is used; both 0 without such a limit.
    """

    reached: str
    retry_ms: int
    requests: int
    requests_ms: int
    tokens: int
    tokens_ms: int
