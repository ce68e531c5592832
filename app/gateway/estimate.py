"""How large a request is, in tokens: its prompt, and the answer that is likely to come.

No tokenizer: what a model makes of a byte is learned from the usage that nodes return. What is
measured is the text that goes into the prompt, as compact JSON in UTF-8, however the client wrote
it. The names of members count with it: `role` and `content` are about as long as the markup that
a chat template puts in their place, and tools are rendered as the JSON they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

if TYPE_CHECKING:
    from collections.abc import Hashable

BYTES_PER_TOKEN: Final = 4.0
"""Of a model that nothing is known of: OpenAI's rule of thumb for English text."""
PRIOR_OUTPUT_TOKENS: Final = 100
"""Answer of a model and key that nothing is known of."""

# Members that become the prompt, over all routes: chat, completions, responses, messages,
# embeddings, moderations, rerank, score, pooling, tokenize, detokenize.
_PROMPT: Final = frozenset(
    ("messages", "prompt", "suffix", "input", "instructions", "system", "query", "queries",
     "documents", "text_1", "text_2", "data_1", "data_2", "content", "tokens")
)  # fmt: skip
_SCHEMAS: Final = frozenset(("tools", "functions"))

# What a part costs that is no text: its base64 says nothing of that. An image of one megapixel
# is 1000 tokens to Qwen2-VL (one for 28 by 28 pixels), 765 to GPT-4o, 576 to LLaVA; audio is 25
# tokens a second to Qwen2-Audio, here of 20 s; a video is 32 frames of 256; a file is a PDF of
# two or three pages, each a text and an image.
_IMAGE, _AUDIO, _VIDEO, _FILE = 1024, 512, 8192, 4096
MEDIA_TOKENS: Final = {
    "image_url": _IMAGE, "input_image": _IMAGE, "image": _IMAGE, "image_embeds": _IMAGE,
    "input_audio": _AUDIO, "audio_url": _AUDIO, "audio": _AUDIO,
    "video_url": _VIDEO, "input_video": _VIDEO, "video": _VIDEO,
    "file": _FILE, "input_file": _FILE,
    "base64": _FILE,  # the source of a document in Anthropic's messages
}  # fmt: skip
_LONG_CHARS: Final = 4096  # a string so long may be media, whatever part it is in
_BASE64 = re.compile(r"(?:data:[^,]{0,200},)?[A-Za-z0-9+/=_\r\n-]*")
_SEEN_CHARS: Final = 1024  # of it

_MODELS, _CALLERS = 1024, 8192  # that are remembered, those that were seen last
_KEEP_PROMPTS, _KEEP_ANSWERS = 0.98, 0.95  # the last fifty, the last twenty count
_PRIOR_TEXT = 500, 500 * BYTES_PER_TOKEN  # tokens and bytes: what the prior is worth
# One long prompt must not outweigh fifty others, and nothing that a tokenizer does is beyond
# these: counts that are mean something else (usage without the cached part, a made-up number).
_MOST_TOKENS = 4096
_LEAST_BYTES, _MOST_BYTES = 0.5, 32.0


class Size(NamedTuple):
    """What a prompt consists of.

    ``text_bytes``: UTF-8 bytes of text; ``tokens``: those known without it, of token ids and
    of media; ``media``: whether some of them are only a price.
    """

    text_bytes: int
    tokens: int = 0
    media: bool = False


NO_SIZE: Final = Size(0)
"""Of an upload: it is no prompt."""


