"""The nodes of a simulated fleet: their engines, and what an operator says of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.errors import ConfigError
from app.lab.profiles import A100, PROFILES, RTX4090, XEON, Profile
from app.lab.simulate.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

UNBOUNDED = 1_000_000  # capacity that an operator did not set: the score alone bounds the load
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Spec:
    """One node as its operator describes it."""

    name: str
    profile: Profile
    weight: float
    capacity: int = UNBOUNDED


def several(*kinds: tuple[Profile, int]) -> tuple[Spec, ...]:
    """So many nodes of each kind; a number behind the name where there is more than one."""
    return tuple(
        Spec(profile.name if count == 1 else f"{profile.name}-{i + 1}", profile, profile.weight_k)
        for profile, count in kinds
        for i in range(count)
    )


TRIO = several((A100, 1), (RTX4090, 1), (XEON, 1))
TWELVE = several((A100, 3), (RTX4090, 5), (XEON, 4))
EQUAL = several((A100, 8))


class Fleet:
    """The nodes of one run. `present` is false for a node that has not joined yet."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = specs
        self.engines = [Engine(spec.profile) for spec in specs]
        self.inflight = [0] * len(specs)
        self.present = [True] * len(specs)
        self.median_weight = median(spec.weight for spec in specs)
        self._bounded = any(spec.capacity < UNBOUNDED for spec in specs)

    def takes(self, node: int) -> bool:
        """Whether a node is there and below its capacity."""
        return self.present[node] and self.inflight[node] < self.specs[node].capacity

    def free(self) -> bool:
        """Whether all of them surely are."""
        return not self._bounded and all(self.present)


class _Node(BaseModel):
    """A line of a fleet file: a known profile, or what a benchmark of the node says."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    count: Count = 1
    weight: Positive | None = None
    capacity: Count | None = None
    profile: str | None = None
    prefill_tokens_per_s: Positive | None = None
    decode_tokens_per_s: Positive | None = None
    decode_tokens_per_s_full: Positive | None = None
    slots: Count | None = None
    kv_tokens: Count | None = None
    chunk_tokens: Count | None = None

    def speed(self) -> Profile:
        """The profile. Raises ``ValueError`` that says what is missing or cannot be."""
        if self.profile is not None and self.profile not in PROFILES:
            raise ValueError(f"profile {self.profile!r} is none of {', '.join(sorted(PROFILES))}")
        if self.profile is None:
            needed = ("prefill_tokens_per_s", "decode_tokens_per_s", "slots", "kv_tokens")
            if missing := [field for field in needed if getattr(self, field) is None]:
                raise ValueError(f"give a profile, or also {', '.join(missing)}")
        base = PROFILES.get(self.profile or "", A100)
        given = ("prefill_tokens_per_s", "slots", "kv_tokens", "chunk_tokens")
        changes: dict[str, Any] = {
            field: value for field in given if (value := getattr(self, field)) is not None
        }
        base = replace(base, name=self.name, **changes)
        return base if self.decode_tokens_per_s is None else self._decoding(base)

    def _decoding(self, base: Profile) -> Profile:
        """Cost of a step from two speeds: one answer alone, and all slots together."""
        assert self.decode_tokens_per_s is not None  # noqa: S101
        alone, slots = self.decode_tokens_per_s, base.slots
        full = self.decode_tokens_per_s_full or alone * slots / 2
        per_seq_ms = 0.0
        if slots > 1:
            per_seq_ms = (1000 * slots / full - 1000 / alone) / (slots - 1)
        base_ms = 1000 / alone - per_seq_ms
        if per_seq_ms < 0 or base_ms < 0:
            raise ValueError(
                f"decode_tokens_per_s_full is the sum over all {slots} slots: "
                f"between {alone:g} and {alone * slots:g}"
            )
        return replace(
            base, step_base_ms=base_ms, decode_ms_per_seq=per_seq_ms, kv_ms_per_token=0.0
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    nodes: Annotated[list[_Node], Field(min_length=1)]


def read(path: Path) -> tuple[Spec, ...]:
    """The fleet that a YAML file describes. Raises ``ConfigError``.

    A node is a known profile, what a benchmark says of it, or the one with some of the other::

        nodes:
        - {name: a100, profile: a100, count: 2, weight: 10, capacity: 64}
        - name: h100
          weight: 20                      # K
          prefill_tokens_per_s: 40000
          decode_tokens_per_s: 150        # one answer alone
          decode_tokens_per_s_full: 4000  # the sum when all slots are taken; default: half speed
          slots: 64                       # sequences at once
          kv_tokens: 300000               # that its KV cache holds
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(exc).split())}") from exc
    try:
        nodes = _File.model_validate(raw).nodes
    except ValidationError as exc:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors())
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems)) from exc
    specs: list[Spec] = []
    for number, node in enumerate(nodes):
        try:
            profile = node.speed()
        except ValueError as exc:
            raise ConfigError(f"{path}: nodes.{number}: {exc}") from exc
        weight = profile.weight_k if node.weight is None else node.weight
        specs += (
            replace(spec, weight=weight, capacity=node.capacity or UNBOUNDED)
            for spec in several((profile, node.count))
        )
    if twice := [name for name, n in Counter(spec.name for spec in specs).items() if n > 1]:
        raise ConfigError(f"{path}: nodes: {twice[0]!r} is given twice; each needs its own name")
    return tuple(specs)
