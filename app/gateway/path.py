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
from app.gateway import asgi
from app.gateway.attempt import Answer, AnsweredBadly, attempt, to_node
from app.gateway.cors import Cors, is_preflight
from app.gateway.estimate import Sizes
from app.gateway.inspect import Call, inspect
from app.gateway.listen import Bounds
from app.gateway.prefix import Followed
from app.gateway.refuse import COMPRESSED, ENDING, gave_up, not_allowed, refused
from app.gateway.relay import Relay
from app.gateway.respond import Client, ClientGone
from app.gateway.routes import ROUTES, Route
from app.gateway.shape import Shape
from app.model import Ask, Outcome
from app.telemetry.exchange import Exchange, outcome_of_error

if TYPE_CHECKING:
    from app.admission.keys import Keys
    from app.admission.limits import Admission, Limits
    from app.cluster.leases import Lease
    from app.cluster.replica import Replica
    from app.config import KeySettings, Settings
    from app.gateway.connection import Headers
    from app.gateway.forward import Forward
    from app.telemetry.exchange import Telemetry

log = logging.getLogger("leaseway.path")
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
        telemetry: Telemetry,
        control: asgi.Application,
    ) -> None:
        self._replica = replica
        self._forward = forward
        self._keys = keys
        self._limits = limits
        self._telemetry = telemetry
        self._metrics = metrics = telemetry.metrics
        self._control = control
        self._aliases = settings.aliases
        self._ask_usage = settings.server.ask_usage
        self._max_attempts = settings.retries.max_attempts
        self._cors = Cors(settings.server.cors_origins)
        self._sizes = Sizes()
        self._followed = Followed(settings, self._sizes)
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
        exchange = _exchange(route, request_id)
        self._telemetry.begin(exchange, client.method, client.raw_headers)
        self._serving += 1
        try:
            client.check()
            if route is not None:
                client.shape = route.shape
                await self._serve(client, route, exchange)
        except ClientGone:
            exchange.outcome = exchange.outcome or Outcome.ABANDONED
            self._metrics.abandoned.inc()
        except asyncio.CancelledError:
            with contextlib.suppress(AttributeError):
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
            if client.gone:
                exchange.outcome = exchange.outcome or Outcome.ABANDONED
                self._metrics.abandoned.inc()
            elif not client.started:  # the server ends, and `drain_s` is over
                self._metrics.request("unknown", 503)
                await client.fail(ENDING, [(b"x-request-id", request_id)])
            # else the answer is cut off: the server closes the connection without its end
        except ApiError as error:
            exchange.outcome = outcome_of_error(error)
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
            self._telemetry.ended(
                exchange, status=client.status, bytes_in=client.size, bytes_out=client.sent
            )

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
        finally:
            self._metrics.control(client.status)

    async def _tell_options(self, client: Client, headers: Headers) -> None:
        await client.start(204, [*self._cors.preflight(client.headers), *headers])
        await client.finish()

    async def _serve(self, client: Client, route: Route, exchange: Exchange) -> None:
        """Receive, lease, forward, stream. Raises ``ApiError`` before the first byte only."""
        if client.method == "OPTIONS":  # of a browser or not: needs no key, reaches no node
            told = [(b"allow", b"OPTIONS, POST"), (b"x-request-id", exchange.request_id)]
            await self._tell_options(client, told)
            exchange.outcome = Outcome.OK
            return
        if client.method != "POST":
            raise not_allowed(client.method, route)
        key = self._keys.identify(client.headers)
        exchange.key = key.name if key is not None else None
        try:
            await self._serve_for(key, client, route, exchange)
        except ApiError as error:
            if key is not None:
                self._metrics.key_request(key.name, error.status)
            raise

    async def _serve_for(
        self, key: KeySettings | None, client: Client, route: Route, exchange: Exchange
    ) -> None:
        if client.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise COMPRESSED
        call = await self._inspected(route, client)
        exchange.received, exchange.stream = monotonic(), call.stream
        self._keys.require_model(key, call.asked_model)
        target = route.path.encode() + (b"?" + client.query if client.query else b"")
        headers = to_node(client.raw_headers, exchange.request_id)
        pool = self._replica.pool_of(call.model)
        if call.model in pool.registry.models:  # else it is but a word of the client's
            exchange.model = call.model
        ask = self._ask(call, key, pool.name)
        expected = ask.prompt_tokens + call.max_output_tokens
        with await self._limits.admit(key, expected) as admission:
            client.watch()
            try:
                async with pool.leases.hold(ask) as lease:
                    exchange.leased_as(call.model, lease.started, degraded=lease.grant.degraded)
                    try:
                        answer = await self._first_good_answer(
                            lease, call, target, headers, exchange
                        )
                    except asyncio.CancelledError:
                        admission.settle(ask.prompt_tokens)  # a node was at work on it
                        raise
                    admission.mark(answer.headers)
                    try:
                        await self._relay.send(client, lease, call, answer, exchange)
                        self._learn(call, key, answer)
                    finally:
                        answer.connection.done()
                        observed = answer.observed
                        exchange.read(observed.prompt_tokens, observed.tokens, lease.heard_at)
                        self._settle(key, admission, call, ask, answer)
            except Refused as exc:
                exchange.degraded = exc.refusal.degraded
                self._metrics.refusal(exc.refusal.reason)
                raise refused(call, exc.refusal) from exc
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

    def _ask(self, call: Call, key: KeySettings | None, pool: str) -> Ask:
        model, sizes = call.model, self._sizes
        ask = Ask(model, sizes.prompt_tokens(model, call.size), call.stream)
        if call.route.ttft == "first":
            name = _name(key)
            ask.output_tokens = sizes.output_tokens(model, name, call.max_output_tokens)
            fields, call.fields = call.fields, None
            ask.blocks = self._followed.blocks(pool, model, fields, name)
        return ask

    def _learn(self, call: Call, key: KeySettings | None, answer: Answer) -> None:
        """Take what the node counted of an answer that it gave to its end."""
        observed = answer.observed
        if answer.status == 200 and observed.ended and observed.error is None:
            output_tokens = observed.tokens if call.route.ttft == "first" else 0
            self._sizes.learn(
                call.model, _name(key), call.size, observed.prompt_tokens, output_tokens
            )

    def _settle(
        self,
        key: KeySettings | None,
        admission: Admission,
        call: Call,
        ask: Ask,
        answer: Answer,
    ) -> None:
        """Charge the caller what was used, as far as it got: nothing for a refusal."""
        if key is not None and answer.status < 400:
            observed = answer.observed
            self._metrics.key_tokens(key.name, observed.prompt_tokens, observed.tokens)
            untold = ask.prompt_tokens if call.route.ttft != "none" else 0
            admission.settle((observed.prompt_tokens or untold) + observed.tokens)

    async def _first_good_answer(
        self, lease: Lease, call: Call, target: bytes, headers: Headers, exchange: Exchange
    ) -> Answer:
        """Try nodes until one answers well; the last one's bad answer is better than ours."""
        while True:
            node = lease.node
            told = self._telemetry.attempt(exchange, node, headers)
            try:
                return await attempt(self._forward, node, call, target, told)
            except AttemptFailed as failure:
                self._telemetry.attempt_failed(exchange, failure)
                log.info("%s (%s), attempt %d", failure, failure.kind, lease.attempts)
                try:
                    if lease.attempts >= self._max_attempts:
                        lease.end(failure.outcome, cool_ms=failure.cool_ms)
                        raise gave_up(failure) from failure
                    await lease.move(failure)
                    exchange.degraded = lease.grant.degraded
                    self._metrics.retry(node.id, failure.kind)
                except BaseException as exc:
                    if isinstance(failure, AnsweredBadly):
                        if isinstance(exc, ApiError | Refused):
                            failure.answer.booked = True
                            return failure.answer
                        failure.answer.connection.abort()
                    if isinstance(exc, Refused):
                        raise gave_up(failure) from failure
                    raise
                if isinstance(failure, AnsweredBadly):
                    failure.answer.connection.abort()


def _name(key: KeySettings | None) -> str:
    return key.name if key is not None else ""


def _exchange(route: Route | None, request_id: bytes) -> Exchange:
    if route is None:
        return Exchange(request_id, "other", "", "")
    provider = "anthropic" if route.shape is Shape.ANTHROPIC else "openai"
    return Exchange(request_id, route.path, route.operation, provider)
