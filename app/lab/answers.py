"""The bytes that answer an OpenAI request on a fake node.

The text of an answer is a function of (seed, prompt), so the same request has the same text on any
node with that seed, streamed or not.
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from app.lab.calls import Call

_WORDS: Final = (
    b"the node of a river and its slow lantern turns under bright copper sky while seven quiet "
    b"engines count every token that falls from old paper maps into small green harbours where "
    b"patient clerks lease one window at noon then weave wind salt amber glass until no echo is "
    b"left but warm stone"
).split()
FIRST_WORDS: Final = tuple(_WORDS[i % len(_WORDS)] for i in range(64))
NEXT_WORDS: Final = tuple(b" " + word for word in FIRST_WORDS)


def word(digest: bytes, index: int) -> bytes:
    """Give token number `index` of an answer; plain ASCII, so it needs no JSON escapes."""
    pick = (digest[index & 31] + (index >> 5) * 7) & 63
    return NEXT_WORDS[pick] if index else FIRST_WORDS[pick]


def answer_text(digest: bytes, tokens: int) -> str:
    """Give the whole answer of `tokens` tokens."""
    return b"".join(word(digest, index) for index in range(tokens)).decode()


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Build the usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def finish_reason(call: Call) -> str:
    """Tell whether the answer ran into the client's limit or ended by itself."""
    return "stop" if call.max_tokens is None else "length"


def unix_now() -> int:
    """Seconds since 1970, for the `created` fields."""
    return int(datetime.now(UTC).timestamp())


def whole_answer(call: Call, answer_id: str, tokens: int) -> dict[str, Any]:
    """Build the body of an answer that is not streamed."""
    text = answer_text(call.digest, tokens)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason(call)}
    if call.kind == "chat":
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return {
        "id": answer_id,
        "object": "chat.completion" if call.kind == "chat" else "text_completion",
        "created": unix_now(),
        "model": call.model,
        "choices": [choice],
        "usage": usage(call.prompt_tokens, tokens),
    }


def embedding_answer(call: Call) -> dict[str, Any]:
    """Build the body of an embeddings answer: vectors that depend on the text alone."""
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(call.inputs):
        noise = hashlib.shake_256(text).digest(call.dimensions)
        vector = array("f", ((byte - 127.5) / 127.5 for byte in noise))
        value = base64.b64encode(vector.tobytes()).decode() if call.as_base64 else vector.tolist()
        rows.append({"object": "embedding", "index": index, "embedding": value})
    return {
        "object": "list",
        "model": call.model,
        "data": rows,
        "usage": {"prompt_tokens": call.prompt_tokens, "total_tokens": call.prompt_tokens},
    }


class EventTemplates:
    """The server-sent events of one stream, rendered once and filled in per token."""

    def __init__(self, call: Call, answer_id: str, *, chunked: bool) -> None:
        self._call = call
        self._chunked = chunked
        self._base = {
            "id": answer_id,
            "object": "chat.completion.chunk" if call.kind == "chat" else "text_completion",
            "created": unix_now(),
            "model": call.model,
        }
        # The word is the last "@" in quotes: the names before it cannot be mistaken for it.
        head, _, tail = self._event(self._choice("@")).rpartition(b'"@"')
        self._head, self._tail = head + b'"', b'"' + tail
        self._fixed = len(self._head) + len(self._tail)

    def role(self) -> bytes:
        """Render the event that opens a chat stream, before any token."""
        if self._call.kind != "chat":
            return b""
        choice = self._choice("")
        choice["delta"] = {"role": "assistant", "content": ""}
        return self.frame(self._event(choice))

    def tokens(self, start: int, stop: int) -> bytes:
        """Render one event for each of the tokens `start` to `stop - 1`."""
        digest, head, tail = self._call.digest, self._head, self._tail
        if not self._chunked:
            return b"".join(head + word(digest, index) + tail for index in range(start, stop))
        events = []
        for index in range(start, stop):
            text = word(digest, index)
            events.append(b"%x\r\n%b%b%b\r\n" % (self._fixed + len(text), head, text, tail))
        return events[0] if len(events) == 1 else b"".join(events)

    def end(self, tokens: int) -> bytes:
        """Render the end of a good stream: finish reason, usage if asked for, [DONE]."""
        choice = self._choice("")
        if self._call.kind == "chat":
            choice["delta"] = {}
        choice["finish_reason"] = finish_reason(self._call)
        events = [self._event(choice)]
        if self._call.include_usage:
            totals = usage(self._call.prompt_tokens, tokens)
            events.append(_sse({**self._base, "choices": [], "usage": totals}))
        events.append(b"data: [DONE]\n\n")
        return b"".join(map(self.frame, events)) + self.last_chunk()

    def error(self, payload: dict[str, Any]) -> bytes:
        """Render an error event and the end of the transfer, without [DONE]."""
        return self.frame(_sse(payload)) + self.last_chunk()

    def frame(self, data: bytes) -> bytes:
        """Wrap bytes in a chunk if the transfer is chunked."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def last_chunk(self) -> bytes:
        """Close the chunked transfer."""
        return b"0\r\n\r\n" if self._chunked else b""

    def _choice(self, text: str) -> dict[str, Any]:
        said = {"delta": {"content": text}} if self._call.kind == "chat" else {"text": text}
        return {"index": 0, **said, "logprobs": None, "finish_reason": None}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return _sse({**self._base, "choices": [choice]})


def _sse(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"
