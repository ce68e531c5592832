"""F6: a black hole is a failure although nothing answers 5xx."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    ROLE_EVENT,
    STREAM_HEAD,
    RawNode,
    chunk,
    content_event,
    hang,
    json_answer,
    sse_answer,
)
from tests.support.rawnode import events as answer_of
from tests.support.servers import Gateway, ValkeyServer, wait_until
from tests.support.stagednode import StagedNode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.rawnode import Peer, Request

CONNECT_S, FIRST_TOKEN_S, STALL_S = 0.4, 2.5, 1.0
# A request on a connection that was idle when its machine died is given up after this (s).
UNREACHED_S = 1.0
SLACK_S = 0.6  # of a machine that is busy with other things
REQUESTS = 20
WELL = sse_answer(answer_of(2))
PROBES, NO_PROBES = 0.3, 3600  # interval, s
# Of equal nodes both are used, until one of them is out.
EQUAL = {"policy": "ttft", "ttft_floor_ms": 10_000, "ttft_prior_ms": 10_000}


@dataclass(frozen=True)
class Pair:
    """Two equal nodes of one model; ``hole`` is the one that something happens to."""

    valkey: redis.Redis
    port: int
    hole: StagedNode
    other: RawNode
    ids: tuple[str, str]

    @property
    def model(self) -> str:
        """What both serve."""
        return self.other.models[0]

    def ask(self, _: int = 0) -> tuple[float, RawClient]:
        """One request: how long it took, and its answer."""
        begun = monotonic()
        done = ask(self.port, chat(model=self.model))
        return monotonic() - begun, done

    def both_used(self) -> None:
        """Both are well, and connections to both are kept alive."""
        wait_until(
            lambda: self.ask()[1].status == 200 and self.hole.requests and self.other.requests,
            what="both are used",
        )
        with ThreadPoolExecutor(REQUESTS) as pool:
            assert {done.status for _, done in pool.map(self.ask, range(REQUESTS))} == {200}
        assert self.hole.connected
        wait_until(lambda: state.unloaded(self.valkey), within_s=2, what="load = 0")

    def out(self) -> bool:
        """Whether the black hole gets no more requests."""
        return state.scores(self.valkey, self.model)[self.ids[0]] == 0


@pytest.fixture(scope="module", params=[NO_PROBES], ids=["no probes"])
def pairs(request: pytest.FixtureRequest) -> Iterator[Callable[[], Pair]]:
    """Pairs that nobody has used before, behind one replica."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        models = [(f"m{i // 2}",) for i in range(20)]
        nodes = [stack.enter_context(StagedNode(WELL, models=model)) for model in models]
        settings = small_settings(
            [*nodes],
            capacity=2 * REQUESTS,
            scoring=EQUAL,
            health={"interval_s": request.param},
            circuit={"open_s": 30},
            timeouts={"connect_s": CONNECT_S, "first_token_s": FIRST_TOKEN_S, "stall_s": STALL_S},
        )
        gw = stack.enter_context(Gateway(settings, server.url))
        left = iter(range(0, 20, 2))

        def pair() -> Pair:
            i = next(left)
            return Pair(valkey, gw.port, nodes[i], nodes[i + 1], (f"b{i + 1}", f"b{i + 2}"))

        yield pair
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        assert_ended_cleanly(gw)


@contextlib.contextmanager
def full_backlog(node: StagedNode) -> Iterator[None]:
    """The node is gone, and its port takes no SYN: its backlog is full."""
    node.stop()
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server((node.host, node.port), backlog=0))
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                filler.connect((node.host, node.port))
        yield


@contextlib.contextmanager
def never_answers(node: StagedNode) -> Iterator[None]:
    """The node takes connections and requests, and never says a word."""
    node.script, node.pages = hang(), {"/health": hang()}
    yield


HOLES = {
    # what it is, and after how long a request that went there is given up
    "takes no SYN": (full_backlog, CONNECT_S),
    "is gone without a word": (StagedNode.vanished, UNREACHED_S + CONNECT_S),
    "takes requests and never answers": (never_answers, FIRST_TOKEN_S),
}


