"""M1: client mistakes give 4xx in the OpenAI error shape, and touch neither node nor state."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import RawNode, json_answer
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cases.conftest import StartGateway, StartNode

CHAT = "/v1/chat/completions"
JSON = "application/json"
GOOD = b'{"model":"m","messages":[]}'


@dataclass(frozen=True)
class Mistake:
    """A request and what the client is told."""

    status: int
    code: str | None
    body: bytes = GOOD
    method: str = "POST"
    path: str = CHAT
    kind: str | None = JSON
    param: str | None = None

    def sent(self, port: int) -> RawClient:
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: g"]
        lines += [f"content-type: {self.kind}"] if self.kind is not None else []
        lines += [f"content-length: {len(self.body)}"]
        return ask(port, "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body)


MISTAKES = {
    "unknown model": Mistake(404, "model_not_found", b'{"model":"gpt-9"}', param="model"),
    "unknown model, odd name": Mistake(
        404, "model_not_found", '{"model":"日\\u0000\\"\U0001f600"}'.encode(), param="model"
    ),
    "model of another case": Mistake(404, "model_not_found", b'{"model":"M"}', param="model"),
    "missing model": Mistake(400, "missing_required_parameter", b'{"stream":true}', param="model"),
    "null model": Mistake(400, "missing_required_parameter", b'{"model":null}', param="model"),
    "empty model": Mistake(400, "invalid_value", b'{"model":""}', param="model"),
    "model is a number": Mistake(400, "invalid_type", b'{"model":1}', param="model"),
    "model is a list": Mistake(400, "invalid_type", b'{"model":["m"]}', param="model"),
    "model is too long": Mistake(
        400, "invalid_value", b'{"model":"' + b"m" * 300 + b'"}', param="model"
    ),
    "stream is a word": Mistake(
        400, "invalid_type", b'{"model":"m","stream":"yes"}', param="stream"
    ),
    "broken JSON": Mistake(400, "invalid_json", b"{bad"),
    "half a body": Mistake(400, "invalid_json", b'{"model":"m","messages":['),
    "two bodies": Mistake(400, "invalid_json", b'{"model":"m"}{"model":"m"}'),
    "NaN": Mistake(400, "invalid_json", b'{"model":"m","temperature":NaN}'),
    "empty body": Mistake(400, "invalid_json", b""),
    "JSON array": Mistake(400, "invalid_json", b'[{"model":"m"}]'),
    "JSON string": Mistake(400, "invalid_json", b'"m"'),
    "invalid UTF-8": Mistake(400, "invalid_json", b'{"model":"m","x":"\xff\xfe"}'),
    "half a surrogate": Mistake(400, "invalid_json", b'{"model":"m","x":"\\ud83d"}'),
    "nested too deep": Mistake(
        400, "invalid_json", b'{"model":"m","x":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    ),
    "wrong content type": Mistake(415, "unsupported_media_type", kind="text/plain"),
    "form content type": Mistake(
        415, "unsupported_media_type", kind="application/x-www-form-urlencoded"
    ),
    "no content type": Mistake(415, "unsupported_media_type", kind=None),
    "unknown path": Mistake(404, "not_found", path="/v1/nothing"),
    "unknown path, escaped": Mistake(404, "not_found", path="/v1/%ff%0a%3Cx%3E"),
    "doubled v1": Mistake(404, "not_found", path="/v1/v1/chat/completions"),
    "trailing slash": Mistake(404, "not_found", path=f"{CHAT}/"),
    "root": Mistake(404, "not_found", method="GET", path="/", body=b"", kind=None),
    "unknown model by id": Mistake(
        404, "model_not_found", method="GET", path="/v1/models/gpt-9", body=b"", param="model"
    ),
    "GET of a completion": Mistake(405, "method_not_allowed", method="GET", body=b"", kind=None),
    "PUT of a completion": Mistake(405, "method_not_allowed", method="PUT"),
    "DELETE of a completion": Mistake(405, "method_not_allowed", method="DELETE", body=b""),
    "POST to the models": Mistake(405, "method_not_allowed", path="/v1/models"),
    "POST to the health page": Mistake(405, "method_not_allowed", path="/healthz"),
    "body above the limit": Mistake(
        413, "request_too_large", b'{"model":"m","x":"' + b"x" * 1_100_000 + b'"}'
    ),
}


@dataclass(frozen=True)
class Bench:
    gw: Gateway
    node: RawNode
    valkey: redis.Redis


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        node = stack.enter_context(RawNode())
        gw = stack.enter_context(
            Gateway(small_settings([node], server={"body_limit_mib": 1}), server.url)
        )
        yield Bench(gw, node, valkey)
        assert gw.stop() == 0
        assert "Traceback" not in gw.log, gw.log


def everything(valkey: redis.Redis) -> tuple[object, ...]:
    """Leases and counters, the node's record, the ranking."""
    return state.snapshot(valkey), state.record(valkey, "b1"), state.scores(valkey)


