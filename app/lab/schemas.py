"""Values that fit a JSON schema, as constrained decoding makes them: tool arguments, JSON answers.

A value is a function of (schema, digest), so the same request has the same answer on any node.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import orjson

from app.lab.answers import answer_text

_PIECE_CHARS: Final = 4
_MAX_DEPTH: Final = 8


def pieces_of(value: object) -> tuple[str, ...]:
    """Cut the JSON of a value into tokens of a few characters."""
    text = orjson.dumps(value).decode()
    return tuple(text[i : i + _PIECE_CHARS] for i in range(0, len(text), _PIECE_CHARS))


def fitting(schema: object, digest: bytes) -> Any:
    """Make up a value that fits a schema; whatever is not a schema asks for `{}`."""
    root = schema if isinstance(schema, dict) else {}
    return _fitting(root, root, digest, _MAX_DEPTH)


def _fitting(schema: dict[str, Any], root: dict[str, Any], digest: bytes, depth: int) -> Any:
    if depth == 0:  # a schema that contains itself
        return None
    depth -= 1
    if "$ref" in schema:
        return _fitting(_at(root, str(schema["$ref"])), root, digest, depth)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][digest[0] % len(schema["enum"])]
    for choice in ("anyOf", "oneOf", "allOf"):
        if schema.get(choice):
            return _fitting(schema[choice][0], root, digest, depth)
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "array":
        items = schema.get("items") or {"type": "string"}
        return [
            _fitting(items, root, _inner(digest, str(i)), depth)
            for i in range(max(1, schema.get("minItems", 1)))
        ]
    if kind == "object":
        members: dict[str, Any] = schema.get("properties") or {}
        return {
            name: _fitting(member, root, _inner(digest, name), depth)
            for name, member in members.items()
        }
    return _scalar(kind, schema, digest)


def _scalar(kind: str, schema: dict[str, Any], digest: bytes) -> Any:
    match kind:
        case "integer":
            return max(schema.get("minimum", 0), digest[0])
        case "number":
            return max(schema.get("minimum", 0), digest[0] / 8)
        case "boolean":
            return digest[0] % 2 == 0
        case "null":
            return None
        case _:
            return answer_text(digest, 2)


def _inner(digest: bytes, name: str) -> bytes:
    """Give each member a digest of its own."""
    return hashlib.blake2b(name.encode(), digest_size=32, key=digest).digest()


def _at(root: dict[str, Any], reference: str) -> dict[str, Any]:
    """Follow a reference inside the schema, `#/$defs/Name`; {} when it leads nowhere."""
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}
