"""G5: no retry once a byte of the answer has gone out."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    chunk,
    content_event,
    event,
    sse_answer,
)
from tests.support.rawnode import events as answer_of
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.servers import Gateway

FIVE = [content_event(f"t{i} ") for i in range(5)]
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


def counted(gw: Gateway, metric: str) -> dict[tuple[str, ...], float]:
    """A metric of the replica: values of its labels, by their names → value."""
    page = httpx.get(f"{gw.url}/metrics", trust_env=False).text
    return {
        tuple(sample.labels[name] for name in sorted(sample.labels)): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == metric
    }


@pytest.mark.parametrize("usage", [False, True], ids=["without usage", "with usage so far"])
def test_a_reset_after_five_events_is_an_error_to_the_client_and_no_second_request(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, usage: bool
) -> None:
    parts = [ROLE_EVENT, *FIVE, *([event({"choices": [], "usage": USAGE})] if usage else [])]
    well = sse_answer(answer_of(5))
    turns = itertools.count()

    async def script(request: Request, peer: Peer) -> None:
        """The first request of all breaks off, on whichever node; any other is answered well."""
        if next(turns):
            await well(request, peer)
            return
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for part in parts:
            await peer.write(chunk(part))
            await peer.sleep(0.01)
        peer.reset()

    nodes = [raw_node(script), raw_node(script)]
    gw = gateway(nodes, retries={"max_attempts": 3})
    with state.sampling(valkey) as seen, RawClient(gw.port) as client:
        client.send(chat(stream_options={"include_usage": True}))
        body = client.read_all()
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    used = client.headers[b"x-leaseway-node"].decode()
    other = {"b1": "b2", "b2": "b1"}[used]

    # The five events once, then an error ending.
    assert (client.status, client.headers[b"x-leaseway-attempts"]) == (200, b"1")
    assert body.startswith(b"".join(parts))
    ending = body.removeprefix(b"".join(parts))
    if client.complete:
        (error,) = [e.removeprefix(b"data: ") for e in ending.split(b"\n\n") if e]
        assert set(json.loads(error)["error"]) == {"message", "type", "param", "code"}
    else:
        assert client.cut
        assert ending == b""
    assert b"[DONE]" not in body
    assert b'"finish_reason":"' not in body

    # One request on one node, one lease, booked once.
    assert sorted(len(node.requests) for node in nodes) == [0, 1]
    assert (seen.highest[used], seen.highest.get(other, 0)) == (1, 0)
    assert counted(gw, "leaseway_attempts_total") == {(used, "failed"): 1}
    assert counted(gw, "leaseway_requests_total") == {("m", "200"): 1}
    tokens = {("output", "m"): 5.0} | ({("prompt", "m"): 7.0} if usage else {})
    assert counted(gw, "leaseway_tokens_total") == tokens
    assert counted(gw, "leaseway_ttft_seconds_count") == {(used,): 1}
    assert state.record(valkey, used)["streak"] == "1"
    assert state.record(valkey, other)["streak"] == "0"
    assert int(state.record(valkey, used)["samples"]) == 1

    # The next request is a new one, and it is answered.
    with RawClient(gw.port) as client:
        assert client.send(chat()).read_all() == b"".join(answer_of(5))
    assert sum(len(node.requests) for node in nodes) == 2


def test_a_stream_that_only_the_close_ends_is_cut_unless_it_says_that_it_is_whole(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(sse_answer(answer_of(3)[:-2], chunked=False))  # no finish, no [DONE], then FIN
    gw = gateway([node])
    cut = ask(gw.port, chat())
    assert cut.status == 200
    assert b'"error"' in cut.body
    assert b"[DONE]" not in cut.body
    wait_until(lambda: state.record(valkey, "b1")["streak"] == "1", what="a failure is booked")
    node.script = sse_answer(answer_of(3), chunked=False)
    whole = ask(gw.port, chat())
    assert b'"error"' not in whole.body
    assert whole.body.endswith(b"data: [DONE]\n\n")
    wait_until(lambda: state.record(valkey, "b1")["streak"] == "0", what="a success is booked")
