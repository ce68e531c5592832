"""C3: Redis came back empty, or a read failed: state must rebuild, not vanish.

The catalogue's outage of 10 s is 4 s here: still longer than a lease lives (3 s).
"""

from __future__ import annotations

import contextlib
import time
from time import monotonic
from typing import TYPE_CHECKING

import redis

from tests.support import state
from tests.support.rawclient import RawClient, chat
from tests.support.rawnode import RawNode, events, sse_answer, stream_forever
from tests.support.redis_ha import ask_once, load, wait_shared
from tests.support.servers import ValkeyServer, wait_until

if TYPE_CHECKING:
    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.relay import Relay
    from tests.support.servers import Gateway

INTERVAL_S, RENEWAL_S, TTL_S = 0.5, 1.0, 3.0
OUTAGE_S = 4
WHOLE = events(5)
HELD = 3  # streams through each replica


def _hold(stack: contextlib.ExitStack, replicas: list[Gateway]) -> list[RawClient]:
    held = [stack.enter_context(RawClient(replica.port)) for replica in replicas * HELD]
    for client in held:
        client.send(chat()).read_events(2)
        assert client.status == 200
    return held


def _true(valkey: redis.Redis, nodes: list[RawNode], held: int) -> bool:
    """The running streams and nothing else: in counters, in leases, and at the nodes."""
    now = state.snapshot(valkey)
    there = {f"b{i}": node.open for i, node in enumerate(nodes, 1) if node.open}
    counters = {node: count for node, count in now.counters.items() if count}
    return counters == now.by_leases == there and sum(there.values()) == held


def _routable(valkey: redis.Redis) -> bool:
    return {n: s > 0 for n, s in state.scores(valkey).items()} == {"b1": True, "b2": True} and {
        state.record(valkey, node)["health"] for node in ("b1", "b2")
    } == {"ok"}


def test_a_flush_while_streams_run_is_mended_within_a_heartbeat_and_costs_no_request(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(stream_forever(0.05)) for _ in range(2)]
    gws = [gateway(nodes, replica_id=f"gw{i}", capacity=64) for i in (1, 2)]
    with contextlib.ExitStack() as stack:
        held = _hold(stack, gws)
        for node in nodes:
            node.script = sse_answer(WHOLE, 0.01)
        took_s = []
        with load([gw.port for gw in gws], gap_s=0.02) as asked:
            for _ in range(5):  # at any phase of heartbeat and probe
                probes = [node.probes for node in nodes]
                valkey.flushall()
                flushed = monotonic()
                wait_until(
                    lambda: _routable(valkey), within_s=2 * INTERVAL_S, what="both nodes routable"
                )
                took_s.append(monotonic() - flushed)
                wait_until(
                    lambda: (
                        state.snapshot(valkey).replicas == {"gw1", "gw2"}
                        and len(state.leases(valkey)) >= len(held)
                    ),
                    within_s=RENEWAL_S + 0.5,
                    what="the streams' leases are there again",
                )
                wait_until(
                    lambda p=probes: all(
                        node.probes > before for node, before in zip(nodes, p, strict=True)
                    ),
                    within_s=2 * INTERVAL_S,
                    what="health is fresh",
                )
                time.sleep(0.17)
        print(f"routable after {', '.join(f'{s * 1e3:.0f}' for s in took_s)} ms; {asked.figures()}")
        assert not asked.bad, asked.bad[:3]
        wait_until(
            lambda: _true(valkey, nodes, len(held)), within_s=RENEWAL_S + 0.5, what="load = true"
        )
        assert not any(client.ended for client in held)

        # Nobody asks: the heartbeat alone finds out.
        valkey.flushall()
        wait_until(
            lambda: _routable(valkey) and _true(valkey, nodes, len(held)),
            within_s=RENEWAL_S + 2 * INTERVAL_S,
            what="mended without a request",
        )
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_a_redis_that_comes_back_empty_is_filled_from_what_the_replicas_know(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(stream_forever(0.05)) for _ in range(2)]
    with ValkeyServer() as server, redis.Redis(port=server.port, decode_responses=True) as valkey:
        gws = [
            gateway(nodes, replica_id=f"gw{i}", capacity=64, redis_url=server.url) for i in (1, 2)
        ]
        ports = [gw.port for gw in gws]
        with contextlib.ExitStack() as stack:
            held = _hold(stack, gws)
            for node in nodes:
                node.script = sse_answer(WHOLE, 0.01)
            with load(ports) as asked:
                wait_until(lambda: len(asked.asked) > 20, what="under way")
                server.kill()
                time.sleep(OUTAGE_S)
                server.start()
                shared_s = wait_shared(ports, within_s=5)
                wait_until(lambda: _routable(valkey), within_s=2 * INTERVAL_S, what="routable")
            print(f"back {shared_s:.2f} s after Redis; {asked.figures()}")
            assert not asked.bad, asked.bad[:3]
            assert sum(one.degraded for one in asked.asked) > 10, "there was an outage"
            wait_until(
                lambda: _true(valkey, nodes, len(held)),
                within_s=RENEWAL_S + 0.5,
                what="load = true",
            )
            assert state.snapshot(valkey).replicas == {"gw1", "gw2"}
            assert not any(client.ended for client in held)
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        for gw in gws:
            assert gw.stop() == 0


