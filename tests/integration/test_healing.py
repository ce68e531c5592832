"""Replicas and Redis are killed, stopped and restarted under load: the books heal."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from time import monotonic
from typing import TYPE_CHECKING

import httpx
import pytest
import redis

from app.lab.node import NodeConfig
from tests.support.fleet import CHAT, POOL, Fleet, Nodes, chat, pace, plain_async_http, ready
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

TTL_S = 1.0
TOKEN_MS = 40.0
STREAMS = 24


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Three nodes that emit a token of every answer each 40 ms."""
    with Nodes(**{node_id: NodeConfig(profile=pace(TOKEN_MS)) for node_id in "abc"}) as started:
        yield started


@pytest.fixture(scope="module")
def shared(nodes: Nodes) -> Iterator[Fleet]:
    """Three replicas with a short lease."""
    with Fleet(nodes.settings(), leases={"ttl_s": TTL_S}, server={"drain_s": 20}) as started:
        yield started


@pytest.fixture
def fleet(shared: Fleet) -> Fleet:
    """The three replicas, all alive, whatever the test before did to them."""
    for replica in shared.replicas:
        if replica.process is None:
            replica.start(wait=False)
    for replica in shared.replicas:
        wait_until(partial(ready, replica), within_s=20, what=f"{replica.url} is ready")
    shared.wait_settled()
    return shared


@dataclass(slots=True)
class Talk:
    """One streamed answer as its client sees it. ``end``: done, cut, or the status."""

    url: str
    tokens: int = 0
    end: str = ""
    task: asyncio.Task[None] | None = None

    async def run(self, http: httpx.AsyncClient, max_tokens: int) -> None:
        """Ask and read to the end."""
        body = chat(max_tokens=max_tokens, stream=True)
        try:
            async with http.stream("POST", self.url + CHAT, json=body) as answer:
                if answer.status_code != 200:
                    self.end = str(answer.status_code)
                    return
                async for line in answer.aiter_lines():
                    self.tokens += '"content"' in line
                    if line == "data: [DONE]":
                        self.end = "done"
                    elif '"error"' in line:
                        self.end = line
                self.end = self.end or "cut"
        except httpx.TransportError:
            self.end = "cut"


