"""O3: the gateway's own health page never waits for a node.

The catalogue's 20 s are 6 s here. Times are judged on medians, gaps on the 99th percentile:
clients, nodes, replica and Redis share two busy cores.
"""

from __future__ import annotations

import asyncio
import socket
from statistics import median, quantiles
from time import monotonic
from typing import TYPE_CHECKING, Any

from tests.support import state
from tests.support.rawclient import chat
from tests.support.rawnode import STREAM_HEAD, chunk, content_event
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, Request
    from tests.support.relay import Relay

STREAMS, GAP_S, WATCHED_S, A_SECOND = 100, 0.25, 6.0, 10
LIVE, READY = b"/healthz", b"/readyz"


class _BlackHole:
    """A node that takes connections and never says a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.models = ("m",)

    def __enter__(self) -> _BlackHole:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()


async def _page(port: int, path: bytes) -> tuple[float, bytes]:
    begin = monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        return monotonic() - begin, answer
    finally:
        writer.close()
        await writer.wait_closed()


async def _stream(port: int, number: int, arrivals: dict[int, list[float]]) -> None:
    """Read events and note when each came, until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(chat(request_id=f"s-{number}"))
        while data := await reader.read(65536):
            arrivals[number] += [monotonic()] * data.count(b"\n\n")
    finally:
        writer.close()


async def test_pages_answer_at_once_while_a_node_and_redis_hang_and_streams_flow(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay
) -> None:
    sent: dict[int, list[float]] = {i: [] for i in range(STREAMS)}
    came: dict[int, list[float]] = {i: [] for i in range(STREAMS)}

    async def script(request: Request, peer: Peer) -> None:
        number = int((request.header(b"x-request-id") or b"").removeprefix(b"s-"))
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        await peer.sleep(GAP_S * number / STREAMS)
        while True:
            sent[number].append(monotonic())
            await peer.write(chunk(content_event("t ")))
            await peer.sleep(GAP_S)

    node = raw_node(script)
    with _BlackHole() as hole:
        listed: list[Any] = [node, hole]
        gw = gateway(listed, redis_url=relay.url, capacity=200)
        wait_until(
            lambda: (
                state.record(valkey, "b2")["health"] in {"down", "new"}
                and int(state.record(valkey, "b2")["misses"]) >= 3
            ),
            what="the black hole is out",
        )
        alone = [(await _page(gw.port, LIVE))[0] for _ in range(10)]
        tasks = [asyncio.create_task(_stream(gw.port, i, came)) for i in range(STREAMS)]
        try:
            begun = monotonic()
            while not all(came.values()):
                assert monotonic() - begun < 20, "all streams flow"
                await asyncio.sleep(0.05)
            assert await _status(gw.port) == (200, "ok")
            relay.pause()
            began = monotonic()
            times: dict[bytes, list[float]] = {LIVE: [], READY: []}
            said: list[tuple[float, tuple[int, str]]] = []
            while monotonic() < began + WATCHED_S:
                for path in (LIVE, READY):
                    took_s, answer = await _page(gw.port, path)
                    times[path].append(took_s)
                    assert answer.startswith(b"HTTP/1.1 200"), answer
                    if path == READY:
                        said.append((monotonic() - began, _said(answer)))
                await asyncio.sleep(1 / A_SECOND)
            relay.resume()
            ended = monotonic()
            while await _status(gw.port) != (200, "ok"):
                assert monotonic() - ended < 5, "readiness says that Redis is back"
                await asyncio.sleep(0.05)
            back_s = monotonic() - ended
        finally:
            relay.resume()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # How much longer than at the node the gap between two events was at the client.
    beyond = [
        (came[i][k] - came[i][k - 1]) - (sent[i][k] - sent[i][k - 1])
        for i in range(STREAMS)
        for k in range(1, min(len(came[i]), len(sent[i])))
        if began < came[i][k] < ended
    ]
    p99 = quantiles(beyond, n=100)[98]
    degraded_after = next(at for at, (_, status) in said if status == "degraded")
    print(
        f"liveness {_ms(times[LIVE])} ({median(alone) * 1e3:.1f} ms alone), readiness "
        f"{_ms(times[READY])}, degraded after {degraded_after:.2f} s, ok {back_s:.2f} s after "
        f"Redis; {len(beyond)} gaps, beyond the node's: p99 {p99 * 1e3:.0f}, "
        f"most {max(beyond) * 1e3:.0f} ms"
    )
    assert len(times[LIVE]) > WATCHED_S * A_SECOND / 3
    assert median(times[LIVE]) < 0.05
    assert median(times[READY]) < 0.2
    assert max(times[LIVE] + times[READY]) < 0.5, "nothing blocks the loop, as a probe once did"
    assert degraded_after < 2
    assert all(status == "degraded" for at, (_, status) in said if at > degraded_after)
    assert len(beyond) > STREAMS * WATCHED_S / GAP_S / 3
    assert p99 < 0.1
    assert max(beyond) < 0.5
    assert len(node.requests) == STREAMS
    wait_until(lambda: state.unloaded(valkey), within_s=4, what="load = 0")


def _ms(times: list[float]) -> str:
    return f"{median(times) * 1e3:.1f} ms (most {max(times) * 1e3:.0f}, {len(times)} pages)"


def _said(answer: bytes) -> tuple[int, str]:
    status = answer.partition(b'"status":"')[2].partition(b'"')[0].decode()
    return int(answer.split(b" ", 2)[1]), status


async def _status(port: int) -> tuple[int, str]:
    return _said((await _page(port, READY))[1])
