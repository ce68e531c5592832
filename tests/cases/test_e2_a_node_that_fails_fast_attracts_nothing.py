"""E2: a node that fails fast must not attract traffic."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from tests.support import state
from tests.support.rawclient import ask, chat
from tests.support.rawnode import (
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    Script,
    chunk,
    close_without_answer,
    content_event,
    event,
    events,
    json_answer,
    raw_answer,
    reset_before_headers,
    sized,
    sse_answer,
    write_then_reset,
)
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import RawNode
    from tests.support.servers import Gateway

REQUESTS, AT_ONCE = 100, 10
THRESHOLD, OPEN_S = 3, 2.0
COOL_S = 1.0  # of a busy node that does not say how long
SLOW_S = 0.3  # what the healthy node takes
JSON = [(b"content-type", b"application/json")]
CHUNKED = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"
BROKEN = event({"error": {"message": "out of memory", "type": "server_error", "code": 500}})


def _slow() -> Script:
    """What a healthy node says, streamed when asked to."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.sleep(SLOW_S)
        answer = sse_answer(events(2)) if request.json()["stream"] else json_answer()
        await answer(request, peer)

    return script


# How a node can fail at once. In the last two the client has had a byte: nobody can help it, and
# each good beginning leaves a TTFT of next to nothing.
FAST: dict[str, tuple[Script, bool]] = {
    "503": (json_answer(503, b"no", JSON), False),
    "500 to a stream": (json_answer(500, b"no", JSON), True),
    "503 that says busy": (json_answer(503, b'{"error":"overloaded"}', JSON), False),
    "429": (json_answer(429, b"{}", JSON), False),
    "reset": (reset_before_headers(), False),
    "close": (close_without_answer(), True),
    "no HTTP": (raw_answer(b"SSH-2.0-OpenSSH_9.6\r\n"), False),
    "200 and nothing": (raw_answer(sized(200, b"", JSON)), False),
    "200 with an error": (json_answer(200, {"error": {"message": "no"}}, JSON), False),
    "200 and an error event": (sse_answer([BROKEN]), True),
    "a role, an error event": (sse_answer([ROLE_EVENT + BROKEN]), True),
    "a token, then a reset":
        (write_then_reset(CHUNKED + chunk(ROLE_EVENT + content_event("a")), 0.002), True),
    "a token, then an error event": (sse_answer([ROLE_EVENT, content_event("a"), BROKEN]), True),
}  # fmt: skip
BUSY = {"503 that says busy", "429"}  # it cools, and is asked again
TOO_LATE = {"a token, then a reset", "a token, then an error event"}


def _all_can_be_had(valkey: redis.Redis, gw: Gateway, models: Sequence[str]) -> None:
    """Wait until every node has been probed well: the fast one has its fair chance."""
    wait_until(
        lambda: all(all(state.scores(valkey, model).values()) for model in models),
        what=f"probed; log:\n{gw.log}",
    )


def _ask_all(
    port: int, n: int, at_once: int, *, model: str = "m", stream: bool = False
) -> Counter[str]:
    """``n`` requests, ``at_once`` at a time; how they ended."""

    def one(_: int) -> str:
        client = ask(port, chat(model=model, stream=stream))
        whole = client.complete and b'"error"' not in client.body
        return f"{client.status}" if whole or client.status != 200 else "200 and broken"

    with ThreadPoolExecutor(at_once) as pool:
        return Counter(pool.map(one, range(n)))


def _only_trials_after_the_trip(
    valkey: redis.Redis, node_id: str, node: RawNode, at_once: int, *, let_in: int = 1
) -> None:
    """Threshold, what was in flight then, and ``let_in`` each time that the circuit was open."""
    begin = node.requests[0].at
    took_s = monotonic() - begin
    trials = [r for r in node.requests if r.at - begin > OPEN_S - 0.1]
    first_wave = len(node.requests) - len(trials)
    assert first_wave <= THRESHOLD + at_once - 1, node_id
    assert len(trials) <= let_in * (took_s // OPEN_S), node_id
    record = state.record(valkey, node_id)
    if record["circuit"] == "closed":  # the price of its failures alone has kept requests away
        assert valkey.exists(state.KEYS.work), node_id
        assert len(node.requests) <= at_once, node_id
    else:
        assert record["circuit"] == "open", node_id
        assert int(record["opens"]) >= (2 if trials else 1), f"{node_id}: it stays open for longer"


@pytest.mark.parametrize("policy", ["work", "ttft"])
@pytest.mark.parametrize("max_attempts", [3, 1], ids=["retries on", "retries off"])
def test_of_a_node_that_says_503_at_once_and_one_that_takes_its_time_the_second_has_the_traffic(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, max_attempts: int, policy: str
) -> None:
    b1, b2 = raw_node(json_answer(503, b"no", JSON)), raw_node(_slow())
    retries = {"max_attempts": max_attempts}
    gw = gateway([b1, b2], capacity=64, retries=retries, scoring={"policy": policy})
    _all_can_be_had(valkey, gw, ["m"])
    ended = _ask_all(gw.port, REQUESTS, AT_ONCE)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    _only_trials_after_the_trip(valkey, "b1", b1, AT_ONCE)
    assert len(b1.requests) < REQUESTS / 10
    if max_attempts > 1:
        assert ended == {"200": REQUESTS}, "no client sees the 503"
        assert len(b2.requests) == REQUESTS
    else:
        assert ended == {"200": len(b2.requests), "503": len(b1.requests)}
        assert len(b1.requests) + len(b2.requests) == REQUESTS
    assert not valkey.exists(state.KEYS.ttft("b1")), "no TTFT sample"
    assert int(state.record(valkey, "b1").get("samples", 0)) == 0


@pytest.mark.parametrize("policy", ["work", "ttft"])
def test_however_a_node_fails_fast_it_gets_its_threshold_and_then_only_trials(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, policy: str
) -> None:
    n, at_once = 36, 4
    nodes, kinds = [], list(FAST.items())
    for i, (_, (script, _)) in enumerate(kinds):  # a pair for each kind, with a model of its own
        for role in (script, _slow()):
            nodes.append(raw_node(role))
            nodes[-1].models = (f"m{i}",)
    gw = gateway(nodes, capacity=64, scoring={"policy": policy})

    _all_can_be_had(valkey, gw, [f"m{i}" for i in range(len(kinds))])

    def run(i: int) -> Counter[str]:
        return _ask_all(gw.port, n, at_once, model=f"m{i}", stream=kinds[i][1][1])

    with ThreadPoolExecutor(len(kinds)) as pool:
        ended = dict(zip(FAST, pool.map(run, range(len(kinds))), strict=True))
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    print({kind: (len(nodes[2 * i].requests), dict(ended[kind])) for i, kind in enumerate(FAST)})
    for i, kind in enumerate(FAST):
        node_id, node = f"b{2 * i + 1}", nodes[2 * i]
        if kind in BUSY:
            took_s = node.requests[-1].at - node.requests[0].at
            assert len(node.requests) <= at_once * (1 + took_s // COOL_S), kind
        else:
            # A trial that has begun to answer lets others in, until it has broken off.
            let_in = at_once if kind in TOO_LATE else 1
            _only_trials_after_the_trip(valkey, node_id, node, at_once, let_in=let_in)
        if kind in TOO_LATE:
            assert ended[kind]["200 and broken"] == len(node.requests), kind
        else:
            assert ended[kind] == {"200": n}, kind
            assert not valkey.exists(state.KEYS.ttft(node_id)), kind
