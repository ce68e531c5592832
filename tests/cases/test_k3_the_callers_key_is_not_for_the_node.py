"""K3: the caller's gateway key is not for the node, and no key is ever written down."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
import redis

from app.admission.keys import hash_key
from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient
from tests.support.rawnode import RawNode, hang, json_answer, reset_before_headers, sse_answer
from tests.support.rawnode import events as answer_of
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Peer, Request, Script

CALLER = "sk-caller-0f3b9c"
ADMIN = "sk-admin-77aa21"
WRONG = "sk-wrong-5e5e5e"
K1 = "nk-of-node-1-c0ffee"
SECRETS = [
    CALLER, ADMIN, WRONG, K1,
    *(hash_key(key).removeprefix("sha256:") for key in (CALLER, ADMIN, WRONG, K1)),
]  # fmt: skip
# Node b1 has a key; b2 has none; b3 names a variable that is empty, b4 one that is not set.
KEY_VARIABLES = {"b1": "CASE_K1", "b3": "CASE_EMPTY", "b4": "CASE_UNSET"}


class Bench:
    """A replica with keys over four nodes, each with a model of its own: m1 … m4, and m on all."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        server = stack.enter_context(ValkeyServer())
        self.valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        self.nodes = [stack.enter_context(RawNode()) for _ in range(4)]
        settings: dict[str, Any] = small_settings(
            self.nodes,
            circuit={"failure_threshold": 1000},  # failures are only a means here
            scoring={
                "policy": "ttft",
                "ttft_floor_ms": 10_000,
                "ttft_prior_ms": 10_000,
            },  # every node has its turn
        )
        for i, node in enumerate(settings["nodes"], 1):
            node["models"] = [f"m{i}", "m"]
            if variable := KEY_VARIABLES.get(node["id"]):
                node["api_key_env"] = variable
        settings["keys"] = [
            {"name": "team", "hash": hash_key(CALLER)},
            {"name": "root", "hash": hash_key(ADMIN), "admin": True},
        ]
        environment = {"CASE_K1": K1, "CASE_EMPTY": ""}
        self.gw = stack.enter_context(Gateway(settings, server.url, environment=environment))


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        yield bench
        assert bench.gw.stop() == 0
        assert "Traceback" not in bench.gw.log, bench.gw.log


@pytest.fixture
def bench(started: Bench) -> Bench:
    for node in started.nodes:
        node.script = json_answer()
        node.requests.clear()
    return started


def send(
    port: int, model: str, *credentials: tuple[str, str], method: str = "POST",
    path: str = "/v1/chat/completions", stream: bool = False,
) -> RawClient:  # fmt: skip
    """One request with these headers; the client with the whole answer."""
    body = json.dumps({"model": model, "messages": [], "stream": stream}).encode()
    body = body if method == "POST" else b""
    lines = [f"{method} {path} HTTP/1.1", "host: g", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in credentials]
    lines += [f"content-length: {len(body)}"]
    with RawClient(port) as client:
        client.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        client.read_all()
        return client


BEARER = ("authorization", f"Bearer {CALLER}")
WAYS = {
    "bearer": [BEARER],
    "x-api-key": [("x-api-key", CALLER)],
    "both": [BEARER, ("x-api-key", CALLER)],
    "with other credentials": [
        BEARER, ("api-key", CALLER), ("cookie", f"session={CALLER}"),
        ("proxy-authorization", f"Bearer {CALLER}"),
    ],
    "bearer twice": [BEARER, ("Authorization", f"Bearer {ADMIN}")],
}  # fmt: skip


def text_of(request: Request) -> str:
    return repr((request.target, request.headers, request.body))


@pytest.mark.parametrize("way", WAYS)
def test_each_node_sees_its_own_key_or_none_and_never_the_callers(bench: Bench, way: str) -> None:
    for i, node in enumerate(bench.nodes, 1):
        answer = send(bench.gw.port, f"m{i}", *WAYS[way])
        assert answer.status == 200
        (request,) = node.requests
        given = [v for n, v in request.headers if n.lower() == b"authorization"]
        assert given == ([f"Bearer {K1}".encode()] if i == 1 else [])
        seen = text_of(request)
        assert CALLER not in seen
        assert ADMIN not in seen
        assert (K1 in seen) == (i == 1)
        assert K1.encode() not in answer.body + repr(answer.headers).encode()


