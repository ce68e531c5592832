"""Scenarios by name: a fleet, a load, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from app.cluster.score import Constants
from app.lab.profiles import A100, RTX4090, XEON
from app.lab.simulate.fleet import EQUAL, TRIO, TWELVE, Spec, several
from app.lab.simulate.workload import (
    ClosedLoop,
    Drawn,
    Mix,
    OpenLoop,
    Sessions,
    Source,
    bimodal,
    chat,
    conversation,
    total_per_s,
)

FAULT_MS = 60_000.0  # when things go wrong: the policies have settled by then


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls a node from `at_ms` for `for_ms`.

    ``kind``: pause (no step ends), slow (steps take `value` times as long), fail (a share `value`
    of its requests gets an error at once), join (absent before, pauses for `for_ms` to warm up).
    """

    kind: str
    node: int
    for_ms: float
    value: float = 0.0
    at_ms: float = FAULT_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One experiment, but for policy and seed."""

    name: str
    about: str
    specs: tuple[Spec, ...]
    load: float = 0.8
    """Share of the summed saturated throughput of the nodes that stand there."""
    requests: int = 20_000
    mix: Mix = bimodal
    clients: int = 0
    """A closed loop of so many, instead of Poisson arrivals at `load`."""
    think_ms: float = 17.0
    sessions: bool = False
    """Conversations of several turns, at `load` if nothing of them were cached."""
    replicas: int = 16
    sharing: str = "global"
    """global, local, or the age in ms up to which replicas use a copy of the shared state."""
    faults: tuple[Fault, ...] = ()
    warm_up: float = 0.1
    """Share of the requests, the first, that no figure counts."""
    constants: Constants = field(default_factory=Constants)

    def source(self, seed: int) -> Source:
        """The requests, the same for every policy."""
        profiles = [spec.profile for spec in self.specs]
        if self.sessions:
            per_s = self.load * total_per_s(profiles, conversation)
            return Sessions(self.requests, per_s, self.replicas, seed)
        drawn = Drawn(self.mix, self.replicas, seed)
        if self.clients:
            return ClosedLoop(drawn, self.requests, self.clients, self.think_ms)
        return OpenLoop(drawn, self.requests, self.load * total_per_s(profiles, self.mix))


def _weighted(specs: tuple[Spec, ...], *weights: float) -> tuple[Spec, ...]:
    return tuple(replace(spec, weight=w) for spec, w in zip(specs, weights, strict=True))


_BATCHING = replace(XEON, slots=16, decode_ms_per_seq=2.4)
_FIFTH = replace(
    A100,
    prefill_tokens_per_s=A100.prefill_tokens_per_s / 5,
    step_base_ms=A100.step_base_ms * 5,
    decode_ms_per_seq=A100.decode_ms_per_seq * 5,
    kv_ms_per_token=A100.kv_ms_per_token * 5,
)

_ALL = (
    Scenario(name="trio", about="A100, RTX 4090 and a CPU node", specs=TRIO),
    Scenario(name="fleet", about="3 A100, 5 RTX 4090, 4 CPU nodes, 16 replicas", specs=TWELVE),
    Scenario(name="equal", about="8 A100", specs=EQUAL),
    Scenario(
        name="closed",
        about="20 clients, 17 ms think time, 512 tokens in, 68 out on average",
        specs=several((A100, 1), (RTX4090, 1), (_BATCHING, 1)),
        mix=chat,
        clients=20,
        replicas=1,
    ),
    Scenario(
        name="stall",
        about="the A100 of the trio does nothing for 20 s",
        specs=TRIO, load=0.3, requests=1500, warm_up=0.15,
        faults=(Fault("pause", 0, 20_000),),
    ),
    Scenario(
        name="slow",
        about="the A100 of the trio runs at a fifth of its speed for good",
        specs=(replace(TRIO[0], profile=_FIFTH), *TRIO[1:]), load=0.74, requests=5000,
    ),
    Scenario(
        name="hang",
        about="one A100 of the twelve takes 50 times as long for 20 s",
        specs=TWELVE, load=0.7, requests=8000, faults=(Fault("slow", 0, 20_000, 50.0),),
    ),
    Scenario(
        name="flaky",
        about="one A100 of the twelve fails 30 % of its requests at once",
        specs=TWELVE, load=0.6, requests=8000, faults=(Fault("fail", 0, 1e12, 0.3, 0.0),),
    ),
    Scenario(
        name="wrong_k",
        about="the trio with weights 2.5, 4 and 4 instead of 10, 4 and 1",
        specs=_weighted(TRIO, 2.5, 4, 4), load=0.5,
    ),
    Scenario(
        name="join",
        about="one A100 of the twelve joins and is warm after 10 s",
        specs=TWELVE, load=0.6, requests=8000, faults=(Fault("join", 0, 10_000),),
    ),
    Scenario(
        name="prefix",
        about="8 A100, conversations of several turns",
        specs=EQUAL, load=0.7, requests=12_000, sessions=True, warm_up=0.3,
    ),
    Scenario(
        name="prefix_fleet",
        about="the twelve, conversations of several turns",
        specs=TWELVE, load=0.7, requests=12_000, sessions=True, warm_up=0.3,
    ),
)  # fmt: skip
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
