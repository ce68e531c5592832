"""Cached prompt prefixes: what a node really holds, and what the gateway believes it holds.

Both are the same thing, a cache that forgets what was used longest ago: of a session the tokens of
its conversation so far, of a group of sessions their common system prompt. The node's has the room
that running answers leave of its KV cache; the gateway's shadow has a fixed size.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.lab.simulate.workload import Call

Key = tuple[str, int]


class Prefixes:
    """The cached prefixes of one node, sizes in tokens."""

    def __init__(self, system_tokens: int) -> None:
        self._system = system_tokens
        self._tokens: OrderedDict[Key, int] = OrderedDict()
        self._total = 0

    def hit(self, call: Call) -> int:
        """Tokens of the prompt that are here; at least one must always be computed."""
        session, group = ("session", call.client), ("group", call.group)
        held = self._tokens.get(session, 0)
        if held or group in self._tokens:
            held += self._system
        return min(held, call.prompt - 1)

    def add(self, call: Call, tokens: int, room: float) -> None:
        """The conversation is here, `tokens` long; forget what no longer fits in `room`."""
        self._put(("group", call.group), self._system)
        self._put(("session", call.client), tokens - self._system)
        while self._total > room and self._tokens:
            self._total -= self._tokens.popitem(last=False)[1]

    def _put(self, key: Key, tokens: int) -> None:
        self._total += tokens - self._tokens.pop(key, 0)
        self._tokens[key] = tokens
