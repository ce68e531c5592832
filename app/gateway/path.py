"""THE PATH of a request, top to bottom: receive, lease, forward, first byte, stream, release.

A raw ASGI callable in front of the control plane. One owner at a time: ``async with`` holds
the lease from the pick to the last byte; ending it never waits, so no exit can miss it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from time import monotonic
from typing import TYPE_CHECKING

from app.errors import ApiError, AttemptFailed, Refused
from app.gateway.attempt import Answer, AnsweredBadly, attempt, to_node
from app.gateway.connection import Broken, Headers
from app.gateway.inspect import ROUTES, Call, Route, inspect
from app.gateway.observe import EventStream
from app.gateway.respond import Client, ClientGone, Receive, Scope, Send, error_body
from app.model import Ask, Outcome, Refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from app.admission.keys import Keys
    from app.cluster.leases import Lease
    from app.cluster.replica import Replica
    from app.config import Settings
    from app.gateway.forward import Forward
    from app.telemetry.metrics import Metrics

log = logging.getLogger("leaseway.path")
_ENDING = ApiError(
    503, "The gateway ends.", kind="server_error", code="shutting_down", retry_after_s=1
)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class DataPlane:
    """Serves the forwarded routes; everything else goes to ``control``."""

    def __init__(
        self,
        settings: Settings,
        replica: Replica,
        forward: Forward,
        keys: Keys,
        metrics: Metrics,
        control: Callable[[Scope, Receive, Send], Awaitable[None]],
    ) -> None:
        self._replica = replica
        self._forward = forward
        self._keys = keys
        self._metrics = metrics
        self._control = control
        self._aliases = settings.aliases
        self._body_limit = int(settings.server.body_limit_mib * 1024 * 1024)
        self._max_attempts = settings.retries.max_attempts
        self._stall_s = settings.timeouts.stall_s
        self._serving = 0
        metrics.in_flight.set_function(lambda: self._serving)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        route = ROUTES.get(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            if scope.get("method") == "HEAD":  # GET without the body, which the server leaves out
                scope = {**scope, "method": "GET"}
            await self._control(scope, receive, send)
            return
        client = Client(scope, receive, send)
        given = client.headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else b"%032x" % random.getrandbits(128)
        self._serving += 1
        try:
            await self._serve(client, route, scope, request_id)
        except ClientGone:
            self._metrics.abandoned.inc()
        except asyncio.CancelledError:
            with contextlib.suppress(AttributeError):
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
            if client.gone:
                self._metrics.abandoned.inc()
            elif not client.started:  # the server ends, and `drain_s` is over
                self._metrics.request("unknown", 503)
                await client.fail(_ENDING, [(b"x-request-id", request_id)])
            # else the answer is cut off: the server closes the connection without its end
        except ApiError as error:
            self._metrics.request("unknown", error.status)
            await client.fail(error, [(b"x-request-id", request_id)])
        except Exception:
            if client.started:
                raise  # the server logs it and cuts the answer off
            log.exception("request %s failed by a fault of the gateway", request_id.decode())
            self._metrics.request("unknown", 500)
            fault = ApiError(500, "The gateway failed.", kind="server_error", code="internal")
            await client.fail(fault, [(b"x-request-id", request_id)])
        finally:
            client.unwatch()
            self._serving -= 1

    async def _serve(self, client: Client, route: Route, scope: Scope, request_id: bytes) -> None:
        """Receive, lease, forward, stream. Raises ``ApiError`` before the first byte only."""
        if scope["method"] != "POST":
            raise ApiError(
                405,
                f"{scope['method']} is not allowed on {route.path}; use POST.",
                kind="invalid_request_error",
                code="method_not_allowed",
                allow="POST",
            )
        key = self._keys.identify(client.headers)
        body = await client.body(self._body_limit)
        call = inspect(route, client.headers.get(b"content-type", b""), body, self._aliases)
        self._keys.require_model(key, call.asked_model)
        query = scope["query_string"]
        target = route.path.encode() + (b"?" + query if query else b"")
        headers = to_node(client.raw_headers, request_id)
        pool = self._replica.pool_of(call.model)
        client.watch()
        try:
            ask = Ask(call.model, call.prompt_tokens, call.stream)
            async with pool.leases.hold(ask) as lease:
                answer = await self._first_good_answer(lease, call, target, headers)
                try:
                    await self._relay(client, lease, call, answer, request_id)
                finally:
                    answer.connection.done()
        except Refused as exc:
            raise _refused(call, exc.refusal) from exc

    async def _first_good_answer(
        self, lease: Lease, call: Call, target: bytes, headers: Headers
    ) -> Answer:
        """Try nodes until one answers well; the last one's bad answer is better than ours."""
        while True:
            try:
                return await attempt(self._forward, lease.node, call, target, headers)
            except AttemptFailed as failure:
                self._metrics.attempt(lease.node.id, failure.outcome.value)
                log.info("%s (%s), attempt %d", failure, failure.kind, lease.attempts)
                try:
                    if lease.attempts >= self._max_attempts:
                        lease.end(failure.outcome, cool_ms=failure.cool_ms)
                        raise _gave_up(failure) from failure
                    await lease.move(failure)
                except BaseException as exc:
                    if isinstance(failure, AnsweredBadly):
                        if isinstance(exc, ApiError | Refused):
                            return failure.answer
                        failure.answer.connection.abort()
                    if isinstance(exc, Refused):
                        raise _gave_up(failure) from failure
                    raise
                if isinstance(failure, AnsweredBadly):
                    failure.answer.connection.abort()

    async def _relay(
        self, client: Client, lease: Lease, call: Call, answer: Answer, request_id: bytes
    ) -> None:
        """Send the answer as it comes; then end the lease with what was seen."""
        connection, observed = answer.connection, answer.observed
        first_at = 0.0

        def pass_on(data: bytes) -> bool:
            lease.heard()
            return client.push(observed.feed(data))

        try:
            await client.start(answer.status, self._headers(lease, answer, request_id))
            ready = answer.ready
            lease.heard()
            while True:
                if observed.first_token and not first_at:
                    first_at = lease.heard_at
                    lease.first_token()
                    connection.be_patient(self._stall_s)
                    self._metrics.first_token(lease.node.id, first_at - lease.started)
                at_end = connection.complete and not connection.unread
                if at_end:
                    rest = observed.rest()
                    if answer.complete:
                        ready += rest
                        break
                if ready:
                    await client.write(ready)
                if at_end:
                    raise Broken("truncated", "the node closed before the end of its stream")
                # After the first token nothing is left to decide about a stream: what comes goes to
                # the client without waking this task, until the end or until the client is slow.
                straight = pass_on if first_at and answer.streaming else None
                ready = observed.feed(await connection.read(straight))
                lease.heard()
        except Broken as exc:
            await self._break_off(client, lease, call, answer, exc)
            return
        decode_us = int((lease.heard_at - first_at) * 1e6) if first_at else 0
        self._end(lease, call, answer, decode_us)
        await client.finish(ready)

    def _headers(self, lease: Lease, answer: Answer, request_id: bytes) -> Headers:
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

    def _end(self, lease: Lease, call: Call, answer: Answer, decode_us: int) -> None:
        """The answer is whole: book it and give the lease back."""
        observed, node_id = answer.observed, lease.node.id
        self._metrics.request(call.model, answer.status)
        if answer.status >= 400:
            lease.end(Outcome.REJECTED)  # no effect when the attempt was ended as failed
            return
        if observed.error is not None:
            log.warning("node %s: error inside a stream: %s", node_id, observed.error[:200])
            lease.end(Outcome.FAILED)
            self._metrics.attempt(node_id, Outcome.FAILED.value)
            return
        tokens = observed.tokens
        if not answer.streaming and (tokens <= 1 or not call.route.decodes):
            # The whole answer is one token or no decode at all: its time is the TTFT. A longer
            # answer in one piece does not show when its first token came.
            lease.first_token()
            self._metrics.first_token(node_id, monotonic() - lease.started)
        self._metrics.attempt(node_id, Outcome.OK.value)
        self._metrics.book_tokens(call.model, observed.prompt_tokens, tokens)
        lease.end(
            Outcome.OK, tokens=max(0, tokens - 1) if decode_us > 0 else 0, decode_us=decode_us
        )

    async def _break_off(
        self, client: Client, lease: Lease, call: Call, answer: Answer, broken: Broken
    ) -> None:
        """The node broke off in mid-answer: say so, never pretend that it is complete."""
        log.warning("node %s: %s (%s)", lease.node.id, broken, broken.kind)
        lease.end(Outcome.FAILED)
        observed = answer.observed
        observed.conclude()
        self._metrics.request(call.model, answer.status)
        self._metrics.attempt(lease.node.id, Outcome.FAILED.value)
        self._metrics.book_tokens(call.model, observed.prompt_tokens, observed.tokens)
        if isinstance(observed, EventStream) and observed.between_events:
            error = ApiError(
                502,
                f"The node broke off its answer ({broken.kind}).",
                kind="upstream_error",
                code=broken.kind,
            )
            await client.write(b"data: " + error_body(error) + b"\n\n")
            await client.finish()
        # Otherwise the transfer ends unfinished: the server closes the connection, and the
        # client's HTTP library reports the cut.


def _refused(call: Call, refusal: Refusal) -> ApiError:
    if refusal.reason == "unknown":
        return ApiError(
            404,
            f"The model {call.asked_model!r} does not exist.",
            kind="invalid_request_error",
            param="model",
            code="model_not_found",
        )
    full = refusal.reason == "full"
    return ApiError(
        429 if full else 503,
        f"Every node that serves {call.asked_model!r} is "
        + ("at capacity." if full else "unavailable."),
        kind="rate_limit_error" if full else "server_error",
        code="at_capacity" if full else "no_node_available",
        retry_after_s=max(refusal.retry_ms, 1000) / 1000,
    )


def _gave_up(failure: AttemptFailed) -> ApiError:
    return ApiError(
        failure.status,
        f"No node could answer; the last attempt ended with: {failure.kind}.",
        kind="upstream_error",
        code=failure.kind,
        retry_after_s=1,
    )
