"""A1: the release must survive the cancellation that triggers it."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from app.cluster.link import Link
from app.cluster.scripts import Scripts, constants
from app.config import Settings
from app.model import Outcome
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import stream_forever
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.relay import Relay
    from tests.support.servers import ValkeyServer

CLIENTS = 50


@pytest.mark.parametrize("spread_s", [0.0, 0.4], ids=["at once", "while releases are on the wire"])
def test_fifty_streams_that_leave_over_a_slow_redis_give_all_leases_back(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay, spread_s: float
) -> None:
    node = raw_node(stream_forever(0.05))
    gw = gateway([node], capacity=64, redis_url=relay.url, redis={"call_timeout_ms": 2000})
    relay.delay_replies_s = 0.3
    draw = random.Random(1)
    all_are_there = threading.Barrier(CLIENTS)

    def leave(wait_s: float) -> float:
        client = RawClient(gw.port)
        client.send(chat())
        client.read_events(2)
        assert client.status == 200
        all_are_there.wait(20)
        time.sleep(wait_s)
        client.close()
        return client.closed_at

    with state.sampling(valkey) as seen, ThreadPoolExecutor(CLIENTS) as pool:
        waits = [draw.uniform(0, spread_s) for _ in range(CLIENTS)]
        last = max(pool.map(leave, waits))
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")
        assert time.monotonic() - last < 2
    assert seen.highest["b1"] == CLIENTS
    wait_until(lambda: node.open == 0, within_s=1, what="true(b1) = 0")
    state.assert_scores_equal_records(valkey)


async def test_a_second_release_of_the_same_lease_is_harmless(
    valkey: redis.Redis,
    valkey_server: ValkeyServer,
    gateway: StartGateway,
    raw_node: StartNode,
) -> None:
    node = raw_node(stream_forever(0.05))
    gw = gateway([node])
    with RawClient(gw.port) as stays, RawClient(gw.port) as leaves:
        leaves.send(chat()).read_events(2)
        (lease,) = state.leases(valkey)
        stays.send(chat()).read_events(2)
        leaves.close()
        wait_until(lambda: state.load(valkey, "b1") == 1, within_s=2, what="the first release")
        before = state.snapshot(valkey)

        link = Link(valkey_server.url, budget_s=1, name="second")
        await link.start()
        try:
            scripts = Scripts(
                link,
                namespace="lw",
                pool="default",
                constants=constants(Settings()),
            )
            for outcome in Outcome:
                ended = await scripts.release(lease.id, replica=lease.replica, outcome=outcome)
                assert not ended
        finally:
            await link.close()
        assert state.snapshot(valkey) == before
        stays.close()
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")


def test_a_release_that_could_not_be_sent_is_kept_and_sent_when_redis_is_back(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay
) -> None:
    node = raw_node(stream_forever(0.05))
    gw = gateway([node], redis_url=relay.url, leases={"ttl_s": 60})  # no help from the expiry
    clients = [RawClient(gw.port) for _ in range(5)]
    for client in clients:
        client.send(chat()).read_events(2)
    assert state.load(valkey, "b1") == 5
    relay.refuse = True
    relay.reset_all()
    for client in clients:
        client.close()
    wait_until(lambda: node.open == 0, within_s=1, what="the node's streams are closed")
    assert state.load(valkey, "b1") == 5
    relay.refuse = False
    wait_until(lambda: state.unloaded(valkey), within_s=4, what="load(b1) = 0")


def test_a_release_whose_script_was_gone_and_whose_source_was_lost_is_sent_again(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay
) -> None:
    node = raw_node(stream_forever(0.05))
    gw = gateway([node], redis_url=relay.url, leases={"ttl_s": 60})  # no help from the expiry
    with RawClient(gw.port) as client:
        client.send(chat()).read_events(2)
        valkey.script_flush()
        relay.reset_instead_of_forwarding(lambda command: command[0] == b"EVAL")
    wait_until(lambda: relay.resets, within_s=2, what="the source of release is lost")
    assert state.load(valkey, "b1") == 1
    relay.reset_after_forwarding(None)
    wait_until(lambda: state.unloaded(valkey), within_s=4, what="load(b1) = 0")


def test_requests_served_during_an_outage_leave_nothing_to_be_released_after_it(
    valkey: redis.Redis,
    valkey_server: ValkeyServer,
    gateway: StartGateway,
    raw_node: StartNode,
    relay: Relay,
) -> None:
    gw = gateway([raw_node()], redis_url=relay.url)
    relay.refuse = True
    relay.reset_all()
    wait_until(lambda: not gw.ready(), what="Redis is away")
    for _ in range(100):
        answer = ask(gw.port)
        assert (answer.status, answer.headers[b"x-leaseway-degraded"]) == (200, b"1")
    with state.monitoring(valkey, valkey_server.port) as seen:
        relay.refuse = False
        wait_until(gw.ready, what="Redis is back")
    calls = [one for one in seen if one.verb in {"EVALSHA", "EVAL"} and one.source != "lua"]
    assert 1 <= len(calls) < 30, "a heartbeat, and no release for each request"
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")
