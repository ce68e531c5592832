"""Every policy that can be simulated, by name: shipped ones, peers, and the reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from app.cluster.score import POLICIES, Constants
from app.lab.simulate import peers
from app.lab.simulate.clairvoyant import Clairvoyant
from app.lab.simulate.router import Router, Shipped, Stale

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.lab.simulate.fleet import Fleet

REFERENCE = "clairvoyant"
EVERYONE = 1_000_000


@dataclass(frozen=True, slots=True)
class Variant:
    """A shipped policy with other constants."""

    policy: str
    changes: dict[str, Any] = field(default_factory=dict)
    sees_prefix: bool = True
    knows_limits: bool = False


VARIANTS = {policy: Variant(policy) for policy in POLICIES} | {
    "ttft_half": Variant("ttft", {"alpha": 0.5}),
    "work_all": Variant("work", {"top_k": EVERYONE}),
    "work_blind": Variant("work", {"top_k": 1}),
    "work_no_prefix": Variant("work", sees_prefix=False),
    "work_limits": Variant("work", knows_limits=True),
}
PEERS: dict[str, Callable[[Fleet, Random, peers.Servers], Router]] = {
    "linkerd": lambda fleet, chance, _: peers.Linkerd(fleet, chance),
    "litellm": lambda fleet, chance, _: peers.LiteLLM(fleet, chance),
    "higress": lambda fleet, chance, _: peers.Higress(fleet, chance),
    "higress_all": lambda fleet, chance, _: peers.Higress(fleet, chance, choices=EVERYONE),
    "prequal": peers.Prequal,
    "prequal_1": lambda fleet, chance, servers: peers.Prequal(fleet, chance, servers, q_rif=1.0),
    "llm_d": lambda fleet, chance, _: peers.LlmD(fleet, chance),
    "sglang": lambda fleet, chance, _: peers.SGLang(fleet, chance),
    "vllm_load_aware": lambda fleet, chance, _: peers.LoadAware(fleet, chance),
}
PREFIX_ONLY = {"sglang", "vllm_load_aware", "work_no_prefix"}  # without a cache like another one
ALL = (*VARIANTS, *PEERS, REFERENCE)


def usual(*, sessions: bool) -> list[str]:
    """The policies worth a row of a scenario."""
    return [policy for policy in ALL if sessions or policy not in PREFIX_ONLY]


def routers(
    policy: str, fleet: Fleet, *, sharing: str, replicas: int, seed: int, constants: Constants
) -> list[Router]:
    """One router per replica, or one that all of them share.

    ``sharing`` is "global" (one state, chosen and counted in one step), "local" (each replica its
    own), or the age in ms that a replica's copy of the shared state may come to.
    """

    def chance(replica: int) -> Random:
        return Random(f"{seed}:{policy}:{replica}")

    count = replicas if sharing == "local" else 1
    if policy == REFERENCE:
        return [Clairvoyant(fleet, chance(0))]
    if policy in PEERS:
        servers = peers.Servers(fleet)
        return [PEERS[policy](fleet, chance(i), servers) for i in range(count)]
    variant = VARIANTS[policy]
    constants = replace(constants, **variant.changes)
    if sharing == "local":
        constants = constants.alone(replicas)
    shipped = [
        Shipped(
            variant.policy,
            fleet,
            chance(i),
            constants,
            sees_prefix=variant.sees_prefix,
            knows_limits=variant.knows_limits,
        )
        for i in range(count)
    ]
    if sharing in {"local", "global"}:
        return list(shipped)
    return [Stale(shipped[0], float(sharing), chance(1 + i)) for i in range(replicas)]
