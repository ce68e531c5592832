"""G2: a 429 from a node means 'try another', not 'success' and not 'broken'."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from tests.support import state
from tests.support.rawclient import ask, chat
from tests.support.rawnode import Headers, Peer, Request, events, json_answer, sse_answer
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import RawNode, Script
    from tests.support.relay import Relay

COOL_S, COOL_MAX_S, COOL_DEFAULT_S = 7.0, 60.0, 1.0
JSON = (b"content-type", b"application/json")
LIMITED = (
    b'{"error":{"message":"slow down","type":"rate_limit_error","code":"rate_limit_exceeded"}}'
)
OVERLOADED = b'{"error":{"message":"the engine is overloaded"}}'
# Equal nodes, whatever is measured: each new request is as likely to go to either.
EQUAL = {"policy": "ttft", "ttft_floor_ms": 10_000, "ttft_prior_ms": 10_000}


def _limited(retry_after: bytes | None, status: int = 429, body: bytes = LIMITED) -> Script:
    headers: Headers = [JSON, *([(b"retry-after", retry_after)] if retry_after else [])]
    return json_answer(status, body, headers)


async def _well(request: Request, peer: Peer) -> None:
    answer = sse_answer(events(2)) if request.json()["stream"] else json_answer()
    await answer(request, peer)


def _now_ms(valkey: redis.Redis) -> int:
    """Redis' clock."""
    seconds, micros = valkey.time()
    return int(seconds) * 1000 + int(micros) // 1000


