"""B3: client gone before the first step of the response."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from app.config import Settings
from app.main import create_app
from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import RawNode, Script, events, hang, json_answer, sse_answer
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import redis

    from app.gateway.path import DataPlane
    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.servers import ValkeyServer

CLIENTS = 300


@pytest.mark.parametrize(
    "script", [hang(), sse_answer(events(3)), json_answer()], ids=["hangs", "streams", "answers"]
)
def test_three_hundred_clients_that_close_at_once_leave_nothing_behind(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, script: Script
) -> None:
    node = raw_node(script)
    gw = gateway([node], capacity=2 * CLIENTS, timeouts={"node_idle_s": 0.3})
    draw = random.Random(5)

    def leave(wait_s: float) -> None:
        client = RawClient(gw.port)
        client.send(chat())
        time.sleep(wait_s)
        client.close()

    with state.sampling(valkey), ThreadPoolExecutor(2) as pool:
        for _ in pool.map(leave, [draw.uniform(0, 0.003) for _ in range(CLIENTS)]):
            pass
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    wait_until(lambda: node.open == 0, within_s=1, what="no request is open at the node")
    wait_until(lambda: node.connected == 0, within_s=2, what="no connection to the node is left")
    print(f"{len(node.requests)} of {CLIENTS} requests reached the node")
    assert node.requests
    node.script = json_answer()
    assert ask(gw.port, chat(stream=False)).status == 200


class _Protocol:
    """The server's side of a client connection, as the data plane looks at it."""

    def __init__(self) -> None:
        self.on_gone: Callable[[], None] | None = None
        self.transport = self
        self.gone = asyncio.Event()

    def is_closing(self) -> bool:
        return self.gone.is_set()

    def leave(self) -> None:
        self.gone.set()
        if self.on_gone is not None:
            self.on_gone()


@contextlib.asynccontextmanager
async def _running(app: DataPlane) -> AsyncIterator[None]:
    """ASGI lifespan."""
    to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    from_app: asyncio.Queue[Any] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    task = asyncio.create_task(app(scope, to_app.get, from_app.put))
    to_app.put_nowait({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        to_app.put_nowait({"type": "lifespan.shutdown"})
        assert (await from_app.get())["type"] == "lifespan.shutdown.complete"
        await task


WHEN = ["with the body", "at the acquire", "at the head", "at the first part"]


@pytest.mark.parametrize("when", WHEN)
async def test_a_disconnect_that_wins_the_race_against_the_first_send_leaves_nothing_behind(
    valkey: redis.Redis, valkey_server: ValkeyServer, when: str
) -> None:
    with RawNode(sse_answer(events(3), 0.01)) as node:
        settings = Settings(**small_settings([node]))
        app = create_app(settings, valkey_server.url).app
        before = asyncio.all_tasks()
        async with _running(app):
            for _ in range(20):
                await _one_that_leaves(app, when)
            await asyncio.to_thread(
                wait_until, lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0"
            )
            await asyncio.to_thread(
                wait_until, lambda: node.open == 0, within_s=1, what="true(b1) = 0"
            )
            reached = len(node.requests)
        assert asyncio.all_tasks() == before, "no task is left over"
        assert reached == (0 if when in WHEN[:2] else 20)


async def _one_that_leaves(app: DataPlane, when: str) -> None:
    """One request whose client leaves at ``when``; the send of that moment never returns."""
    protocol = _Protocol()
    head, _, body = chat().partition(b"\r\n\r\n")
    headers = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:]]
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await protocol.gone.wait()
            return {"type": "http.disconnect"}
        asked = True
        if when == "with the body":
            protocol.leave()
        elif when == "at the acquire":
            asyncio.get_running_loop().call_soon(protocol.leave)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        expected = "http.response.start" if when == "at the head" else "http.response.body"
        if message["type"] == expected:
            protocol.leave()
            await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(name, value) for name, value in headers],
        "extensions": {"leaseway": protocol},
    }
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    assert protocol.gone.is_set()
    assert protocol.on_gone is None
