"""The reference: a router that knows what no gateway can know.

It reads the true state of every engine, true prompt sizes and true answer lengths, runs each engine
ahead as if the request were there, and takes the node with the earliest first token. It is myopic:
who comes later it does not know, so it is no lower bound, but nobody who only looks at what is
there can do much better for this request.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from app.lab.simulate.router import Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.lab.simulate.workload import Call


class Clairvoyant(Router):
    """Least exact time to first token."""

    def choose(self, now_ms: float, call: Call, nodes: Sequence[int]) -> int:
        best, least = nodes[0], inf
        for node in nodes:
            ttft_ms = self.fleet.engines[node].ttft_ms(call, call.hits.get(node, 0), now_ms, least)
            if ttft_ms < least:
                best, least = node, ttft_ms
        return best
