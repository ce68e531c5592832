"""What is asked and what must come back: the three workloads of the data-plane bench.

Backend and load generator both build from here, so the byte length that counts as a success is
known before the first request is sent.
"""

from dataclasses import dataclass
from typing import Any, Final

import orjson

JSON_ANSWER_BYTES: Final = 600
DONE_EVENT: Final = b"data: [DONE]\n\n"
SYSTEM_TEXT: Final = "You answer in one short, plain paragraph of at most four sentences. No lists."
USER_TEXT: Final = "Which node takes the next request, and why?"
# Token-like pieces of different lengths, so that events are not all of one size.
PIECES: Final = (" the", " lease", " is", " granted", " to", " whichever", " node", " scores", ".")


@dataclass(frozen=True, slots=True)
class Workload:
    """One shape of traffic: how many at once, and what each answer looks like."""

    name: str
    connections: int
    events: int = 0  # SSE events, the closing [DONE] among them; 0 is one sized JSON body
    per_turn: int = 1  # events that the backend writes in one turn of its loop
    gap_s: float = 0.0  # pause between turns

    @property
    def answer_seconds(self) -> float:
        """How long the backend takes to write one whole answer, at least."""
        return self.gap_s * max(0, self.events - 1)

    @property
    def answer_bytes(self) -> int:
        """Body length after chunked framing is taken off: what the load generator insists on."""
        return sum(map(len, self.sse_events())) if self.events else len(json_answer())

    def sse_events(self) -> list[bytes]:
        """Role, content, finish, usage, [DONE]: the order in which OpenAI sends them."""
        content = [{"content": PIECES[n % len(PIECES)]} for n in range(self.events - 4)]
        usage = {"prompt_tokens": 31, "completion_tokens": len(content)}
        return [
            _event({"role": "assistant", "content": ""}),
            *map(_event, content),
            _event({}, finish_reason="stop"),
            _sse(_chunk(choices=[], usage=usage | {"total_tokens": 31 + len(content)})),
            DONE_EVENT,
        ]

    def request_body(self, model: str) -> bytes:
        """About 300 bytes. `user` names the workload: a gateway passes bodies on unchanged."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [
                {"role": "system", "content": SYSTEM_TEXT},
                {"role": "user", "content": USER_TEXT},
            ],
            "max_tokens": 128,
            "temperature": 0.7,
            "top_p": 0.95,
            "seed": 7,
            "user": self.name,
        }
        if self.events:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return orjson.dumps(body)


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload("json", connections=64),
        Workload("burst", connections=32, events=64, per_turn=8),
        Workload("paced", connections=200, events=20, gap_s=0.010),
    )
}


def json_answer() -> bytes:
    """A chat.completion padded to exactly JSON_ANSWER_BYTES."""
    bare = len(_completion(""))
    return _completion("".join(PIECES * 20)[: JSON_ANSWER_BYTES - bare])


def _completion(content: str) -> bytes:
    message = {"role": "assistant", "content": content, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return orjson.dumps(
        {
            "id": "chatcmpl-7d9f2b64c01e4a",
            "object": "chat.completion",
            "created": 1760000000,
            "model": "demo",
            "choices": [choice],
            "usage": {"prompt_tokens": 31, "completion_tokens": 64, "total_tokens": 95},
        }
    )


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _sse(_chunk(choices=[choice]))


def _chunk(**fields: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-7d9f2b64c01e4a",
        "object": "chat.completion.chunk",
        "created": 1760000000,
        "model": "demo",
        "system_fingerprint": "fp_1c2d3e",
        **fields,
    }


def _sse(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"
