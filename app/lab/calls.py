"""What an OpenAI request asks of a fake node."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import orjson

CALL_KINDS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
}
DEFAULT_DIMENSIONS: Final = 16
MAX_DIMENSIONS: Final = 4096
BYTES_PER_TOKEN: Final = 4


class BadCall(Exception):  # noqa: N818 - it reads as what happened
    """A call that is answered with an error: status, message, and the parameter at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Call:
    """What a request asks of the engine. Sizes are tokens."""

    kind: str
    model: str
    stream: bool
    include_usage: bool
    prompt_tokens: int
    max_tokens: int | None
    digest: bytes
    """32 bytes that fix text and length of the answer."""
    inputs: tuple[bytes, ...] = ()
    """The texts to embed."""
    dimensions: int = DEFAULT_DIMENSIONS
    as_base64: bool = False

    def chance(self) -> Random:
        """Seed the chance of this call alone: the same call draws the same length."""
        return Random(int.from_bytes(self.digest[:8], "big"))


def parse_call(kind: str, body: bytes, *, seed: int, models: tuple[str, ...]) -> Call:
    """Read a request body; BadCall says what is wrong with it."""
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadCall(400, f"request body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadCall(400, "request body must be a JSON object")
    model = raw.get("model")
    if not isinstance(model, str) or not model:
        raise BadCall(400, "model must be a string", "model")
    if model not in models:
        raise BadCall(404, f"The model `{model}` does not exist.", "model", "model_not_found")
    if kind == "embedding":
        return _embedding_call(raw, model)
    texts = _chat_texts(raw) if kind == "chat" else _prompt_texts(raw, "prompt")
    stream, include_usage = _stream_options(raw)
    max_tokens = _max_tokens(raw)
    digest = hashlib.blake2b(
        b"\0".join((kind.encode(), str(max_tokens).encode(), *texts)),
        digest_size=32,
        key=str(seed).encode()[:64],
    ).digest()
    return Call(kind, model, stream, include_usage, _count(texts), max_tokens, digest)


def _embedding_call(raw: dict[str, Any], model: str) -> Call:
    inputs = _prompt_texts(raw, "input")
    dimensions = raw.get("dimensions", DEFAULT_DIMENSIONS)
    if not _is_count(dimensions) or dimensions > MAX_DIMENSIONS:
        raise BadCall(400, f"dimensions must be 1 to {MAX_DIMENSIONS}", "dimensions")
    encoding = raw.get("encoding_format", "float")
    if encoding not in {"float", "base64"}:
        raise BadCall(400, "encoding_format must be float or base64", "encoding_format")
    return Call(
        kind="embedding",
        model=model,
        stream=False,
        include_usage=False,
        prompt_tokens=_count(inputs),
        max_tokens=1,  # one pass over the prompt: the step that would emit a token ends it
        digest=bytes(32),
        inputs=tuple(inputs),
        dimensions=dimensions,
        as_base64=encoding == "base64",
    )


def _count(texts: list[bytes]) -> int:
    return max(1, sum(map(len, texts)) // BYTES_PER_TOKEN)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _max_tokens(raw: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = raw.get(name)
        if value is None:
            continue
        if not _is_count(value):
            raise BadCall(400, f"{name} must be an integer of at least 1", name)
        return int(value)
    return None


def _stream_options(raw: dict[str, Any]) -> tuple[bool, bool]:
    stream = raw.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadCall(400, "stream must be a boolean", "stream")
    options = raw.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadCall(400, "stream_options must be an object", "stream_options")
    return bool(stream), bool(options and options.get("include_usage"))


def _chat_texts(raw: dict[str, Any]) -> list[bytes]:
    messages = raw.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadCall(400, "messages must be a non-empty array", "messages")
    texts = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadCall(400, "each message must be an object", "messages")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                texts.append(text.encode())
    return texts


def _prompt_texts(raw: dict[str, Any], name: str) -> list[bytes]:
    """Read a string, strings, token ids, or lists of token ids: ids count as one token each."""
    value = raw.get(name)
    if isinstance(value, str):
        return [value.encode()]
    if not isinstance(value, list) or not value:
        raise BadCall(400, f"{name} must be a string or a non-empty array", name)
    if all(isinstance(item, str) for item in value):
        return [item.encode() for item in value]
    rows = value if all(isinstance(item, list) for item in value) else [value]
    try:
        return [array("i", row).tobytes() for row in rows]
    except (TypeError, OverflowError):
        raise BadCall(400, f"{name} must hold strings or token ids", name) from None
