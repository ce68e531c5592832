"""The server-sent events of a fake node's streams, in the shape of each API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from app.lab.answers import (
    call_id,
    finish_reason,
    input_output,
    message_answer,
    output_item,
    output_text,
    response_answer,
    said,
    stop_reason,
    transcript_usage,
    unix_now,
    usage,
    word,
)

if TYPE_CHECKING:
    from app.lab.calls import Call

DONE: Final = b"data: [DONE]\n\n"


class Events:
    """One stream: what opens it, an event for each token, what ends it."""

    def __init__(self, call: Call, answer_id: str, *, chunked: bool) -> None:
        self.call = call
        self.answer_id = answer_id
        self.chunked = chunked

    def opening(self) -> bytes:
        """Render the events before any token."""
        return b"".join(map(self.frame, self._before()))

    def tokens(self, start: int, stop: int) -> bytes:
        """Render one event for each of the tokens `start` to `stop - 1`."""
        return b"".join(self.frame(self._token(index)) for index in range(start, stop))

    def end(self, tokens: int) -> bytes:
        """Render the end of a good stream."""
        return b"".join(map(self.frame, self._after(tokens))) + self.last_chunk()

    def error(self, payload: dict[str, Any]) -> bytes:
        """Render an error event and the end of the transfer, without the end of the stream."""
        return self.frame(self._failure(payload)) + self.last_chunk()

    def frame(self, data: bytes) -> bytes:
        """Wrap bytes in a chunk if the transfer is chunked."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data

    def last_chunk(self) -> bytes:
        """Close the chunked transfer."""
        return b"0\r\n\r\n" if self.chunked else b""

    def piece(self, index: int) -> str:
        """Give the text of one token."""
        pieces = self.call.pieces
        return word(self.call.digest, index).decode() if pieces is None else pieces[index]

    def _before(self) -> list[bytes]:
        return []

    def _token(self, index: int) -> bytes:
        raise NotImplementedError

    def _after(self, tokens: int) -> list[bytes]:
        raise NotImplementedError

    def _failure(self, payload: dict[str, Any]) -> bytes:
        return _sse(payload)


class OpenAIEvents(Events):
    """Chat and completions: rendered once and filled in per token, because load tests use them."""

    def __init__(self, call: Call, answer_id: str, *, chunked: bool) -> None:
        super().__init__(call, answer_id, chunked=chunked)
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

    def tokens(self, start: int, stop: int) -> bytes:
        """Render one event for each of the tokens `start` to `stop - 1`."""
        digest, head, tail = self.call.digest, self._head, self._tail
        if self.call.pieces is not None:
            return super().tokens(start, stop)
        if not self.chunked:
            return b"".join(head + word(digest, index) + tail for index in range(start, stop))
        events = []
        for index in range(start, stop):
            text = word(digest, index)
            events.append(b"%x\r\n%b%b%b\r\n" % (self._fixed + len(text), head, text, tail))
        return events[0] if len(events) == 1 else b"".join(events)

    def _before(self) -> list[bytes]:
        if self.call.kind != "chat":
            return []
        choice = self._choice("")
        choice["delta"] = {"role": "assistant", "content": ""}
        if self.call.tool:
            function = {"name": self.call.tool, "arguments": ""}
            opened = {"index": 0, "id": call_id(self.call), "type": "function"}
            choice["delta"] = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**opened, "function": function}],
            }
        return [self._event(choice)]

    def _token(self, index: int) -> bytes:
        return self._head + orjson.dumps(self.piece(index))[1:-1] + self._tail

    def _after(self, tokens: int) -> list[bytes]:
        choice = self._choice("")
        if self.call.kind == "chat":
            choice["delta"] = {}
        choice["finish_reason"] = finish_reason(self.call)
        events = [self._event(choice)]
        if self.call.include_usage:
            totals = usage(self.call.prompt_tokens, tokens)
            events.append(_sse({**self._base, "choices": [], "usage": totals}))
        return [*events, DONE]

    def _choice(self, text: str) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text}
        if self.call.tool:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        spoken = {"delta": delta} if self.call.kind == "chat" else {"text": text}
        return {"index": 0, **spoken, "logprobs": None, "finish_reason": None}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return _sse({**self._base, "choices": [choice]})


