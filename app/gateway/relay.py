"""From the first byte to the last: an answer goes to the client as it comes, and is booked."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

from app.cluster.engines import without_key
from app.errors import ApiError
from app.gateway.connection import Broken
from app.gateway.observe import EventStream
from app.gateway.respond import ClientGone
from app.gateway.shape import error_event
from app.model import Outcome
from app.telemetry.exchange import outcome_of

if TYPE_CHECKING:
    from app.cluster.leases import Lease
    from app.gateway.attempt import Answer
    from app.gateway.connection import Headers
    from app.gateway.inspect import Call
    from app.gateway.respond import Client
    from app.telemetry.exchange import Exchange
    from app.telemetry.metrics import Metrics

log = logging.getLogger("leaseway.relay")


class Relay:
    """Sends answers on. ``stall_s`` is how long a node may be silent after its first token."""

    def __init__(self, metrics: Metrics, stall_s: float) -> None:
        self._metrics = metrics
        self._stall_s = stall_s

    async def send(
        self, client: Client, lease: Lease, call: Call, answer: Answer, exchange: Exchange
    ) -> None:
        """Send the answer as it comes; then end the lease with what was seen."""
        connection, observed = answer.connection, answer.observed
        first_at = 0.0

        def pass_on(data: bytes) -> bool:
            lease.heard()
            return client.push(observed.feed(data))

        try:
            await client.start(answer.status, _headers(lease, answer, exchange.request_id))
            ready = answer.ready
            lease.heard()
            while True:
                if observed.first_token and not first_at:
                    first_at = lease.heard_at
                    connection.be_patient(self._stall_s)
                    if call.route.ttft != "none":
                        lease.first_token()
                        exchange.first_token = first_at
                        self._metrics.first_token(lease.node.id, first_at - lease.started)
                at_end = answer.at_end
                if at_end:
                    rest = answer.rest()
                    if answer.complete:
                        ready += rest
                        break
                await client.write(ready)
                if at_end:
                    raise Broken("truncated", "the node closed before the end of its answer")
                # After the first token nothing is left to decide about a stream: what comes goes to
                # the client without waking this task, until the end or until the client is slow.
                straight = pass_on if first_at and answer.streaming else None
                ready = observed.feed(await connection.read(straight))
                lease.heard()
        except Broken as exc:
            observed.conclude()
            if not (
                isinstance(observed, EventStream) and observed.over and observed.between_events
            ):
                exchange.outcome = Outcome.FAILED
                await self._break_off(client, lease, call, answer, exc)
                return
            ready = b""  # its last word has gone out: only the framing is cut
        except (ClientGone, asyncio.CancelledError):
            observed.conclude()
            if observed.error is not None:  # perhaps why the client left
                exchange.outcome = self._end_failed(lease, call, answer)
            elif isinstance(observed, EventStream) and observed.over:
                # Its last word has gone out, and many a client leaves at that: the answer is whole.
                self._end(lease, call, answer, exchange, _decode_us(lease, first_at))
            else:
                self._metrics.book_tokens(call.model, observed.prompt_tokens, observed.tokens)
            raise
        self._end(lease, call, answer, exchange, _decode_us(lease, first_at))
        await client.finish(ready)

    def _end(
        self, lease: Lease, call: Call, answer: Answer, exchange: Exchange, decode_us: int
    ) -> None:
        """The answer is whole: book it and give the lease back."""
        observed, node_id = answer.observed, lease.node.id
        self._metrics.request(call.model, answer.status)
        exchange.outcome = outcome_of(answer.status)
        if answer.status >= 400:
            lease.end(Outcome.REJECTED)  # no effect when the attempt was ended as failed
            return
        if observed.error is not None or answer.booked:
            exchange.outcome = self._end_failed(lease, call, answer)
            return
        tokens, ttft = observed.tokens, call.route.ttft
        if not answer.streaming and (ttft == "whole" or (ttft == "first" and tokens <= 1)):
            # The whole answer is one token or no decode at all: its time is the TTFT. A longer
            # answer in one piece does not show when its first token came.
            lease.first_token()
            exchange.first_token = monotonic()
            self._metrics.first_token(node_id, exchange.first_token - lease.started)
        self._metrics.attempt(node_id, Outcome.OK.value)
        self._metrics.book_tokens(call.model, observed.prompt_tokens, tokens)
        lease.end(
            Outcome.OK, tokens=max(0, tokens - 1) if decode_us > 0 else 0, decode_us=decode_us
        )

    def _end_failed(self, lease: Lease, call: Call, answer: Answer) -> Outcome:
        """The answer itself says that it failed."""
        error = answer.observed.error
        if error is not None:
            said = without_key(lease.node, error)
            log.warning("node %s: error inside an answer: %s", lease.node.id, said)
        self._book_failed(lease, call, answer)
        return Outcome.FAILED

    def _book_failed(self, lease: Lease, call: Call, answer: Answer) -> None:
        observed = answer.observed
        lease.end(Outcome.FAILED)
        if not answer.booked:
            self._metrics.attempt(lease.node.id, Outcome.FAILED.value)
        self._metrics.book_tokens(call.model, observed.prompt_tokens, observed.tokens)

    async def _break_off(
        self, client: Client, lease: Lease, call: Call, answer: Answer, broken: Broken
    ) -> None:
        """The node broke off in mid-answer: say so, never pretend that it is complete."""
        log.warning("node %s: %s (%s)", lease.node.id, broken, broken.kind)
        self._metrics.request(call.model, answer.status)
        self._book_failed(lease, call, answer)
        observed = answer.observed
        if isinstance(observed, EventStream) and observed.between_events:
            error = ApiError(
                502,
                f"The node broke off its answer ({broken.kind}).",
                kind="upstream_error",
                code=broken.kind,
            )
            await client.finish(error_event(error, client.shape))
        # Otherwise the transfer ends unfinished: the server closes the connection, and the
        # client's HTTP library reports the cut.


def _decode_us(lease: Lease, first_at: float) -> int:
    """How long the node has decoded since its first token, 0 when there was none."""
    return int((lease.heard_at - first_at) * 1e6) if first_at else 0


def _headers(lease: Lease, answer: Answer, request_id: bytes) -> Headers:
    headers = [
        *answer.headers,
        (b"x-request-id", request_id),
        (b"x-leaseway-node", lease.node.id.encode()),
        (b"x-leaseway-attempts", b"%d" % lease.attempts),
        (b"x-leaseway-queue-ms", b"0"),
    ]
    if lease.grant.degraded:
        headers.append((b"x-leaseway-degraded", b"1"))
    return headers
