"""M4: browsers ask before they send credentials, and are told on every answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from app.admission.keys import hash_key
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    STREAM_HEAD,
    chunk,
    events,
    json_answer,
    raw_answer,
    sse_answer,
)

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.servers import Gateway

PAGE, OTHER = b"https://app.example.com", b"https://evil.example.com"
KEYS = {
    "LEASEWAY_KEYS": json.dumps([{"name": "one", "hash": hash_key("sk-one"), "rpm": 1000}]),
}
CHAT = b"/v1/chat/completions"
ALLOW = b"access-control-allow-origin"


def preflight(port: int, origin: bytes, *, path: bytes = CHAT) -> RawClient:
    """What a browser sends before a POST with a key: no key, no body."""
    lines = [
        b"OPTIONS " + path + b" HTTP/1.1",
        b"host: g",
        b"origin: " + origin,
        b"access-control-request-method: POST",
        b"access-control-request-headers: authorization, content-type,x-stainless-os",
    ]
    return ask(port, b"\r\n".join(lines) + b"\r\n\r\n")


def asked(
    gw: Gateway, origin: bytes | None, key: bytes = b"sk-one", *, body: bytes = b""
) -> RawClient:
    """A chat request from a page."""
    more = b"authorization: Bearer " + key + b"\r\n"
    more += b"origin: " + origin + b"\r\n" if origin else b""
    return ask(gw.port, (body or chat()).replace(b"host: gateway\r\n", b"host: g\r\n" + more, 1))


@pytest.mark.parametrize("path", [CHAT, b"/v1/models", b"/v1/audio/speech", b"/v1/nothing"])
def test_a_preflight_needs_no_key_and_reaches_no_node(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode, path: bytes
) -> None:
    node = raw_node()
    gw = gateway([node], server={"cors_origins": [PAGE.decode()]}, environment=KEYS)
    told = preflight(gw.port, PAGE, path=path)
    assert (told.status, told.body) == (204, b"")
    assert told.headers[ALLOW] == PAGE
    assert b"POST" in told.headers[b"access-control-allow-methods"]
    names = told.headers[b"access-control-allow-headers"].replace(b" ", b"").split(b",")
    assert set(names) == {b"authorization", b"content-type", b"x-stainless-os"}
    assert told.headers[b"vary"] == b"Origin"
    assert node.requests == []


def test_an_origin_that_is_not_configured_gets_nothing(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node()
    gw = gateway([node], server={"cors_origins": [PAGE.decode()]})
    for origin in (OTHER, b"null", PAGE + b".evil.com", b"http://app.example.com", PAGE.upper()):
        told = preflight(gw.port, origin)
        assert not [name for name in told.headers if name.startswith(b"access-control-")], origin
        assert ALLOW not in asked(gw, origin).headers
    assert all(request.method == "POST" for request in node.requests)
    # A cache in front must not hand one origin's answer to another, nor to one that sent none.
    assert asked(gw, None).headers[b"vary"] == b"Origin"


def test_without_the_setting_no_page_of_another_site_is_let_in(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    allowing = [(b"content-type", b"application/json"), (ALLOW, b"*"), (b"vary", b"Origin")]
    node = raw_node(json_answer(headers=allowing))
    gw = gateway([node])
    assert ALLOW not in preflight(gw.port, PAGE).headers
    # What a node allows (vLLM: everybody) is not the gateway's word.
    told = asked(gw, PAGE)
    assert told.status == 200
    assert ALLOW not in told.headers
    assert node.requests[0].header(b"origin") is None


def test_every_answer_tells_a_configured_origin_errors_and_streams_alike(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node()
    gw = gateway(
        [node],
        server={"cors_origins": ["https://first.example.com", PAGE.decode()]},
        environment=KEYS,
        retries={"max_attempts": 1},
        circuit={"failure_threshold": 100},
    )

    def told(status: int, client: RawClient) -> None:
        assert client.status == status
        assert client.headers[ALLOW] == PAGE
        assert client.headers[b"access-control-expose-headers"] == b"*"
        assert client.complete

    told(401, asked(gw, PAGE, b"wrong"))
    told(200, asked(gw, PAGE))
    told(400, asked(gw, PAGE, body=chat(model="")))
    told(404, asked(gw, PAGE, body=chat(model="none")))
    told(404, asked(gw, PAGE, body=chat().replace(CHAT, b"/v1/nothing", 1)))
    told(405, asked(gw, PAGE, body=chat().replace(b"POST", b"PUT", 1)))
    node.script = json_answer(500)
    told(500, asked(gw, PAGE))
    node.script = raw_answer(b"no HTTP\r\n\r\n")
    told(502, asked(gw, PAGE))
    node.script = sse_answer(events(3), 0.01)
    stream = asked(gw, PAGE)
    told(200, stream)
    assert stream.body.endswith(DONE_EVENT)
    node.script = raw_answer(
        STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(events(1)[0])
    )
    told(200, asked(gw, PAGE))
    get = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n"
    told(200, asked(gw, PAGE, body=get))
    told(401, asked(gw, PAGE, b"wrong", body=get))
    node.script = json_answer(429)
    told(429, asked(gw, PAGE))
    told(503, asked(gw, PAGE))  # the only node is left alone for a second


def test_a_star_lets_every_page_in_without_its_name(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    gw = gateway([raw_node()], server={"cors_origins": ["*"]})
    for origin in (PAGE, OTHER, b"null"):
        assert preflight(gw.port, origin).headers[ALLOW] == b"*"
        answer = asked(gw, origin)
        assert answer.headers[ALLOW] == b"*"
        assert b"access-control-allow-credentials" not in answer.headers
        assert b"vary" not in answer.headers


def test_names_that_are_none_are_not_echoed(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    gw = gateway([raw_node()], server={"cors_origins": ["*"]})
    head = b"OPTIONS /v1/models HTTP/1.1\r\nhost: g\r\norigin: https://a.b\r\n"
    head += b"access-control-request-method: GET\r\naccess-control-request-headers: a b;<x>\r\n\r\n"
    told = ask(gw.port, head)
    assert told.status == 204
    assert b"access-control-allow-headers" not in told.headers
