"""M3: usage events only when asked, never overruled; usage is booked all the same."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import state
from tests.support.rawclient import ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    chunk,
    content_event,
    event,
)
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Script
    from tests.support.servers import Gateway

USAGE = {"prompt_tokens": 31, "completion_tokens": 17, "total_tokens": 48}
USAGE_EVENT = event({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
CONTENT = [content_event(f't{i} {{"choices":[],"usage":{{}}}} ') for i in range(4)]
# Events that look like it and are not: Azure's filter results, a keep-alive, usage beside content.
ODD = [
    b": keep-alive\n\n",
    event({"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}),
    event({"object": "keepalive"}),
    event({"usage": None, "choices": [{"index": 0, "delta": {"tool_calls": []}}]}),
    event({"usage": {"prompt_tokens": 31}, "choices": [{"index": 0, "delta": {"content": "x"}}]}),
    b"data: not JSON []\n\n",
    b'data: {"usage": {"prompt_tokens": 1}}\n\n',
    b'data: {"choices":null,"usage":{"prompt_tokens":31}}\n\n',
]
STREAM = [ROLE_EVENT, *ODD[:3], *CONTENT, *ODD[3:], FINISH_EVENT]

ABSENT = object()
SAID: dict[str, Any] = {
    "absent": ABSENT,
    "null": None,
    "empty": {},
    "another option": {"continuous_usage_stats": False},
    "false": {"include_usage": False},
    "true": {"include_usage": True},
}
UNSAID = ("absent", "null", "empty", "another option")


def engine(*, unasked: bool = False, size: int = 0) -> Script:
    """A node that appends the usage event when it is asked to, or always; ``size`` cuts writes."""

    async def script(request: Request, peer: Peer) -> None:
        asked = (request.json().get("stream_options") or {}).get("include_usage") is True
        answer = b"".join([*STREAM, *([USAGE_EVENT] if asked or unasked else []), DONE_EVENT])
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        step = size or len(answer)
        for i in range(0, len(answer), step):
            await peer.write(chunk(answer[i : i + step]))
            await peer.sleep(0.0005)
        await peer.write(b"0\r\n\r\n")

    return script


def request(said: Any) -> bytes:
    return chat() if said is ABSENT else chat(stream_options=said)


def booked(gw: Gateway) -> dict[str, float]:
    """Tokens booked so far, by kind."""
    page = ask(gw.port, b"GET /metrics HTTP/1.1\r\nhost: g\r\n\r\n").body.decode()
    return {
        sample.labels["kind"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "leaseway_tokens_total"
    }


@pytest.mark.parametrize("size", [0, 1, 7, 300], ids=["one write", "bytes", "sevens", "parts"])
@pytest.mark.parametrize("name", SAID)
def test_the_client_sees_the_event_only_when_it_asked_and_the_counts_are_booked(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, name: str, size: int
) -> None:
    node = raw_node(engine(size=size))
    gw = gateway([node])
    client = ask(gw.port, request(SAID[name]))
    shown = [USAGE_EVENT] if name == "true" else []
    assert client.complete
    assert client.body == b"".join([*STREAM, *shown, DONE_EVENT])
    (seen,) = node.requests
    options = seen.json().get("stream_options", {})
    if name in UNSAID:
        assert options.pop("include_usage") is True
        assert options == (SAID[name] if name == "another option" else {})
    else:
        assert options == SAID[name]
        assert seen.body == request(SAID[name]).partition(b"\r\n\r\n")[2]
    if name == "false":  # counted from the events: the node was not asked
        assert booked(gw)["output"] >= len(CONTENT)
    else:
        assert booked(gw) == {"prompt": 31, "output": 17}
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert state.record(valkey, "b1")["streak"] == "0"


@pytest.mark.parametrize("name", ["false", "true"])
def test_an_event_that_a_node_sends_unasked_passes_unless_the_gateway_asked(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, name: str
) -> None:
    gw = gateway([raw_node(engine(unasked=True))])
    client = ask(gw.port, request(SAID[name]))
    assert client.body == b"".join([*STREAM, USAGE_EVENT, DONE_EVENT])
    assert booked(gw) == {"prompt": 31, "output": 17}


def test_with_the_setting_off_nothing_is_asked_and_nothing_removed(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(engine(unasked=True))
    gw = gateway([node], server={"ask_usage": False})
    client = ask(gw.port, chat())
    assert client.body == b"".join([*STREAM, USAGE_EVENT, DONE_EVENT])
    assert node.requests[0].body == chat().partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["CRLF", "CR"])
def test_the_event_is_found_with_any_line_end_and_beside_other_fields(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, end: bytes
) -> None:
    odd = b"id: 7\nevent: usage\n" + USAGE_EVENT.replace(b"data: ", b"data:")
    spaced = (
        b'data: {"usage":{"prompt_tokens":31,\ndata: "completion_tokens":17}, "choices" : [ ]}\n\n'
    )
    answer = b"".join([*STREAM, odd, spaced, DONE_EVENT]).replace(b"\n", end)

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        await peer.write(chunk(answer) + b"0\r\n\r\n")

    gw = gateway([raw_node(script)])
    client = ask(gw.port, chat())
    assert client.body == b"".join([*STREAM, DONE_EVENT]).replace(b"\n", end)
    assert booked(gw) == {"prompt": 31, "output": 17}


def test_what_was_asked_moves_with_the_request_to_another_node(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    turns = itertools.count()

    async def script(request: Request, peer: Peer) -> None:
        """The first request of all breaks off, on whichever node."""
        if next(turns):
            await engine()(request, peer)
        else:
            peer.reset()

    nodes = [raw_node(script), raw_node(script)]
    gw = gateway(nodes)
    client = ask(gw.port, chat())
    assert client.headers[b"x-leaseway-attempts"] == b"2"
    assert client.body == b"".join([*STREAM, DONE_EVENT])
    assert [len(node.requests) for node in nodes] == [1, 1]
    assert nodes[0].requests[0].body == nodes[1].requests[0].body
    assert nodes[0].requests[0].json()["stream_options"] == {"include_usage": True}
