"""The answers of a fake node in one piece, in the shape of each API.

The text of an answer is a function of (seed, prompt), so the same request has the same text on any
node with that seed, streamed or not.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
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
WORDS_PER_SECOND: Final = 4
"""How fast a transcript was spoken."""
SPEECH_BYTES_PER_TOKEN: Final = 1600
_AUDIO_TYPES: Final = {"wav": "audio/wav", "pcm": "audio/pcm", "flac": "audio/flac",
                       "opus": "audio/opus", "aac": "audio/aac"}  # fmt: skip
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def word(digest: bytes, index: int) -> bytes:
    """Give token number `index` of an answer; plain ASCII, so it needs no JSON escapes."""
    pick = (digest[index & 31] + (index >> 5) * 7) & 63
    return NEXT_WORDS[pick] if index else FIRST_WORDS[pick]


def answer_text(digest: bytes, tokens: int) -> str:
    """Give the whole plain answer of `tokens` tokens."""
    return b"".join(word(digest, index) for index in range(tokens)).decode()


def said(call: Call, tokens: int) -> str:
    """Give what the model has said after `tokens` tokens: plain words or structured text."""
    if call.pieces is not None:
        return "".join(call.pieces[:tokens])
    return answer_text(call.digest, tokens)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Build the usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def input_output(call: Call, tokens: int) -> dict[str, int]:
    """Build the usage object under the names of the newer APIs."""
    return {"input_tokens": call.prompt_tokens, "output_tokens": tokens}


def finish_reason(call: Call) -> str:
    """Tell whether the answer ran into the client's limit or ended by itself."""
    if call.pieces is None:
        return "stop" if call.max_tokens is None else "length"
    if call.max_tokens is not None and call.max_tokens < len(call.pieces):
        return "length"
    return "tool_calls" if call.tool else "stop"


def stop_reason(call: Call) -> str:
    """Tell the same in Anthropic's words."""
    return _STOP_REASONS[finish_reason(call)]


def unix_now() -> int:
    """Seconds since 1970, for the `created` fields."""
    return int(datetime.now(UTC).timestamp())


def call_id(call: Call) -> str:
    """Name the tool call of an answer; the same for the same request."""
    return f"call_{call.digest[:8].hex()}"


def whole_answer(call: Call, answer_id: str, tokens: int) -> tuple[str, bytes]:
    """Build an answer that is not streamed: its content type and its body."""
    if call.kind == "transcription":
        return transcript(call, tokens)
    if call.kind == "speech":
        return speech(call)
    return "application/json", orjson.dumps(_OBJECTS[call.kind](call, answer_id, tokens))


def _chat(call: Call, answer_id: str, tokens: int) -> dict[str, Any]:
    text = said(call, tokens)
    message: dict[str, Any] = {"role": "assistant", "content": None if call.tool else text}
    if call.tool:
        function = {"name": call.tool, "arguments": text}
        message["tool_calls"] = [{"id": call_id(call), "type": "function", "function": function}]
    return _openai(call, answer_id, "chat.completion", tokens, {"message": message})


def _completion(call: Call, answer_id: str, tokens: int) -> dict[str, Any]:
    return _openai(call, answer_id, "text_completion", tokens, {"text": said(call, tokens)})


def _openai(
    call: Call, answer_id: str, kind: str, tokens: int, spoken: dict[str, Any]
) -> dict[str, Any]:
    choice = {"index": 0, "logprobs": None, "finish_reason": finish_reason(call), **spoken}
    return {
        "id": answer_id,
        "object": kind,
        "created": unix_now(),
        "model": call.model,
        "choices": [choice],
        "usage": usage(call.prompt_tokens, tokens),
    }


def message_answer(call: Call, answer_id: str, tokens: int) -> dict[str, Any]:
    """Build an Anthropic message; with 0 tokens, the one that opens a stream."""
    content: list[dict[str, Any]] = []
    if tokens and call.tool:
        # Cut off by the limit, the arguments are no JSON any more: then the call has none.
        whole = finish_reason(call) == "tool_calls"
        arguments = orjson.loads(said(call, tokens)) if whole else {}
        content = [{"type": "tool_use", "id": call_id(call), "name": call.tool, "input": arguments}]
    elif tokens:
        content = [{"type": "text", "text": said(call, tokens)}]
    return {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "stop_reason": stop_reason(call) if tokens else None,
        "stop_sequence": None,
        "usage": input_output(call, tokens),
    }


