"""H1: any split of the upstream bytes gives the same downstream bytes."""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import DONE_EVENT, STREAM_HEAD, Peer, Request, chunk
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.servers import Gateway

RUNS = 300


def _event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    payload = {
        "id": "chatcmpl-录",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        **more,
    }
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def _tool(arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"name": "读", "arguments": arguments}}]}


USAGE = {"prompt_tokens": 31, "completion_tokens": 17, "total_tokens": 48}
RECORDED = b"".join(
    [
        b": keep-alive\n\n",
        _event({"role": "assistant", "content": ""}),
        *(
            _event({"content": text})
            for text in ("春眠不觉晓、", "処処啼鳥を聞く", " 😀👩‍👩‍👧 ", "𐍈", "é ñ")
        ),
        *(_event(_tool(part)) for part in ('{"path": "C:\\\\tmp\\"ä', '\\u00fc", "n": [1, 2]}')),
        _event({}, "tool_calls"),
        _event({}, None, choices=[], usage=USAGE),
        DONE_EVENT,
    ]
)
INSIDE_CHARACTERS = [i for i, byte in enumerate(RECORDED) if byte & 0xC0 == 0x80]
BETWEEN_NEWLINES = [i for i in range(1, len(RECORDED)) if RECORDED[i - 1 : i + 1] == b"\n\n"]


class Splitting:
    """``script`` answers each request with the next way of cutting the same bytes."""

    def __init__(self) -> None:
        draw = random.Random(1)
        every = set(range(1, len(RECORDED)))
        ways: list[set[int]] = [set(), every, set(INSIDE_CHARACTERS), set(BETWEEN_NEWLINES)]
        ways += [{i} for i in draw.sample(INSIDE_CHARACTERS, 50)]
        ways += [{i} for i in BETWEEN_NEWLINES]
        while len(ways) < RUNS:
            ways.append(set(draw.sample(sorted(every), draw.choice((1, 2, 3, 5, 25)))))
        self.ways = ways
        self.turn = -1

    async def script(self, request: Request, peer: Peer) -> None:  # noqa: ARG002 - a ``Script``
        self.turn += 1
        cuts = self.ways[self.turn]
        pieces = [RECORDED[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(RECORDED)])]
        pause_s = 0.0005 if len(pieces) <= 50 else 0  # so that a piece is a read of its own
        way_of_framing = self.turn % 3
        if way_of_framing == 0:  # each piece is a chunk
            await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
            pieces = [*map(chunk, pieces), b"0\r\n\r\n"]
        elif way_of_framing == 1:  # one chunk, cut
            await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
            pieces = [b"%x\r\n" % len(RECORDED), *pieces, b"\r\n0\r\n\r\n"]
        else:  # ended by the close
            peer.keep_alive = False
            await peer.write(STREAM_HEAD + b"connection: close\r\n\r\n")
        for piece in pieces:
            await peer.write(piece)
            await peer.sleep(pause_s)


def booked(gw: Gateway) -> tuple[float, float, float]:
    """What the replica has booked so far: prompt tokens, output tokens, first tokens."""
    page = ask(gw.port, b"GET /metrics HTTP/1.1\r\nhost: g\r\n\r\n").body.decode()
    found = {
        (sample.name, sample.labels.get("kind")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    return (
        found.get(("leaseway_tokens_total", "prompt"), 0),
        found.get(("leaseway_tokens_total", "output"), 0),
        found.get(("leaseway_ttft_seconds_count", None), 0),
    )


def test_three_hundred_ways_of_cutting_one_stream_give_the_same_bytes_and_books(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    assert "\ufffd" not in RECORDED.decode()
    assert len(INSIDE_CHARACTERS) > 60
    splitting = Splitting()
    assert len(splitting.ways) == RUNS
    node = raw_node(splitting.script)
    gw = gateway([node], scoring={"window": 1000})
    for run in range(RUNS):
        with RawClient(gw.port) as client:
            # It asks for the counts: else the event that holds them would be the gateway's.
            body = client.send(chat(stream_options={"include_usage": True})).read_all()
        assert client.complete, run
        assert body == RECORDED, (run, splitting.ways[run])
        assert "\ufffd" not in body.decode()
        assert booked(gw) == ((run + 1) * 31, (run + 1) * 17, run + 1), (run, splitting.ways[run])
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert int(state.record(valkey, "b1")["samples"]) == RUNS
    assert state.record(valkey, "b1")["streak"] == "0"
    assert len(node.requests) == RUNS
