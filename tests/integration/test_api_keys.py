"""API keys on running replicas: who is let in, what is counted of them, and that none is told."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
import redis
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.admission.keys import hash_key
from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask
from tests.support.rawnode import (
    RawNode,
    event,
    events,
    hang,
    json_answer,
    reset_before_headers,
    sse_answer,
    write_then_reset,
)
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TEAM, NEXT, NARROW = "sk-team-0f3b9c", "sk-team-next-51aa", "sk-narrow-b0b0b0"
PAST, ROOT, WRONG = "sk-past-9e9e9e", "sk-root-77aa21", "sk-wrong-5e5e5e"
REDIS_PASSWORD, NODE_KEY = "redis-pw-8d8d8d", "nk-node-c0ffee"
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def send(
    gw: Gateway, *headers: tuple[str, str], method: str = "POST", path: str = CHAT,
    body: Any = None,
) -> RawClient:  # fmt: skip
    """One request with these headers; the client with the whole answer."""
    content = body if isinstance(body, bytes) else json.dumps(body or BODY).encode()
    content = content if method == "POST" else b""
    lines = [f"{method} {path} HTTP/1.1", "host: g", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines += [f"content-length: {len(content)}"]
    return ask(gw.port, "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content)


def bearer(key: str) -> tuple[str, str]:
    """The header with which OpenAI's clients send a key."""
    return "authorization", f"Bearer {key}"


class Bench:
    """A replica with keys over two nodes, behind a Redis with a password."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        server = stack.enter_context(ValkeyServer())
        with redis.Redis(port=server.port) as admin:
            admin.config_set("requirepass", REDIS_PASSWORD)
        self.valkey = redis.Redis(port=server.port, password=REDIS_PASSWORD, decode_responses=True)
        stack.callback(self.valkey.close)
        self.nodes = [stack.enter_context(RawNode()) for _ in range(2)]
        self.settings = small_settings(self.nodes, circuit={"failure_threshold": 1000})
        for entry in self.settings["nodes"]:
            entry |= {"models": ["m", "other"], "api_key_env": "TEST_NODE_KEY"}
        self.settings["keys"] = [
            {"name": "team", "hash": [hash_key(TEAM), hash_key(NEXT)]},
            {"name": "narrow", "hash": hash_key(NARROW), "models": ["other"]},
            {"name": "past", "hash": hash_key(PAST), "expires": "2020-01-01"},
            {"name": "root", "hash": hash_key(ROOT), "admin": True, "rpm": 10_000, "tpm": 10**9},
        ]
        self.gw = stack.enter_context(
            Gateway(
                self.settings,
                f"redis://:{REDIS_PASSWORD}@127.0.0.1:{server.port}/0",
                environment={"TEST_NODE_KEY": NODE_KEY},
            )
        )

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric now; 0 when it has no such labels."""
        page = send(self.gw, method="GET", path="/metrics").body.decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return 0.0


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        yield bench
        assert_ended_cleanly(bench.gw)


@pytest.fixture
def bench(started: Bench) -> Bench:
    for node in started.nodes:
        node.script = json_answer()
    return started


# Who is let in


def refusal(client: RawClient) -> dict[str, Any]:
    """The error, which has exactly the fields of OpenAI's."""
    assert client.headers[b"content-type"] == b"application/json"
    error = client.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", "/v1/models"])
def test_a_caller_without_a_good_key_gets_401_and_reaches_no_node(bench: Bench, path: str) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    before = sum(len(node.requests) for node in bench.nodes)
    for headers, code in (
        ([], "invalid_api_key"),
        ([bearer(WRONG)], "invalid_api_key"),
        ([bearer("")], "invalid_api_key"),
        ([("x-api-key", WRONG)], "invalid_api_key"),
        ([bearer(PAST)], "api_key_expired"),
        ([("x-api-key", PAST)], "api_key_expired"),
    ):
        answer = send(bench.gw, *headers, method=method, path=path)
        assert answer.status == 401
        assert answer.headers[b"www-authenticate"] == b"Bearer"
        error = refusal(answer)
        assert error["code"] == code
        assert ("expired" in error["message"]) == (code == "api_key_expired")
    assert sum(len(node.requests) for node in bench.nodes) == before
    for key in (TEAM, NEXT):
        assert send(bench.gw, bearer(key), method=method, path=path).status == 200