def test_a_read_that_fails_on_one_replica_leaves_all_records_as_they_were(
    valkey: redis.Redis,
    gateway: StartGateway,
    raw_node: StartNode,
    relay: Relay,
) -> None:
    nodes = [raw_node(stream_forever(0.05)) for _ in range(2)]
    gw1 = gateway(nodes, replica_id="gw1", capacity=64, redis_url=relay.url)
    gw2 = gateway(nodes, replica_id="gw2", capacity=64)

    def told() -> dict[str, dict[str, str | None]]:
        """What the fleet knows of the nodes; their scores move by themselves."""
        fields = ("url", "weight", "capacity", "models", "state", "health", "circuit", "streak",
                  "epoch", "samples", "sum_us")  # fmt: skip
        return {
            node: {field: state.record(valkey, node).get(field) for field in fields}
            for node in map(str, valkey.sscan_iter(state.KEYS.nodes))
        }

    def leases_of(replica: str) -> set[state.Lease]:
        return {lease for lease in state.leases(valkey) if lease.replica == replica}

    with contextlib.ExitStack() as stack:
        held = _hold(stack, [gw1, gw2])
        wait_until(
            lambda: sum(int(one["samples"] or 0) for one in told().values()) == len(held),
            what="each stream has left its sample",
        )
        before, theirs, mine = told(), leases_of("gw2"), leases_of("gw1")
        assert len(before) == 2
        assert len(theirs) == len(mine) == HELD
        for verb in (b"HGETALL", b"SMEMBERS", b"EVALSHA"):
            lost: list[bytes] = []

            def once(command: list[bytes], verb: bytes = verb, lost: list[bytes] = lost) -> bool:
                fits = command[0] == verb and not lost
                lost += [verb] * fits
                return fits

            relay.reset_after_forwarding(once)
            wait_until(lambda lost=lost: lost, within_s=3, what="a reply was lost")
            until = monotonic() + 1.2 * RENEWAL_S
            while monotonic() < until:  # at no instant
                assert told() == before
                assert leases_of("gw2") == theirs
                assert leases_of("gw1") == mine
                assert state.snapshot(valkey).replicas == {"gw1", "gw2"}
                time.sleep(0.02)
            relay.reset_after_forwarding(None)
        assert not any(client.ended for client in held)
        for node in nodes:
            node.script = sse_answer(WHOLE)
        for gw in (gw1, gw2):
            one = ask_once(gw.port, chat())
            assert one.good
            assert not one.degraded
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def _made_new(valkey: redis.Redis, node: str) -> None:
    """As one that replicas put back which had just started, and so did not know it as well."""
    valkey.hset(
        state.KEYS.node(node), mapping={"health": "new", "misses": 0, "base": 0, "state": "active"}
    )
    valkey.zadd(state.KEYS.score("m"), {node: 0})
    valkey.zadd(state.KEYS.probes, {node: 0})


def test_a_request_waits_for_the_first_probe_when_no_other_node_is_there(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(sse_answer(WHOLE)) for _ in range(2)]
    ports = [gateway(nodes, replica_id=f"gw{i}", capacity=64).port for i in (1, 2)]
    with load(ports, gap_s=0.02) as asked:
        wait_until(lambda: len(asked.asked) > 20, what="under way")
        for _ in range(5):
            for node in ("b1", "b2"):
                _made_new(valkey, node)
            wait_until(lambda: _routable(valkey), within_s=3 * INTERVAL_S, what="both proved well")
    print(asked.figures())
    assert not asked.bad, asked.bad[:3]
    assert not any(one.degraded for one in asked.asked), "Redis was there all the time"


def test_a_first_probe_that_fails_ends_the_wait(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(sse_answer(WHOLE))
    gw = gateway([node], capacity=64)
    node.probes_fail = True
    _made_new(valkey, "b1")
    refused = ask_once(gw.port, chat())
    assert refused.status == 503
    assert int(state.record(valkey, "b1")["misses"]) > 0
    node.probes_fail = False
    wait_until(
        lambda: state.record(valkey, "b1")["health"] == "ok", within_s=3 * INTERVAL_S, what="well"
    )
    assert ask_once(gw.port, chat()).good
