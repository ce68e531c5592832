"""The prefixes of a prompt as a chain of hashes: who shares the first n, shares the prefix.

A prompt is written down the same way each time: tools, system prompt, then the turns, in the
order in which engines render them, as compact JSON with sorted names. One more turn only adds to
its end. The hash at each edge covers all bytes before it, as the blocks of an engine's prefix
cache do (https://docs.vllm.ai/en/latest/design/prefix_caching/), so equal hashes mean equal
prefixes. Hashes are keyed: they say nothing of a prompt to whoever sees them without the salt.

A block has 512 bytes, about 128 tokens: a turn of a conversation, and less is not worth a detour.
From the ninth on it is an eighth of what stands before it. So a prompt of any size has at most
``MOST_BLOCKS``, and a hit falls short of the truth by an eighth, by a sixteenth in the mean.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from app.gateway.estimate import BYTES_PER_TOKEN, MEDIA_TOKENS

if TYPE_CHECKING:
    from app.config import Settings
    from app.gateway.estimate import Sizes

MOST_BLOCKS: Final = 64
_LEAST_BYTES: Final = 512
_GROWTH: Final = 8


def _edges() -> tuple[int, ...]:
    edges = [_LEAST_BYTES]
    while len(edges) < MOST_BLOCKS:
        edges.append(edges[-1] + max(_LEAST_BYTES, edges[-1] // _GROWTH))
    return tuple(edges)


EDGES: Final = _edges()
"""Where blocks end, in bytes of the prompt as it is written down here."""

# What templates render before anything else, or what keeps caches apart (vLLM's `cache_salt`).
_HEAD = ("cache_salt", "chat_template_kwargs", "reasoning", "reasoning_effort")
_FIRST = ("tools", "functions", "system", "instructions")
_TURNS = ("messages", "input", "prompt")
_TEXT = frozenset(("text", "input_text", "output_text"))
_DEPTH = 4  # of parts within parts, like the image in the result of a tool
_WHOLE_BYTES, _SLICES, _SLICE_BYTES = 16 * 1024, 16, 1024  # of media that are hashed


class Block(NamedTuple):
    """The prefix up to one edge: its hash, 16 hex digits, and about how many tokens it has."""

    hash: str
    tokens: int


class Prefixes:
    """Hashes of one deployment. Replicas that share an index must share the ``salt``."""

    __slots__ = ("_key",)

    def __init__(self, salt: str = "") -> None:
        self._key = blake2b(salt.encode("utf-8", "replace"), digest_size=32).digest()

    def blocks(
        self, model: str, body: Any, owner: str = "", bytes_per_token: float = BYTES_PER_TOKEN
    ) -> list[Block]:
        """The blocks of a request body, which is parsed JSON of any kind; the shortest first.

        For routes that generate: elsewhere ``input`` is no prompt with a continuation. Prompts
        of two ``owner`` share nothing. Empty when there is no prompt, a short one, or one of
        which a part is elsewhere (``previous_response_id``).
        """
        if not isinstance(body, dict) or body.get("previous_response_id") is not None:
            return []
        head = [model, owner, [body.get(name) for name in _HEAD]]
        try:
            seed = orjson.dumps(head, option=orjson.OPT_SORT_KEYS)
            prompt = orjson.dumps(_prompt(body), option=orjson.OPT_SORT_KEYS)
        except TypeError:  # what orjson does not write: too deep, numbers too large
            return []
        chain = blake2b(b"%d %b" % (len(seed), seed), digest_size=8, key=self._key)
        bytes_of, size, begin = memoryview(prompt), len(prompt) - 1, 0  # the end is none of it
        found: list[Block] = []
        for edge in EDGES:
            if edge > size:
                break
            chain.update(bytes_of[begin:edge])
            found.append(Block(chain.copy().hexdigest(), int(edge / bytes_per_token)))
            begin = edge
        return found


class Followed:
    """The pools that follow prefixes, and what their requests bring to the scripts."""

    __slots__ = ("_by_key", "_pools", "_prefixes", "_sizes")

    def __init__(self, settings: Settings, sizes: Sizes) -> None:
        self._sizes = sizes
        follows = settings.scoring.policy == "work"
        self._pools = frozenset(settings.prefix.pools if follows else ())
        self._by_key = settings.prefix.by_key
        self._prefixes = Prefixes(settings.prefix.salt)

    def blocks(self, pool: str, model: str, body: Any, key: str) -> str:
        """``hash tokens hash tokens …``; empty in a pool that does not follow them."""
        if pool not in self._pools:
            return ""
        owner = key if self._by_key else ""
        found = self._prefixes.blocks(model, body, owner, self._sizes.bytes_per_token(model))
        return " ".join([f"{block.hash} {block.tokens}" for block in found])


def _prompt(body: dict[str, Any]) -> list[Any]:
    """What is rendered, in that order; each request of a conversation begins like the last one."""
    prompt = [_content(body[name], _DEPTH) for name in _FIRST if body.get(name) is not None]
    for name in _TURNS:
        turns = body.get(name)
        if isinstance(turns, list):
            prompt += [_part(turn, _DEPTH) for turn in turns]
        elif turns is not None:
            prompt.append(turns)
    return prompt


def _content(content: Any, depth: int) -> Any:
    """A text, however it is put: as a string, or as the only part of a list."""
    if not isinstance(content, list) or depth == 0:
        return content
    parts = [_part(part, depth) for part in content]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def _part(part: Any, depth: int) -> Any:
    """A message, or a part of one: text as a string, media as a hash."""
    if not isinstance(part, dict):
        return part
    if "cache_control" in part:  # Anthropic's mark of what to cache: it moves on with each turn
        part = {name: value for name, value in part.items() if name != "cache_control"}
    kind, content = part.get("type"), part.get("content")
    if isinstance(kind, str):
        if kind in _TEXT and isinstance(part.get("text"), str):
            return part["text"]
        if kind in MEDIA_TOKENS:
            return _media(part, MEDIA_TOKENS[kind])
    return {**part, "content": _content(content, depth - 1)} if type(content) is list else part


def _media(part: dict[str, Any], tokens: int) -> str:
    """A hash of media in the place of their bytes, as long as their tokens are worth."""
    data = orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
    if len(data) > _WHOLE_BYTES:  # megabytes: enough to tell two of them apart
        step = len(data) // _SLICES
        slices = [data[at : at + _SLICE_BYTES] for at in range(0, len(data), step)]
        data = b"".join([b"%d" % len(data), *slices, data[-_SLICE_BYTES:]])
    digest = blake2b(data, digest_size=16).hexdigest()
    return digest.ljust(int(tokens * BYTES_PER_TOKEN), ".")
