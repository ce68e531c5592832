"""One JSON line per request on stdout: who, what, where, how long and how much; never content.

Lines leave in a thread, a tenth of a second later: whoever reads stdout may be slow, and requests
must not wait for that. What cannot be kept meanwhile is dropped, and the next line says how many.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from typing import BinaryIO

    from app.telemetry.exchange import Exchange, Headers

log = logging.getLogger("leaseway.access")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_EVERY_S = 0.1
_MOST_LINES = 20_000


class AccessLog:
    """The access lines of one replica; ``to`` takes them, stdout unless a test says otherwise."""

    def __init__(self, replica: str, to: BinaryIO | None = None) -> None:
        self._replica = replica
        self._to = to or sys.stdout.buffer
        self._lines: deque[bytes] = deque()
        self._dropped = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    @staticmethod
    def trace_id(headers: Headers) -> str:
        """The trace that the client says its request is part of, "" without one
        (https://www.w3.org/TR/trace-context/#traceparent-header)."""
        for name, value in headers:
            if name == b"traceparent" and (given := _TRACEPARENT.fullmatch(value)):
                return given[1].decode()
        return ""

    def write(
        self, exchange: Exchange, outcome: str, status: int, took_s: float,
        bytes_in: int, bytes_out: int,
    ) -> None:  # fmt: skip
        """The line of a request that has ended. Never waits."""
        if len(self._lines) >= _MOST_LINES:
            self._dropped += 1
            return
        leased = exchange.leased - exchange.received if exchange.leased else None
        line = {
            "at": datetime.now(UTC),
            "replica": self._replica,
            "request_id": exchange.request_id.decode("latin-1"),
            "trace_id": exchange.trace_id or None,
            "key": exchange.key,
            "route": exchange.route,
            "model": exchange.model or None,
            "stream": exchange.stream,
            "node": exchange.node or None,
            "attempts": exchange.attempts,
            "outcome": outcome,
            "status": status or None,
            "degraded": exchange.degraded,
            "queue_ms": _ms(leased),
            "ttft_ms": _ms(exchange.ttft_s or None),
            "e2e_ms": _ms(took_s),
            "prompt_tokens": exchange.prompt_tokens,
            "output_tokens": exchange.output_tokens,
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
        }
        if self._dropped:
            line["dropped_before"], self._dropped = self._dropped, 0
        self._lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Write what is left; waits for it a second at most."""
        self._ended.set()
        self._thread.join(1)

    def _run(self) -> None:
        over = False
        while not over:
            over = self._ended.wait(_EVERY_S)  # then once more, for the last ones
            try:
                if self._lines:
                    self._to.write(b"".join(self._taken()))
                    self._to.flush()
            except (OSError, ValueError) as exc:  # the reader has gone
                log.error("no more access lines: %s", exc)  # noqa: TRY400
                self._lines = deque(maxlen=0)
                return

    def _taken(self) -> list[bytes]:
        return [self._lines.popleft() for _ in range(len(self._lines))]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
