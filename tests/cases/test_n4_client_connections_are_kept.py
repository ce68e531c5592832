"""N4: idle client connections outlive the load balancer's patience."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import pytest
import yaml

from app.config import Settings
from tests.support import state
from tests.support.rawclient import RawClient, chat
from tests.support.rawnode import COMPLETION, Peer, Request, events, json_answer, sse_answer
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode

CONNECTIONS, GAPS = 20, 2
LONG_S = 30
BALANCER_S = 65  # 60 s of idleness are usual, and some for the way

REQUESTS = {
    "in one piece": (chat(stream=False), 200),
    "a stream": (chat(stream=True), 200),
    "the models": (b"GET /v1/models HTTP/1.1\r\nhost: g\r\n\r\n", 200),
    "a health page": (b"GET /healthz HTTP/1.1\r\nhost: g\r\n\r\n", 200),
    "a mistake": (chat(model="nobody's"), 404),
    "no such page": (b"GET /nothing HTTP/1.1\r\nhost: g\r\n\r\n", 404),
}


class Kept(RawClient):
    """A connection for one exchange after the other."""

    def exchange(self, request: bytes) -> int:
        """Send and read all; the status, 0 when the connection was closed instead."""
        self._headed = self.complete = False
        self._body.clear()
        self.headers.clear()
        try:
            self.send(request).read_all()
        except BrokenPipeError:
            return 0
        return self.status if self.complete else 0


async def answers(request: Request, peer: Peer) -> None:
    stream = request.json().get("stream")
    await (sse_answer(events(3)) if stream else json_answer())(request, peer)


def test_gaps_around_five_seconds_and_one_of_thirty_keep_their_connections(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    gw = gateway([raw_node(answers)], capacity=64)
    draw = random.Random(4)
    kinds = [list(REQUESTS.values())[i % len(REQUESTS)] for i in range(CONNECTIONS)]
    gaps = [[draw.uniform(4.9, 5.1) for _ in range(GAPS)] for _ in range(CONNECTIONS)]

    def converse(kind: tuple[bytes, int], waits: list[float]) -> list[int]:
        request, _ = kind
        with Kept(gw.port) as client:
            statuses = [client.exchange(request)]
            for wait in waits:
                time.sleep(wait)  # the idleness is what is tested
                statuses.append(client.exchange(request))
        return statuses

    with ThreadPoolExecutor(CONNECTIONS + 1) as pool:
        long = pool.submit(converse, REQUESTS["in one piece"], [LONG_S])
        seen = list(pool.map(converse, kinds, gaps))
        assert seen == [[status] * (GAPS + 1) for _, status in kinds]
        assert long.result() == [200, 200]
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_the_default_outlives_a_balancer_and_the_settings_file_says_the_same() -> None:
    assert Settings().server.keep_alive_s >= BALANCER_S
    file = Path(__file__).parents[2] / "config" / "leaseway.yaml"
    assert yaml.safe_load(file.read_text())["server"]["keep_alive_s"] >= BALANCER_S


@pytest.mark.parametrize("keep_alive_s", [1, 2])
def test_the_time_is_what_the_setting_says_and_the_end_is_a_clean_close(
    gateway: StartGateway, raw_node: StartNode, keep_alive_s: int
) -> None:
    gw = gateway([raw_node(answers)], server={"keep_alive_s": keep_alive_s})

    def idle_s(kind: str) -> float:
        with Kept(gw.port) as client:
            client.exchange(REQUESTS[kind][0])
            at = monotonic()
            assert client._socket.recv(1) == b"", "closed, not reset, and nothing is sent"
            return monotonic() - at

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        for kind, took_s in zip(REQUESTS, pool.map(idle_s, REQUESTS), strict=True):
            assert keep_alive_s / 2 < took_s < keep_alive_s + 3, kind


def test_an_answer_that_takes_longer_than_the_idle_time_is_not_idle(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    may_answer = threading.Event()

    async def slow(request: Request, peer: Peer) -> None:
        while not may_answer.is_set():
            await peer.sleep(0.01)
        await answers(request, peer)

    gw = gateway([raw_node(slow)], server={"keep_alive_s": 1})
    with Kept(gw.port) as idle, Kept(gw.port) as busy:
        idle.exchange(REQUESTS["a health page"][0])
        busy.send(chat(stream=False))
        assert idle._socket.recv(1) == b"", "the idle one is closed"
        may_answer.set()
        assert json.loads(busy.read_all()) == COMPLETION
        assert busy.exchange(chat(stream=True)) == 200, "and the time begins anew"


def test_a_client_that_says_close_is_closed_at_once(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    gw = gateway([raw_node(answers)])
    for kind, (request, status) in REQUESTS.items():
        for version, line in ((b"HTTP/1.1", b"connection: close"), (b"HTTP/1.0", b"x-y: z")):
            said = request.replace(b"HTTP/1.1\r\n", version + b"\r\n" + line + b"\r\n", 1)
            with Kept(gw.port) as client:
                client.send(said).read_all()
                assert client.status == status, kind
                client._socket.settimeout(5)
                assert client._socket.recv(1) == b"", (kind, version)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
