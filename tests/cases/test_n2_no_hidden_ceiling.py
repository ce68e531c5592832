"""N2: no hidden ceiling at 100 connections; Redis is no bottleneck either."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from time import monotonic
from typing import TYPE_CHECKING

from tests.support import state
from tests.support.rawclient import chat
from tests.support.rawnode import ROLE_EVENT, STREAM_HEAD, Peer, Request, chunk, content_event
from tests.support.rawnode import events as answer_of
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

    from tests.cases.conftest import StartGateway, StartNode

STREAMS = 400
LENGTH_S = 5.0
FIRST = content_event("t0 ")


@contextlib.contextmanager
def file_limit(soft: int) -> Iterator[None]:
    """The limit of open files, for this process and those that it starts meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_four_hundred_streams_of_five_seconds_all_start_at_once(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    said_at: dict[str, float] = {}
    heard_at: dict[str, float] = {}
    whole = b"".join(answer_of(1))

    async def script(request: Request, peer: Peer) -> None:
        """Role and first token at once, the rest after five seconds."""
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        said_at[(request.header(b"x-request-id") or b"").decode()] = monotonic()
        await peer.write(chunk(ROLE_EVENT + FIRST))
        await peer.sleep(LENGTH_S)
        await peer.write(chunk(whole.removeprefix(ROLE_EVENT + FIRST)) + b"0\r\n\r\n")

    with file_limit(4096):
        nodes = [raw_node(script), raw_node(script)]
        patient = {"connect_s": 5, "first_token_s": 15, "stall_s": 15}  # two cores, 400 at once
        gw = gateway(nodes, capacity=STREAMS, timeouts=patient)

        async def stream(number: int) -> bytes:
            """The whole answer as it came, framing and all."""
            reader, writer = await asyncio.open_connection("127.0.0.1", gw.port)
            try:
                writer.write(chat(request_id=f"r{number}"))
                got = await reader.readuntil(FIRST)
                heard_at[f"r{number}"] = monotonic()
                return got + await reader.readuntil(b"0\r\n\r\n")
            finally:
                writer.close()
                await writer.wait_closed()

        began = monotonic()
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(i)) for i in range(STREAMS)]
        took = monotonic() - began

    assert all(task.result().startswith(b"HTTP/1.1 200") for task in tasks)
    assert all(b"data: [DONE]" in task.result() for task in tasks)
    assert said_at.keys() == heard_at.keys()
    assert len(heard_at) == STREAMS
    lags = sorted(heard_at[name] - said_at[name] for name in heard_at)
    print(f"first byte behind the node's: median {lags[200]:.3f} s, worst {lags[-1]:.3f} s")
    assert lags[-1] < 1, lags[-10:]
    # All at the same time: nobody waited for somebody else's stream to end.
    assert sum(node.max_open for node in nodes) == STREAMS
    assert max(said_at.values()) - began < LENGTH_S
    assert took < 2 * LENGTH_S
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    for node_id in ("b1", "b2"):
        assert state.record(valkey, node_id)["streak"] == "0"
    # One connection to Redis for all of them, and not a word of trouble.
    ours = [c for c in valkey.client_list() if str(c["name"]).startswith("leaseway-")]
    assert len(ours) == 1
    for word in ("PoolTimeout", "Too many connections", "ERROR", "is away", "Traceback"):
        assert word not in gw.log, gw.log[-2000:]
