"""Change one value inside a JSON text; every other byte stays (BerriAI/litellm#20246)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator

_OUTER = re.compile(rb'["{}\[\],:]')  # what matters between the members of the object
_INNER = re.compile(rb'["{}\[\]]')  # what matters inside one of them
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)  # possessive: it must not remember
_EMPTY = re.compile(rb"[ \t\n\r]*\}")
_SPACE = b" \t\n\r"
_BACKSLASH = 0x5C


def spans(text: bytes, key: str) -> Iterator[tuple[int, int]]:
    """Where the values of the top-level ``key`` begin and end; ``text`` is a valid JSON object."""
    depth, name, begin, at = 0, b"", 0, 0
    while (token := (_OUTER if depth == 1 else _INNER).search(text, at)) is not None:
        mark, at = token.group(), token.end()
        if mark == b'"':
            at = _string_end(text, token.start())
            if depth == 1 and not begin:
                name = text[token.start() : at]
        elif mark in b"{[":
            depth += 1
        elif mark == b":":
            begin = at
        else:  # the end of a member, a list or an object
            if depth == 1 and begin:
                if orjson.loads(name) == key:
                    value = text[begin : token.start()]
                    begin += len(value) - len(value.lstrip(_SPACE))
                    yield begin, begin + len(value.strip(_SPACE))
                begin = 0
            if mark != b",":
                depth -= 1


def _string_end(text: bytes, begin: int) -> int:
    """Behind the string that begins here. Most are found by one search, however long they are."""
    end = text.find(b'"', begin + 1)
    if text[end - 1] != _BACKSLASH:
        return end + 1
    string = _STRING.match(text, begin)
    assert string is not None  # noqa: S101 - the text is valid
    return string.end()


def replace_value(text: bytes, key: str, value: bytes) -> bytes:
    """``text`` with ``value``, which is JSON, for every value of the top-level ``key``.

    A key given twice is replaced each time, so that every parser at the node agrees on it.
    """
    whole = memoryview(text)  # a slice of it is no copy: bodies may be large
    pieces: list[bytes | memoryview] = []
    copied = 0
    for begin, end in spans(text, key):
        pieces += (whole[copied:begin], value)
        copied = end
    return b"".join([*pieces, whole[copied:]]) if pieces else text


def add_member(text: bytes, member: bytes) -> bytes:
    """``text``, a valid JSON object, with ``member`` (``"name":value``) before the others."""
    at = text.index(b"{") + 1
    comma = b"" if _EMPTY.match(text, at) else b","
    return b"".join((text[:at], member, comma, memoryview(text)[at:]))
