"""The answers of a fake node that take time: tokens as they come, and faults on the way.

A reply ends exactly once, by its end, its fault, or its client, and then holds nothing: no slot in
the engine, no timer, no memory of the text (words are made again from their number).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import orjson

from app.lab.answers import whole_answer
from app.lab.engine import State
from app.lab.ledger import End, Ledger

if TYPE_CHECKING:
    from app.lab.calls import Call
    from app.lab.driver import Driver
    from app.lab.engine import Sequence
    from app.lab.events import Events
    from app.lab.faults import Fault
    from app.lab.http1 import Connection

BURST: Final = 128
"""Token events written at once to a client that has fallen behind."""
CUDA_ERROR: Final[dict[str, Any]] = {
    "error": {"message": "CUDA out of memory", "type": "server_error", "code": 500}
}
_EVENT_STREAM: Final = {"Cache-Control": "no-cache"}


class Reply:
    """An open request: counted from here to its one end."""

    def __init__(self, connection: Connection, ledger: Ledger) -> None:
        self._connection = connection
        self._ledger = ledger
        self._ended = False
        connection.exchange = self
        ledger.begin()

    def abandoned(self) -> None:
        """The client has left."""
        self._end(End.ABORTED)

    def writable(self) -> None:
        """The client reads again; by default nothing was held back."""

    def reject(self, status: int, payload: object) -> None:
        """Answer with an error that the request itself has caused."""
        self._end(End.REJECTED)
        self._connection.respond(status, payload)

    def reset(self) -> None:
        """Break the connection as a fault."""
        self._end(End.FAULTED)
        self._connection.reset()

    def _end(self, how: End) -> None:
        if not self._ended:
            self._ended = True
            self._ledger.end(how)
            self._stop()

    def _stop(self) -> None:
        """Give back what the reply holds."""


class FaultyReply(Reply):
    """An answer that is a fault: an error status after a delay, or never (`answer` not called)."""

    _timer: asyncio.TimerHandle | None = None

    def answer(
        self, status: int, payload: object, *, headers: dict[str, str], delay_ms: float
    ) -> None:
        """Answer `delay_ms` from now."""
        self._timer = asyncio.get_running_loop().call_later(
            delay_ms / 1000, self._answer, status, payload, headers
        )

    def _answer(self, status: int, payload: object, headers: dict[str, str]) -> None:
        self._end(End.FAULTED)
        self._connection.respond(status, payload, headers)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class ModelReply(Reply):
    """An answer made by the engine."""

    def __init__(
        self, connection: Connection, ledger: Ledger, driver: Driver, fault: Fault | None
    ) -> None:
        super().__init__(connection, ledger)
        self._driver = driver
        self._fault = fault
        self._sequence: Sequence | None = None
        self._broken = False

    def begin(self, call: Call) -> None:
        """Put the call in the engine's line; PromptTooLong passes through."""
        self._sequence = self._driver.submit(
            call.prompt_tokens, call.max_tokens, call.chance(), self
        )
        self._ledger.prompt_tokens += call.prompt_tokens

    def token(self, sequence: Sequence) -> None:
        """One more token exists."""
        raise NotImplementedError

    def _stop(self) -> None:
        if self._sequence is not None:
            self._driver.cancel(self._sequence)

    def _break(self, fault: Fault, partial: bytes, error: bytes) -> None:
        """Let the fault happen: after `partial` for a torn answer, or with `error`."""
        self._broken = True
        self._stop()  # a crashed or stuck engine works no more on it
        if fault.mode == "stall":
            self._connection.send(partial)
            return  # still open: it ends when the client gives up
        self._end(End.FAULTED)
        if fault.mode == "error_event":
            self._connection.send(error)
            self._connection.end(close=True)
        else:
            self._connection.send(partial)
            self._connection.reset_when_flushed()


class WholeReply(ModelReply):
    """An answer sent in one piece once the last token is there."""

    def __init__(
        self,
        connection: Connection,
        ledger: Ledger,
        driver: Driver,
        fault: Fault | None,
        *,
        call: Call,
        answer_id: str,
    ) -> None:
        super().__init__(connection, ledger, driver, fault)
        self._call = call
        self._answer_id = answer_id

    def token(self, sequence: Sequence) -> None:
        """Count; answer at the last one."""
        if self._call.decodes:
            self._ledger.completion_tokens += 1
        done = sequence.state is State.FINISHED
        fault = self._fault
        if fault is not None and (done or sequence.emitted >= fault.after_tokens):
            kind, body = self._answer(sequence.emitted)
            error = orjson.dumps(CUDA_ERROR)
            self._break(
                fault,
                self._head(200, kind, body) + body[: len(body) // 2],
                self._head(500, "application/json", error) + error,
            )
        elif done:
            self._end(End.COMPLETED)
            kind, body = self._answer(sequence.emitted)
            self._connection.respond(200, body, content_type=kind)

    def _answer(self, tokens: int) -> tuple[str, bytes]:
        return whole_answer(self._call, self._answer_id, tokens)

    def _head(self, status: int, kind: str, body: bytes) -> bytes:
        return self._connection.head(status, kind, {"Content-Length": str(len(body))})


class StreamReply(ModelReply):
    """An answer sent token by token.

    A client that reads slowly does not slow the engine, as in vLLM. What it is owed is a number,
    not a buffer, and is written when its socket takes it.
    """

    def __init__(
        self,
        connection: Connection,
        ledger: Ledger,
        driver: Driver,
        fault: Fault | None,
        events: Events,
        *,
        early_role: bool,
    ) -> None:
        super().__init__(connection, ledger, driver, fault)
        self._events = events
        self._early_role = early_role
        self._opened = False
        self._due = 0
        self._sent = 0
        self._last: int | None = None
        self._cut = None if fault is None else fault.after_tokens

    def open(self, *, chunked: bool) -> None:
        """Send the head (at once, as vLLM does) and, if asked to, the role event."""
        framing = {"Transfer-Encoding": "chunked"} if chunked else {}
        head = self._connection.head(200, "text/event-stream", {**_EVENT_STREAM, **framing})
        if self._early_role:
            head += self._opening()
        self._connection.send(head)

    def token(self, sequence: Sequence) -> None:
        """One more event is due."""
        self._ledger.completion_tokens += 1
        self._due = sequence.emitted
        if sequence.state is State.FINISHED:
            self._last = sequence.emitted
            if self._cut is not None:  # a fault strikes a shorter answer at its end
                self._cut = min(self._cut, self._last)
        if not self._connection.paused:
            self._write_due()

    def writable(self) -> None:
        """Go on with what is owed."""
        self._write_due()

    def _write_due(self) -> None:
        if self._ended or self._broken:
            return
        connection = self._connection
        until = self._due if self._cut is None else min(self._due, self._cut)
        while self._sent < until and not connection.paused:
            stop = min(until, self._sent + BURST)
            data = b"" if self._opened else self._opening()
            data += self._events.tokens(self._sent, stop)
            self._sent = stop
            if stop == self._last and self._cut is None:
                # The end rides with the last token: one write, and the reply is over.
                self._end(End.COMPLETED)
                connection.send(data + self._events.end(stop))
                connection.end()
                return
            connection.send(data)
        if self._fault is not None and self._sent == self._cut and self._due:
            self._break(self._fault, b"", self._events.error(CUDA_ERROR))

    def _opening(self) -> bytes:
        self._opened = True
        return self._events.opening()