def assert_error_shape(client: RawClient) -> dict[str, str | None]:
    """The OpenAI error shape, as JSON; its error object."""
    assert client.complete
    assert client.headers[b"content-type"] == b"application/json"
    body = client.json()
    assert set(body) == {"error"}
    error: dict[str, str | None] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"].endswith((".", ")"))
    assert error["type"]
    return error


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_the_openai_shape_and_touches_nothing(bench: Bench, name: str) -> None:
    mistake = MISTAKES[name]
    before = everything(bench.valkey)
    keys = set(bench.valkey.keys())
    client = mistake.sent(bench.gw.port)
    assert client.status == mistake.status
    error = assert_error_shape(client)
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        mistake.code,
        mistake.param,
    )
    assert (client.headers.get(b"allow") is not None) == (mistake.status == 405)
    assert b"retry-after" not in client.headers  # it would be as wrong later
    # No node contacted, no lease taken, no circuit moved, no key made for what it named.
    assert everything(bench.valkey) == before
    assert set(bench.valkey.keys()) == keys
    assert bench.node.requests == []
    assert bench.node.connections == bench.node.probes


def test_the_allow_header_names_the_right_method(bench: Bench) -> None:
    assert MISTAKES["PUT of a completion"].sent(bench.gw.port).headers[b"allow"] == b"POST"
    assert b"GET" in MISTAKES["POST to the models"].sent(bench.gw.port).headers[b"allow"]


def test_a_model_whose_nodes_are_down_is_503_with_retry_after(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(json_answer(500))
    gw = gateway([node], circuit={"open_s": 5}, retries={"max_attempts": 1})
    for _ in range(3):
        assert ask(gw.port, chat(stream=False)).status == 500
    wait_until(lambda: state.record(valkey, "b1")["circuit"] == "open", what="the circuit is open")
    asked = len(node.requests)
    client = ask(gw.port, chat(stream=False))
    assert client.status == 503
    error = assert_error_shape(client)
    assert (error["type"], error["code"]) == ("server_error", "no_node_available")
    assert 1 <= int(client.headers[b"retry-after"]) <= 6  # 5 s, spread by up to 20 %
    # A model that nobody knows is still unknown, not down.
    unknown = ask(gw.port, chat(stream=False, model="gpt-9"))
    assert unknown.status == 404
    assert assert_error_shape(unknown)["code"] == "model_not_found"
    assert len(node.requests) == asked
    assert state.unloaded(valkey)


def test_a_mistake_that_only_the_node_can_see_is_passed_through_unchanged(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    told = {"error": {"message": "max_tokens", "type": "x", "param": "max_tokens", "code": None}}
    node = raw_node(json_answer(422, told))
    gw = gateway([node])
    for _ in range(4):
        client = ask(gw.port, chat(stream=True))
        assert (client.status, json.loads(client.body)) == (422, told)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert len(node.requests) == 4
    assert state.record(valkey, "b1")["circuit"] == "closed"
    assert state.record(valkey, "b1")["streak"] == "0"
