"""M2: 'nobody can take it now' says when to come back, in a header and at once."""

from __future__ import annotations

import contextlib
import json
import math
import time
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import events, hang, json_answer, sse_answer, stream_forever
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import RawNode
    from tests.support.servers import Gateway

OPEN_S, TRIES = 5, 10


def refused(gw: Gateway, *, stream: bool = True, model: str = "m") -> RawClient:
    """The quickest of some refusals: each is well-formed, and none takes long."""
    took, client = [], None
    for _ in range(TRIES):
        at = monotonic()
        client = ask(gw.port, chat(stream=stream, model=model))
        took.append(monotonic() - at)
        assert client.status in {429, 503}
        assert client.complete
        assert client.headers[b"content-type"] == b"application/json"
        error = client.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert model in error["message"]
        assert client.headers[b"retry-after"].isdigit()
        assert int(client.headers[b"retry-after"]) >= 1
    assert client is not None
    assert min(took) < 0.1, took
    return client


def remaining_s(valkey: redis.Redis, model: str = "m") -> float:
    """Until the first of the model's nodes may be tried again, by the clock that counts."""
    seconds, micros = valkey.time()
    due = valkey.zrange(state.KEYS.due(model), 0, 0, withscores=True)
    return float(due[0][1]) / 1000 - seconds - micros / 1e6


def told_s(client: RawClient) -> int:
    return int(client.headers[b"retry-after"])


def _open(gw: Gateway, nodes: list[RawNode], valkey: redis.Redis) -> None:
    """Fail until the circuit of each of ``nodes`` is open."""
    for node in nodes:
        node.script = json_answer(500)
    names = [f"b{i}" for i in range(1, len(nodes) + 1)]

    def opened() -> bool:
        ask(gw.port, chat(stream=False))
        return all(state.record(valkey, name)["circuit"] == "open" for name in names)

    wait_until(opened, what="the circuits are open")
    wait_until(lambda: state.unloaded(valkey), what="load = 0")


def test_all_circuits_open_says_when_the_first_one_is_tried_again(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    raw = [raw_node(), raw_node()]
    gw = gateway(raw, circuit={"failure_threshold": 3, "open_s": OPEN_S})
    _open(gw, raw, valkey)
    reached = [len(node.requests) for node in raw]
    client = refused(gw)
    assert (client.status, client.json()["error"]["code"]) == (503, "no_node_available")
    assert client.json()["error"]["type"] == "server_error"
    # Whole seconds, rounded up: who comes back then does not come too early.
    for _ in range(3):
        before = remaining_s(valkey)
        told = told_s(ask(gw.port, chat()))
        after = remaining_s(valkey)
        assert max(1, math.ceil(after)) <= told <= max(1, math.ceil(before))
        time.sleep(0.7)  # the answer follows the time
    assert told < OPEN_S * 1.2
    assert [len(node.requests) for node in raw] == reached, "no node is asked"
    # Who does as told is served: one by the trial, all once that has gone well.
    for node in raw:
        node.script = json_answer()
    time.sleep(told_s(refused(gw, stream=False)))
    assert ask(gw.port, chat(stream=False)).status == 200


def test_all_at_capacity_says_to_come_back(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    raw = [raw_node(stream_forever(0.05)) for _ in range(2)]
    gw = gateway(raw, capacity=2)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(RawClient(gw.port)) for _ in range(4)]
        for client in held:
            client.send(chat()).read_events(2)
        reached = [len(node.requests) for node in raw]
        for stream in (True, False):
            client = refused(gw, stream=stream)
            assert client.status == 429
            error = client.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "at_capacity")
            assert told_s(client) <= 5
        assert [len(node.requests) for node in raw] == reached
        assert sum(state.snapshot(valkey).counters.values()) == 4, "a refusal counts nothing"
        for node in raw:
            node.script = json_answer()
        held[0].close()
        wait_until(lambda: sum(state.snapshot(valkey).counters.values()) == 3, what="a free place")
        assert ask(gw.port, chat(stream=False)).status == 200
    wait_until(lambda: state.unloaded(valkey), what="load = 0")


