"""G1: what counts as a node failure: not the client's mistakes, not the client's leaving.

The catalogue's first-byte timeout of 5 s is 2 s here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    Script,
    chunk,
    hang,
    json_answer,
    sized,
    stream_forever,
)
from tests.support.servers import NO_TLS, wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import RawNode
    from tests.support.relay import Relay
    from tests.support.servers import Gateway

CLIENTS, NORMAL = 30, 10
# Any status that speaks of the request; 429 is another matter (G2).
MISTAKES = (
    400,
    401,
    402,
    403,
    404,
    405,
    406,
    408,
    409,
    410,
    413,
    415,
    418,
    422,
    424,
    426,
    431,
    451,
)
FIRST_BYTE_S = 1.5
CHUNKED = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"


def _count(gw: Gateway, metric: str, **labels: str) -> float:
    """A metric of the replica, summed over the labels that are not given."""
    page = httpx.get(f"{gw.url}/metrics", trust_env=False, verify=NO_TLS).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == metric and labels.items() <= sample.labels.items()
    )


def _unblamed(valkey: redis.Redis, gw: Gateway, nodes: list[RawNode]) -> None:
    """No node has a failure on its record, and ten normal requests succeed."""
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    for i in range(1, len(nodes) + 1):
        record = state.record(valkey, f"b{i}")
        assert (record["circuit"], record["streak"]) == ("closed", "0")
        assert float(record["bad"]) == 0
        assert float(record.get("cooling_until_ms", 0)) == 0
    assert _count(gw, "leaseway_attempts_total", outcome="failed") == 0
    for node in nodes:
        node.script = json_answer()
    for _ in range(NORMAL):
        answer = ask(gw.port)
        assert (answer.status, answer.headers[b"x-leaseway-attempts"]) == (200, b"1")
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


# The client's mistakes


def _mistake(status: int, i: int) -> tuple[bytes, bytes]:
    """An answer in one of three frames, and the body that it carries."""
    body = b'{ "error" : {"message":"mistake %d","code":%d, "x":null} }' % (i, status)
    head = b"HTTP/1.1 %d No\r\ncontent-type: application/problem+json\r\nx-engine: e\r\n" % status
    if i % 3 == 0:
        return sized(status, body, [(b"content-type", b"application/problem+json")]), body
    if i % 3 == 1:
        whole = chunk(body[:7]) + chunk(body[7:]) + b"0\r\n\r\n"
        return head + b"transfer-encoding: chunked\r\n\r\n" + whole, body
    return head + b"content-length: 0\r\n\r\n", b""


async def _says_no(request: Request, peer: Peer) -> None:
    asked = request.json()
    await peer.write(_mistake(asked["status"], asked["i"])[0])


def test_a_clients_mistake_comes_back_as_the_node_said_it_and_no_node_is_blamed(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(_says_no), raw_node(_says_no)]
    gw = gateway(nodes)
    asked = [(MISTAKES[i % len(MISTAKES)], i) for i in range(2 * len(MISTAKES))]
    for (
        status,
        i,
    ) in asked:  # one by one: one bad client is enough to open a circuit that counts them
        client = ask(gw.port, chat(stream=i % 2 == 0, status=status, i=i))
        assert client.complete
        assert (client.status, client.body) == (status, _mistake(status, i)[1])
        assert client.headers[b"content-type"] == b"application/problem+json"
        assert client.headers[b"x-leaseway-attempts"] == b"1"
    assert sum(len(node.requests) for node in nodes) == len(asked), "no attempt on another node"
    assert all(node.requests for node in nodes)
    assert _count(gw, "leaseway_requests_total", status="404") == 2
    assert _count(gw, "leaseway_requests_abandoned_total") == 0
    for i in (1, 2):
        assert not valkey.exists(state.KEYS.ttft(f"b{i}")), "a quick no is not a quick token"
    _unblamed(valkey, gw, nodes)


def test_a_clients_mistake_neither_clears_failures_nor_uses_up_the_trial(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node()
    gw = gateway([node], circuit={"open_s": 0.5})
    for status in (500, 422, 500, 404, 500):
        node.script = json_answer(status)
        assert ask(gw.port).status == status
    wait_until(lambda: state.record(valkey, "b1")["circuit"] == "open", what="three failures open")
    node.script = json_answer(400)
    wait_until(lambda: ask(gw.port).status == 400, what="the trial, a client's mistake")
    assert ask(gw.port).status == 400, "its place was free again at once"
    node.script = json_answer()
    assert [ask(gw.port).status for _ in range(NORMAL)] == [200] * NORMAL
    wait_until(lambda: state.record(valkey, "b1")["circuit"] == "closed", what="closed")


# The client leaves


@dataclass(frozen=True)
class Leaving:
    """What the nodes do, what the client has read when it goes, and when that is.

    ``events`` are SSE events, ``octets`` bytes of the body that it has waited for; ``after_s`` is
    counted from the first request on. ``before_s`` is when all must have gone.
    """

    name: str
    script: Script
    stream: bool = True
    events: int = 0
    octets: int = 0
    after_s: float = 0.2
    before_s: float = 60


async def _half_a_body(request: Request, peer: Peer) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900000\r\n\r\n"
    await peer.write(head + b'{"x":"' + b"x" * 600_000)
    await peer.wait_closed()


async def _only_a_role(request: Request, peer: Peer) -> None:
    await peer.write(CHUNKED + chunk(ROLE_EVENT))
    await peer.wait_closed()


async def _only_a_head(request: Request, peer: Peer) -> None:
    await peer.write(CHUNKED)
    await peer.wait_closed()


LEAVINGS = [
    Leaving("during an answer of 2 s in one piece", json_answer(after_s=2), stream=False),
    Leaving("before the first byte of a stream", hang()),
    Leaving("after the head", _only_a_head),
    Leaving("after the role event", _only_a_role, events=1),
    Leaving("during a stream", stream_forever(0.05), events=3),
    Leaving("at once", json_answer(after_s=2), after_s=0),
    Leaving("halfway through a body", _half_a_body, stream=False, octets=300_000),
    Leaving("just before the first-byte timeout", hang(), after_s=FIRST_BYTE_S - 0.5,
            before_s=FIRST_BYTE_S),
]  # fmt: skip


def test_a_client_that_leaves_blames_no_node_and_asks_no_other(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(), raw_node()]
    gw = gateway(nodes, capacity=64, timeouts={"first_token_s": FIRST_BYTE_S})
    for turn, case in enumerate(LEAVINGS, 1):
        for node in nodes:
            node.script = case.script
            node.requests.clear()
        begin = monotonic()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(RawClient(gw.port)) for _ in range(CLIENTS)]
            for client in clients:
                client.send(chat(stream=case.stream))
            wait_until(lambda: sum(n.open for n in nodes) == CLIENTS, what="all are at the nodes")
            for client in clients:
                client.read_events(case.events)
                while len(client.body) < case.octets:
                    client._read()
            time.sleep(max(0.0, case.after_s - (monotonic() - begin)))
            for i, client in enumerate(clients):
                (client.close if i % 2 else client.reset)()
            assert monotonic() - begin < case.before_s
        wait_until(
            lambda: sum(n.open for n in nodes) == 0, within_s=2, what=f"{case.name}: nodes are free"
        )
        assert sum(len(node.requests) for node in nodes) == CLIENTS, case.name
        wait_until(lambda: state.unloaded(valkey), within_s=2, what=f"{case.name}: load = 0")
        gone = _count(gw, "leaseway_requests_abandoned_total")
        assert gone == turn * CLIENTS, case.name
        assert _count(gw, "leaseway_attempts_total", outcome="failed") == 0, case.name
    assert _count(gw, "leaseway_requests_total") == 0, "aborts are a metric of their own"
    _unblamed(valkey, gw, nodes)


def test_a_client_that_leaves_before_its_request_is_whole_reaches_no_node(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(), raw_node()]
    gw = gateway(nodes)
    request = chat()
    for i in range(CLIENTS):
        client = RawClient(gw.port).send(request[: -1 - i])
        (client.close if i % 2 else client.reset)()
    wait_until(lambda: _count(gw, "leaseway_requests_in_flight") == 0, what="all are gone")
    assert not any(node.requests for node in nodes)
    _unblamed(valkey, gw, nodes)


@pytest.mark.parametrize("where", ["while it moves", "on the second node"])
def test_a_client_that_leaves_during_a_retry_adds_nothing_to_the_failure_that_caused_it(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay, where: str
) -> None:
    may_fail, seen = threading.Event(), set[bytes]()

    async def fails_first(request: Request, peer: Peer) -> None:
        request_id = request.header(b"x-request-id") or b""
        if request_id in seen:
            await peer.wait_closed()
        seen.add(request_id)
        while not may_fail.is_set():
            await peer.sleep(0.01)
        await json_answer(500)(request, peer)

    nodes = [raw_node(fails_first), raw_node(fails_first)]
    gw = gateway(
        nodes,
        redis_url=relay.url,
        redis={"call_timeout_ms": 20_000},
        circuit={"failure_threshold": 10_000, "failure_rate": 1},
        capacity=64,
    )
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(gw.port)) for _ in range(CLIENTS)]
        for client in clients:
            client.send(chat())
        wait_until(lambda: sum(n.open for n in nodes) == CLIENTS, what="first attempts")
        if where == "while it moves":  # they fail, and Redis does not say where to go
            relay.delay_replies_s = 5
        may_fail.set()
        wait_until(
            lambda: _count(gw, "leaseway_attempts_total", outcome="failed") == CLIENTS,
            within_s=4,
            what="every first attempt has failed",
        )
        attempts = CLIENTS
        if where == "on the second node":
            attempts *= 2
            wait_until(lambda: sum(len(n.requests) for n in nodes) == attempts, what="that far")
        for i, client in enumerate(clients):
            (client.close if i % 2 else client.reset)()
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    relay.delay_replies_s = 0
    wait_until(lambda: sum(n.open for n in nodes) == 0, within_s=2, what="the nodes are free")
    assert sum(len(node.requests) for node in nodes) == attempts, "nobody was asked for the leavers"
    assert _count(gw, "leaseway_attempts_total", outcome="failed") == CLIENTS
    assert _count(gw, "leaseway_requests_abandoned_total") == CLIENTS
    streaks = [int(state.record(valkey, f"b{i}")["streak"]) for i in (1, 2)]
    assert sum(streaks) == CLIENTS, "each failure once, and no more"
    for node in nodes:
        node.script = json_answer()
    assert [ask(gw.port, timeout_s=20).status for _ in range(NORMAL)] == [200] * NORMAL
