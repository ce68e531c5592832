"""B2: a non-streaming client that leaves stops the node too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat, post
from tests.support.rawnode import json_answer
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode

WAIT_S = 1.0


@pytest.mark.parametrize("kind", ["stream false", "stream absent", "body of 1 MiB"])
def test_a_plain_request_ends_at_the_node_when_its_client_leaves(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, kind: str
) -> None:
    node = raw_node(json_answer(after_s=20))
    gw = gateway([node], timeouts={"first_token_s": 30})
    big = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 2**20}]})
    request = {
        "stream false": chat(stream=False),
        "stream absent": chat(stream=None),
        "body of 1 MiB": post("/v1/chat/completions", big.encode()),
    }[kind]
    for i, leave in enumerate((RawClient.close, RawClient.reset)):
        client = RawClient(gw.port)
        client.send(request)
        wait_until(lambda: node.open == 1, within_s=WAIT_S, what="the node has the request")
        assert node.requests[i].body == request.partition(b"\r\n\r\n")[2]
        assert state.load(valkey, "b1") == 1
        leave(client)
        wait_until(lambda: node.open == 0, within_s=1, what="the node's socket closes")
        assert node.closes[i] - client.closed_at < 1
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")

    record = state.record(valkey, "b1")
    assert (record["streak"], record["circuit"]) == ("0", "closed")
    metrics = httpx.get(f"{gw.url}/metrics", trust_env=False).text
    assert "leaseway_requests_abandoned_total 2.0\n" in metrics
    assert 'outcome="failed"' not in metrics
    node.script = json_answer()
    assert ask(gw.port).status == 200
    assert len(node.requests) == 3, "nothing was tried again"
