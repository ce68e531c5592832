"""C2: a frozen Redis must not freeze the gateway.

The documented policy is to fail open (DESIGN, section 7): requests are served from the last known
picture with the header ``x-leaseway-degraded``; readiness answers 200 with the status "degraded".
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import events, json_answer, sse_answer
from tests.support.redis_ha import ask_once, load, wait_shared
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, Request
    from tests.support.relay import Relay
    from tests.support.servers import Gateway

RUNNING, SEQUENTIAL, STREAMS = 10, 50, 20
LONG, SHORT = events(32), events(5)
READY = b"GET /readyz HTTP/1.1\r\nhost: g\r\n\r\n"
LIVE = b"GET /healthz HTTP/1.1\r\nhost: g\r\n\r\n"


async def _script(request: Request, peer: Peer) -> None:
    kind = (request.header(b"x-request-id") or b"").partition(b"-")[0]
    if kind == b"long":
        await sse_answer(LONG, 0.1)(request, peer)
    elif kind == b"short":
        await sse_answer(SHORT, 0.02)(request, peer)
    else:
        await json_answer()(request, peer)


@contextlib.contextmanager
def _frozen(relay: Relay) -> Iterator[None]:
    relay.pause()
    yield
    relay.resume()


@contextlib.contextmanager
def _refused(relay: Relay) -> Iterator[None]:
    relay.refuse = True
    relay.reset_all()
    yield
    relay.refuse = False


@contextlib.contextmanager
def _reset(relay: Relay) -> Iterator[None]:
    relay.reset_after_forwarding(lambda _: True)
    yield
    relay.reset_after_forwarding(None)


@contextlib.contextmanager
def _cut(relay: Relay) -> Iterator[None]:
    done = threading.Event()

    def every_reply() -> None:
        while not done.wait(0.001):
            relay.cut_next_reply()

    with ThreadPoolExecutor(1) as pool:
        cutting = pool.submit(every_reply)
        yield
        done.set()
        cutting.result()
    relay._cut = False  # armed, with no reply to cut any more


@pytest.mark.parametrize(
    "outage", [_frozen, _refused, _reset, _cut], ids=["frozen", "refused", "reset", "cut in half"]
)
def test_requests_are_served_without_redis_while_it_is(
    outage: Callable[[Relay], contextlib.AbstractContextManager[None]],
    valkey: redis.Redis,
    gateway: StartGateway,
    raw_node: StartNode,
    relay: Relay,
) -> None:
    node = raw_node(_script)
    gw = gateway([node], redis_url=relay.url, capacity=200)
    json = chat(stream=False)
    usual_s = median(ask_once(gw.port, json).took_s for _ in range(20))
    assert _status(gw) == "ok"
    lines_before = len(gw.log.splitlines())
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(STREAMS) as pool:
        running = [stack.enter_context(RawClient(gw.port)) for _ in range(RUNNING)]
        for client in running:
            client.send(chat(request_id="long-1")).read_events(1)
        with outage(relay):
            asked = [ask_once(gw.port, json) for _ in range(SEQUENTIAL)]
            begin = monotonic()
            alive = ask(gw.port, LIVE)
            live_s = monotonic() - begin
            assert alive.status == 200
            wait_until(lambda: _status(gw) == "degraded", within_s=2, what="readiness says so")
            streams = list(pool.map(lambda _: ask(gw.port, chat(request_id="short-1")),
                                    range(STREAMS)))  # fmt: skip
        shared_s = wait_shared([gw.port], json, within_s=5)
        wait_until(lambda: _status(gw) == "ok", within_s=5, what="readiness says so")
        for client in running:
            assert client.read_all() == b"".join(LONG), "running streams are untouched"

    added_ms = sorted((one.took_s - usual_s) * 1e3 for one in asked)
    opened = next(i for i, one in enumerate(asked) if one.degraded and one.took_s < usual_s + 0.1)
    steady_ms = median((one.took_s - usual_s) * 1e3 for one in asked[opened:])
    lines = gw.log.splitlines()[lines_before:]
    print(
        f"usual {usual_s * 1e3:.1f} ms; added: {opened} slow ones, at most {added_ms[-1]:.0f} ms, "
        f"then {steady_ms:+.1f} ms (median); liveness {live_s * 1e3:.0f} ms; back {shared_s:.2f} s "
        f"after Redis; {len(lines)} log lines"
    )
    assert all(one.good for one in asked), [one for one in asked if not one.good]
    assert all(one.degraded for one in asked[opened:])
    assert opened <= 5
    assert added_ms[-1] < 1000
    assert steady_ms < 50
    assert all(client.status == 200 and client.body == b"".join(SHORT) for client in streams)
    assert all(client.headers[b"x-leaseway-degraded"] == b"1" for client in streams)
    assert len(lines) <= 6, gw.log
    wait_until(lambda: state.unloaded(valkey), within_s=4, what="load(b1) = 0")
    assert state.record(valkey, "b1")["streak"] == "0"


def test_a_blip_of_half_a_second_costs_a_handful_of_log_lines_and_no_request(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay
) -> None:
    node = raw_node(json_answer())
    gw = gateway([node], redis_url=relay.url, capacity=200)
    lines_before = len(gw.log.splitlines())
    with load([gw.port], chat(stream=False), hands=12, gap_s=0.08) as asked:
        wait_until(lambda: len(asked.asked) > 50, what="under way")
        relay.delay_replies_s = 0.3
        time.sleep(0.5)
        relay.delay_replies_s = 0
        ended = monotonic()
        shared_s = wait_shared([gw.port], chat(stream=False), within_s=5)
        wait_until(lambda: len(asked.since(ended)) > 100, what="on with it")
    lines = gw.log.splitlines()[lines_before:]
    print(f"{asked.figures()}; back {shared_s:.2f} s after the blip; {len(lines)} log lines")
    assert not asked.bad, asked.bad[:3]
    assert len(lines) <= 6, gw.log
    wait_until(lambda: state.unloaded(valkey), within_s=4, what="load(b1) = 0")


def _status(gw: Gateway) -> str:
    answer = ask(gw.port, READY)
    assert answer.status == 200
    return str(answer.json()["status"])
