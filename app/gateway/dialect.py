"""What the objects that engines send mean, in the words of each dialect.

An object is judged by what it holds, not by the route it came on: OpenAI chat and completions
have ``choices``, all others a ``type`` (or an SSE event name, which says the same).
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

TOKEN, END, ERROR = "token", "end", "error"
_TYPES = {
    # Anthropic messages: https://docs.anthropic.com/en/docs/build-with-claude/streaming
    "content_block_delta": TOKEN,
    "message_stop": END,
    # OpenAI responses: https://platform.openai.com/docs/api-reference/responses-streaming
    "response.completed": END,
    "response.incomplete": END,
    "response.failed": ERROR,
    # OpenAI speech, transcriptions and images
    "speech.audio.done": END,
    "transcript.text.done": END,
    "image_generation.completed": END,
    "image_edit.completed": END,
    # all of them
    "error": ERROR,
}
_DELTA = ".delta"  # of OpenAI's types
_NOT_GENERATED = frozenset(("role", "type"))  # keys of a delta
# What adds up to the prompt. The first is one count by two names; in Anthropic's dialect it is
# what no cache had (https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching, and
# vllm-project/vllm#40912), elsewhere the others are absent.
_PROMPT_NAMES = (
    ("prompt_tokens", "input_tokens"),
    ("cache_read_input_tokens",),
    ("cache_creation_input_tokens",),
)
_OF_PROMPT = frozenset(name for names in _PROMPT_NAMES for name in names)
_OUTPUT_NAMES = ("completion_tokens", "output_tokens")
_MOST_TOKENS = 2**31  # above it is no count
_MESSAGE_CHARS = 500
_CONTROLS = re.compile(r"[\x00-\x20\x7f]+")


def parsed(data: bytes) -> Any:
    """``data`` as JSON, or as what Python servers write for it (NaN, halves of surrogates,
    numbers without bounds, a broken character); None when it is none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data.decode("utf-8-sig", "replace"), parse_int=_number)
    except (ValueError, RecursionError):
        return None


def _number(digits: str) -> float:
    return int(digits) if len(digits) < 20 else float(digits)


def kind_of(name: Any) -> str:
    """What an object of this type is: ``TOKEN``, ``END``, ``ERROR``, or "" for anything else."""
    if not isinstance(name, str):
        return ""
    return _TYPES.get(name) or (TOKEN if name.endswith(_DELTA) else "")


def choices_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an OpenAI object, as far as they are any."""
    choices = fields.get("choices")
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


def is_generated(fields: dict[str, Any], choices: list[dict[str, Any]], kind: str) -> bool:
    """Whether an event carries generated content: text, or anything in a delta but the role."""
    for choice in choices:
        if choice.get("text") or _filled(choice.get("delta")):
            return True
    return kind == TOKEN and _filled(fields.get("delta"))


def _filled(delta: Any) -> bool:
    if isinstance(delta, dict):
        return any(value for key, value in delta.items() if key not in _NOT_GENERATED)
    return isinstance(delta, str) and bool(delta)


def is_end(choices: list[dict[str, Any]], kind: str) -> bool:
    """Whether an event ends the answer, or one choice of it."""
    return kind == END or any(choice.get("finish_reason") for choice in choices)


def is_usage_event(data: bytes) -> bool:
    """Whether this is the event that ``stream_options.include_usage`` asks for."""
    fields = parsed(data)
    return (
        isinstance(fields, dict)
        and fields.get("choices") == []
        and isinstance(fields.get("usage"), dict)
        and not fields.get("error")
    )


def failure_of(fields: dict[str, Any], choices: list[dict[str, Any]], kind: str) -> str | None:
    """The message of the error that an object carries, in the shapes of all engines.

    ``{"error": {...}}`` or text, ``{"object": "error", "message"}`` (vLLM, SGLang), ``{"type":
    "error"}``, a failed response, a choice that finished with ``error``.
    """
    response = fields.get("response")
    error = fields.get("error") or (isinstance(response, dict) and response.get("error"))
    if error:
        return error_text(error)
    failed = (
        kind == ERROR
        or fields.get("object") == "error"
        or any(choice.get("finish_reason") == "error" for choice in choices)
    )
    return error_text(fields) if failed else None


def error_text(error: Any) -> str:
    """The words of an error, as one bounded line."""
    if isinstance(error, dict):
        error = error.get("message") or ""
    return _CONTROLS.sub(" ", str(error)[:_MESSAGE_CHARS]).strip() or "error"


def usages_of(fields: dict[str, Any]) -> list[Any]:
    """The usage objects of an event or answer, wherever its dialect puts them."""
    found = [fields.get("usage")]
    if isinstance(response := fields.get("response"), dict):
        found.append(response.get("usage"))
    if isinstance(message := fields.get("message"), dict):  # at the start: output is yet to come
        usage = message.get("usage")
        if isinstance(usage, dict):
            found.append({name: usage[name] for name in _OF_PROMPT & usage.keys()})
    return found


def counts_of(usage: Any) -> tuple[int, int]:
    """Prompt and output tokens of a usage object; 0 for a count that makes no sense.

    A prompt is all of it, whether a cache had some or not.
    """
    if not isinstance(usage, dict):
        return 0, 0
    prompt = sum(_count(usage, names) for names in _PROMPT_NAMES)
    return prompt if prompt < _MOST_TOKENS else 0, _count(usage, _OUTPUT_NAMES)


def _count(usage: dict[str, Any], names: tuple[str, ...]) -> int:
    value = next((usage[name] for name in names if name in usage), None)
    return value if type(value) is int and 0 < value < _MOST_TOKENS else 0
