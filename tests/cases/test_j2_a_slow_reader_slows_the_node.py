"""J2: a slow reader slows the node, not the memory."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING

from tests.support import state
from tests.support.rawclient import RawClient, chat
from tests.support.rawnode import STREAM_HEAD, chunk, content_event, json_answer
from tests.support.redis_ha import ask_once
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, Request
    from tests.support.servers import Gateway

MIB = 1024 * 1024
SLOW, OFFERED, PIECE = 20, 50 * MIB, 64 * 1024
WATCHED_S = 6


class Rss:
    """The resident memory of a replica while the block runs, in bytes."""

    def __init__(self, gw: Gateway) -> None:
        self._status = Path(f"/proc/{gw.pid}/status")
        self.before = self.most = self.now()

    def now(self) -> int:
        """At this moment."""
        lines = self._status.read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) * 1024

    @property
    def grown(self) -> int:
        """By how much it was ever above the start."""
        return self.most - self.before


@contextlib.contextmanager
def _rss(gw: Gateway) -> Iterator[Rss]:
    rss, done = Rss(gw), threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            rss.most = max(rss.most, rss.now())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield rss
    finally:
        done.set()
        thread.join(5)


def _slow_socket(port: int, request: bytes) -> socket.socket:
    """A client with a receive buffer of 4 KiB."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", port))
    sock.sendall(request)
    return sock


def test_twenty_slow_readers_block_the_node_and_take_no_memory(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    event = content_event("x" * 1000)
    piece = chunk(event * (PIECE // len(event)))
    written = [0] * SLOW

    async def script(request: Request, peer: Peer) -> None:
        kind, _, number = (request.header(b"x-request-id") or b"").partition(b"-")
        if kind != b"slow":
            await json_answer()(request, peer)
            return
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        while written[int(number)] < OFFERED:
            await peer.write(piece)
            written[int(number)] += len(piece)
        await peer.write(b"0\r\n\r\n")

    node = raw_node(script)
    gw = gateway([node], capacity=64, timeouts={"stall_s": 2})
    json = chat(stream=False)
    usual = [ask_once(gw.port, json).took_s for _ in range(30)]
    with contextlib.ExitStack() as stack, _rss(gw) as rss:
        clients = [
            stack.enter_context(_slow_socket(gw.port, chat(request_id=f"slow-{i}")))
            for i in range(SLOW)
        ]
        wait_until(
            lambda: min(written) > 0 and _stands(written), within_s=15, what="the node is blocked"
        )
        blocked_at = list(written)
        beside, read, until = [], 0, monotonic() + WATCHED_S
        while monotonic() < until:  # longer than the limit on silence, which is not the node's
            for client in clients:
                read += len(client.recv(512))
            one = ask_once(gw.port, json)
            assert one.good
            beside.append(one.took_s)
            time.sleep(0.45)
        assert state.load(valkey, "b1") == node.open == SLOW, "none was cut for being slow"
    grew = max(now - then for now, then in zip(written, blocked_at, strict=True))
    print(
        f"RSS +{rss.grown / MIB:.1f} MiB; the node wrote at most {max(written) / MIB:.1f} of "
        f"{OFFERED // MIB} MiB, {grew / MIB:.2f} of it while blocked; other requests "
        f"{median(usual) * 1e3:.1f} ms before, {median(beside) * 1e3:.1f} ms beside"
    )
    assert read > 0
    assert rss.grown < 64 * MIB
    assert max(written) < OFFERED / 3, "blocked by TCP"
    assert median(beside) < median(usual) + 0.05
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    wait_until(lambda: node.open == 0, within_s=2, what="the node's streams are closed")


def _stands(written: list[int]) -> bool:
    before = list(written)
    time.sleep(0.5)
    return before == written


def test_a_stream_without_a_line_end_passes_and_takes_no_memory(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    size, block = 64 * MIB, b"data: " + b"y" * (MIB - 6)

    async def script(request: Request, peer: Peer) -> None:
        if request.json().get("stream") is not True:
            await json_answer()(request, peer)
            return
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(size // MIB):
            await peer.write(chunk(block))
        await peer.write(b"0\r\n\r\n")

    gw = gateway([raw_node(script)], capacity=64)
    assert ask_once(gw.port, chat(stream=False)).good
    got, beside = 0, list[float]()
    with _rss(gw) as rss, RawClient(gw.port) as client:
        client.send(chat()).read_head()
        while not client.ended:
            client._read()
            got, client._body = got + len(client._body), bytearray()
            if len(beside) < got // (4 * MIB):
                beside.append(ask_once(gw.port, chat(stream=False)).took_s)
    print(f"RSS +{rss.grown / MIB:.1f} MiB for {got / MIB:.0f} MiB; other requests "
          f"{median(beside) * 1e3:.1f} ms")  # fmt: skip
    assert client.complete
    assert got == size
    assert rss.grown < 16 * MIB
    assert median(beside) < 0.1
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