def measure(fields: dict[str, Any]) -> Size:
    """The size of the prompt in a request body; any JSON object will do.

    What is text is put together and written as JSON at once: that is far cheaper than to look
    at each string of it.
    """
    text: list[Any] = []
    left: list[Any] = []
    for name, value in fields.items():
        if name in _PROMPT:
            left.append([value] if isinstance(value, str) else value)
        elif name in _SCHEMAS:
            text.append(value)
    tokens, media = 0, False
    while left:
        value = left.pop()
        items: Any = value
        if isinstance(value, dict):
            kind = value.get("type")
            if isinstance(kind, str) and kind in MEDIA_TOKENS:
                tokens, media = tokens + MEDIA_TOKENS[kind], True
                continue
            items = value.values()
        elif not isinstance(value, list):
            continue
        elif value and isinstance(value[0], int | float):
            tokens += len(value)  # ids
            continue
        for item in items:
            content = item.get("content") if type(item) is dict else item
            if type(content) is not str or (content is not item and "type" in item):
                left.append(item)
            elif len(content) <= _LONG_CHARS or _is_text(content):
                text.append(item)  # a string, or a message that is one
            else:
                tokens, media = tokens + _IMAGE, True
    return Size(_dumped(text) if text else 0, tokens, media)


def _is_text(string: str) -> bool:
    """Whether a long string is text, and not media in base64."""
    return _BASE64.fullmatch(string, 0, _SEEN_CHARS) is None


def _dumped(value: Any) -> int:
    """Bytes of ``value`` as JSON."""
    try:
        return len(orjson.dumps(value))
    except TypeError:  # deeper than it writes, though not deeper than it reads: nobody's prompt
        return 0


class Sizes:
    """What one replica has learned of sizes: per model, and per model and API key.

    ``model`` is the name that the node knows; ``key`` the name of the caller's key, "" without.
    """

    __slots__ = ("_answers", "_prompts")

    def __init__(self) -> None:
        self._prompts = _Table(_MODELS, _KEEP_PROMPTS, *_PRIOR_TEXT)
        self._answers = _Table(_CALLERS, _KEEP_ANSWERS, PRIOR_OUTPUT_TOKENS, 1)

    def bytes_per_token(self, model: str) -> float:
        """UTF-8 bytes of text that make one token of ``model``."""
        return 1 / self._prompts.quotient(model)

    def prompt_tokens(self, model: str, size: Size) -> int:
        """The prompt's tokens, at least 1."""
        return max(1, size.tokens + int(size.text_bytes * self._prompts.quotient(model)))

    def output_tokens(self, model: str, key: str, most: int = 0) -> int:
        """The answer's tokens, at least 1; ``most``: the bound that the caller set, 0 for none."""
        mean = max(1, round(self._answers.quotient((model, key))))
        return min(mean, most) if most > 0 else mean

    def learn(
        self, model: str, key: str, size: Size, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Take what a node counted; 0 is no count.

        ``output_tokens`` must be of an answer that was given to its end.
        """
        if output_tokens > 0:
            self._answers.add((model, key), output_tokens, 1.0)
        if size.media or size.text_bytes <= 0:
            return
        tokens = prompt_tokens - size.tokens
        if tokens > 0 and _LEAST_BYTES <= size.text_bytes / tokens <= _MOST_BYTES:
            weight = min(1.0, _MOST_TOKENS / tokens)
            self._prompts.add(model, tokens * weight, size.text_bytes * weight)


class _Table:
    """Quotients of two sums that fade with each sample, by name; of the names seen last only."""

    __slots__ = ("_keep", "_most", "_prior", "_sums")

    def __init__(self, most: int, keep: float, above: float, below: float) -> None:
        self._most = most
        self._keep = keep
        self._prior = above, below
        self._sums: dict[Hashable, tuple[float, float]] = {}

    def quotient(self, name: Hashable) -> float:
        above, below = self._sums.get(name, self._prior)
        return above / below

    def add(self, name: Hashable, above: float, below: float) -> None:
        # Taken out and put in again: a dict keeps the order of that.
        old_above, old_below = self._sums.pop(name, self._prior)
        if len(self._sums) >= self._most:
            del self._sums[next(iter(self._sums))]
        keep = self._keep
        self._sums[name] = old_above * keep + above, old_below * keep + below
