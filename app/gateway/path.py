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
from typing import TYPE_CHECKING

from app.errors import ApiError, AttemptFailed, Refused
from app.gateway import asgi
from app.gateway.attempt import Answer, AnsweredBadly, attempt, to_node
from app.gateway.cors import Cors, is_preflight
from app.gateway.inspect import Call, inspect
from app.gateway.listen import Bounds
from app.gateway.relay import Relay
from app.gateway.respond import Client, ClientGone
from app.gateway.routes import ROUTES, Route
from app.model import Ask, Refusal

if TYPE_CHECKING:
    from app.admission.keys import Keys
    from app.admission.limits import Admission, Limits
    from app.cluster.leases import Lease
    from app.cluster.replica import Replica
    from app.config import KeySettings, Settings
    from app.gateway.connection import Headers
    from app.gateway.forward import Forward
    from app.telemetry.metrics import Metrics

log = logging.getLogger("leaseway.path")
_ENDING = ApiError(
    503, "The gateway ends.", kind="server_error", code="shutting_down", retry_after_s=1
)
_COMPRESSED = ApiError(
    415,
    "The body must not be compressed: send no Content-Encoding.",
    kind="invalid_request_error",
    code="unsupported_media_type",
    headers=[(b"accept-encoding", b"identity")],
)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_CONTROL_BODY_BYTES = 1024 * 1024
_LARGE_BYTES = 256 * 1024


class DataPlane:
    """Serves the forwarded routes; everything else goes to ``control``."""

    def __init__(
        self,
        settings: Settings,
        replica: Replica,
        forward: Forward,
        keys: Keys,
        limits: Limits,
        metrics: Metrics,
        control: asgi.Application,
    ) -> None:
        self._replica = replica
        self._forward = forward
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._control = control
        self._aliases = settings.aliases
        self._ask_usage = settings.server.ask_usage
        self._max_attempts = settings.retries.max_attempts
        self._cors = Cors(settings.server.cors_origins)
        self._relay = Relay(metrics, settings.timeouts.stall_s)
        self.bounds = Bounds(
            int(settings.server.body_limit_mib * 1024 * 1024),
            settings.server.header_timeout_s,
            settings.server.body_timeout_s,
        )
        self._large = asyncio.Lock()
        self._serving = 0
        metrics.in_flight.set_function(lambda: self._serving)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """ASGI entry, for the lifespan; requests come through ``serve``."""
        await self._control(scope, receive, send)

    async def serve(self, client: Client) -> None:
        """Answer one request, whatever it is."""
        client.extra = self._cors.headers(client.headers)
        route = ROUTES.get(client.path)
        if route is None and not client.refused:
            await self._serve_control(client)
            return
        given = client.headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else b"%032x" % random.getrandbits(128)
        self._serving += 1
        try:
            client.check()
            if route is not None:
                client.shape = route.shape
                await self._serve(client, route, request_id)
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

    async def _serve_control(self, client: Client) -> None:
        client.limit = min(client.limit, _CONTROL_BODY_BYTES)
        try:
            if is_preflight(client.method, client.headers):
                await self._tell_options(client, [])
            else:
                await asgi.run(self._control, client)
        except ClientGone:
            pass
        except ApiError as error:
            await client.fail(error, [])

    async def _tell_options(self, client: Client, headers: Headers) -> None:
        await client.start(204, [*self._cors.preflight(client.headers), *headers])
        await client.finish()

    async def _serve(self, client: Client, route: Route, request_id: bytes) -> None:
        """Receive, lease, forward, stream. Raises ``ApiError`` before the first byte only."""
        if client.method == "OPTIONS":  # of a browser or not: needs no key, reaches no node
            told = [(b"allow", b"OPTIONS, POST"), (b"x-request-id", request_id)]
            await self._tell_options(client, told)
            return
        if client.method != "POST":
            raise ApiError(
                405,
                f"{client.method} is not allowed on {route.path}; use POST.",
                kind="invalid_request_error",
                code="method_not_allowed",
                allow="POST",
            )
        key = self._keys.identify(client.headers)
        try:
            await self._serve_for(key, client, route, request_id)
        except ApiError as error:
            if key is not None:
                self._metrics.key_request(key.name, error.status)
            raise

    async def _serve_for(
        self, key: KeySettings | None, client: Client, route: Route, request_id: bytes
    ) -> None:
        if client.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise _COMPRESSED
        call = await self._inspected(route, client)
        self._keys.require_model(key, call.asked_model)
        target = route.path.encode() + (b"?" + client.query if client.query else b"")
        headers = to_node(client.raw_headers, request_id)
        pool = self._replica.pool_of(call.model)
        expected = call.prompt_tokens + call.max_output_tokens
        with await self._limits.admit(key, expected) as admission:
            client.watch()
            try:
                ask = Ask(call.model, call.prompt_tokens, call.stream)
                async with pool.leases.hold(ask) as lease:
                    try:
                        answer = await self._first_good_answer(lease, call, target, headers)
                    except asyncio.CancelledError:
                        admission.settle(call.prompt_tokens)  # a node was at work on it
                        raise
                    admission.mark(answer.headers)
                    try:
                        await self._relay.send(client, lease, call, answer, request_id)
                    finally:
                        answer.connection.done()
                        self._settle(key, admission, call, answer)
            except Refused as exc:
                raise _refused(call, exc.refusal) from exc
        if key is not None:
            self._metrics.key_request(key.name, answer.status)

    async def _inspected(self, route: Route, client: Client) -> Call:
        body = await client.body()
        if len(body) < _LARGE_BYTES:
            return self._inspect(route, client, body)
        # Reading ten MiB takes a tenth of a second. Of many such bodies that are complete at
        # once, one is read in a turn of the loop: others must not wait for all of them.
        async with self._large:
            return self._inspect(route, client, body)

    def _inspect(self, route: Route, client: Client, body: bytes) -> Call:
        content_type = client.headers.get(b"content-type", b"")
        return inspect(
            route,
            content_type,
            body,
            self._aliases,
            lambda: self._replica.models,
            ask_usage=self._ask_usage,
        )

    def _settle(
        self, key: KeySettings | None, admission: Admission, call: Call, answer: Answer
    ) -> None:
        """Charge the caller what was used, as far as it got: nothing for a refusal."""
        if key is not None and answer.status < 400:
            observed = answer.observed
            self._metrics.key_tokens(key.name, observed.prompt_tokens, observed.tokens)
            untold = call.prompt_tokens if call.route.ttft != "none" else 0
            admission.settle((observed.prompt_tokens or untold) + observed.tokens)

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
                            failure.answer.booked = True
                            return failure.answer
                        failure.answer.connection.abort()
                    if isinstance(exc, Refused):
                        raise _gave_up(failure) from failure
                    raise
                if isinstance(failure, AnsweredBadly):
                    failure.answer.connection.abort()


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
        headers=[(b"x-leaseway-degraded", b"1")] if refusal.degraded else None,
    )


def _gave_up(failure: AttemptFailed) -> ApiError:
    return ApiError(
        failure.status,
        f"No node could answer; the last attempt ended with: {failure.kind}.",
        kind="upstream_error",
        code=failure.kind,
        retry_after_s=1,
    )
