"""Redis Cluster: two pools on two primaries, one of which is killed under load."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from redis.crc import key_slot

from app.keys import pool_keys
from tests.support.rawclient import RawClient, chat
from tests.support.rawnode import RawNode, events, sse_answer, stream_forever
from tests.support.redis_ha import Cluster, load, wait_shared
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WHOLE = events(5)
TTL_S = 3
NEAR, FAR = "m", "far-model"  # models of the pool whose primary dies, and of the other one
POOL = "default"


class _Bench:
    """Two replicas over the cluster; b1 and b2 in the pool that suffers, b3 in the other."""

    def __init__(self, ha: Cluster, nodes: Mapping[str, RawNode], stack: contextlib.ExitStack):
        self.ha = ha
        self.nodes = nodes
        self.far = ha.others(POOL)[0]
        assert key_slot(POOL.encode()) != key_slot(self.far.encode())
        assert ha.owner(POOL) is not ha.owner(self.far)
        self._stack = stack
        self.replicas = [self.start(f"gw{i}") for i in (1, 2)]
        for replica in self.replicas:
            wait_until(replica.ready, within_s=20, what="ready")
        self.ports = [replica.port for replica in self.replicas]
        for model in (NEAR, FAR):
            wait_shared(self.ports, chat(model=model), within_s=5)

    def start(self, replica_id: str) -> Gateway:
        """One more replica; it is not waited for."""
        settings: dict[str, Any] = {
            "server": {"drain_s": 3, "notice_s": 0},
            "leases": {"ttl_s": TTL_S},
            "health": {"interval_s": 0.5, "timeout_s": 1},
            "timeouts": {"connect_s": 2, "stall_s": 10},
            "nodes": [
                {"id": name, "url": node.url, "capacity": 64,
                 "models": [FAR if name == "b3" else NEAR],
                 "pool": self.far if name == "b3" else POOL}
                for name, node in self.nodes.items()
            ],
        }  # fmt: skip
        replica = Gateway(settings, self.ha.url, replica_id=replica_id)
        self._stack.callback(replica.__exit__)
        return replica.start(wait=False)

    def hold(self, stack: contextlib.ExitStack) -> list[RawClient]:
        """Streams through each replica: two near, one far."""
        for node in self.nodes.values():
            node.script = stream_forever(0.05)
        held = []
        for port in self.ports:
            for model in (NEAR, NEAR, FAR):
                client = stack.enter_context(RawClient(port, timeout_s=20))
                client.send(chat(model=model)).read_events(2)
                assert client.status == 200
                held.append(client)
        for node in self.nodes.values():
            node.script = sse_answer(WHOLE, 0.01)
        return held

    def books(self, pool: str) -> tuple[dict[str, int], dict[str, int]]:
        """Counters and leases by node, read from the pool's primary; zeros left out."""
        keys, client = pool_keys("lw", pool), self.ha.owner(pool).client
        counters = {name: int(client.get(keys.active(name)) or 0) for name in self.nodes}
        listed = client.zrange(keys.replicas, 0, -1)
        leases = Counter(
            record.partition(" ")[0]
            for replica in listed
            for record in client.hvals(keys.leases(replica))
        )
        return {name: n for name, n in counters.items() if n}, dict(leases)

    def true(self, pool: str) -> dict[str, int]:
        """What the nodes of the pool are working on."""
        names = {"b3"} if pool == self.far else {"b1", "b2"}
        return {n: node.open for n, node in self.nodes.items() if n in names and node.open}

    def is_true(self, pool: str) -> bool:
        """Whether counters, leases and the truth are the same."""
        counters, leases = self.books(pool)
        return counters == leases == self.true(pool)

    def status(self, replica: Gateway) -> str:
        """What ``/readyz`` says, with 200; "" before it listens."""
        try:
            answer = httpx.get(f"{replica.url}/readyz", timeout=2, trust_env=False)
        except httpx.TransportError:
            return ""
        assert answer.status_code == 200, answer.text
        return str(answer.json()["status"])

    def end(self) -> None:
        """Every replica ends with code 0 and has logged no fault."""
        for replica in self.replicas:
            assert replica.stop() == 0, replica.log
            assert "Traceback" not in replica.log, replica.log
            assert "ERROR" not in replica.log, replica.log


@pytest.fixture(scope="module")
def bench() -> Iterator[_Bench]:
    """The cluster is whole and every replica serves both pools from shared state."""
    with contextlib.ExitStack() as stack:
        ha = stack.enter_context(Cluster())
        nodes = {
            name: stack.enter_context(RawNode(sse_answer(WHOLE, 0.01)))
            for name in ("b1", "b2", "b3")
        }
        bench = _Bench(ha, nodes, stack)
        yield bench
        bench.end()