class Load:
    """Streams that run beside the test."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.talks: list[Talk] = []

    async def start(self, urls: list[str], *, seconds: float, count: int = STREAMS) -> list[Talk]:
        """Start streams of about ``seconds``, in turn over ``urls``; all have a token."""
        talks = [Talk(url) for url in islice(cycle(urls), count)]
        for talk in talks:
            tokens = int(seconds * 1000 / TOKEN_MS)
            talk.task = asyncio.create_task(talk.run(self._http, tokens))
        self.talks += talks
        await until(lambda: all(talk.tokens > 1 or talk.end for talk in talks), "streams run")
        return talks

    async def finish(self, talks: list[Talk]) -> Counter[str]:
        """Wait until they have ended; how they did."""
        await asyncio.gather(*(talk.task for talk in talks if talk.task))
        return Counter(talk.end for talk in talks)


@asynccontextmanager
async def load() -> AsyncIterator[Load]:
    """Whatever still runs at the end is hung up on."""
    async with plain_async_http() as http:
        running = Load(http)
        try:
            yield running
        finally:
            tasks = [talk.task for talk in running.talks if talk.task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], object], what: str, within_s: float = 10.0) -> float:
    """Wait for ``condition()``; how long it took."""
    start = monotonic()
    while not condition():
        assert monotonic() - start < within_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.005)
    return monotonic() - start


def true_to(nodes: Nodes, fleet: Fleet) -> Callable[[], bool]:
    """Whether the counters say what the nodes say."""

    def agree() -> bool:
        try:
            return +Counter(nodes.open()) == Counter(fleet.active())
        except redis.ConnectionError:
            return False

    return agree


def by_replica(fleet: Fleet) -> dict[str, int]:
    return fleet.books().owners


async def test_a_killed_replica_gives_its_leases_back(nodes: Nodes, fleet: Fleet) -> None:
    async with load() as running:
        with fleet.watched() as watch:
            talks = await running.start(fleet.urls, seconds=4)
            assert by_replica(fleet) == {"r0": 8, "r1": 8, "r2": 8}
            assert true_to(nodes, fleet)()
            fleet.replicas[1].kill()
            took = await until(
                lambda: "r1" not in fleet.books().owners and true_to(nodes, fleet)(),
                "its leases are gone",
                within_s=TTL_S + 1,
            )
            print(f"healed_s: {took}")
            assert by_replica(fleet) == {"r0": 8, "r2": 8}
            assert fleet.active() == dict(+Counter(nodes.open()))
            assert "r1" not in fleet.books().replicas
            # The survivors go on serving, and what they carry ends well.
            more = await running.start([fleet.urls[0], fleet.urls[2]], seconds=0.4, count=6)
            assert await running.finish(more) == {"done": 6}
            assert await running.finish(talks) == {"done": 16, "cut": 8}
            await until(fleet.settled, "nothing is left")
        assert watch.most_held == STREAMS
    await until(lambda: not any(nodes.open().values()), "the nodes are idle")


async def test_a_paused_replica_asserts_again_what_it_still_carries(
    nodes: Nodes, fleet: Fleet
) -> None:
    async with load() as running:
        with fleet.watched():
            talks = await running.start(fleet.urls, seconds=TTL_S * 2 + 3)
            paused = fleet.replicas[2]
            paused.signal(signal.SIGSTOP)
            await asyncio.sleep(TTL_S * 2)
            assert by_replica(fleet) == {"r0": 8, "r1": 8}, "reaped by the others"
            assert sum(nodes.open().values()) == STREAMS, "its nodes still work for it"
            paused.signal(signal.SIGCONT)
            took = await until(true_to(nodes, fleet), "asserted again", within_s=TTL_S + 1)
            print(f"reasserted_s: {took}")
            assert by_replica(fleet) == {"r0": 8, "r1": 8, "r2": 8}
            assert await running.finish(talks) == {"done": STREAMS}
            await until(fleet.settled, "nothing is left")


async def test_redis_restarted_empty_under_streams_is_filled_again(nodes: Nodes) -> None:
    # The default ttl: the next heartbeat may be 3.3 s away, so nothing may wait for it.
    with Fleet(nodes.settings(), leases={"ttl_s": 10}) as fleet:
        async with load() as running:
            talks = await running.start(fleet.urls, seconds=5)
            fleet.valkey.kill()
            await asyncio.sleep(1)
            assert all(not talk.end for talk in talks), "streams go on without Redis"
            fleet.valkey.start()
            back = monotonic()
            await until(
                lambda: fleet.redis.scard(f"{POOL}nodes") == 3, "nodes are registered", within_s=5
            )
            with fleet.watched():
                await until(
                    lambda: fleet.books().held == STREAMS and true_to(nodes, fleet)(),
                    "leases are asserted again",
                    within_s=5 - (monotonic() - back),
                )
                print(f"healed_s: {monotonic() - back}")
                assert by_replica(fleet) == {"r0": 8, "r1": 8, "r2": 8}
                fresh = await running.start(fleet.urls, seconds=0.4, count=6)
                assert await running.finish(fresh) == {"done": 6}
                assert await running.finish(talks) == {"done": STREAMS}
                await until(fleet.settled, "nothing is left")


async def test_flushed_scripts_come_back_by_themselves(nodes: Nodes, fleet: Fleet) -> None:
    async with load() as running:
        with fleet.watched():
            talks: list[Talk] = []
            for _ in range(10):
                fleet.redis.script_flush()
                talks += await running.start(fleet.urls, seconds=0.3, count=9)
                fleet.redis.script_flush()
            assert await running.finish(talks) == {"done": len(talks)}
            await until(fleet.settled, "nothing is left")


async def test_a_terminated_replica_finishes_its_streams_and_signs_off(
    nodes: Nodes, fleet: Fleet
) -> None:
    async with load() as running:
        with fleet.watched():
            talks = await running.start(fleet.urls, seconds=2.5)
            leaver = fleet.replicas[0]
            process = leaver.process
            assert process is not None
            process.terminate()
            # Its entry outlives the ttl while it drains, or its leases would be reaped.
            await asyncio.sleep(TTL_S * 1.3)
            assert by_replica(fleet) == {"r0": 8, "r1": 8, "r2": 8}
            assert await running.finish(talks) == {"done": STREAMS}
            await until(lambda: process.poll() is not None, "it ends")
            assert process.returncode == 0, leaver.log
            leaver.process = None
            assert set(fleet.books().replicas) == {"r1", "r2"}
            await until(fleet.settled, "nothing is left")


async def test_a_replica_restarted_under_its_id_ends_the_leases_of_its_former_life(
    nodes: Nodes,
) -> None:
    # A long ttl: no reaper comes to its help.
    with Fleet(nodes.settings(), leases={"ttl_s": 60}) as fleet:
        async with load() as running:
            with fleet.watched():
                talks = await running.start(fleet.urls, seconds=6)
                victim = fleet.replicas[1]
                victim.kill()
                await until(lambda: sum(nodes.open().values()) == 16, "its nodes noticed")
                assert by_replica(fleet) == {"r0": 8, "r1": 8, "r2": 8}
                victim.start(wait=False)
                await until(lambda: ready(victim), "it is back", within_s=10)
                assert by_replica(fleet) == {"r0": 8, "r2": 8}
                assert true_to(nodes, fleet)()
                fresh = await running.start([victim.url], seconds=0.4, count=3)
                assert await running.finish(fresh) == {"done": 3}
                assert await running.finish(talks) == {"done": 16, "cut": 8}
                await until(fleet.settled, "nothing is left")
