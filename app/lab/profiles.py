"""How fast a fake engine is: one frozen `Profile` per kind of machine.

The cost of one step of continuous batching, in milliseconds, is

    step_base_ms + prefill_tokens / rate + decoding * decode_ms_per_seq + context * kv_ms_per_token

The numbers are a model, nothing was measured on hardware. Given are slots, KV sizes and the idle
time to first token (TTFT) of a 512-token prompt. `step_base_ms`
and `kv_ms_per_token` are reading an 8B model's weights and its KV cache (128 KiB a token) once at
the memory bandwidth of the machine; the prefill rate is what is then left of the idle TTFT.
`decode_ms_per_seq` was solved for the saturated throughput of the bimodal mix (half: 200 tokens in,
1-16 out; half: lognormal 600 in up to 6,000, lognormal 150 out up to 800): 12.5, 3.94 and 0.354
requests/s, i.e. 35 : 11 : 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

OUTPUT_MEDIAN = 150
OUTPUT_SIGMA = 0.6
OUTPUT_CAP = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The speed and size of one engine. Times are milliseconds, sizes are tokens."""

    name: str
    prefill_tokens_per_s: float
    """Prompt tokens processed per second of step time."""
    slots: int
    """Sequences that run at once (vLLM's max_num_seqs)."""
    kv_tokens: int
    """Tokens that the KV cache holds over all running sequences."""
    step_base_ms: float
    """Cost of a step whatever its batch."""
    decode_ms_per_seq: float
    """Added to a step by each decoding sequence."""
    kv_ms_per_token: float = 0.0
    """Added to a step by each token of context of the decoding sequences."""
    chunk_tokens: int = 2048
    """Prompt tokens that one step prefills at most."""
    weight_k: float = 1.0
    """K of the classic score: the operator's guess of relative speed."""

    def step_ms(self, prefill_tokens: int, decoding: int, context_tokens: int) -> float:
        """Duration in ms of a step with this batch."""
        return (
            self.step_base_ms
            + prefill_tokens * 1000.0 / self.prefill_tokens_per_s
            + decoding * self.decode_ms_per_seq
            + context_tokens * self.kv_ms_per_token
        )


def draw_output_tokens(chance: Random) -> int:
    """Length in tokens of an answer that nobody limited: lognormal, 1 to `OUTPUT_CAP`."""
    drawn = round(chance.lognormvariate(math.log(OUTPUT_MEDIAN), OUTPUT_SIGMA))
    return min(OUTPUT_CAP, max(1, drawn))


A100 = Profile(
    name="a100",
    prefill_tokens_per_s=20_000,
    slots=40,
    kv_tokens=120_000,
    step_base_ms=9.4,
    decode_ms_per_seq=0.27,
    kv_ms_per_token=0.00009,
    weight_k=10,
)
RTX4090 = Profile(
    name="rtx4090",
    prefill_tokens_per_s=8_000,
    slots=16,
    kv_tokens=16_000,
    step_base_ms=16.0,
    decode_ms_per_seq=0.83,
    kv_ms_per_token=0.00013,
    weight_k=4,
)
XEON = Profile(
    name="xeon",
    prefill_tokens_per_s=2_000,
    slots=4,
    kv_tokens=200_000,
    step_base_ms=44.0,
    decode_ms_per_seq=15.4,
    kv_ms_per_token=0.00065,
    weight_k=1,
)
IDEAL = Profile(
    name="ideal",
    prefill_tokens_per_s=math.inf,
    slots=10_000,
    kv_tokens=1_000_000_000,
    step_base_ms=0.0,
    decode_ms_per_seq=0.0,
    chunk_tokens=1_000_000_000,
    weight_k=10,
)
"""Answers at once and has room for everybody: for tests of correctness, not of load."""

PROFILES = {profile.name: profile for profile in (A100, RTX4090, XEON, IDEAL)}
