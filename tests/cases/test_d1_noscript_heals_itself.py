"""D1: NOSCRIPT heals itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import redis

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import events, sse_answer, stream_forever
from tests.support.servers import ValkeyServer, wait_until

if TYPE_CHECKING:
    from tests.cases.conftest import StartGateway, StartNode

REQUESTS = 100
WHOLE = events(5)


def _hundred(port: int) -> None:
    """A hundred concurrent streams, each whole."""
    with ThreadPoolExecutor(25) as pool:
        answers = list(pool.map(lambda _: ask(port, chat()), range(REQUESTS)))
    assert [client.status for client in answers] == [200] * REQUESTS
    assert all(client.complete and client.body == b"".join(WHOLE) for client in answers)


def test_a_script_flush_before_between_and_during_requests_is_invisible(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    gw = gateway([raw_node(sse_answer(WHOLE, 0.01))], capacity=64)
    with state.sampling(valkey):
        valkey.script_flush()
        _hundred(gw.port)
        valkey.script_flush()
        _hundred(gw.port)
        done, flushes = threading.Event(), 0

        def flush() -> int:
            flushes = 0
            while not done.wait(0.005):
                valkey.script_flush()
                flushes += 1
            return flushes

        with ThreadPoolExecutor(1) as pool:
            flushing = pool.submit(flush)
            _hundred(gw.port)
            done.set()
            flushes = flushing.result()
        assert flushes >= 20
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")
    assert state.record(valkey, "b1")["streak"] == "0"
    assert state.record(valkey, "b1")["samples"] == "50", "no sample was lost: a full window"
    wait_until(lambda: _steady(valkey, gw.port), what="steady state is EVALSHA")


def _steady(valkey: redis.Redis, port: int) -> bool:
    """Whether 20 requests need no EVAL."""
    valkey.config_resetstat()
    for _ in range(20):
        assert ask(port, chat()).status == 200
    stats: Any = valkey.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] >= 40
    return "cmdstat_eval" not in stats


def test_a_restarted_redis_is_filled_again_without_a_restart_of_the_gateway(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(stream_forever(0.05))
    with ValkeyServer() as server, redis.Redis(port=server.port, decode_responses=True) as valkey:
        gw = gateway([node], capacity=64, redis_url=server.url)
        with RawClient(gw.port) as held:
            held.send(chat()).read_events(2)
            node.script = sse_answer(WHOLE, 0.01)
            _hundred(gw.port)
            server.kill()
            wait_until(lambda: not gw.ready(), what="readiness says so")
            server.start()
            wait_until(gw.ready, within_s=5, what="ready again")
            with state.sampling(valkey):
                _hundred(gw.port)
                wait_until(lambda: len(state.leases(valkey)) == 1, within_s=2, what="the held one")
                state.assert_counters_equal_leases(valkey)
            assert not held.ended, "the running stream has not noticed"
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")
        wait_until(lambda: _steady(valkey, gw.port), what="steady state is EVALSHA")
        assert gw.stop() == 0


def test_a_restart_of_redis_under_load_costs_no_request(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(sse_answer(WHOLE, 0.01))
    with ValkeyServer() as server, redis.Redis(port=server.port, decode_responses=True) as valkey:
        gw = gateway([node], capacity=64, redis_url=server.url)
        with ThreadPoolExecutor(10) as pool:
            asked = [pool.submit(ask, gw.port, chat()) for _ in range(REQUESTS)]
            wait_until(lambda: len(node.requests) > 20, what="under way")
            server.kill()
            server.start()
            answers = [one.result() for one in asked]
        assert [client.status for client in answers] == [200] * REQUESTS
        assert all(client.body == b"".join(WHOLE) for client in answers)
        wait_until(gw.ready, within_s=5, what="ready again")
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")
        assert gw.stop() == 0


def test_readiness_exercises_a_script_not_only_ping(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    gw = gateway([raw_node()], log_may_show="NOPERM")
    scripts = ["eval", "evalsha"]
    valkey.acl_setuser("default", enabled=True, commands=[f"-{name}" for name in scripts])
    try:
        wait_until(lambda: not gw.ready(), within_s=4, what="not ready")
        assert valkey.ping(), "while PING works"
    finally:
        valkey.acl_setuser("default", enabled=True, commands=[f"+{name}" for name in scripts])
    wait_until(gw.ready, within_s=4, what="ready again")
    assert ask(gw.port).status == 200
