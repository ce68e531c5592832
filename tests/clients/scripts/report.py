"""What every script prints: a line of JSON for each call, with what the client made of the answer.

``{"client", "version"}`` first, then ``{"call", "result", "detail"}``; ``result`` is ``ok`` or
``error``. A detail holds what an application would use: texts, reasons, counts, error types. It
leaves out ids and times, so that the same call on any node gives the same line.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Calls = dict[str, Callable[[], Any]]

HELLO = "Say something about rivers."
MODEL = os.environ.get("CLIENT_MODEL", "demo")
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def target() -> tuple[str, str]:
    """Where to call, without a path, and with which key: the command line and the environment."""
    return sys.argv[1].rstrip("/"), os.environ["CLIENT_KEY"]


def report(client: str, package: str, calls: Calls, *, told: str | None = None) -> None:
    """Make every call in order and print what came of it.

    ``told`` is the version of a client that is no Python package.
    """
    _print({"client": client, "version": told or version(package)})
    asyncio.run(_report(calls))


async def _report(calls: Calls) -> None:
    for name, call in calls.items():
        try:
            detail = call()
            if inspect.isawaitable(detail):
                detail = await detail
        except Exception as exc:  # whatever it is, the reader of the line decides
            _print(
                {"call": name, "result": "error", "detail": f"{type(exc).__name__}: {exc}"[:400]}
            )
        else:
            _print({"call": name, "result": "ok", "detail": detail})


def digest(data: bytes) -> str:
    """Stand for bytes too long to print: their length and a hash."""
    return f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:16]}"


def raised(call: Callable[[], Any], *kinds: type[BaseException]) -> dict[str, Any]:
    """Make a call that must fail; what the client raised, as an application would see it."""
    try:
        got = call()
    except kinds as exc:
        return failure(exc)
    raise AssertionError(f"no error, but {got!r}")


def failure(exc: BaseException) -> dict[str, Any]:
    """What an error of a client says: its type, status and code."""
    found = {"raised": type(exc).__name__}
    for name in ("status_code", "code", "param"):
        value = getattr(exc, name, None)
        if value is not None:
            found[name] = value
    return found


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line, sort_keys=True), flush=True)
