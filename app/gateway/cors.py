"""Cross-origin requests of browsers: answered by the gateway, for the origins configured.

Preflights carry no credentials and never reach a node. https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.gateway.connection import Headers

_NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")
_METHODS = b"GET, HEAD, POST, PATCH, DELETE"
_KEPT_S = 600  # for how long a browser may remember the answer to a preflight


class Cors:
    """``server.cors_origins``."""

    def __init__(self, origins: list[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        # A cache must not give the answer for one origin to another.
        self._varies: Headers = [(b"vary", b"Origin")] if origins and not self._any else []

    def headers(self, asked: Mapping[bytes, bytes]) -> Headers:
        """What an answer of any kind carries; ``asked`` are the request's headers."""
        if not self._origins:
            return []
        origin = asked.get(b"origin")
        if origin is None or not (self._any or origin in self._origins):
            return self._varies
        return [
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-expose-headers", b"*"),
            *self._varies,
        ]

    def preflight(self, asked: Mapping[bytes, bytes]) -> Headers:
        """What the answer to a preflight carries beyond ``headers``."""
        origin = asked.get(b"origin")
        if origin is None or not (self._any or origin in self._origins):
            return []
        allowed: Headers = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", b"%d" % _KEPT_S),
        ]
        names = asked.get(b"access-control-request-headers", b"")
        if _NAMES.fullmatch(names):
            allowed.append((b"access-control-allow-headers", names))
        return allowed


def is_preflight(method: str, asked: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks what it may ask for."""
    return method == "OPTIONS" and b"origin" in asked and b"access-control-request-method" in asked
