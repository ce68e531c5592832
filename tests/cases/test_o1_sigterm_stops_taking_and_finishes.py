"""O1: SIGTERM: stop taking, finish what runs.

The catalogue's streams with 8 s left have 4 s left here; the 10 s in which the process must have
ended are 6 s.
"""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import events, json_answer, sse_answer
from tests.support.redis_ha import ask_once, load
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, Request

STREAMS, LEFT_S, GAP_S, GRACE_S = 10, 4.0, 0.1, 2.0
WHOLE = events(int(LEFT_S / GAP_S))
READY = b"GET /readyz HTTP/1.1\r\nhost: g\r\n\r\n"


async def _script(request: Request, peer: Peer) -> None:
    if request.json().get("stream"):
        await sse_answer(WHOLE, GAP_S)(request, peer)
    else:
        await json_answer()(request, peer)


def test_a_replica_that_is_told_to_end_finishes_its_streams_and_signs_off(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(_script)
    server = {"drain_s": LEFT_S + GRACE_S, "notice_s": 0.5}
    gw1 = gateway([node], replica_id="gw1", capacity=64, server=server)
    gw2 = gateway([node], replica_id="gw2", capacity=64, server=server)
    json = chat(stream=False)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(STREAMS) as pool:
        streams = [stack.enter_context(RawClient(gw1.port)) for _ in range(STREAMS)]
        kept = stack.enter_context(RawClient(gw1.port))  # a connection from before
        kept.send(READY).read_all()
        assert kept.json()["status"] == "ok"
        for client in streams:
            client.send(chat()).read_events(1)
        assert state.load(valkey, "b1") == STREAMS
        with load([gw1.port], json, hands=2) as at_gw1, load([gw2.port], json, hands=2) as at_gw2:
            wait_until(lambda: len(at_gw1.asked) > 5, what="under way")
            assert gw1.process is not None
            process = gw1.process
            gw1.signal(signal.SIGTERM)
            told = monotonic()
            said = ask(gw1.port, READY)  # at once: it still listens, so that balancers can see it
            ready_s = monotonic() - told
            assert said.status == 503
            assert said.json()["status"] == "leaving"
            bodies = list(pool.map(RawClient.read_all, streams))
            finished = monotonic()
            code = process.wait(GRACE_S + 2)
            ended = monotonic()
        print(
            f"readiness said no after {ready_s * 1e3:.0f} ms, streams done after "
            f"{finished - told:.1f} s, process ended {ended - finished:.2f} s later; "
            f"gw1: {at_gw1.figures()}; gw2: {at_gw2.figures()}"
        )
    assert code == 0
    assert ready_s < 0.5
    assert ended - told < LEFT_S + GRACE_S
    assert ended - told > LEFT_S * 0.8, "the streams had that long to go"
    assert all(client.complete for client in streams)
    assert bodies == [b"".join(WHOLE)] * STREAMS
    # New requests to gw1: served while it still listens, then refused at the door; never cut.
    after = at_gw1.since(told)
    assert {(one.status, one.complete) for one in after} <= {(200, True), (0, False)}, after
    assert all(not one.body for one in after if not one.good)
    first_refused = next(i for i, one in enumerate(after) if not one.good)
    assert all(not one.good for one in after[first_refused + 4 :]), "no way back in"
    assert len(at_gw2.since(told)) > 10
    assert not at_gw2.bad, "gw2 serves all the while"

    wait_until(lambda: state.load(valkey, "b1") == 0, within_s=2, what="load = 0")
    assert state.unloaded(valkey)
    assert state.snapshot(valkey).replicas == {"gw2"}, "gw1 is off the list, without a reaper"
    assert not valkey.exists(state.KEYS.leases("gw1"))
    assert "reaped" not in gw2.log
    assert node.left == []
    assert "Traceback" not in gw1.log, gw1.log
    assert "ERROR" not in gw1.log, gw1.log
    gw1.process = None


def test_a_stream_that_would_outlast_the_drain_is_cut_and_the_lease_comes_back(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(_script)
    gw = gateway(
        [node], replica_id="gw1", server={"drain_s": 1, "notice_s": 0.1},
        log_may_show="timeout graceful shutdown exceeded",
    )  # fmt: skip
    with RawClient(gw.port) as client:
        client.send(chat()).read_events(1)
        told = monotonic()
        assert gw.stop() == 0
        took_s = monotonic() - told
        client.read_all()
    assert 1 < took_s < 3
    assert not client.complete or b'"error"' in client.body, "it does not pretend to be whole"
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert ask_once(gw.port, chat()).status == 0
