"""A4: housekeeping must not wipe load that is alive.

The catalogue's streams of 20 s last as long as the housekeeping takes here.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    Script,
    chunk,
    content_event,
    json_answer,
    stream_forever,
)
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.servers import Gateway

STREAMS = 6
# Every periodic job as often as it can be: probes and ticks all the time, windows that age at
# once. A heartbeat still has time to come before its replica counts as dead on a busy machine.
FAST: Any = {
    "leases": {"ttl_s": 2.4},
    "health": {"interval_s": 0.05},
    "scoring": {"sample_max_age_s": 0.3, "idle_after_s": 0.1, "slow_start_s": 0.3},
    "timeouts": {"stall_s": 60},
}


def _until(ended: threading.Event, gap_s: float | None) -> Script:
    """A stream that ends well once ``ended`` is set; silent after its first token without a gap."""

    async def script(request: Request, peer: Peer) -> None:
        head = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"
        await peer.write(head + chunk(ROLE_EVENT) + chunk(content_event("a")))
        while not ended.is_set():
            await peer.sleep(gap_s or 0.02)
            if gap_s:
                await peer.write(chunk(content_event("b")))
        await peer.write(chunk(FINISH_EVENT) + chunk(DONE_EVENT) + b"0\r\n\r\n")

    return script


def _hold(stack: contextlib.ExitStack, replicas: list[Gateway], n: int) -> list[RawClient]:
    """``n`` streams, through the replicas in turn."""
    held = [stack.enter_context(RawClient(replicas[i % len(replicas)].port)) for i in range(n)]
    for client in held:
        client.send(chat()).read_events(2)
        assert client.status == 200
    return held


@pytest.mark.parametrize("gap_s", [None, 0.05], ids=["silent streams", "talking streams"])
def test_probes_reaper_sweep_and_a_flap_of_health_leave_the_count_of_running_streams_alone(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, gap_s: float | None
) -> None:
    ended = threading.Event()
    b1, b2 = raw_node(_until(ended, gap_s)), raw_node(stream_forever(0.05))
    b2.models = ("other",)
    gws = [gateway([b1, b2], replica_id=f"gw{i}", **FAST) for i in (1, 2)]
    dies = gateway([b1, b2], replica_id="dies", **FAST)
    with contextlib.ExitStack() as stack:
        held = _hold(stack, gws, STREAMS)
        stack.enter_context(RawClient(dies.port)).send(chat(model="other")).read_events(2)
        assert state.snapshot(valkey).counters == {"b1": STREAMS, "b2": 1}
        with state.sampling(valkey) as seen:
            dies.kill()  # the reaper gets something to do
            for _ in range(2):
                probes = b1.probes
                b1.probes_fail = True
                if gap_s:  # a node that delivers need not be thought dead
                    wait_until(lambda p=probes: b1.probes > p + 6, what="six bad probes")
                else:
                    wait_until(
                        lambda: state.record(valkey, "b1")["health"] == "down", what="b1 is down"
                    )
                b1.probes_fail = False
                wait_until(
                    lambda: (
                        state.record(valkey, "b1")["health"] == "ok"
                        and state.scores(valkey)["b1"] > 0
                    ),
                    what="b1 is back",
                )
            wait_until(
                lambda: state.record(valkey, "b1")["samples"] == "0", what="the windows were aged"
            )
            wait_until(lambda: state.load(valkey, "b2") == 0, within_s=4.4, what="b2 was reaped")
        assert (seen.lowest["b1"], seen.highest["b1"]) == (STREAMS, STREAMS)
        assert b1.open == STREAMS
        state.assert_counters_equal_leases(valkey)
        with state.sampling(valkey):
            ended.set()
            assert all(client.read_all().endswith(DONE_EVENT) for client in held)
            wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_a_circuit_that_opens_and_closes_again_leaves_the_count_alone(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    ended = threading.Event()
    node = raw_node(_until(ended, None))
    gws = [gateway([node], **FAST, circuit={"open_s": 0.3}) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        held = _hold(stack, gws, STREAMS)
        with state.sampling(valkey) as seen:
            node.script = json_answer(500)
            for _ in range(3):
                assert ask(gws[0].port).status == 500
            wait_until(lambda: state.record(valkey, "b1")["circuit"] == "open", what="it opens")
            node.script = json_answer()
            wait_until(lambda: ask(gws[1].port).status == 200, what="it is tried again")
            wait_until(lambda: state.record(valkey, "b1")["circuit"] == "closed", what="it closes")
            wait_until(lambda: state.load(valkey, "b1") == STREAMS, what="the trial is released")
        assert seen.lowest["b1"] == STREAMS
        assert seen.highest["b1"] <= STREAMS + 1
        state.assert_counters_equal_leases(valkey)
        ended.set()
        assert all(client.read_all().endswith(DONE_EVENT) for client in held)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


def test_a_replica_that_looks_dead_is_reaped_without_its_siblings_and_comes_back_whole(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    ended = threading.Event()
    node = raw_node(_until(ended, 0.05))
    gw1, gw2 = (gateway([node], replica_id=f"gw{i}", **FAST) for i in (1, 2))

    def silent() -> bool:
        """As if gw1 had been silent for the time of a lease; it beats again a moment later."""
        valkey.zadd(state.KEYS.replicas, {"gw1": 1}, xx=True)
        return True

    with contextlib.ExitStack() as stack:
        held = _hold(stack, [gw1, gw2], STREAMS)
        with state.sampling(valkey) as seen:
            wait_until(lambda: silent() and "reaped 3 leases" in gw1.log + gw2.log, what="reaped")
            wait_until(lambda: state.load(valkey, "b1") == STREAMS, what="put back")
        assert seen.lowest["b1"] >= STREAMS // 2, "gw2's own were never in question"
        assert seen.highest["b1"] == STREAMS
        state.assert_counters_equal_leases(valkey)
        ended.set()
        assert all(client.read_all().endswith(DONE_EVENT) for client in held)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
