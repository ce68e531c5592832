"""Faults on demand: what a fake node does wrong, to which requests, and how often."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from random import Random

MODES: Final = frozenset(
    {
        "ok",
        "refuse",  # reset the connection as soon as the request's head is here
        "hang",  # read the request, never answer
        "slow",  # every step of the engine takes `factor` times as long
        "status",  # answer `status`, with `retry_after_s`, after `delay_ms`
        "drop_before_headers",  # read the whole request, then reset
        "drop_mid_stream",  # reset after `after_tokens` tokens
        "stall",  # silence after `after_tokens` tokens, the connection stays open
        "error_event",  # an error event after `after_tokens` tokens, then close
        "loading",  # llama.cpp while it loads: /health and POSTs answer 503
    }
)
MID_ANSWER: Final = frozenset({"drop_mid_stream", "stall", "error_event"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One set of faults. Without `paths` it strikes POSTs under /v1/ (`refuse`: every path)."""

    mode: str = "ok"
    probability: float = 1.0
    """Share of the affected requests that it strikes (`slow`: always)."""
    paths: tuple[str, ...] | None = None
    """Path prefixes that it strikes, with any method."""
    factor: float = 5.0
    status: int = 500
    retry_after_s: float | None = None
    delay_ms: float = 0.0
    after_tokens: int = 0
    health_fails: bool = False
    """GET /health answers 503, whatever the mode."""
    health_delay_ms: float = 0.0

    def __post_init__(self) -> None:
        checks = {
            "mode": self.mode in MODES,
            "probability": 0 <= self.probability <= 1,
            "factor": self.factor > 0,
            "status": 400 <= self.status <= 599,
            "retry_after_s": self.retry_after_s is None or self.retry_after_s >= 0,
            "delay_ms": self.delay_ms >= 0,
            "after_tokens": self.after_tokens >= 0,
            "health_delay_ms": self.health_delay_ms >= 0,
        }
        wrong = [name for name, good in checks.items() if not good]
        if wrong:
            raise ValueError(f"fault field out of range: {', '.join(wrong)}")

    @property
    def slowness(self) -> float:
        """Factor on the time of an engine step."""
        return self.factor if self.mode == "slow" else 1.0

    def strikes(self, method: str, path: str, chance: Random) -> bool:
        """Decide whether this request is hit."""
        if self.mode in {"ok", "slow"}:
            return False
        if self.paths is not None:
            if not path.startswith(self.paths):
                return False
        elif self.mode != "refuse" and not (method == "POST" and path.startswith("/v1/")):
            return False
        return self.probability >= 1 or chance.random() < self.probability

    def to_json(self) -> dict[str, Any]:
        """Give every field as plain data."""
        return asdict(self)


_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "mode": (str,),
    "probability": (int, float),
    "paths": (list, type(None)),
    "factor": (int, float),
    "status": (int,),
    "retry_after_s": (int, float, type(None)),
    "delay_ms": (int, float),
    "after_tokens": (int,),
    "health_fails": (bool,),
    "health_delay_ms": (int, float),
}


def parse_fault(raw: object) -> Fault:
    """Read a fault from decoded JSON; ValueError names what is wrong. `{}` is no fault."""
    if not isinstance(raw, dict):
        raise ValueError("a fault is a JSON object")  # noqa: TRY004 - a wrong value, to the caller
    known = {field.name for field in fields(Fault)}
    for name, value in raw.items():
        if name not in known:
            raise ValueError(f"unknown fault field: {name}")
        kinds = _KINDS[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"fault field of the wrong type: {name}")
    paths = raw.get("paths")
    if paths is None:
        return Fault(**raw)
    if not all(isinstance(path, str) for path in paths):
        raise ValueError("fault field of the wrong type: paths")
    return Fault(**{**raw, "paths": tuple(paths)})
