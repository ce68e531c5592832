"""What an OpenAI or Anthropic request asks of a fake node."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import orjson

from app.lab.forms import form_fields
from app.lab.schemas import fitting, pieces_of
from app.lab.structure import called_tool, wanted_schema

CALL_KINDS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "transcription",
    "/v1/embeddings": "embedding",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
    "/v1/audio/speech": "speech",
    "/v1/images/generations": "image",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
ONE_PASS: Final = frozenset(
    {"embedding", "rerank", "score", "speech", "image", "tokenize", "detokenize"}
)
"""Kinds without decode: the step that would emit a token ends them."""
DEFAULT_DIMENSIONS: Final = 16
MAX_DIMENSIONS: Final = 4096
BYTES_PER_TOKEN: Final = 4
AUDIO_BYTES_PER_TOKEN: Final = 640
_TRANSCRIPT_FORMS: Final = frozenset({"json", "text", "srt", "vtt", "verbose_json"})
_TOKEN_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")


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
    """The texts to embed, rank, score, speak, draw or cut into tokens."""
    dimensions: int = DEFAULT_DIMENSIONS
    as_base64: bool = False
    pieces: tuple[str, ...] | None = None
    """The tokens of a structured answer; None for plain words."""
    tool: str | None = None
    """The tool that the answer calls, with `pieces` as its arguments."""
    form: str = ""
    """Format asked of a transcript, of speech; how many to rank."""

    @property
    def decodes(self) -> bool:
        """Whether the answer is made token by token."""
        return self.kind not in ONE_PASS

    def chance(self) -> Random:
        """Seed the chance of this call alone: the same call draws the same length."""
        return Random(int.from_bytes(self.digest[:8], "big"))


def parse_call(
    kind: str,
    body: bytes,
    *,
    seed: int,
    models: tuple[str, ...],
    content_type: str = "application/json",
) -> Call:
    """Read a request body; BadCall says what is wrong with it."""
    raw = _form(content_type, body) if kind == "transcription" else _json(body)
    model = raw.get("model")
    if not isinstance(model, str) or not model:
        raise BadCall(400, "model must be a string", "model")
    if model not in models:
        raise BadCall(404, f"The model `{model}` does not exist.", "model", "model_not_found")
    if kind in ONE_PASS:
        return _one_pass_call(kind, raw, model)
    texts = _texts(kind, raw)
    stream, include_usage = _stream_options(raw)
    max_tokens = _max_tokens(raw)
    digest = hashlib.blake2b(
        b"\0".join((kind.encode(), str(max_tokens).encode(), *texts)),
        digest_size=32,
        key=str(seed).encode()[:64],
    ).digest()
    tool = called_tool(raw)
    schema = tool[1] if tool else wanted_schema(raw)
    pieces = pieces_of(fitting(schema, digest)) if tool or schema is not None else None
    if pieces is not None:
        max_tokens = len(pieces) if max_tokens is None else min(max_tokens, len(pieces))
    return Call(
        kind,
        model,
        stream,
        include_usage,
        _count(texts, AUDIO_BYTES_PER_TOKEN if kind == "transcription" else BYTES_PER_TOKEN),
        max_tokens,
        digest,
        pieces=pieces,
        tool=tool[0] if tool else None,
        form=str(raw.get("response_format", "json")) if kind == "transcription" else "",
    )


def _json(body: bytes) -> dict[str, Any]:
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadCall(400, f"request body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadCall(400, "request body must be a JSON object")
    return raw


def _form(content_type: str, body: bytes) -> dict[str, Any]:
    try:
        fields = form_fields(content_type, body)
    except ValueError as error:
        raise BadCall(400, str(error)) from None
    raw: dict[str, Any] = {
        name: value if name == "file" else value.decode("utf-8", "replace")
        for name, value in fields.items()
    }
    if "file" not in raw:
        raise BadCall(400, "file is required", "file")
    if raw.setdefault("response_format", "json") not in _TRANSCRIPT_FORMS:
        raise BadCall(400, "response_format is not known", "response_format")
    raw["stream"] = raw.get("stream", "").lower() in {"true", "1"}
    return raw


def _texts(kind: str, raw: dict[str, Any]) -> list[bytes]:
    match kind:
        case "chat":
            return _chat_texts(raw)
        case "messages":
            if "max_tokens" not in raw:
                raise BadCall(400, "max_tokens: Field required", "max_tokens")
            return [*_text_parts(raw.get("system")), *_chat_texts(raw)]
        case "responses":
            given = raw.get("input")
            if not isinstance(given, str | list) or not given:
                raise BadCall(400, "input must be a string or a non-empty array", "input")
            turns = [{"content": given}] if isinstance(given, str) else given
            return [*_text_parts(raw.get("instructions")), *_contents(turns, "input")]
        case "transcription":
            return [raw["file"]]
        case _:
            return _prompt_texts(raw, "prompt")


def _one_pass_call(kind: str, raw: dict[str, Any], model: str) -> Call:
    dimensions = raw.get("dimensions", DEFAULT_DIMENSIONS)
    if not _is_count(dimensions) or dimensions > MAX_DIMENSIONS:
        raise BadCall(400, f"dimensions must be 1 to {MAX_DIMENSIONS}", "dimensions")
    encoding = raw.get("encoding_format", "float")
    if encoding not in {"float", "base64"}:
        raise BadCall(400, "encoding_format must be float or base64", "encoding_format")
    inputs = _one_pass_inputs(kind, raw)
    return Call(
        kind=kind,
        model=model,
        stream=False,
        include_usage=False,
        prompt_tokens=_count(inputs),
        max_tokens=1,
        digest=bytes(32),
        inputs=tuple(inputs),
        dimensions=dimensions,
        as_base64=encoding == "base64",
        form=str(raw.get("top_n" if kind == "rerank" else "response_format", "")),
    )


def _one_pass_inputs(kind: str, raw: dict[str, Any]) -> list[bytes]:
    """Read the texts of a call without decode; rank and score: the query first."""
    match kind:
        case "rerank":
            return [*_prompt_texts(raw, "query"), *_prompt_texts(raw, "documents")]
        case "score":
            return [*_prompt_texts(raw, "text_1"), *_prompt_texts(raw, "text_2")]
        case "image" | "tokenize":
            return _prompt_texts(raw, "prompt")
        case "detokenize":
            tokens = raw.get("tokens")
            if not isinstance(tokens, list) or not all(map(_is_token, tokens)):
                raise BadCall(400, "tokens must be an array of token ids", "tokens")
            return [token.to_bytes(4, "big").lstrip(b"\0") for token in tokens]
        case _:
            return _prompt_texts(raw, "input")


def _count(texts: list[bytes], bytes_per_token: int = BYTES_PER_TOKEN) -> int:
    return max(1, sum(map(len, texts)) // bytes_per_token)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _max_tokens(raw: dict[str, Any]) -> int | None:
    for name in _TOKEN_LIMITS:
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
    return _contents(messages, "messages")


def _contents(turns: list[Any], param: str) -> list[bytes]:
    texts = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise BadCall(400, f"each of {param} must be an object", param)
        texts += _text_parts(turn.get("content"))
    return texts


def _text_parts(content: object) -> list[bytes]:
    """Read the texts of a content: a string, or parts, of which some are text."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return [text.encode() for text in texts if isinstance(text, str)]


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
