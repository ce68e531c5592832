"""F1: busy is not dead; one missed probe is not dead either.

The catalogue's 30 s are a dozen probe intervals here: time for an idle node to be taken out twice.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    RawNode,
    Script,
    chunk,
    content_event,
    hang,
    json_answer,
)
from tests.support.servers import Gateway, ValkeyServer, wait_until
from tests.support.stagednode import StagedNode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.rawnode import Peer, Request

INTERVAL_S, TIMEOUT_S = 0.25, 0.4
WATCHED_S = 2.4
CLIENTS, CAPACITY = 8, 16
LATE = 3 * TIMEOUT_S
LISTED = json_answer(body={"data": [{"id": "m"}, {"id": "both"}]})
WELL = {"/health": json_answer(body={}), "/v1/models": LISTED}


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
        "/v1/models": json_answer(body={"data": [{"id": "m"}, {"id": "both"}]}, after_s=LATE),
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


@dataclass(frozen=True)
class Bench:
    """Two replicas; b1 serves m, and together with b2 both."""

    valkey: redis.Redis
    gateways: list[Gateway]
    b1: StagedNode
    b2: RawNode

    def hold(
        self, stack: contextlib.ExitStack, n: int = CLIENTS, model: str = "m"
    ) -> list[RawClient]:
        """Streams through the replicas in turn."""
        clients = []
        for i in range(n):
            client = stack.enter_context(RawClient(self.gateways[i % 2].port))
            client.send(chat(model=model)).read_events(2)
            assert client.status == 200
            clients.append(client)
        return clients

    def health(self, seconds: float) -> list[str]:
        """The health of b1 now, and then each time that it changes."""
        seen: list[str] = []
        end = monotonic() + seconds
        while monotonic() < end:
            health = state.record(self.valkey, "b1")["health"]
            if not seen or health != seen[-1]:
                seen.append(health)
            time.sleep(0.01)
        return seen


@contextlib.contextmanager
def two_replicas(**health: float) -> Iterator[Bench]:
    """In front of b1 and b2, which are well."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        b1 = stack.enter_context(StagedNode(pages=dict(WELL), models=("m", "both")))
        b2 = stack.enter_context(RawNode(models=("both",)))
        settings = small_settings(
            [b1, b2],
            capacity=CAPACITY,
            health=health,
            # Heartbeats come far less often than probes: what the fleet knows of a node must not
            # wait for one.
            leases={"ttl_s": 9},
            timeouts={"stall_s": 30},
        )
        gws = [stack.enter_context(Gateway(settings, server.url)) for _ in range(2)]
        yield Bench(valkey, gws, b1, b2)
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        for gw in gws:
            assert_ended_cleanly(gw)


@pytest.fixture(scope="module")
def shared() -> Iterator[Bench]:
    with two_replicas(interval_s=INTERVAL_S, timeout_s=TIMEOUT_S) as bench:
        yield bench


@pytest.fixture
def bench(shared: Bench) -> Bench:
    """Idle, and both nodes are well, whatever the test before has done to them."""
    shared.b1.pages, shared.b1.script = dict(WELL), json_answer()
    wait_until(lambda: state.unloaded(shared.valkey), within_s=2, what="load = 0")
    wait_until(
        lambda: {state.record(shared.valkey, node)["health"] for node in ("b1", "b2")} == {"ok"},
        what="both are well",
    )
    return shared


@pytest.mark.parametrize("pages", [late, dropped_every_second, never], ids=lambda f: f.__name__)
def test_a_node_that_delivers_to_eight_clients_stays_routable_however_late_its_health_page_is(
    bench: Bench, pages: Callable[[], dict[str, Script]]
) -> None:
    ended = threading.Event()
    b1, b2 = bench.b1, bench.b2
    b1.script = b2.script = until(ended, 0.05)
    with contextlib.ExitStack() as stack:
        # Half of them through another replica than the one that happens to probe.
        clients = bench.hold(stack)
        said = [gw.log.count("node b1: health") for gw in bench.gateways]
        b1.pages = pages()
        asked = len(b1.asked)
        assert bench.health(WATCHED_S) == ["ok"]
        assert len(b1.asked) - asked >= 4, "probed all the while"
        assert [gw.log.count("node b1: health") for gw in bench.gateways] == said
        assert state.scores(bench.valkey)["b1"] > 0
        assert not any(client.ended for client in clients), "its streams are untouched"
        assert b1.open == CLIENTS
        # It is not only said to be usable: with the other one full, it is used.
        more = bench.hold(stack, CAPACITY + 2, "both")
        assert {client.headers[b"x-leaseway-node"] for client in more} == {b"b1", b"b2"}
        ended.set()
        assert all(client.read_all().endswith(DONE_EVENT) for client in clients + more)