def test_a_limited_node_is_passed_over_for_as_long_as_it_asked_and_every_client_is_served(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    b1, b2 = raw_node(_limited(b"7")), raw_node(_well)
    gws = [gateway([b1, b2], capacity=64, scoring=EQUAL) for _ in range(2)]
    with ThreadPoolExecutor(20) as pool:  # all at once: half of them meet the 429
        clients = list(pool.map(lambda i: ask(gws[i % 2].port, chat(stream=i % 3 == 0)), range(20)))
    assert [client.status for client in clients] == [200] * 20
    assert 1 <= len(b1.requests) <= 10
    assert len(b2.requests) == 20
    attempts = sorted(client.headers[b"x-leaseway-attempts"] for client in clients)
    assert attempts == sorted([b"2"] * len(b1.requests) + [b"1"] * (20 - len(b1.requests)))
    record, asked = state.record(valkey, "b1"), len(b1.requests)
    assert (record["circuit"], record["streak"]) == ("closed", "0")
    assert not valkey.exists(state.KEYS.ttft("b1")), "a quick no is not a quick token"
    assert state.scores(valkey)["b1"] == 0, "neither replica sends it anything"

    b1.script = _well
    since = b1.requests[-1].at
    until = b1.requests[0].at + COOL_S
    i = 0
    while len(b1.requests) == asked and monotonic() < since + COOL_S + 5:
        assert ask(gws[i % 2].port).status == 200
        i += 1
    assert len(b1.requests) > asked, "it is asked again"
    assert until - 0.1 <= b1.requests[asked].at < since + COOL_S + 2
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


# Retry-After, status and body of an answer, and for how long its node is to be left alone.
ASKS: list[tuple[bytes | None, int, bytes, float]] = [
    (b"7", 429, LIMITED, COOL_S),
    (b"2.5", 429, LIMITED, 2.5),
    (b"86400", 429, LIMITED, COOL_MAX_S),
    (b"Fri, 31 Dec 2100 23:59:59 GMT", 429, LIMITED, COOL_MAX_S),
    (b"0", 429, LIMITED, COOL_DEFAULT_S),
    (b"-5", 429, LIMITED, COOL_DEFAULT_S),
    (b"nan", 429, LIMITED, COOL_DEFAULT_S),
    (b"1e999", 429, LIMITED, COOL_MAX_S),
    (b"soon", 429, LIMITED, COOL_DEFAULT_S),
    (b"Fri, 31 Dec 1999 23:59:59 GMT", 429, LIMITED, COOL_DEFAULT_S),
    (None, 429, b"", COOL_DEFAULT_S),
    (b"7", 503, b"later", COOL_S),
    (None, 503, OVERLOADED, COOL_DEFAULT_S),
]


def test_how_long_a_node_is_passed_over_is_what_it_asked_within_bounds(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes: list[RawNode] = []
    for i, (retry_after, status, body, _) in enumerate(ASKS):
        nodes.append(raw_node(_limited(retry_after, status, body)))
        nodes[-1].models = (f"m{i}",)
    dated = raw_node()
    dated.models = ("dated",)
    gw = gateway([*nodes, dated])
    for i, (retry_after, status, body, cool_s) in enumerate(ASKS):
        before_ms = _now_ms(valkey)
        client = ask(gw.port, chat(model=f"m{i}", stream=i % 2 == 0))
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        after_ms = _now_ms(valkey)
        # Nobody else could be asked: the client gets what the node said.
        assert (client.status, client.body) == (status, body)
        assert client.headers.get(b"retry-after") == retry_after
        record = state.record(valkey, f"b{i + 1}")
        assert (record["circuit"], record["streak"]) == ("closed", "0")
        until_ms, cool_ms = int(record["cooling_until_ms"]), cool_s * 1000
        assert before_ms + cool_ms - 5 <= until_ms <= after_ms + cool_ms, ASKS[i]
        # Whoever asks now is told when to come back, without a look at the node.
        refused = ask(gw.port, chat(model=f"m{i}", stream=False))
        assert refused.status in {429, 503}
        assert 1 <= int(refused.headers[b"retry-after"]) <= cool_s + 1
        assert len(nodes[i].requests) == 1 or cool_s == COOL_DEFAULT_S
    # A date stands for that moment.
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=30)
    dated.script = _limited(format_datetime(at, usegmt=True).encode())
    before_ms = _now_ms(valkey)
    assert ask(gw.port, chat(model="dated")).status == 429
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    until_ms = int(state.record(valkey, f"b{len(nodes) + 1}")["cooling_until_ms"])
    at_ms = at.timestamp() * 1000
    assert at_ms - 5 <= until_ms <= at_ms + _now_ms(valkey) - before_ms


@pytest.mark.parametrize(
    ("retry_after", "status", "body"),
    [(b"0.2", 429, LIMITED), (b"0.2", 503, b""), (None, 503, OVERLOADED)],
    ids=["429", "503 with Retry-After", "503 that says overloaded"],
)
def test_500_busy_500_busy_500_opens_the_circuit_and_no_client_sees_any_of_it(
    valkey: redis.Redis,
    gateway: StartGateway,
    raw_node: StartNode,
    retry_after: bytes | None,
    status: int,
    body: bytes,
) -> None:
    turns = itertools.cycle([json_answer(500), _limited(retry_after, status, body)])

    async def alternates(request: Request, peer: Peer) -> None:
        await next(turns)(request, peer)

    b1, b2 = raw_node(alternates), raw_node(_well)
    gw = gateway([b1, b2], scoring=EQUAL, circuit={"open_s": 30})
    for n in range(1, 6):
        while len(b1.requests) < n:
            assert ask(gw.port).status == 200
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        record = state.record(valkey, "b1")
        assert record["streak"] == str((n + 1) // 2), "what is busy is neither success nor failure"
        assert record["circuit"] == ("open" if n == 5 else "closed")
    for _ in range(10):
        assert ask(gw.port).status == 200
    assert len(b1.requests) == 5, "the circuit is open"


def test_without_retries_the_client_gets_the_429_and_the_next_ones_another_node(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    b1, b2 = raw_node(_limited(b"30")), raw_node(_well)
    gw = gateway([b1, b2], scoring=EQUAL, retries={"max_attempts": 1})
    while not b1.requests:
        last = ask(gw.port)
    assert (last.status, last.body) == (429, LIMITED)
    assert last.headers[b"retry-after"] == b"30"
    assert [ask(gw.port, chat(stream=i % 2 == 0)).status for i in range(20)] == [200] * 20
    assert len(b1.requests) == 1
    assert (state.record(valkey, "b1")["circuit"], len(state.leases(valkey))) == ("closed", 0)


def test_without_redis_a_limited_node_is_passed_over_as_well(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay
) -> None:
    b1, b2 = raw_node(_limited(b"30")), raw_node(_well)
    gw = gateway([b1, b2], redis_url=relay.url, scoring=EQUAL)
    relay.refuse = True
    relay.reset_all()
    while not b1.requests:
        met = ask(gw.port)
        assert met.status == 200
    assert met.headers[b"x-leaseway-degraded"] == b"1"
    assert met.headers[b"x-leaseway-attempts"] == b"2"
    assert [ask(gw.port).status for _ in range(20)] == [200] * 20
    assert len(b1.requests) == 1
    b2.script = _limited(b"3")
    assert ask(gw.port).status == 429, "nobody else can be asked"
    refused = ask(gw.port)
    assert refused.status in {429, 503}
    assert 1 <= int(refused.headers[b"retry-after"]) <= 3
    relay.refuse = False
    wait_until(gw.ready, what="back to shared state")
    assert state.unloaded(valkey)
