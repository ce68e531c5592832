"""A5: a replica killed outright must not leak."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import stream_forever
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.relay import Relay
    from tests.support.servers import ValkeyServer

TTL_S = 3


def _ten_streams(valkey: redis.Redis, gw: Gateway) -> list[RawClient]:
    """Ten streams through ``gw``: six on b1, four on b2, beside what is there already."""
    there = state.snapshot(valkey).counters
    for node, more in (("b1", 6), ("b2", 4)):
        valkey.hset(state.KEYS.node(node), "capacity", there.get(node, 0) + more)
    clients = [RawClient(gw.port) for _ in range(10)]
    for client in clients:
        client.send(chat()).read_events(2)
        assert client.status == 200
    mine = Counter(lease.node for lease in state.leases(valkey) if lease.replica == "gw1")
    assert mine == {"b1": 6, "b2": 4}
    state.assert_counters_equal_leases(valkey)
    return clients


def test_the_leases_of_a_killed_replica_are_back_within_ttl_and_two_seconds(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(stream_forever(0.05)) for _ in range(2)]
    gw1, gw2 = gateway(nodes, replica_id="gw1"), gateway(nodes, replica_id="gw2")
    with contextlib.ExitStack() as stack:
        stays = stack.enter_context(RawClient(gw2.port))
        stays.send(chat()).read_events(2)
        for client in _ten_streams(valkey, gw1):
            stack.enter_context(client)
        with state.sampling(valkey) as seen:
            killed_at = monotonic()
            gw1.kill()
            wait_until(
                lambda: len(state.leases(valkey)) == 1, within_s=TTL_S + 2, what="all reaped"
            )
            took_s = monotonic() - killed_at
        assert TTL_S - 1.1 < took_s < TTL_S + 2  # not before the heartbeat ran out either
        (left,) = state.leases(valkey)
        assert left.replica == "gw2"
        assert sum(seen.highest.values()) == 11
        state.assert_counters_equal_leases(valkey)
        state.assert_scores_equal_records(valkey)
        wait_until(lambda: state.snapshot(valkey).replicas == {"gw2"}, what="gw1 is off the list")
        assert not valkey.exists(state.KEYS.leases("gw1"))
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    for node in nodes:  # what was lost with gw1 is usable again
        node.script = stream_forever(0.01, for_s=0.05)
    assert ask(gw2.port, chat()).complete


def test_a_replica_that_was_paused_and_reaped_puts_its_living_leases_back(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(stream_forever(0.05)) for _ in range(2)]
    gw1, _ = gateway(nodes, replica_id="gw1"), gateway(nodes, replica_id="gw2")
    with state.sampling(valkey) as seen, contextlib.ExitStack() as stack:
        for client in _ten_streams(valkey, gw1):
            stack.enter_context(client)
        gw1.signal(signal.SIGSTOP)
        paused_at = monotonic()
        wait_until(lambda: state.unloaded(valkey), within_s=TTL_S + 2, what="reaped")
        wait_until(lambda: monotonic() - paused_at > 2 * TTL_S, what="the pause")
        gw1.signal(signal.SIGCONT)
        wait_until(
            lambda: state.snapshot(valkey).counters == {"b1": 6, "b2": 4},
            within_s=2,
            what="put back",
        )
        assert [node.open for node in nodes] == [6, 4], "the pause was ours, not the nodes'"
        state.assert_counters_equal_leases(valkey)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert seen.highest == {"b1": 6, "b2": 4}
    assert [state.record(valkey, node)["streak"] for node in ("b1", "b2")] == ["0", "0"]


def test_an_acquire_is_one_step_so_a_kill_cannot_fall_inside_it(
    valkey: redis.Redis,
    valkey_server: ValkeyServer,
    gateway: StartGateway,
    raw_node: StartNode,
    relay: Relay,
) -> None:
    nodes = [raw_node() for _ in range(2)]
    gw1 = gateway(nodes, redis_url=relay.url, replica_id="gw1", redis={"call_timeout_ms": 5000})
    gateway(nodes, replica_id="gw2")
    with state.monitoring(valkey, valkey_server.port) as seen:
        assert ask(gw1.port).status == 200
        wait_until(lambda: state.unloaded(valkey), what="load = 0")
    writes = {"INCR", "DECR", "HSET", "HSETNX", "HDEL", "ZADD", "SET", "DEL", "EXPIRE", "PEXPIRE"}
    assert {one.source for one in seen if one.verb in writes} == {"lua"}
    assert [one.verb for one in seen if one.verb in {"INCR", "DECR"}] == ["INCR", "DECR"]

    # Redis has run ten acquires, and none of their answers has reached the replica.
    relay.withhold_replies(30)
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(ask, gw1.port) for _ in range(10)]
        wait_until(lambda: len(state.leases(valkey)) == 10, what="ten leases")
        state.assert_counters_equal_leases(valkey)
        with state.sampling(valkey):
            gw1.kill()
            wait_until(lambda: state.unloaded(valkey), within_s=TTL_S + 2, what="all reaped")
        assert all(one.result().cut for one in asked)


def test_every_key_that_holds_load_has_an_owner_that_can_be_found_dead(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(stream_forever(0.05))
    gw = gateway([node], replica_id="gw1")
    with RawClient(gw.port) as client:
        client.send(chat()).read_events(2)
        # As after an eviction of the heartbeat: the next lease lists its owner again at once.
        valkey.delete(state.KEYS.replicas)
        with RawClient(gw.port) as second:
            second.send(chat()).read_events(2)
            assert state.snapshot(valkey).replicas == {"gw1"}
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