def test_a_killed_primary_costs_its_pool_no_request_and_the_other_pool_nothing(
    bench: _Bench,
) -> None:
    ha, ports = bench.ha, bench.ports
    with contextlib.ExitStack() as stack:
        held = bench.hold(stack)
        old = ha.owner(POOL)
        with (
            load(ports, chat(model=NEAR)) as near,
            load(ports, chat(model=FAR), hands=2) as far,
        ):
            wait_until(lambda: len(near.asked) > 40, what="under way")
            assert not any(one.degraded for one in near.asked)
            old.kill()
            killed = monotonic()
            wait_until(lambda: ha.owner(POOL) is not old, within_s=15, what="a new primary")
            elected = monotonic()
            shared_s = wait_shared(ports, chat(model=NEAR), within_s=5)
            wait_until(
                lambda: {bench.status(one) for one in bench.replicas} == {"ok"},
                within_s=5,
                what="readiness says so",
            )
            old.start()  # empty, and it still believes that the slots are its own
            rejoined = monotonic()
            wait_until(lambda: old.role == "slave", within_s=15, what="the old one is a replica")
            at = len(near.asked)
            wait_until(lambda: len(near.asked) > at + 40, what="on with it")
        print(
            f"new primary after {elected - killed:.1f} s, shared {shared_s:.2f} s later; near: "
            f"{near.figures()}; far: {far.figures()}"
        )
        assert not near.bad + far.bad, (near.bad + far.bad)[:3]
        assert all(one.body == b"".join(WHOLE) for one in near.asked + far.asked)
        assert any(one.degraded for one in near.asked), "the outage was noticed"
        assert not any(one.degraded for one in near.since(rejoined)), "the old one did harm"
        assert not any(one.degraded for one in far.asked), "the other pool has its own primary"

        assert not any(client.ended for client in held)
        for pool in (POOL, bench.far):
            wait_until(lambda p=pool: bench.is_true(p), within_s=2, what=f"{pool} has the truth")
            assert bench.true(pool)
    for pool in (POOL, bench.far):
        wait_until(
            lambda p=pool: bench.books(p) == ({}, {}), within_s=2, what=f"load of {pool} = 0"
        )


def test_a_pool_that_is_gone_for_longer_than_a_lease_lives_takes_no_other_pool_along(
    bench: _Bench,
) -> None:
    ha, ports = bench.ha, bench.ports
    with contextlib.ExitStack() as stack:
        held = bench.hold(stack)
        primary = ha.owner(POOL)
        gone = [ha.replica_of(primary), primary]
        with (
            load(ports, chat(model=NEAR), hands=2) as near,
            load(ports, chat(model=FAR), hands=2) as far,
        ):
            wait_until(lambda: len(near.asked) > 10, what="under way")
            for server in gone:
                server.kill()
            wait_until(
                lambda: {bench.status(one) for one in bench.replicas} == {"degraded"},
                within_s=5,
                what="readiness says so",
            )
            # A replica that starts now serves one pool degraded and the other one well.
            late = bench.start("gw3")
            bench.replicas.append(late)
            wait_until(lambda: bench.status(late) == "degraded", within_s=20, what="gw3 is there")
            wait_shared([late.port], chat(model=FAR), within_s=5)
            # Two lives of a lease: without heartbeats the far pool's would be reaped by now.
            far_keys, owner = pool_keys("lw", bench.far), ha.owner(bench.far).client
            probes, until = bench.nodes["b3"].probes, monotonic() + 2 * TTL_S
            while monotonic() < until:
                time.sleep(0.1)
                assert owner.zcard(far_keys.replicas) == 3
                leases = sum(owner.hlen(far_keys.leases(f"gw{i}")) for i in (1, 2))
                assert leases >= 2, "the far streams hold their leases"
            assert bench.nodes["b3"].probes >= probes + 6, "the far pool is probed on"
            for server in gone:
                server.start()
            shared_s = wait_shared([*ports, late.port], chat(model=NEAR), within_s=15)
            wait_until(
                lambda: {bench.status(one) for one in bench.replicas} == {"ok"},
                within_s=5,
                what="readiness says so",
            )
        print(
            f"shared {shared_s:.2f} s after the servers' return; near: {near.figures()}; "
            f"far: {far.figures()}"
        )
        assert not near.bad + far.bad, (near.bad + far.bad)[:3]
        assert not any(one.degraded for one in far.asked)
        assert not any(client.ended for client in held)
        for pool in (POOL, bench.far):
            wait_until(lambda p=pool: bench.is_true(p), within_s=2, what=f"{pool} has the truth")
            assert bench.true(pool)
    for replica in bench.replicas:  # a line for each change of state, not one per attempt
        assert replica.log.count(" is away: ") <= 4, replica.log
