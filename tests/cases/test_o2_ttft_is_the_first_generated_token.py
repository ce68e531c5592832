"""O2: TTFT is the first generated token."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.support import state
from tests.support.rawclient import ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    RawNode,
    chunk,
    content_event,
    event,
    events,
    sse_answer,
)
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Script

WINDOW, MAX_AGE_S = 5, 60
TOKEN = content_event("hello")
END = [(0.0, FINISH_EVENT + DONE_EVENT)]
ERROR = event({"error": {"message": "out of memory", "type": "server_error", "code": 500}})

# What comes at which time after the head, and the TTFT that the window must show, in s.
STREAMS: dict[str, tuple[list[tuple[float, bytes]], tuple[float, float] | None]] = {
    "comment and role event, then a token": (
        [(0.1, b": keep-alive\n\n"), (0.2, ROLE_EVENT), (1.5, TOKEN), *END],
        (1.5, 1.75),
    ),
    "an error before any token": ([(0.2, ERROR)], None),
    "a role event, then an error": ([(0.1, ROLE_EVENT), (0.3, ERROR)], None),
    "a token event in two writes": ([(0.4, TOKEN[:40]), (0.9, TOKEN[40:]), *END], (0.9, 1.15)),
    "a role and its end": ([(0.1, ROLE_EVENT), *END], None),
}


def _timed(parts: list[tuple[float, bytes]]) -> Script:
    async def script(request: Any, peer: Any) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        at_s = 0.0
        for when_s, data in parts:
            if when_s > at_s:
                await peer.sleep(when_s - at_s)
                at_s = when_s
            await peer.write(chunk(data))
        await peer.write(b"0\r\n\r\n")

    return script


def _samples(valkey: redis.Redis, node: str) -> list[float]:
    """The window of a node, newest first, in s."""
    window: Any = valkey.lrange(state.KEYS.ttft(node), 0, -1)
    return [int(sample.split(":")[0]) / 1e6 for sample in window]


def test_a_sample_ends_at_the_first_generated_token_and_only_there(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    nodes = []
    for i, (parts, _) in enumerate(STREAMS.values(), 1):
        nodes.append(raw_node(_timed(parts)))
        nodes[-1].models = (f"m{i}",)
    gw = gateway(nodes, retries={"max_attempts": 1})
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: ask(gw.port, chat(model=node.models[0])), nodes))
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    for i, (shape, (_, expected)) in enumerate(STREAMS.items(), 1):
        samples = _samples(valkey, f"b{i}")
        print(f"{shape}: {samples}")
        assert len(nodes[i - 1].requests) == 1
        assert int(state.record(valkey, f"b{i}").get("samples", 0)) == len(samples)
        if expected is None:
            assert samples == [], shape
        else:
            (ttft_s,) = samples
            assert expected[0] <= ttft_s < expected[1], shape


def test_the_window_is_capped_and_expires_and_every_replica_goes_by_it(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    slow, fast = (
        raw_node(_timed([(0.25, TOKEN), *END])),
        raw_node(sse_answer(events(1))),
    )
    scoring = {"window": WINDOW, "sample_max_age_s": MAX_AGE_S}
    gw1 = gateway([slow, fast], replica_id="gw1", scoring=scoring)
    gw2 = gateway([slow, fast], replica_id="gw2", scoring=scoring)
    nodes: dict[str, RawNode] = {"b1": slow, "b2": fast}
    for other in nodes:  # through gw1 alone, both nodes in turn
        valkey.hset(state.KEYS.node(other), "state", "draining")
        wait_until(
            lambda n=other: state.scores(valkey)[n] == 0, within_s=3, what="a sweep has seen it"
        )
        for _ in range(WINDOW + 3):
            assert ask(gw1.port, chat()).complete
            wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        valkey.hset(state.KEYS.node(other), "state", "active")
        wait_until(lambda n=other: state.scores(valkey)[n] > 0, within_s=3, what="and this too")
    for node, source in nodes.items():
        wait_until(
            lambda n=node: int(state.record(valkey, n)["samples"]) == WINDOW, what="full window"
        )
        assert len(source.requests) > WINDOW
        samples = _samples(valkey, node)
        assert len(samples) == WINDOW, "capped"
        ttl_ms: Any = valkey.pttl(state.KEYS.ttft(node))
        assert 0 < ttl_ms <= MAX_AGE_S * 1000, "and it expires"
        mean_us = sum(samples) / WINDOW * 1e6
        assert abs(float(state.record(valkey, node)["sum_us"]) / WINDOW - mean_us) < 1
    scores = state.scores(valkey)
    assert scores["b2"] > 2 * scores["b1"]
    # gw2 has measured nothing itself and goes by what gw1 has.
    chosen: Counter[bytes] = Counter()
    for _ in range(20):
        chosen[ask(gw2.port, chat()).headers[b"x-leaseway-node"]] += 1
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert chosen == {b"b2": 20}
