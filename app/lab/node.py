"""The fake node: an OpenAI-compatible inference engine to test against, with faults on demand.
It speaks the surface of vLLM and its like: chat, completions, responses, Anthropic messages,
embeddings, rerank, score, audio, images, tokenize.

    python -m app.lab.node --profile a100 --port 9101 --model demo

Honest continuous batching, not a sleep: see `app.lab.engine`. The control plane under /_fake/
(`GET stats`, `GET|POST faults`, `POST reset`) is immune to the node's own faults.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import signal
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

import orjson
import uvloop

from app.lab.calls import CALL_KINDS, BadCall, Call, parse_call
from app.lab.driver import Driver
from app.lab.engine import Engine, PromptTooLong
from app.lab.events import EVENTS
from app.lab.faults import MID_ANSWER, Fault, parse_fault
from app.lab.http1 import Connection, Request, anthropic_error, error_body
from app.lab.ledger import Ledger
from app.lab.pages import LOADING, serve_control, serve_page, sick_health
from app.lab.profiles import A100, PROFILES, Profile
from app.lab.replies import FaultyReply, ModelReply, Reply, StreamReply, WholeReply

if TYPE_CHECKING:
    from collections.abc import Sequence as Arguments

BACKLOG: Final = 2048
_ID_PREFIXES: Final = {"chat": "chatcmpl-", "messages": "msg_", "responses": "resp_"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """How a fake node is set up."""

    profile: Profile = A100
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    models: tuple[str, ...] = ("demo",)
    seed: int = 1
    """Decides texts, lengths and whom a fault of some probability strikes."""
    node_id: str = ""
    """Name in the start line and in answer ids; empty: the profile's."""
    time_scale: float = 1.0
    """Real seconds per second of the model: 0.1 is ten times as fast."""
    api_key: str | None = None
    """If set, /v1/ wants it as a bearer token."""
    early_role: bool = False
    """Send a stream's role event with the head instead of with the first token."""
    fault: Fault = field(default_factory=Fault)

    @property
    def name(self) -> str:
        """The node's id."""
        return self.node_id or self.profile.name


