"""F1: busy is not dead; one missed probe is not dead either.

The catalogue's 30 s are a dozen probe intervals here: at every instant of them the node has
missed more probes in a row than take an idle one out.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Script,
    chunk,
    content_event,
    hang,
    json_answer,
    sse_answer,
)
from tests.support.rawnode import events as answer_of
from tests.support.servers import wait_until
from tests.support.stagednode import StagedNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, Request
    from tests.support.servers import Gateway

INTERVAL_S = TIMEOUT_S = 0.25
HEALTH = {"interval_s": INTERVAL_S, "timeout_s": TIMEOUT_S}
WATCHED_S = 12 * 2 * INTERVAL_S
CLIENTS = 8
LATE = 3 * TIMEOUT_S
WELL = {"/health": json_answer(body={}), "/v1/models": json_answer(body={"data": [{"id": "m"}]})}


def dropped_every_second() -> dict[str, Script]:
    """Each second probe, whichever pages it asks for, is never answered."""
    turns = itertools.count()

    async def health(request: Request, peer: Peer) -> None:
        await (hang() if next(turns) % 2 else WELL["/health"])(request, peer)

    return {"/health": health, "/v1/models": WELL["/v1/models"]}


def late() -> dict[str, Script]:
    """Every page comes after three times the probe timeout."""
    return {
        "/health": json_answer(body={}, after_s=LATE),
        "/v1/models": json_answer(body={"data": [{"id": "m"}]}, after_s=LATE),
    }


def never() -> dict[str, Script]:
    """No probe is answered."""
    return {"/health": hang(), "/v1/models": hang()}


def until(ended: threading.Event, gap_s: float) -> Script:
    """A stream that talks until ``ended`` is set, and then ends well."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(ROLE_EVENT))
        while not ended.is_set():
            await peer.write(chunk(content_event("a")))
            await peer.sleep(gap_s)
        await peer.write(chunk(FINISH_EVENT) + chunk(DONE_EVENT) + b"0\r\n\r\n")

    return script


@pytest.fixture
def b1() -> Iterator[StagedNode]:
    """A node whose pages are the test's own; it stops after the replicas."""
    with StagedNode(pages=dict(WELL)) as node:
        yield node


def watched(valkey: redis.Redis, node: StagedNode, seconds: float) -> tuple[list[str], int]:
    """The health of b1 each time that it changed, and the most misses in a row."""
    seen: list[str] = []
    most, end = 0, monotonic() + seconds
    while monotonic() < end:
        record = state.record(valkey, "b1")
        most = max(most, int(record.get("misses", 0)))
        if not seen or record["health"] != seen[-1]:
            seen.append(record["health"])
        time.sleep(0.01)
    return seen, most


def held_on_b1(
    stack: contextlib.ExitStack, replicas: list[Gateway], n: int = CLIENTS
) -> list[RawClient]:
    """Streams through the replicas in turn."""
    clients = [stack.enter_context(RawClient(replicas[i % len(replicas)].port)) for i in range(n)]
    for client in clients:
        client.send(chat()).read_events(2)
        assert client.headers[b"x-leaseway-node"] == b"b1"
    return clients