def test_a_request_that_moves_to_another_node_takes_no_key_along(bench: Bench) -> None:
    fails, well = json_answer(500), json_answer()
    attempts: list[RawNode] = []

    def on(node: RawNode) -> Script:
        async def script(request: Request, peer: Peer) -> None:
            attempts.append(node)
            await (fails if len(attempts) % 2 else well)(request, peer)

        return script

    for node in bench.nodes:
        node.script = on(node)
    b1 = bench.nodes[0]
    while not (b1 in attempts[::2] and b1 in attempts[1::2]):  # it was left, and it was moved to
        answer = send(bench.gw.port, "m", BEARER)
        assert (answer.status, answer.headers[b"x-leaseway-attempts"]) == (200, b"2")
        assert attempts[-1] is not attempts[-2]
        assert len(attempts) < 400
    for node in bench.nodes:
        for request in node.requests:
            given = [v for n, v in request.headers if n.lower() == b"authorization"]
            assert given == ([f"Bearer {K1}".encode()] if node is b1 else [])
            assert CALLER not in text_of(request)
    wait_until(lambda: state.unloaded(bench.valkey), within_s=2, what="load = 0")


def test_no_key_is_in_logs_metrics_error_bodies_or_redis(bench: Bench) -> None:
    port = bench.gw.port
    answers: list[RawClient] = []

    def say(status: int, client: RawClient) -> None:
        assert client.status == status, (client.status, client.body)
        answers.append(client)

    for credentials, status in (
        ([BEARER], 200),
        ([("x-api-key", ADMIN)], 200),
        ([("authorization", f"Bearer {WRONG}")], 401),
        ([("x-api-key", WRONG)], 401),
        ([("authorization", f"Bearer {hash_key(CALLER)}")], 401),
        ([("authorization", f"Basic {WRONG}")], 401),
        ([], 401),
    ):
        say(status, send(port, "m1", *credentials))
        say(status, send(port, "m1", *credentials, method="GET", path="/v1/models"))
        say(404 if status == 200 else 401, send(port, "none", *credentials))
    say(404, send(port, "m1", BEARER, method="GET", path=f"/v1/{WRONG[:4]}"))
    for path in ("/admin/nodes", "/admin/scores"):
        say(401, send(port, "", ("authorization", f"Bearer {WRONG}"), method="GET", path=path))
        say(403, send(port, "", BEARER, method="GET", path=path))
        say(200, send(port, "", ("x-api-key", ADMIN), method="GET", path=path))
    say(400, send(port, "", BEARER))

    # Nodes that fail in their own ways, one of which shouts its key back.
    b1 = bench.nodes[0]
    refusal = {"error": {"message": "bad key", "type": "invalid_request_error"}}
    for script, stream, status in (
        (json_answer(401, refusal), False, 401),
        (json_answer(500), False, 500),
        (reset_before_headers(), False, 502),
        (sse_answer(answer_of(2)), True, 200),
        (sse_answer(answer_of(2)[:2], chunked=False), True, 200),
    ):
        b1.script = script
        say(status, send(port, "m1", BEARER, stream=stream))
    b1.script = hang()
    with RawClient(port) as leaves:
        leaves.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %s\r\ncontent-length: 14\r\n\r\n"
            % CALLER.encode()
            + b'{"model":"m1"}'
        )
        wait_until(lambda: b1.open == 1, what="the node has the request")
        held = dump(bench.valkey)  # with a lease in it
        assert "m1" in held
        leaves.close()
    wait_until(lambda: state.unloaded(bench.valkey), within_s=2, what="load = 0")

    places = {
        "log": bench.gw.log,
        "metrics": send(port, "", method="GET", path="/metrics").body.decode(),
        "health": send(port, "", method="GET", path="/readyz").body.decode(),
        "API description": send(port, "", method="GET", path="/openapi.json").body.decode(),
        "answers": "".join(f"{a.headers} {a.body!r}" for a in answers),
        "redis during a request": held,
        "redis": dump(bench.valkey),
    }
    assert "reset" in places["log"]  # it did log what happened
    assert "leaseway_requests_total" in places["metrics"]
    for place, text in places.items():
        for secret in SECRETS:
            assert secret not in text, place
    for answer in answers:
        if answer.status >= 400 and b"bad key" not in answer.body and answer.status != 500:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def dump(valkey: redis.Redis) -> str:
    """Everything in Redis as text: keys, values, the scripts' client names."""
    parts: list[Any] = [valkey.client_list()]
    for key in valkey.scan_iter("*"):
        read: dict[str, Any] = {
            "string": valkey.get,
            "hash": valkey.hgetall,
            "set": valkey.smembers,
            "list": lambda k: valkey.lrange(k, 0, -1),
            "zset": lambda k: valkey.zrange(k, 0, -1, withscores=True),
        }
        parts.append((key, read[str(valkey.type(key))](key)))
    return repr(parts)
