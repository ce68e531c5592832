"""C1: a cancelled Redis command must not poison the connection.

A replica has one multiplexed connection per pool and no pool of connections, so the catalogue's
"pool of size 4" is its stricter form here: 300 clients that abort share a single connection.
"""

from __future__ import annotations

import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import events, sse_answer
from tests.support.redis_ha import ask_once
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import RawNode
    from tests.support.relay import Relay

ABORTED, NORMAL, TRIED_AFTER = 300, 200, 20
WHOLE = events(3)


def _abort(port: int, after_s: float, gate: threading.Barrier | None = None) -> None:
    client = RawClient(port)
    if gate is not None:
        gate.wait(30)
    client.send(chat())
    time.sleep(after_s)
    client.reset()


def _assert_documented(valkey: redis.Redis) -> int:
    """Every key is one of DESIGN's, of its type, and holds what it may hold. Number of keys."""
    kinds: dict[str, tuple[str, Any]] = {
        "nodes": ("set", lambda v: v <= {"b1", "b2"}),
        "node": ("hash", lambda v: float(v["base"]) >= 0 and v["health"] == "ok"
                 and v["circuit"] == "closed" and int(v["capacity"]) == 64
                 and int(v["epoch"]) > 0 and int(v["streak"]) == 0),
        "active": ("string", lambda v: 0 <= int(v) <= 64),
        "ttft": ("list", lambda v: len(v) <= 50
                 and all(re.fullmatch(r"\d+:\d+:\d+", one) for one in v)),
        "score": ("zset", lambda v: all(n in {"b1", "b2"} and s >= 0 for n, s in v)),
        "due": ("zset", lambda v: not v),
        "leases": ("hash", lambda v: all(
            re.fullmatch(r"b[12] \d+ \d+ \d+ \d+ \d+ \d+\+?", one) for one in v.values())),
        "work": ("hash", lambda v: v.keys() <= {"b1", "b2"}),
        "weights": ("zset", lambda v: {n for n, _ in v} <= {"b1", "b2"}),
        "files": ("hash", lambda v: v.keys() == {"b1", "b2"}),
        "replicas": ("zset", lambda v: all(n == "gw1" and s > 1e12 for n, s in v)),
        "probes": ("zset", lambda v: {n for n, _ in v} <= {"b1", "b2"}),
        "sweeps": ("zset", lambda v: {n for n, _ in v} <= {"b1", "b2"}),
    }  # fmt: skip
    read: dict[str, Any] = {
        "set": valkey.smembers,
        "hash": lambda key: (
            dict.fromkeys(valkey.hkeys(key))
            if key == state.KEYS.work  # packed numbers
            else valkey.hgetall(key)
        ),
        "string": valkey.get,
        "list": lambda key: valkey.lrange(key, 0, -1),
        "zset": lambda key: valkey.zrange(key, 0, -1, withscores=True),
    }
    keys: Any = valkey.keys()
    for key in keys:
        assert key.startswith(state.KEYS.prefix), key
        kind = key.removeprefix(state.KEYS.prefix).partition(":")[0]
        assert kind in kinds, f"not documented: {key}"
        type_, holds = kinds[kind]
        if not valkey.exists(key):
            continue  # a lease hash that has just become empty
        assert valkey.type(key) == type_, key
        value = read[type_](key)
        assert holds(value), (key, value)
    return len(keys)


def _seconds(port: int, n: int) -> list[float]:
    asked = [ask_once(port, chat()) for _ in range(n)]
    assert all(one.good and not one.degraded for one in asked), [o for o in asked if not o.good]
    return [one.took_s for one in asked]


def _asked_at(node: RawNode) -> set[bytes | None]:
    return {request.header(b"x-request-id") for request in node.requests}


def test_three_hundred_aborts_over_a_slow_redis_leave_every_answer_with_its_asker(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay
) -> None:
    nodes = {f"b{i}": raw_node(sse_answer(WHOLE)) for i in (1, 2)}
    gw = gateway(
        list(nodes.values()), redis_url=relay.url, replica_id="gw1", capacity=64,
        redis={"call_timeout_ms": 2000},
        scoring={"policy": "ttft"},  # decides by what the sorted set shows
    )  # fmt: skip
    relay.delay_replies_s = 0.05
    draw = random.Random(3)
    dialled = relay.accepted
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda s: _abort(gw.port, s), [draw.uniform(0, 0.1) for _ in range(ABORTED)]))
        # The node that the header names is the one that got the request, for each of them.
        ids = [f"normal-{i}" for i in range(NORMAL)]
        answers = list(pool.map(lambda i: ask(gw.port, chat(request_id=i)), ids))
    for i, client in zip(ids, answers, strict=True):
        assert client.status == 200
        assert client.body == b"".join(WHOLE)
        assert b"x-leaseway-degraded" not in client.headers
        assert i.encode() in _asked_at(nodes[client.headers[b"x-leaseway-node"].decode()])
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert _assert_documented(valkey) >= 9
    state.assert_scores_equal_records(valkey)

    for _ in range(TRIED_AFTER):  # decisions match the state
        scores = state.scores(valkey)
        best = {node for node, score in scores.items() if score == max(scores.values())}
        chosen = ask(gw.port, chat()).headers[b"x-leaseway-node"].decode()
        assert chosen in best, (chosen, scores)
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert relay.accepted == dialled, "the one connection has lasted"
    assert "is away" not in gw.log
    assert "ERROR" not in gw.log


def test_three_hundred_clients_that_abort_together_leave_the_connection_as_it_was(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, relay: Relay
) -> None:
    gw = gateway(
        [raw_node(sse_answer(WHOLE)), raw_node(sse_answer(WHOLE))], redis_url=relay.url,
        replica_id="gw1", capacity=64, redis={"call_timeout_ms": 2000},
    )  # fmt: skip
    relay.delay_replies_s = 0.05
    usual_s = median(_seconds(gw.port, TRIED_AFTER))
    gate = threading.Barrier(ABORTED)
    with ThreadPoolExecutor(ABORTED) as pool:
        list(pool.map(lambda _: _abort(gw.port, 0.1, gate), range(ABORTED)))
    after = _seconds(gw.port, TRIED_AFTER)
    print(f"usual {usual_s * 1e3:.0f} ms; after the storm median {median(after) * 1e3:.0f} ms, "
          f"slowest {max(after) * 1e3:.0f} ms")  # fmt: skip
    assert max(after) < usual_s + 1
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert _assert_documented(valkey) >= 9
    assert "ERROR" not in gw.log
