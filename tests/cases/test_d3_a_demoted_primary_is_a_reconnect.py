"""D3: a demoted primary (READONLY) is a reconnect, not an outage.

The catalogue's 10 s as a replica are 4 s here: still longer than a lease lives (3 s).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import redis

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import events, sse_answer, stream_forever
from tests.support.redis_ha import load, wait_shared
from tests.support.servers import ValkeyServer, wait_until

if TYPE_CHECKING:
    from tests.cases.conftest import StartGateway, StartNode

DEMOTED_S = 4
WHOLE = events(5)
READY = b"GET /readyz HTTP/1.1\r\nhost: g\r\n\r\n"


def test_a_primary_that_becomes_a_replica_and_a_primary_again_costs_no_request(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = [raw_node(stream_forever(0.05)) for _ in range(2)]
    with (
        ValkeyServer() as first,
        ValkeyServer() as second,
        redis.Redis(port=first.port, decode_responses=True) as valkey,
        contextlib.ExitStack() as stack,
    ):
        admin: Any = valkey
        gws = [
            gateway(nodes, replica_id=f"gw{i}", capacity=64, redis_url=first.url) for i in (1, 2)
        ]
        ports = [gw.port for gw in gws]
        held = [stack.enter_context(RawClient(port)) for port in ports * 3]
        for client in held:
            client.send(chat()).read_events(2)
        for node in nodes:
            node.script = sse_answer(WHOLE, 0.01)
        before = _connections(admin)
        assert len(before) == 2
        with load(ports) as asked:
            wait_until(lambda: len(asked.asked) > 20, what="under way")
            assert not any(one.degraded for one in asked.asked)
            admin.replicaof("127.0.0.1", second.port)
            wait_until(
                lambda: {ask(port, READY).json()["status"] for port in ports} == {"degraded"},
                within_s=3,
                what="readiness says so",
            )
            wait_until(
                lambda: not before & _connections(admin),
                within_s=1,
                what="connections to the demoted primary are dropped",
            )
            time.sleep(DEMOTED_S)
            admin.replicaof("NO", "ONE")
            shared_s = wait_shared(ports, within_s=5)
            wait_until(
                lambda: {ask(port, READY).json()["status"] for port in ports} == {"ok"},
                within_s=5,
                what="readiness says so",
            )
        print(f"back {shared_s:.2f} s after it is a primary again; {asked.figures()}")
        assert not asked.bad, asked.bad[:3]
        assert all(one.body == b"".join(WHOLE) for one in asked.asked)
        assert any(one.degraded for one in asked.asked)
        for gw in gws:
            assert gw.log.count(" is away: READONLY") == 1, gw.log
            assert gw.log.count(" is back") == 1, gw.log
        wait_until(
            lambda: (
                state.snapshot(valkey).by_leases
                == {f"b{i}": node.open for i, node in enumerate(nodes, 1) if node.open}
            ),
            within_s=2,
            what="load = true",
        )
        state.assert_counters_equal_leases(valkey)
        assert len(state.leases(valkey)) == len(held)
        assert not any(client.ended for client in held)
        stack.close()
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        for gw in gws:
            assert gw.stop() == 0


def _connections(admin: Any) -> set[str]:
    """Ids of the replicas' connections."""
    return {one["id"] for one in admin.client_list() if one["name"].startswith("leaseway-")}
