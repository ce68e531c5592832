"""The clients of the policy bench: streaming requests, each an answer with all its timestamps."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.lab.bench.policies_load import Question


class Clock:
    """Seconds of the fake fleet since the start: real ones over `scale`."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._started = perf_counter()

    def now_s(self) -> float:
        """Now."""
        return (perf_counter() - self._started) / self.scale

    async def reach(self, at_s: float) -> None:
        """Wait until then, and never less: timers of the loop may be a millisecond early."""
        while (left_s := at_s - self.now_s()) > 0:  # noqa: ASYNC110 - time is no event
            await asyncio.sleep(left_s * self.scale)


@dataclass(slots=True)
class Answer:
    """What came of a question. Times are seconds of the load's clock."""

    question: Question
    due_s: float
    """When it should have been sent: a client that is late does not flatter the figures."""
    token_s: list[float] = field(default_factory=list)
    """Arrival of each token of content; the role event is none."""
    node: str = ""
    attempts: int = 0
    degraded: bool = False
    whole: bool = False
    fault: str = ""
    """What was wrong with it. Without one and not whole: given up at the end of the run."""

    @property
    def first_s(self) -> float | None:
        """Arrival of the first token."""
        return self.token_s[0] if self.token_s else None


class Lane(asyncio.Protocol):
    """One connection to a replica, one question at a time."""

    _transport: asyncio.Transport

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._ended: asyncio.Future[None] | None = None
        self._pending = b""
        self._done = False
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}
        self.usable = False

    async def ask(self, answer: Answer, head: bytes) -> None:
        """Send; return when the answer has ended, well or not. Cancelled: hang up."""
        self._answer, self._pending, self._done = answer, b"", False
        self._finish, self._usage = None, {}
        self._ended = asyncio.get_running_loop().create_future()
        body = answer.question.body
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Hang up."""
        self.usable, self._answer = False, None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self.usable = True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._fail("closed before the answer ended")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("malformed")

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        match name.lower():
            case b"x-leaseway-node":
                answer.node = value.decode()
            case b"x-leaseway-attempts":
                answer.attempts = int(value)
            case b"x-leaseway-degraded":
                answer.degraded = True

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            return
        now_s = self._clock.now_s()
        *events, self._pending = (self._pending + body).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                self._done = True
            else:
                self._take(orjson.loads(data), now_s)

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        if self._answer is None:
            return
        if "error" in event:
            self._fail("error event")
            return
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            self._finish = choice["finish_reason"] or self._finish
            if choice["delta"].get("content"):
                self._answer.token_s.append(now_s)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None:
            return
        if wrong := self._wrong(answer):
            self._fail(wrong)
            return
        answer.whole = True
        self.usable = self._parser.should_keep_alive()
        self._end()

    def _wrong(self, answer: Answer) -> str:
        question, tokens = answer.question, len(answer.token_s)
        if (status := self._parser.get_status_code()) != 200:
            return f"status {status}"
        if not self._done or self._finish is None:
            return "no end of the stream"
        if tokens != question.answer_tokens:
            return f"{tokens} tokens, not {question.answer_tokens}"
        counted = self._usage.get("prompt_tokens"), self._usage.get("completion_tokens")
        if counted != (question.prompt_tokens, question.answer_tokens):
            return f"usage {counted}, not {question.prompt_tokens, question.answer_tokens}"
        return ""

    def _fail(self, reason: str) -> None:
        """Nothing that follows a wrong answer on its connection can be trusted."""
        if self._answer is not None:
            self._answer.fault = reason
        self.close()
        self._end()

    def _end(self) -> None:
        self._answer = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class Clients:
    """Everyone who asks: kept-alive connections to all replicas, as many as it takes."""

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        self._targets = [
            (url.hostname or "127.0.0.1", url.port or 80) for url in map(urlsplit, urls)
        ]
        self._idle: list[list[Lane]] = [[] for _ in urls]
        self._clock = clock
        self.answers: list[Answer] = []

    async def ask(self, question: Question, due_s: float, replica: int) -> Answer:
        """One question to one replica. The answer is listed from its start on."""
        answer = Answer(question, due_s)
        self.answers.append(answer)
        host, port = self._targets[replica]
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
            "content-type: application/json\r\n"
        )
        try:
            lane = await self._lane(replica)
        except OSError:
            answer.fault = "connect"
            return answer
        await lane.ask(answer, head.encode())
        if lane.usable:
            self._idle[replica].append(lane)
        return answer

    @property
    def replicas(self) -> int:
        """How many there are to ask."""
        return len(self._targets)

    def replica_of(self, question: Question) -> int:
        """By the question's own lot."""
        return int(question.lot * len(self._targets))

    def close(self) -> None:
        """Drop the idle connections."""
        for lanes in self._idle:
            while lanes:
                lanes.pop().close()

    async def _lane(self, replica: int) -> Lane:
        lanes = self._idle[replica]
        while lanes:
            if (lane := lanes.pop()).usable:
                return lane
        host, port = self._targets[replica]
        loop = asyncio.get_running_loop()
        _, lane = await loop.create_connection(lambda: Lane(self._clock), host, port)
        return lane