def output_item(call: Call, answer_id: str, tokens: int, status: str) -> dict[str, Any]:
    """Build the one item of a response: a message, or a call of a function."""
    if call.tool:
        return {
            "id": f"fc_{answer_id}",
            "type": "function_call",
            "status": status,
            "call_id": call_id(call),
            "name": call.tool,
            "arguments": said(call, tokens),
        }
    content = [output_text(said(call, tokens))] if tokens else []
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def output_text(text: str) -> dict[str, Any]:
    """Build a part of a response's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_answer(call: Call, answer_id: str, tokens: int) -> dict[str, Any]:
    """Build a response of the responses API; with 0 tokens, the one that opens a stream."""
    status, details, output = "in_progress", None, []
    if tokens:
        cut = finish_reason(call) == "length"
        status = "incomplete" if cut else "completed"
        details = {"reason": "max_output_tokens"} if cut else None
        output = [output_item(call, answer_id, tokens, status)]
    counts = {
        **input_output(call, tokens),
        "total_tokens": call.prompt_tokens + tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": answer_id,
        "object": "response",
        "created_at": unix_now(),
        "status": status,
        "error": None,
        "incomplete_details": details,
        "instructions": None,
        "metadata": {},
        "model": call.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": counts if tokens else None,
    }


def transcript(call: Call, tokens: int) -> tuple[str, bytes]:
    """Build a transcript in the format asked for."""
    text = said(call, tokens)
    end_s = tokens / WORDS_PER_SECOND
    span = f"00:00:00,000 --> 00:{int(end_s) // 60:02}:{int(end_s) % 60:02},000"
    match call.form:
        case "text":
            return "text/plain; charset=utf-8", text.encode() + b"\n"
        case "srt":
            return "text/plain; charset=utf-8", f"1\n{span}\n{text}\n\n".encode()
        case "vtt":
            return "text/vtt", f"WEBVTT\n\n{span.replace(',', '.')}\n{text}\n\n".encode()
        case "verbose_json":
            segment = {"id": 0, "start": 0.0, "end": end_s, "text": text}
            body = {"task": "transcribe", "language": "english", "duration": end_s, "text": text,
                    "segments": [segment]}  # fmt: skip
            return "application/json", orjson.dumps(body)
        case _:
            body = {"text": text, "usage": transcript_usage(call, tokens)}
            return "application/json", orjson.dumps(body)


def transcript_usage(call: Call, tokens: int) -> dict[str, Any]:
    """Build the usage object of a transcript."""
    total = call.prompt_tokens + tokens
    return {"type": "tokens", **input_output(call, tokens), "total_tokens": total}


def speech(call: Call) -> tuple[str, bytes]:
    """Build speech: noise, of a length that fits the text; as a real file where it is a WAV."""
    samples = hashlib.shake_256(call.inputs[0]).digest(call.prompt_tokens * SPEECH_BYTES_PER_TOKEN)
    if call.form == "wav":
        rate, width = 8000, 2
        form = struct.pack("<HHIIHH", 1, 1, rate, rate * width, width, 8 * width)
        size = len(samples)
        samples = b"RIFF%bWAVEfmt %b%bdata%b%b" % (
            *(struct.pack("<I", 36 + size), struct.pack("<I", 16), form),
            *(struct.pack("<I", size), samples),
        )
    return _AUDIO_TYPES.get(call.form, "audio/mpeg"), samples


def _embedding(call: Call, _id: str, _tokens: int) -> dict[str, Any]:
    """Build vectors that depend on the text alone."""
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(call.inputs):
        vector = _vector(text, call.dimensions)
        value = base64.b64encode(vector.tobytes()).decode() if call.as_base64 else vector.tolist()
        rows.append({"object": "embedding", "index": index, "embedding": value})
    return {
        "object": "list",
        "model": call.model,
        "data": rows,
        "usage": {"prompt_tokens": call.prompt_tokens, "total_tokens": call.prompt_tokens},
    }


def _vector(text: bytes, dimensions: int) -> array[float]:
    noise = hashlib.shake_256(text).digest(dimensions)
    return array("f", ((byte - 127.5) / 127.5 for byte in noise))


def _likeness(one: bytes, other: bytes) -> float:
    """How much two texts have to do with each other, 0 to 1; chance, but always the same."""
    return hashlib.blake2b(one + b"\0" + other, digest_size=1).digest()[0] / 255


def _rerank(call: Call, answer_id: str, _tokens: int) -> dict[str, Any]:
    query, *documents = call.inputs
    rows = [
        {
            "index": index,
            "document": {"text": document.decode()},
            "relevance_score": _likeness(query, document),
        }
        for index, document in enumerate(documents)
    ]
    rows.sort(key=lambda row: -row["relevance_score"])  # type: ignore[operator]
    top = int(call.form) if call.form.isdigit() else len(rows)
    used = {"total_tokens": call.prompt_tokens}
    return {"id": answer_id, "model": call.model, "usage": used, "results": rows[:top]}


def _score(call: Call, answer_id: str, _tokens: int) -> dict[str, Any]:
    one, *others = call.inputs
    rows = [
        {"index": index, "object": "score", "score": _likeness(one, other)}
        for index, other in enumerate(others)
    ]
    return {
        "id": answer_id,
        "object": "list",
        "created": unix_now(),
        "model": call.model,
        "data": rows,
        "usage": usage(call.prompt_tokens, 0),
    }


def _image(call: Call, _id: str, _tokens: int) -> dict[str, Any]:
    """Build an image: one pixel, of a colour that depends on the text alone."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    pixel = b"\0" + hashlib.blake2b(call.inputs[0], digest_size=3).digest()
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(pixel))
        + chunk(b"IEND", b"")
    )
    return {"created": unix_now(), "data": [{"b64_json": base64.b64encode(png).decode()}]}


def _tokenize(call: Call, _id: str, _tokens: int) -> dict[str, Any]:
    """Cut a text into tokens: four bytes each, whose number is their id."""
    text = b"".join(call.inputs)
    tokens = [int.from_bytes(text[i : i + 4], "big") for i in range(0, len(text), 4)]
    return {"count": len(tokens), "max_model_len": 2**17, "tokens": tokens}


def _detokenize(call: Call, _id: str, _tokens: int) -> dict[str, Any]:
    return {"prompt": b"".join(call.inputs).decode("utf-8", "replace")}


_OBJECTS: Final = {
    "chat": _chat,
    "completion": _completion,
    "messages": message_answer,
    "responses": response_answer,
    "embedding": _embedding,
    "rerank": _rerank,
    "score": _score,
    "image": _image,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
}