class MessageEvents(Events):
    """Anthropic messages: named events around one content block."""

    def _before(self) -> list[bytes]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self.call.tool:
            block = {"type": "tool_use", "id": call_id(self.call), "name": self.call.tool,
                     "input": {}}  # fmt: skip
        return [
            _named(
                {"type": "message_start", "message": message_answer(self.call, self.answer_id, 0)}
            ),
            _named({"type": "content_block_start", "index": 0, "content_block": block}),
            _named({"type": "ping"}),
        ]

    def _token(self, index: int) -> bytes:
        text = self.piece(index)
        delta = {"type": "text_delta", "text": text}
        if self.call.tool:
            delta = {"type": "input_json_delta", "partial_json": text}
        return _named({"type": "content_block_delta", "index": 0, "delta": delta})

    def _after(self, tokens: int) -> list[bytes]:
        delta = {"stop_reason": stop_reason(self.call), "stop_sequence": None}
        return [
            _named({"type": "content_block_stop", "index": 0}),
            _named({"type": "message_delta", "delta": delta,
                    "usage": input_output(self.call, tokens)}),
            _named({"type": "message_stop"}),
        ]  # fmt: skip

    def _failure(self, payload: dict[str, Any]) -> bytes:
        error = {"type": "api_error", "message": payload["error"]["message"]}
        return _named({"type": "error", "error": error})


class ResponseEvents(Events):
    """The responses API: named, numbered events around one output item."""

    def __init__(self, call: Call, answer_id: str, *, chunked: bool) -> None:
        super().__init__(call, answer_id, chunked=chunked)
        self._sent = 0
        self._item = str(output_item(call, answer_id, 0, "in_progress")["id"])
        self._where = {"item_id": self._item, "output_index": 0}
        if call.tool is None:
            self._where["content_index"] = 0

    def _before(self) -> list[bytes]:
        opened = response_answer(self.call, self.answer_id, 0)
        item = output_item(self.call, self.answer_id, 0, "in_progress")
        events = [
            self._numbered("response.created", response=opened),
            self._numbered("response.in_progress", response=opened),
            self._numbered("response.output_item.added", output_index=0, item=item),
        ]
        if self.call.tool is None:
            part = output_text("")
            events.append(self._numbered("response.content_part.added", **self._where, part=part))
        return events

    def _token(self, index: int) -> bytes:
        text = self.piece(index)
        if self.call.tool:
            kind = "response.function_call_arguments.delta"
            return self._numbered(kind, **self._where, delta=text)
        return self._numbered("response.output_text.delta", **self._where, delta=text, logprobs=[])

    def _after(self, tokens: int) -> list[bytes]:
        text = said(self.call, tokens)
        whole = response_answer(self.call, self.answer_id, tokens)
        item = whole["output"][0]
        if self.call.tool:
            kind = "response.function_call_arguments.done"
            done = [self._numbered(kind, **self._where, name=self.call.tool, arguments=text)]
        else:
            part = output_text(text)
            done = [
                self._numbered("response.output_text.done", **self._where, text=text, logprobs=[]),
                self._numbered("response.content_part.done", **self._where, part=part),
            ]
        return [
            *done,
            self._numbered("response.output_item.done", output_index=0, item=item),
            self._numbered(f"response.{whole['status']}", response=whole),
        ]

    def _failure(self, payload: dict[str, Any]) -> bytes:
        error = payload["error"]
        told = {"code": str(error["code"]), "message": error["message"], "param": None}
        return self._numbered("error", **told)

    def _numbered(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return _named({"type": kind, "sequence_number": self._sent - 1, **fields})


class TranscriptEvents(Events):
    """A transcript as it is heard."""

    def _token(self, index: int) -> bytes:
        return _sse({"type": "transcript.text.delta", "delta": self.piece(index)})

    def _after(self, tokens: int) -> list[bytes]:
        text, used = said(self.call, tokens), transcript_usage(self.call, tokens)
        return [_sse({"type": "transcript.text.done", "text": text, "usage": used})]


EVENTS: Final[dict[str, type[Events]]] = {
    "chat": OpenAIEvents,
    "completion": OpenAIEvents,
    "messages": MessageEvents,
    "responses": ResponseEvents,
    "transcription": TranscriptEvents,
}


def _sse(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def _named(payload: dict[str, Any]) -> bytes:
    return b"event: %b\n%b" % (str(payload["type"]).encode(), _sse(payload))