def test_a_key_of_other_models_gets_403_and_sees_its_own_in_the_list(bench: Bench) -> None:
    answer = send(bench.gw, bearer(NARROW))
    assert answer.status == 403
    assert refusal(answer) == {
        "message": "This key may not use the model 'm'.",
        "type": "permission_error",
        "param": "model",
        "code": "model_not_allowed",
    }
    assert send(bench.gw, bearer(NARROW), body=BODY | {"model": "other"}).status == 200
    listed = send(bench.gw, bearer(NARROW), method="GET", path="/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["other"]


@pytest.mark.parametrize("path", ["/admin/nodes", "/admin/scores"])
def test_only_an_admin_key_opens_admin(bench: Bench, path: str) -> None:
    def asked(*headers: tuple[str, str]) -> int:
        return send(bench.gw, *headers, method="GET", path=path).status

    assert [asked(), asked(bearer(WRONG)), asked(bearer(PAST))] == [401, 401, 401]
    assert [asked(bearer(TEAM)), asked(bearer(NARROW)), asked(bearer(ROOT))] == [403, 403, 200]


# What is counted


def test_requests_and_tokens_are_counted_by_the_name_of_the_key(bench: Bench) -> None:
    def counted() -> dict[str, float]:
        return {
            f"{name} {what}": bench.metric(f"leaseway_key_{kind}_total", key=name, **{label: what})
            for name in ("team", "narrow", "past", "root")
            for kind, label, what in (
                ("requests", "status", "200"),
                ("requests", "status", "403"),
                ("requests", "status", "400"),
                ("tokens", "kind", "prompt"),
                ("tokens", "kind", "output"),
            )
        }

    before = counted()
    assert send(bench.gw, bearer(TEAM)).status == 200
    assert send(bench.gw, bearer(NEXT)).status == 200
    assert send(bench.gw, bearer(TEAM), body=b"{").status == 400
    assert send(bench.gw, bearer(NARROW)).status == 403
    assert send(bench.gw, bearer(PAST)).status == 401
    for node in bench.nodes:
        node.script = sse_answer(events(7))
    assert send(bench.gw, bearer(ROOT), body=BODY | {"stream": True}).status == 200
    after = counted()
    assert {name: after[name] - n for name, n in before.items() if after[name] != n} == {
        "team 200": 2, "team 400": 1, "team prompt": 6, "team output": 2,
        "narrow 403": 1, "root 200": 1, "root output": 7,
    }  # fmt: skip


def test_no_label_is_anything_that_a_client_sent(bench: Bench) -> None:
    for key in ("sk-label-1", "sk-label-2"):
        send(bench.gw, bearer(key))
        send(bench.gw, bearer(TEAM), body=BODY | {"model": f"model-{key}", "user": key})
    page = send(bench.gw, method="GET", path="/metrics").body.decode()
    assert "sk-label" not in page
    names = {
        sample.labels["key"]
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "key" in sample.labels
    }
    assert names <= {"team", "narrow", "past", "root"}


# What is never told


def everything_in(valkey: redis.Redis) -> str:
    """All keys and values, client names and the slow log: what an operator sees."""
    parts: list[Any] = [valkey.client_list(), valkey.slowlog_get(100), valkey.acl_log()]
    port = valkey.connection_pool.connection_kwargs["port"]
    with redis.Redis(port=port, password=REDIS_PASSWORD) as raw:  # not all of it is text
        read: dict[bytes, Any] = {
            b"string": raw.get,
            b"hash": raw.hgetall,
            b"set": raw.smembers,
            b"list": lambda k: raw.lrange(k, 0, -1),
            b"zset": lambda k: raw.zrange(k, 0, -1, withscores=True),
        }
        parts += [(key, read[raw.type(key)](key)) for key in raw.scan_iter("*")]
    return repr(parts)


def odd_requests(chance: random.Random) -> Iterator[tuple[list[tuple[str, str]], dict[str, Any]]]:
    """Keys where they belong, where they do not, broken and doubled: headers, and what to ask."""
    for key in (TEAM, NEXT, NARROW, PAST, ROOT, WRONG):
        yield [bearer(key)], {}
        yield [("Authorization", f"bearer   {key}  ")], {}
        yield [("x-api-key", key)], {}
        yield [("authorization", key)], {}
        yield [("authorization", f"Basic {key}")], {}
        yield [("authorization", f"Bearer {key} {key}")], {}
        yield [bearer(key), bearer(WRONG)], {}
        yield [bearer(WRONG), ("x-api-key", key)], {}
        yield [bearer(hash_key(key))], {}
        yield [bearer(key), ("api-key", key), ("cookie", f"key={key}")], {}
        yield [bearer(key)], {"path": f"{CHAT}?api_key={key}"}
        yield [bearer(key)], {"method": "GET", "path": f"/v1/models?key={key}"}
        yield [bearer(key)], {"method": "GET", "path": "/admin/nodes"}
        yield [bearer(key)], {"method": "PUT"}
        yield [bearer(key)], {"body": b"{" + key.encode()}
        yield [bearer(key)], {"body": BODY | {"user": key, "api_key": key, "stream": 5}}
        yield [bearer(key)], {"body": BODY | {"stream": True, "user": key}}
        yield [bearer(key), ("content-type", f"text/{key}")], {}
        yield [bearer(key), ("x-leaseway-explain", "1")], {}
        yield [bearer("".join(chance.choices("\xe4\xff%\t;,=", k=40)) + key)], {}
        yield [bearer(key * 200)], {}


def test_no_secret_is_in_logs_metrics_errors_or_redis_after_a_session_of_odd_requests(
    bench: Bench,
) -> None:
    gw, nodes = bench.gw, bench.nodes
    said = "Incorrect API key provided:"
    shout = {"error": {"message": f"{said} {NODE_KEY}", "type": "auth"}}
    cut = {"error": {"message": f"{said:490}{NODE_KEY}", "type": "auth"}}  # where a log line ends
    scripts = (
        json_answer(),
        json_answer(401, shout),
        json_answer(500, shout),
        json_answer(200, shout),
        reset_before_headers(),
        sse_answer(events(3)),
        sse_answer([*events(3)[:3], event(shout)]),
        sse_answer([event(shout)]),
        json_answer(200, cut),
        sse_answer([*events(3)[:3], event(cut)]),
        write_then_reset(b"HTTP/1.1 200 OK\r\n" + NODE_KEY.encode()),
    )
    answers: list[RawClient] = []
    session = list(odd_requests(random.Random(7)))
    for i, (headers, how) in enumerate(session):
        for node in nodes:
            node.script = scripts[i % len(scripts)]
        answers.append(send(gw, *headers, **how))
    assert {401, 403, 200, 400, 405} <= {answer.status for answer in answers}

    # A client that leaves; settings that are edited badly, with secrets where they do not belong.
    for node in nodes:
        node.script = hang()
    with RawClient(gw.port) as leaves:
        leaves.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %s\r\ncontent-length: 13\r\n\r\n"
            % ROOT.encode()
            + b'{"model":"m"}'
        )
        wait_until(lambda: any(node.open for node in nodes), what="a node has the request")
        held = everything_in(bench.valkey)
    wait_until(lambda: state.unloaded(bench.valkey), within_s=5, what="load = 0")
    edits: list[Any] = [
        {"keys": [{"name": "a", "hash": TEAM}]},
        {"keys": [{"name": "a", "hash": hash_key(TEAM)}, {"name": "b", "hash": hash_key(TEAM)}]},
        {"keys": [{"name": "a", "key": TEAM}]},
        {"keys": [TEAM]},
        {"keys": {"a": TEAM}},
        {"keys": [{"name": "a", "hash": [hash_key(TEAM), 5]}]},
        {"redis": REDIS_PASSWORD},
        {"nodes": [{"id": "b1", "url": f"http://:{NODE_KEY}@h:1"}]},
        f"keys: [{{hash: {TEAM}",
        TEAM,
    ]
    for n, edit in enumerate(edits, 1):
        gw.file.write_text(edit if isinstance(edit, str) else yaml.safe_dump(edit))
        gw.signal(signal.SIGHUP)
        wait_until(lambda n=n: gw.log.count("settings refused") >= n, what=f"refused: {edit}")
    good = bench.settings | {
        "keys": [*bench.settings["keys"], {"name": "x", "hash": hash_key("x")}]
    }
    gw.file.write_text(yaml.safe_dump(good))
    wait_until(lambda: "keys: added x" in gw.log, what="a good edit")

    places = {
        "the log": gw.log,
        "metrics": send(gw, method="GET", path="/metrics").body.decode(),
        "readiness": send(gw, method="GET", path="/readyz").body.decode(),
        "health": send(gw, method="GET", path="/healthz").body.decode(),
        "the API document": send(gw, method="GET", path="/openapi.json").body.decode(),
        "admin": send(gw, bearer(ROOT), method="GET", path="/admin/nodes").body.decode(),
        "redis during a request": held,
        "redis": everything_in(bench.valkey),
        # What a node says goes to its client as it is; all else is the gateway's own word.
        "errors": "".join(
            f"{a.headers} {a.body!r}"
            for a in answers
            if b"Incorrect API key provided:" not in a.body
        ),
    }
    keys = (TEAM, NEXT, NARROW, PAST, ROOT, WRONG)
    secrets = [*keys, *(hash_key(key).removeprefix("sha256:") for key in keys)]
    secrets += [REDIS_PASSWORD, NODE_KEY[:8]]
    assert "leaseway_key_requests_total" in places["metrics"]
    assert "limit:root" in places["redis"]
    for place, text in places.items():
        for secret in secrets:
            assert secret not in text, (
                place,
                secret,
                text[max(0, text.index(secret) - 200) :][:500],
            )


def test_a_redis_that_refuses_the_password_is_named_without_it(bench: Bench) -> None:
    port = bench.valkey.connection_pool.connection_kwargs["port"]
    replica = Gateway(bench.settings, f"redis://:wrong-{REDIS_PASSWORD}@127.0.0.1:{port}/0")
    try:
        replica.start(wait=False)
        wait_until(lambda: "starting without Redis" in replica.log, within_s=20, what="it says so")
        assert f"127.0.0.1:{port}" in replica.log
        assert REDIS_PASSWORD not in replica.log
    finally:
        replica.__exit__()
