"""B3: client gone before the first step of the response."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest

from app.config import Settings
from app.gateway.respond import Client
from app.main import create_app
from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import RawNode, Script, events, hang, json_answer, sse_answer
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import redis

    from app.gateway.listen import ClientProtocol
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


class _Connection:
    """The connection of one client, which leaves with the ``n``th thing that is sent to it; that
    send then waits for ever."""

    def __init__(self, n: int) -> None:
        self.default_headers: list[tuple[bytes, bytes]] = []
        self.client: Client | None = None
        self.closing = self.slow = False
        self.answers = 0
        self._left_to_send = n

    def leave(self) -> None:
        assert self.client is not None
        self.closing = True
        self.client.lost()

    def send(self, data: bytes) -> None:  # noqa: ARG002 - the shape of the real one
        self._left_to_send -= 1
        if not self._left_to_send:
            self.slow = True
            self.leave()

    async def drained(self) -> None:
        await asyncio.Event().wait()

    def answered(self, client: Client) -> None:  # noqa: ARG002
        self.answers += 1


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


WHEN = ["with the body", "at the acquire", "at the first send", "at the second send"]


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
    """One request whose client leaves at ``when``."""
    connection = _Connection(WHEN.index(when) - 1)
    head, _, body = chat().partition(b"\r\n\r\n")
    headers = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:]]
    client = Client(
        cast("ClientProtocol", connection),
        "POST",
        "/v1/chat/completions",
        headers=[(name, value) for name, value in headers],
        keep_alive=True,
    )
    connection.client, client.limit = client, len(body)
    client.take(body)
    client.complete()
    if when == "with the body":
        connection.leave()
    elif when == "at the acquire":
        asyncio.get_running_loop().call_soon(connection.leave)
    async with asyncio.timeout(5):
        await app.serve(client)
    assert client.gone
    assert not client.finished
    assert connection.answers == 0