def test_short_answers_show_as_well_as_streams_that_a_node_is_alive(bench: Bench) -> None:
    bench.b1.pages = late()
    end = monotonic() + WATCHED_S
    while monotonic() < end:
        assert ask(bench.gateways[0].port, chat(stream=False)).status == 200
        assert state.record(bench.valkey, "b1")["health"] == "ok"
        time.sleep(0.02)


def test_a_silent_node_is_out_after_so_many_misses_and_back_after_one_good_probe(
    bench: Bench,
) -> None:
    b1 = bench.b1
    b1.pages = never()
    before = len(b1.asked)
    wait_until(lambda: state.record(bench.valkey, "b1")["health"] == "down", what="b1 is out")
    assert len(b1.asked) - before >= 3
    done = [ask(bench.gateways[i % 2].port, chat(model="both", stream=False)) for i in range(20)]
    assert {one.headers[b"x-leaseway-node"] for one in done} == {b"b2"}
    b1.pages = dict(WELL)
    wait_until(lambda: state.scores(bench.valkey)["b1"] > 0, within_s=2, what="b1 is back")


def test_one_missed_probe_of_an_idle_node_is_not_its_death(bench: Bench) -> None:
    turns = itertools.count()
    missed = 0

    async def health(request: Request, peer: Peer) -> None:
        """Each third probe is missed, so that one more, of a busy machine's, does no harm."""
        nonlocal missed
        well = next(turns) % 3
        missed += not well
        await (WELL["/health"] if well else json_answer(500))(request, peer)

    bench.b1.pages = {"/health": health, "/v1/models": LISTED}
    assert bench.health(WATCHED_S) == ["ok"]
    assert missed >= 2


def test_a_busy_node_that_dies_is_out_all_the_same(bench: Bench) -> None:
    """A busy node is given the benefit of the doubt only while it delivers."""
    silent, ended = threading.Event(), threading.Event()

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(ROLE_EVENT))
        while not ended.is_set():
            if not silent.is_set():
                await peer.write(chunk(content_event("a")))
            await peer.sleep(0.02)
        await peer.write(chunk(FINISH_EVENT) + chunk(DONE_EVENT) + b"0\r\n\r\n")

    bench.b1.script = script
    with contextlib.ExitStack() as stack:
        clients = bench.hold(stack, 4)
        bench.b1.pages = never()
        assert bench.health(6 * INTERVAL_S) == ["ok"]
        silent.set()
        # Three misses and one that the last bytes excuse, each a tick and a timeout after another.
        wait_until(
            lambda: state.record(bench.valkey, "b1")["health"] == "down",
            within_s=4 * (2 * INTERVAL_S + TIMEOUT_S) + 1,
            what="it is out",
        )
        ended.set()
        assert all(client.read_all().endswith(DONE_EVENT) for client in clients)


def test_even_where_one_miss_is_enough_a_node_that_delivers_is_not_taken_out() -> None:
    with two_replicas(interval_s=0.6, timeout_s=0.4, unhealthy_after=1) as bench:
        ended = threading.Event()
        bench.b1.script = until(ended, 0.02)
        with contextlib.ExitStack() as stack:
            clients = bench.hold(stack, 2)
            time.sleep(1)  # of delivering, so that the fleet knows
            bench.b1.pages = never()
            assert bench.health(2.4) == ["ok"]
            ended.set()
            assert all(client.read_all().endswith(DONE_EVENT) for client in clients)