def answered_by_the_other(
    pair: Pair, done: list[tuple[float, RawClient]], given_up_s: float
) -> list[RawClient]:
    """All were answered well and in time; those that had been at the black hole before."""
    assert {one.status for _, one in done} == {200}
    assert {one.headers[b"x-leaseway-node"].decode() for _, one in done} == {pair.ids[1]}
    assert max(took for took, _ in done) < given_up_s + SLACK_S
    return [one for _, one in done if one.headers[b"x-leaseway-attempts"] != b"1"]


ONE_BY_ONE = ["takes no SYN", "is gone without a word"]


@pytest.mark.parametrize("what", ONE_BY_ONE)
def test_one_by_one_three_clients_make_a_detour_and_none_after_them_when_a_node(
    pairs: Callable[[], Pair], what: str
) -> None:
    hole, given_up_s = HOLES[what]
    pair = pairs()
    pair.both_used()
    with hole(pair.hole):
        done = [pair.ask() for _ in range(REQUESTS)]
        assert len(answered_by_the_other(pair, done, given_up_s)) == 3
        wait_until(pair.out, within_s=2, what="it is out")


@pytest.mark.parametrize("pairs", [NO_PROBES, PROBES], ids=["no probes", "probes"], indirect=True)
@pytest.mark.parametrize("what", HOLES)
def test_every_client_is_answered_by_the_other_node_when_one(
    pairs: Callable[[], Pair], what: str
) -> None:
    hole, given_up_s = HOLES[what]
    pair = pairs()
    pair.both_used()
    asked = len(pair.hole.requests)
    with hole(pair.hole):
        with ThreadPoolExecutor(REQUESTS) as pool:
            done = list(pool.map(pair.ask, range(REQUESTS)))
        assert answered_by_the_other(pair, done, given_up_s), "some did go there"
        # The threshold takes it out: afterwards nobody makes the detour.
        wait_until(pair.out, within_s=2, what="it is out")
        assert not answered_by_the_other(pair, [pair.ask() for _ in range(5)], 0)
        if what != "takes requests and never answers":
            assert len(pair.hole.requests) == asked
        assert state.load(pair.valkey, pair.ids[0]) == 0


def test_streams_on_a_node_that_is_gone_without_a_word_end_by_the_limit_on_silence(
    pairs: Callable[[], Pair],
) -> None:
    pair = pairs()
    gone = False

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(ROLE_EVENT))
        while True:
            if not gone:
                await peer.write(chunk(content_event("a")))
            await peer.sleep(0.05)

    pair.hole.script = pair.other.script = script
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(4):
            client = stack.enter_context(RawClient(pair.port))
            client.send(chat(model=pair.model)).read_events(3)
            clients.append(client)
        there = [c for c in clients if c.headers[b"x-leaseway-node"].decode() == pair.ids[0]]
        assert len(there) == 2
        stack.enter_context(pair.hole.vanished())
        gone = True
        pair.other.script = WELL
        died = monotonic()
        for client in there:
            body = client.read_all()
            assert STALL_S - 0.2 < monotonic() - died < STALL_S + SLACK_S + 0.5
            assert b'"error"' in body
            assert b"[DONE]" not in body
            assert b'"finish_reason":"' not in body
        wait_until(lambda: state.load(pair.valkey, pair.ids[0]) == 0, within_s=2, what="load = 0")
        assert int(state.record(pair.valkey, pair.ids[0])["streak"]) == 2


def test_a_node_that_thinks_for_long_is_no_black_hole(pairs: Callable[[], Pair]) -> None:
    """On a connection that is used again, too: its machine has said that the request is there."""
    pair = pairs()
    pair.both_used()
    slow = json_answer(after_s=UNREACHED_S + 0.7)
    pair.hole.script = pair.other.script = slow
    asked = len(pair.hole.requests)
    body = "x" * 3_000_000  # more than the kernel's buffers hold
    with ThreadPoolExecutor(4) as pool:
        requests = [
            chat(model=pair.model, stream=False, **more)
            for more in ({}, {}, {"padding": body}, {"padding": body})
        ]
        done = list(pool.map(partial(ask, pair.port), requests))
    assert [one.status for one in done] == [200] * 4
    assert {one.headers[b"x-leaseway-attempts"] for one in done} == {b"1"}
    assert len(pair.hole.requests) - asked == 2, "each once"
    assert len({request.connection for request in pair.hole.requests}) < len(pair.hole.requests)
