"""Fields of a multipart form, found in its bytes without decoding what stands between them.

An upload is forwarded as it came, boundary and all; the gateway reads two short fields of it.
RFC 7578, with the framing of RFC 2046, 5.1.1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from app.errors import ApiError, bad_request

if TYPE_CHECKING:
    from collections.abc import Iterator

_PART_HEAD_BYTES = 8 * 1024
_MOST_PARTS = 1000
_PARAMETER = re.compile(rb';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^;"\s]*))[ \t]*')
_AFTER_BOUNDARY = re.compile(rb"(--)?[ \t]*(?:\r\n|\Z)")
_DISPOSITION = re.compile(rb"(?:^|\r\n)content-disposition:[ \t]*form-data[ \t]*", re.IGNORECASE)


class Field(NamedTuple):
    """A field's value and where it stands in the body."""

    value: bytes
    begin: int
    end: int


def read_fields(content_type: bytes, body: bytes, names: frozenset[bytes]) -> dict[bytes, Field]:
    """The fields of ``names`` that the form has. Raises ``ApiError`` (400, 415).

    A field given twice is refused: the node might take the other one.
    """
    kind, _, _ = content_type.partition(b";")
    if kind.strip().lower() != b"multipart/form-data":
        raise ApiError(
            415,
            "The body must be a form: send Content-Type: multipart/form-data.",
            kind="invalid_request_error",
            code="unsupported_media_type",
        )
    boundary = _parameters(content_type[len(kind) :]).get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise _malformed("its Content-Type has no boundary")
    found: dict[bytes, Field] = {}
    for head, begin, end in _parts(body, b"--" + boundary):
        dispositions = list(_DISPOSITION.finditer(head))
        if len(dispositions) != 1:
            raise _malformed("a part of it has not exactly one Content-Disposition")
        line, _, _ = head[dispositions[0].end() :].partition(b"\r\n")
        name = _parameters(line).get(b"name", b"")
        if name in names:
            if name in found:
                raise bad_request(
                    f"'{name.decode()}' is given twice.", param=name.decode(), code="invalid_value"
                )
            found[name] = Field(body[begin:end], begin, end)
    return found


def _parts(body: bytes, delimiter: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Head, begin and end of each part of the form."""
    _, after, last = _next_boundary(body, delimiter, 0)
    for _ in range(_MOST_PARTS):
        if last:
            return
        # Without headers the part begins with the blank line alone.
        head_end = body.find(b"\r\n\r\n", after - 2, after + _PART_HEAD_BYTES)
        if head_end < 0:
            raise _malformed("a part of it has no end of its headers")
        begin = head_end + 4
        end, behind, last = _next_boundary(body, delimiter, begin - 2)
        yield body[after:head_end], begin, max(begin, end)
        after = behind
    raise _malformed(f"it has more than {_MOST_PARTS} parts")


def _next_boundary(body: bytes, delimiter: bytes, start: int) -> tuple[int, int, bool]:
    """Where the next boundary line begins (with the line end before it) and ends; if it is the
    last. A line that only begins like a boundary is content."""
    if start == 0 and body.startswith(delimiter):
        after = _AFTER_BOUNDARY.match(body, len(delimiter))
        if after is not None:
            return 0, after.end(), after[1] is not None
    line = b"\r\n" + delimiter
    at = body.find(line, start)
    while at >= 0:
        after = _AFTER_BOUNDARY.match(body, at + len(line))
        if after is not None:
            return at, after.end(), after[1] is not None
        at = body.find(line, at + 2)
    raise _malformed("a boundary is missing")


def _parameters(text: bytes) -> dict[bytes, bytes]:
    """``;name=value`` one after the other; of a name given twice, nothing."""
    found: dict[bytes, bytes] = {}
    twice: set[bytes] = set()
    at = 0
    while (parameter := _PARAMETER.match(text, at)) is not None:
        name = parameter[1].lower()
        quoted = parameter[2]
        value = parameter[3] if quoted is None else re.sub(rb"\\(.)", rb"\1", quoted)
        if name in found:
            twice.add(name)
        found[name] = value
        at = parameter.end()
    return {name: value for name, value in found.items() if name not in twice}


def _malformed(why: str) -> ApiError:
    return bad_request(f"The form cannot be read: {why}.", code="invalid_form")
