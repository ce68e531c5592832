"""B1: a streaming client that leaves stops the node, at TCP level."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.support import state
from tests.support.rawclient import RawClient, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    chunk,
    content_event,
    stream_forever,
)
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode

RESETS, CONCURRENCY = 500, 20


def test_five_hundred_resets_stop_the_node_each_within_a_second_and_leak_nothing(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    forever, over = stream_forever(0.05), threading.Event()
    sent: dict[bytes, list[bytes]] = {b"neighbour-a": [], b"neighbour-b": []}

    async def script(request: Request, peer: Peer) -> None:
        parts = sent.get(request.header(b"x-request-id") or b"")
        if parts is None:
            await forever(request, peer)
            return

        async def write(*new: bytes) -> None:
            parts.extend(new)
            await peer.write(b"".join(map(chunk, new)))

        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        await write(ROLE_EVENT)
        while not over.is_set():
            await write(content_event(f"t{len(parts)} "))
            await peer.sleep(0.05)
        await write(FINISH_EVENT, DONE_EVENT)
        await peer.write(b"0\r\n\r\n")

    node = raw_node(script)
    gw = gateway([node], capacity=64)
    descriptors = Path(f"/proc/{gw.pid}/fd")
    before = len(list(descriptors.iterdir()))

    def neighbour(name: str) -> RawClient:
        with RawClient(gw.port) as client:
            client.send(chat(request_id=f"neighbour-{name}"))
            client.read_all()
            return client

    def leave(i: int) -> tuple[bytes, float]:
        request_id = f"leaves-{i}"
        client = RawClient(gw.port)
        client.send(chat(request_id=request_id)).read_events(3)
        assert client.status == 200
        client.reset()
        return request_id.encode(), client.closed_at

    with state.sampling(valkey, 0.05) as seen, ThreadPoolExecutor(CONCURRENCY + 2) as pool:
        neighbours = [pool.submit(neighbour, name) for name in "ab"]
        wait_until(lambda: node.open == 2, what="the neighbours stream")
        left_at = dict(pool.map(leave, range(RESETS)))
        wait_until(lambda: len(node.left) == RESETS, within_s=1, what="all closes seen")
        over.set()
        for one, parts in zip(neighbours, sent.values(), strict=True):
            assert one.result().complete
            assert one.result().body == b"".join(parts)
            assert len(parts) > 20
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")
    closed_at = {request.header(b"x-request-id") or b"": at for request, at in node.left}
    delays = sorted(closed_at[request_id] - at for request_id, at in left_at.items())
    print(f"close seen by the node after {delays[RESETS // 2] * 1e3:.1f} ms in the median, "
          f"{delays[-1] * 1e3:.1f} ms at most")  # fmt: skip
    assert delays[-1] < 1

    uses = Counter(request.connection for request in node.requests)
    assert len(node.requests) == RESETS + 2, "nothing was tried again"
    assert all(uses[request.connection] == 1 for request, _ in node.left), "never reused"
    assert 2 < seen.highest["b1"] <= CONCURRENCY + 2
    wait_until(
        lambda: abs(len(list(descriptors.iterdir())) - before) <= 5,
        within_s=6,
        what="descriptors are back",
    )
    assert state.record(valkey, "b1")["streak"] == "0", "a client that leaves is no failure"
    metrics = httpx.get(f"{gw.url}/metrics", trust_env=False).text
    assert f"leaseway_requests_abandoned_total {RESETS}.0\n" in metrics
