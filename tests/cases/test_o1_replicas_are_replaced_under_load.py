"""O1, the whole fleet: every replica is replaced by another while clients ask all the time."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import chat
from tests.support.rawnode import events, sse_answer
from tests.support.redis_ha import Asked, ask_once
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartNode
    from tests.support.servers import ValkeyServer

REPLICAS, CLIENTS = 3, 6
WHOLE = events(8)  # 20 ms apart: answers run when their replica is told to go


class Names:
    """What a name leads to: the replicas that may be asked. Clients look it up for each request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ports: list[int] = []

    def add(self, port: int) -> None:
        """From now on this one too."""
        with self._lock:
            self._ports.append(port)

    def remove(self, port: int) -> None:
        """Not this one any more; whoever looked it up before may still come."""
        with self._lock:
            self._ports.remove(port)

    def one(self, chance: random.Random) -> int:
        """Any of them."""
        with self._lock:
            return chance.choice(self._ports)


def test_all_replicas_are_replaced_one_by_one_and_no_request_fails(
    valkey: redis.Redis, valkey_server: ValkeyServer, raw_node: StartNode
) -> None:
    nodes = [raw_node(sse_answer(WHOLE, 0.02)) for _ in range(2)]
    settings = small_settings(nodes, capacity=64, server={"drain_s": 10, "notice_s": 2})
    names, asked, stop = Names(), list[Asked](), threading.Event()

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.wait(0.01):
            asked.append(ask_once(names.one(chance), chat()))

    def started(name: str) -> Gateway:
        replica = Gateway(settings, valkey_server.url, replica_id=name).start()
        names.add(replica.port)
        return replica

    old = [started(f"old{i}") for i in range(REPLICAS)]
    new: list[Gateway] = []
    clients = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(CLIENTS)]
    try:
        for client in clients:
            client.start()
        for i, replica in enumerate(old):
            before = len(asked)
            wait_until(lambda n=before: len(asked) > n + 20, what="under way")
            new.append(started(f"new{i}"))
            names.remove(replica.port)
            assert replica.stop() == 0, replica.log
        before = len(asked)
        wait_until(lambda: len(asked) > before + 20, what="the new ones serve")
    finally:
        stop.set()
        for client in clients:
            client.join(20)
        ends = [replica.stop() for replica in new]
    assert not [client for client in clients if client.is_alive()], "a request hangs"
    bad = [one for one in asked if not one.good]
    print(f"{len(asked)} requests, {len(bad)} failed")
    assert not bad, bad[:3]
    assert ends == [0] * REPLICAS
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert state.snapshot(valkey).replicas == set()