@pytest.mark.parametrize("left", ["draining", "disabled"])
def test_all_taken_out_says_to_come_back(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, left: str
) -> None:
    raw = [raw_node(), raw_node()]
    gw = gateway(raw)
    for name in ("b1", "b2"):
        valkey.hset(state.KEYS.node(name), "state", left)
    wait_until(lambda: max(state.scores(valkey).values()) == 0, what="a sweep has seen it")
    client = refused(gw)
    assert (client.status, client.json()["error"]["code"]) == (503, "no_node_available")
    assert told_s(client) <= 60
    assert not raw[0].requests
    assert not raw[1].requests


@pytest.mark.parametrize("status", [429, 503])
def test_nodes_that_asked_to_be_left_alone_are_and_their_time_is_told(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, status: int
) -> None:
    waits = {"b1": 30, "b2": 20}
    raw = []
    for seconds in waits.values():
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"%d" % seconds)]
        busy = {"error": {"message": "queue is full", "type": "overloaded", "code": status}}
        raw.append(raw_node(json_answer(status, busy, headers)))
    gw = gateway(raw)
    first = ask(gw.port, chat())  # both say so, one after the other
    assert first.status == status
    assert told_s(first) in waits.values(), "the node's own answer, with its own time"
    wait_until(lambda: state.unloaded(valkey), what="load = 0")
    reached = [len(node.requests) for node in raw]
    client = refused(gw)
    assert client.status == 503
    assert math.ceil(remaining_s(valkey)) <= told_s(client) <= 20, "of the sooner one"
    assert [len(node.requests) for node in raw] == reached == [1, 1]
    for name in waits:
        assert state.record(valkey, name)["circuit"] == "closed", "busy is not broken"


def test_one_open_and_one_taken_out_says_when_the_open_one_comes_back(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    raw = [raw_node(), raw_node()]
    gw = gateway(raw, circuit={"failure_threshold": 3, "open_s": 20})
    valkey.hset(state.KEYS.node("b2"), "state", "draining")
    wait_until(lambda: state.scores(valkey)["b2"] == 0, what="a sweep has seen it")
    _open(gw, raw[:1], valkey)
    client = refused(gw)
    assert client.status == 503
    assert abs(told_s(client) - remaining_s(valkey)) <= 1.5
    assert told_s(client) > 10


def test_one_open_and_one_full_says_to_come_back_soon(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    raw = [raw_node(), raw_node()]
    gw = gateway(raw, capacity=1, circuit={"failure_threshold": 3, "open_s": 30})
    valkey.hset(state.KEYS.node("b2"), "state", "draining")
    wait_until(lambda: state.scores(valkey)["b2"] == 0, what="a sweep has seen it")
    _open(gw, raw[:1], valkey)
    raw[1].script = stream_forever(0.05)
    valkey.hset(state.KEYS.node("b2"), "state", "active")
    wait_until(lambda: state.scores(valkey)["b2"] > 0, what="a sweep has seen this too")
    with RawClient(gw.port) as held:
        held.send(chat()).read_events(2)
        client = refused(gw)
        assert client.status == 429, "a place may become free any time"
        assert told_s(client) <= 5


def test_while_the_one_trial_runs_the_others_are_told_to_come_back(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node()
    gw = gateway([node], circuit={"failure_threshold": 3, "open_s": 1})
    _open(gw, [node], valkey)
    node.script = hang()
    wait_until(lambda: remaining_s(valkey) < 0, what="a trial is due")
    reached = len(node.requests)
    with RawClient(gw.port) as trial:
        trial.send(chat())
        wait_until(lambda: len(node.requests) > reached, what="the trial has reached the node")
        assert state.record(valkey, "b1")["circuit"] == "half_open"
        client = refused(gw)
        assert client.status == 503
        assert len(node.requests) == reached + 1, "one trial"
    wait_until(lambda: state.unloaded(valkey), what="load = 0")


def test_a_model_with_a_free_node_is_served_while_another_has_none(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    raw = [raw_node(), raw_node(sse_answer(events(2)))]
    raw[1].models = ("other",)
    gw = gateway(raw, circuit={"failure_threshold": 3, "open_s": 20})
    _open(gw, raw[:1], valkey)
    assert refused(gw).status == 503
    assert ask(gw.port, chat(model="other")).status == 200
    unknown = ask(gw.port, chat(model="nobody's"))
    assert unknown.status == 404
    assert b"retry-after" not in unknown.headers
    assert json.loads(unknown.body)["error"]["code"] == "model_not_found"
