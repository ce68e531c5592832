"""Multipart forms (RFC 7578), as far as audio uploads use them."""

from __future__ import annotations

import re

_BOUNDARY = re.compile(r'boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'[; ]name="([^"]*)"')


def form_fields(content_type: str, body: bytes) -> dict[str, bytes]:
    """Read the fields of a form, files as their bytes. ValueError says what is wrong with it."""
    boundary = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or boundary is None:
        raise ValueError("send multipart/form-data with a boundary")
    mark = b"--" + boundary.group(1).encode("latin-1")
    parts = (b"\r\n" + body).split(b"\r\n" + mark)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise ValueError("the form is cut off: its last boundary is missing")
    fields: dict[str, bytes] = {}
    for part in parts[1:-1]:
        head, found, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if not found or name is None:
            raise ValueError("a part of the form has no name")
        fields[name.group(1).decode("utf-8", "replace")] = value
    return fields