@pytest.mark.parametrize("pages", [late, dropped_every_second, never], ids=lambda f: f.__name__)
def test_a_node_that_delivers_to_eight_clients_stays_routable_however_late_its_health_page_is(
    valkey: redis.Redis,
    b1: StagedNode,
    gateway: StartGateway,
    raw_node: StartNode,
    pages: Script,
) -> None:
    ended = threading.Event()
    b1.script = until(ended, 0.05)
    b2 = raw_node(sse_answer(answer_of(2)))
    b2.probes_fail = True  # not there yet: all eight go to b1
    # Some through another replica than the one that happens to probe, and heartbeats that come
    # far less often than probes: what the fleet knows of a node must not wait for one.
    gws = [gateway([b1, b2], capacity=16, health=HEALTH, leases={"ttl_s": 9}) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        clients = held_on_b1(stack, gws)
        b2.probes_fail = False
        wait_until(lambda: state.record(valkey, "b2")["health"] == "ok", what="b2 is idle")
        b1.pages = pages()  # type: ignore[assignment, call-arg]
        asked = len(b1.asked)
        seen, _ = watched(valkey, b1, WATCHED_S)
        assert len(b1.asked) - asked >= 6, "probed all the while"
        assert seen == ["ok"]
        assert state.scores(valkey)["b1"] > 0
        assert not any(client.ended for client in clients), "its streams are untouched"
        assert b1.open == CLIENTS
        # It is not only said to be usable: with the other one full, it is used.
        b2.script = until(ended, 0.05)
        more = [stack.enter_context(RawClient(gws[0].port)) for _ in range(18)]
        for client in more:
            client.send(chat()).read_events(2)
        assert {client.headers[b"x-leaseway-node"] for client in more} == {b"b1", b"b2"}
        ended.set()
        assert all(client.read_all().endswith(DONE_EVENT) for client in clients + more)
    assert not any("health ok" in gw.log for gw in gws), "no state change"
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_short_answers_show_as_well_as_streams_that_a_node_is_alive(
    valkey: redis.Redis, b1: StagedNode, gateway: StartGateway
) -> None:
    b1.script = json_answer()
    gws = [gateway([b1], health=HEALTH) for _ in range(2)]
    b1.pages = late()
    end, statuses = monotonic() + WATCHED_S, set()
    while monotonic() < end:
        statuses.add(ask(gws[0].port).status)
        assert state.record(valkey, "b1")["health"] == "ok"
        time.sleep(0.02)
    assert statuses == {200}


def test_even_where_one_miss_is_enough_a_node_that_delivers_is_not_taken_out(
    valkey: redis.Redis, b1: StagedNode, gateway: StartGateway
) -> None:
    ended = threading.Event()
    b1.script = until(ended, 0.02)
    slow = {"interval_s": 0.6, "timeout_s": 0.3, "unhealthy_after": 1}
    gws = [gateway([b1], health=slow) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        clients = held_on_b1(stack, gws, 2)
        time.sleep(1)  # of delivering, so that the fleet knows
        b1.pages = never()
        seen, _ = watched(valkey, b1, 4)
        assert seen == ["ok"]
        ended.set()
        assert all(client.read_all().endswith(DONE_EVENT) for client in clients)


def test_a_silent_node_is_out_after_so_many_misses_and_not_before(
    valkey: redis.Redis, b1: StagedNode, gateway: StartGateway, raw_node: StartNode
) -> None:
    gw = gateway([b1, raw_node()], health=HEALTH)
    b1.pages = never()
    before = len(b1.asked)
    wait_until(lambda: state.record(valkey, "b1")["health"] == "down", what="b1 is out")
    assert len(b1.asked) - before >= 3
    assert gw.log.count("node b1: health ok → down") == 1
    assert {ask(gw.port).headers[b"x-leaseway-node"] for _ in range(20)} == {b"b2"}
    b1.pages = dict(WELL)
    wait_until(lambda: state.scores(valkey)["b1"] > 0, within_s=2, what="b1 is back")


@pytest.mark.parametrize("misses", [1, 2])
def test_a_miss_or_two_between_good_probes_take_no_idle_node_out(
    valkey: redis.Redis, b1: StagedNode, gateway: StartGateway, misses: int
) -> None:
    turns = itertools.count()

    async def health(request: Request, peer: Peer) -> None:
        bad = next(turns) % (misses + 1)
        await (hang() if bad else WELL["/health"])(request, peer)

    gateway([b1], health=HEALTH)
    b1.pages = {"/health": health, "/v1/models": WELL["/v1/models"]}
    seen, most = watched(valkey, b1, WATCHED_S)
    assert (seen, most) == (["ok"], misses)


def test_a_busy_node_that_dies_is_out_all_the_same(
    valkey: redis.Redis, b1: StagedNode, gateway: StartGateway, raw_node: StartNode
) -> None:
    """A busy node is given the benefit of the doubt only while it delivers."""
    silent = threading.Event()

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(ROLE_EVENT))
        while True:
            if not silent.is_set():
                await peer.write(chunk(content_event("a")))
            await peer.sleep(0.02)

    b1.script = script
    gw = gateway([b1], health=HEALTH, timeouts={"stall_s": 30})
    with contextlib.ExitStack() as stack:
        held_on_b1(stack, [gw], 3)
        b1.pages = never()
        seen, _ = watched(valkey, b1, 6 * INTERVAL_S)
        assert seen == ["ok"]
        silent.set()
        # Three misses, the one excused by the last bytes, each a tick and a timeout apart.
        wait_until(
            lambda: state.record(valkey, "b1")["health"] == "down",
            within_s=5 * 2 * INTERVAL_S + 1,
            what="it is out",
        )