class FakeNode:
    """A fake node that is being served; made by `serve_node`."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.fault = config.fault
        """The faults in force; assign to change them."""
        self.stats = Ledger()
        self.engine = Engine(config.profile, Random(config.seed))
        self.connections: set[Connection] = set()
        self._driver = Driver(self.engine, config.time_scale, lambda: self.fault.slowness)
        self._chance = Random(config.seed)
        self._answers = 0
        self._loop = asyncio.get_running_loop()
        self._booted = self._loop.time()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def uptime_s(self) -> float:
        """Seconds since it was made."""
        return self._loop.time() - self._booted

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        return f"http://{self.config.host}:{self.port}"

    async def start(self) -> None:
        """Listen."""
        self._server = await self._loop.create_server(
            lambda: Connection(self), self.config.host, self.config.port, backlog=BACKLOG
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, drop all connections, stop the engine."""
        if self._server is not None:
            self._server.close()
        while self.connections:
            for connection in tuple(self.connections):
                connection.abort()
            await asyncio.sleep(0)
        if self._server is not None:
            await self._server.wait_closed()
        self._driver.close()

    # What a connection asks --------------------------------------------------------------------

    def refuses(self, method: str, path: str) -> bool:
        """Whether this request meets a closed door."""
        if self.fault.mode != "refuse" or path.startswith("/_fake/"):
            return False
        return self._strikes(self.fault, method, path)

    def handle(self, request: Request, connection: Connection) -> None:
        """Serve one request: control plane, then faults, then pages and model calls."""
        path = request.path
        if path.startswith("/_fake/"):
            serve_control(self, request, connection)
            return
        if self._fails(request, connection):
            return
        if path.startswith("/v1/") and not self._knows(request):
            payload = error_body(401, "invalid API key", code="invalid_api_key")
            if path == "/v1/messages":
                payload = anthropic_error(401, "invalid x-api-key")
            connection.respond(401, payload)
        elif path in CALL_KINDS:
            if request.method == "POST":
                self._call(request, connection)
            else:
                connection.respond(405, error_body(405, "use POST"), {"Allow": "POST"})
        elif request.method != "GET":
            connection.respond(404, error_body(404, f"no such path: {path}"))
        else:
            serve_page(self, path, connection)

    # Faults ------------------------------------------------------------------------------------

    def _strikes(self, fault: Fault, method: str, path: str) -> bool:
        struck = fault.strikes(method, path, self._chance)
        if struck:
            self.stats.faults_served[fault.mode] += 1
        return struck

    def _fails(self, request: Request, connection: Connection) -> bool:
        """Let a fault that comes before any answer take the request; False if none does."""
        fault = self.fault
        if request.path == "/health" and sick_health(fault, connection):
            return True
        if fault.mode == "refuse" or fault.mode in MID_ANSWER:
            return False
        if not self._strikes(fault, request.method, request.path):
            return False
        reply = FaultyReply(connection, self.stats)
        if fault.mode == "drop_before_headers":
            reply.reset()
        elif fault.mode == "loading":
            reply.answer(503, LOADING, headers={}, delay_ms=fault.delay_ms)
        elif fault.mode == "status":
            headers = {}
            if fault.retry_after_s is not None:
                headers["Retry-After"] = f"{fault.retry_after_s:g}"
            payload = error_body(fault.status, f"injected {fault.status}")
            reply.answer(fault.status, payload, headers=headers, delay_ms=fault.delay_ms)
        return True  # mode hang: the reply stays open and never answers

    # Model calls -------------------------------------------------------------------------------

    def _call(self, request: Request, connection: Connection) -> None:
        try:
            call = parse_call(
                CALL_KINDS[request.path],
                request.body,
                seed=self.config.seed,
                models=self.config.models,
                content_type=request.headers.get("content-type", ""),
            )
        except BadCall as bad:
            payload = error_body(bad.status, bad.message, bad.param, bad.code)
            if CALL_KINDS[request.path] == "messages":
                payload = anthropic_error(bad.status, bad.message)
            Reply(connection, self.stats).reject(bad.status, payload)
        else:
            self._answer(request, connection, call)

    def _answer(self, request: Request, connection: Connection, call: Call) -> None:
        fault = self.fault if self.fault.mode in MID_ANSWER else None
        if fault is not None and not self._strikes(fault, request.method, request.path):
            fault = None
        self._answers += 1
        answer_id = f"{_ID_PREFIXES.get(call.kind, 'cmpl-')}{self.config.name}-{self._answers}"
        common = (connection, self.stats, self._driver, fault)
        if not call.stream:
            self._begin(WholeReply(*common, call=call, answer_id=answer_id), call)
            return
        events = EVENTS[call.kind](call, answer_id, chunked=request.http_1_1)
        reply = StreamReply(*common, events, early_role=self.config.early_role)
        if self._begin(reply, call):
            reply.open(chunked=request.http_1_1)

    def _begin(self, reply: ModelReply, call: Call) -> bool:
        try:
            reply.begin(call)
        except PromptTooLong as error:
            payload = error_body(400, str(error), code="context_length_exceeded")
            if call.kind == "messages":
                payload = anthropic_error(400, str(error))
            reply.reject(400, payload)
            return False
        return True

    def _knows(self, request: Request) -> bool:
        if self.config.api_key is None:
            return True
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = given or request.headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(), self.config.api_key.encode())


async def serve_node(config: NodeConfig) -> FakeNode:
    """Start a fake node on the running loop; `await node.close()` ends it."""
    node = FakeNode(config)
    await node.start()
    return node


def parse_arguments(arguments: Arguments[str] | None = None) -> NodeConfig:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m app.lab.node", description="A fake LLM node.")
    parser.add_argument("--profile", choices=sorted(PROFILES), default=A100.name)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9101, help="0: any free port")
    parser.add_argument("--model", action="append", help="may be repeated; default demo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--id", default="", help="default: the profile's name")
    parser.add_argument("--time-scale", type=float, default=1.0, help="0.1: ten times as fast")
    parser.add_argument("--api-key-env", help="environment variable that holds the bearer token")
    parser.add_argument("--early-role", action="store_true", help="role event before any token")
    parser.add_argument("--fault", default="{}", help='e.g. {"mode":"slow","factor":5}')
    given = parser.parse_args(arguments)
    api_key = None
    if given.api_key_env is not None and not (api_key := os.environ.get(given.api_key_env)):
        parser.error(f"environment variable {given.api_key_env} is not set")
    if given.time_scale < 0:
        parser.error("--time-scale must not be negative")
    try:
        fault = parse_fault(orjson.loads(given.fault))
    except ValueError as error:
        parser.error(f"--fault: {error}")
    return NodeConfig(
        profile=PROFILES[given.profile],
        host=given.host,
        port=given.port,
        models=tuple(given.model or ("demo",)),
        seed=given.seed,
        node_id=given.id,
        time_scale=given.time_scale,
        api_key=api_key,
        early_role=given.early_role,
        fault=fault,
    )


async def run(config: NodeConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    node = await serve_node(config)
    models = ", ".join(config.models)
    print(
        f"fake node {config.name} on {node.url} serving {models} "
        f"(profile {config.profile.name}, time scale {config.time_scale:g})",
        flush=True,
    )
    await stop.wait()
    await node.close()


if __name__ == "__main__":
    uvloop.run(run(parse_arguments()))
