"""A6: starting or restarting one replica must not reset what siblings own."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    RawNode,
    Request,
    Script,
    chunk,
    content_event,
    events,
    json_answer,
    sse_answer,
)
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.servers import ValkeyServer

STREAMS = 5
CONTENT_TYPE = (b"content-type", b"application/json")
# What only probes and the passing of time may change in a record.
_PASSING = {"base", "health", "misses", "waiting_ms", "waiting_until_ms"}


def _until(ended: threading.Event) -> Script:
    """A stream that talks until ``ended`` is set, and then ends well; else an answer at once."""

    async def script(request: Request, peer: Peer) -> None:
        if not request.json()["stream"]:
            await json_answer()(request, peer)
            return
        head = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"
        await peer.write(head + chunk(ROLE_EVENT) + chunk(content_event("a")))
        while not ended.is_set():
            await peer.sleep(0.05)
            await peer.write(chunk(content_event("b")))
        await peer.write(chunk(FINISH_EVENT) + chunk(DONE_EVENT) + b"0\r\n\r\n")

    return script


def _hold(stack: contextlib.ExitStack, gw: Gateway, n: int, model: str = "m") -> list[RawClient]:
    held = [stack.enter_context(RawClient(gw.port)) for _ in range(n)]
    for client in held:
        client.send(chat(model=model)).read_events(2)
        assert client.status == 200
    return held


def _learned(valkey: redis.Redis, nodes: list[RawNode]) -> dict[str, Any]:
    """Everything that the fleet has learned of its nodes: circuit, window, rates, due times."""
    learned: dict[str, Any] = {}
    for i, node in enumerate(nodes, 1):
        record = state.record(valkey, f"b{i}")
        learned[f"b{i}"] = {k: v for k, v in record.items() if k not in _PASSING}
        learned[f"window of b{i}"] = valkey.lrange(state.KEYS.ttft(f"b{i}"), 0, -1)
        learned[f"due of b{i}"] = valkey.zscore(state.KEYS.due(node.models[0]), f"b{i}")
    return learned


def _broken(valkey: redis.Redis, gw: Gateway, node: RawNode, model: str) -> None:
    """Some samples, then an open circuit."""
    node.script = sse_answer(events(2))
    for _ in range(4):
        assert ask(gw.port, chat(model=model)).complete
    node.script = json_answer(500)
    for _ in range(3):
        assert ask(gw.port, chat(model=model)).status == 500
    wait_until(lambda: state.record(valkey, "b2")["circuit"] == "open", what="b2's circuit opens")


def _cooling(valkey: redis.Redis, gw: Gateway, node: RawNode, model: str) -> None:
    """Two failures of three, and a long cool-down."""
    node.script = json_answer(500)
    for _ in range(2):
        assert ask(gw.port, chat(model=model)).status == 500
    node.script = json_answer(429, headers=[CONTENT_TYPE, (b"retry-after", b"50")])
    assert ask(gw.port, chat(model=model)).status == 429
    wait_until(lambda: state.scores(valkey, model)["b3"] == 0, what="b3 cools")
    assert state.record(valkey, "b3")["streak"] == "2"


def test_replicas_that_come_go_and_are_killed_leave_load_circuits_and_windows_as_they_are(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    ended = threading.Event()
    nodes = [raw_node(_until(ended)), raw_node(), raw_node(), raw_node()]
    for i, node in enumerate(nodes[1:], 2):
        node.models = (f"m{i}",)
    settings: Any = {"circuit": {"open_s": 60}}
    gw1 = gateway(nodes, replica_id="gw1", **settings)
    with contextlib.ExitStack() as stack:
        held = _hold(stack, gw1, STREAMS)
        _broken(valkey, gw1, nodes[1], "m2")
        _cooling(valkey, gw1, nodes[2], "m3")
        nodes[3].probes_fail = True
        wait_until(lambda: state.record(valkey, "b4")["health"] == "down", what="b4 is down")
        wait_until(lambda: state.snapshot(valkey).counters["b3"] == 0, what="all released")
        before = _learned(valkey, nodes)
        assert len(before["window of b1"]) == STREAMS
        assert len(before["window of b2"]) == 4
        assert before["due of b2"]
        assert before["due of b3"]
        with state.sampling(valkey) as seen:
            gw2 = gateway(nodes, replica_id="gw2", **settings)
            assert _learned(valkey, nodes) == before, "after a start"
            assert gw2.stop() == 0
            assert _learned(valkey, nodes) == before, "after a stop"
            gw3 = gateway(nodes, replica_id="gw3", **settings)
            assert gw3.stop() == 0
            gw3.start()
            assert _learned(valkey, nodes) == before, "after a restart under the same id"
            gw3.kill()
            gw3.start()
            gw4 = gateway(nodes, **settings)
            assert _learned(valkey, nodes) == before, "after a kill and two starts"
            assert state.record(valkey, "b4")["health"] == "down"
        assert (seen.lowest["b1"], seen.highest["b1"]) == (STREAMS, STREAMS)
        state.assert_counters_equal_leases(valkey)
        with state.sampling(valkey):
            ended.set()
            assert all(client.read_all().endswith(DONE_EVENT) for client in held)
            wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert ask(gw4.port, chat(model="m2")).status == 503, "the circuit is still open for all"
    assert ask(gw3.port).status == 200


def test_a_replica_killed_and_started_again_under_its_id_ends_its_own_leases_and_no_others(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    ended = threading.Event()
    node = raw_node(_until(ended))
    # A dead replica's leases would live for a minute: what ends them is the restart.
    gw1, gw2 = (gateway([node], replica_id=f"gw{i}", leases={"ttl_s": 60}) for i in (1, 2))
    with contextlib.ExitStack() as stack:
        held = _hold(stack, gw2, STREAMS)
        _hold(stack, gw1, 3)
        assert state.load(valkey, "b1") == STREAMS + 3
        with state.sampling(valkey) as seen:
            gw1.kill()
            gw1.start()
            wait_until(
                lambda: state.load(valkey, "b1") == STREAMS, within_s=2, what="gw1's are back"
            )
            again = _hold(stack, gw1, 2)
            assert state.load(valkey, "b1") == STREAMS + 2
        assert (seen.lowest["b1"], seen.highest["b1"]) == (STREAMS, STREAMS + 3)
        state.assert_counters_equal_leases(valkey)
        ended.set()
        assert all(client.read_all().endswith(DONE_EVENT) for client in held + again)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")


@pytest.mark.parametrize("how", ["another replica starts", "the holder is told to reload"])
def test_an_edited_configuration_and_its_rollback_change_what_was_edited_and_no_load(
    valkey: redis.Redis,
    valkey_server: ValkeyServer,
    gateway: StartGateway,
    raw_node: StartNode,
    how: str,
) -> None:
    ended = threading.Event()
    b1, b2, b3 = raw_node(_until(ended)), raw_node(_until(ended)), raw_node()
    b2.models, b3.models = ("m2",), ("m3",)
    gw1 = gateway([b1, b2], replica_id="gw1")
    plain, edited = small_settings([b1, b2]), small_settings([b1, b2, b3])
    edited["nodes"] = [edited["nodes"][0] | {"capacity": 3, "weight": 2.5}, edited["nodes"][2]]

    def in_force(settings: dict[str, Any], model: str) -> Gateway:
        """Bring ``settings`` about, of which ``model`` is the sign; a replica that has them."""
        if how == "another replica starts":
            gw = stack.enter_context(Gateway(settings, valkey_server.url, replica_id="gw2"))
        else:
            gw = gw1
            gw.file.write_text(yaml.safe_dump(settings))
            gw.signal(signal.SIGHUP)
        wait_until(lambda: any(state.scores(valkey, model).values()), what=f"{model} can be had")
        return gw

    with contextlib.ExitStack() as stack:
        held = [*_hold(stack, gw1, STREAMS), *_hold(stack, gw1, 2, "m2")]
        before = _learned(valkey, [b1])
        with state.sampling(valkey) as seen:
            gw = in_force(edited, "m3")
            after = _learned(valkey, [b1])
            assert after["b1"] == before["b1"] | {"capacity": "3", "weight": "2.5"}
            assert after["window of b1"] == before["window of b1"]
            assert ask(gw.port).status == 429, "no place until three have ended"
            assert ask(gw.port, chat(model="m3", stream=False)).status == 200
            for one in (gw1, gw):
                assert ask(one.port, chat(model="m2", stream=False)).status == 404, "b2 is gone"
            running = {n: c for n, c in state.snapshot(valkey).counters.items() if c}
            assert running == {"b1": STREAMS, "b2": 2}
            if gw is not gw1:
                assert gw.stop() == 0
            gw = in_force(plain, "m2")  # the edit is taken back
            assert _learned(valkey, [b1]) == before
            more = _hold(stack, gw, 1, "m2")
            assert state.load(valkey, "b2") == 3, "what ran on b2 before still counts"
        assert (seen.lowest["b1"], seen.highest["b1"]) == (STREAMS, STREAMS)
        assert seen.lowest["b2"] == 2
        state.assert_counters_equal_leases(valkey)
        assert state.scores(valkey, "m3") == {}
        with state.sampling(valkey):
            ended.set()
            assert all(client.read_all().endswith(DONE_EVENT) for client in held + more)
            wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        for model in ("m", "m2"):
            assert ask(gw1.port, chat(model=model, stream=False)).status == 200
