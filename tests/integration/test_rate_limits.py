"""Requests and tokens per minute of a key, over two real replicas that share one count."""

from __future__ import annotations

import contextlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Any

import openai
import pytest
import redis

from app.admission.keys import hash_key
from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask
from tests.support.rawnode import (
    DONE_EVENT,
    STREAM_HEAD,
    RawNode,
    event,
    events,
    hang,
    json_answer,
    reset_before_headers,
    sse_answer,
)
from tests.support.relay import Relay
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Peer, Request, Script

UNIT = 60_000
KEYS: dict[str, dict[str, int]] = {
    "few": {"rpm": 10},
    "slow": {"rpm": 30},
    "tokens": {"tpm": 2000},
    "both": {"rpm": 1000, "tpm": 1200},
    "free": {},
}
TEXT = "word " * 80  # a prompt that is estimated at somewhat over 100 tokens


def request(key: str, *, stream: bool = False, text: str = "hi", **more: Any) -> bytes:
    """A chat request of this key."""
    message = {"role": "user", "content": text}
    body = json.dumps({"model": "m", "stream": stream, "messages": [message], **more}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer sk-{key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def usage(prompt: int, output: int) -> dict[str, int]:
    """What a node says that it used."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def whole(prompt: int, output: int) -> Script:
    """An answer in one piece that used so much."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ok"},
        "finish_reason": "stop",
    }
    return json_answer(body={"object": "chat.completion", "choices": [choice],
                             "usage": usage(prompt, output)})  # fmt: skip


class Bench:
    """Two replicas over one node and one Redis; ``relay`` stands before the second one's Redis."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        server = stack.enter_context(ValkeyServer())
        self.valkey: Any = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        # Of `untold` no usage is ever told, so the size of its prompts is not learned.
        self.node = stack.enter_context(RawNode(models=("m", "untold")))
        self.relay = stack.enter_context(Relay(server.port))
        settings = small_settings([self.node], capacity=4, circuit={"failure_threshold": 1000})
        settings["keys"] = [
            {"name": name, "hash": hash_key(f"sk-{name}"), **limits}
            for name, limits in KEYS.items()
        ]
        self.replicas = [
            stack.enter_context(Gateway(settings, url)) for url in (server.url, self.relay.url)
        ]

    def ask(self, key: str, replica: int = 0, **more: Any) -> RawClient:
        """One whole exchange."""
        return ask(self.replicas[replica].port, request(key, **more))

    def used(self, key: str) -> tuple[float, float]:
        """(requests, tokens) as they were when the key's limits were last written."""
        requests, tokens = self.valkey.hmget(state.KEYS.limit(key), "requests", "tokens")
        return int(requests or 0) / UNIT, int(tokens or 0) / UNIT

    def assert_settles(self, key: str, tokens: float, *, requests: int = 1) -> None:
        """So many tokens are counted soon, less what the limit has given back meanwhile."""
        wait_until(
            lambda: tokens - 90 <= self.used(key)[1] <= tokens + 1,
            within_s=5,
            what=f"{tokens} tokens are counted",
        )
        assert requests - 1 < (self.used(key)[0] or requests) <= requests


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        yield bench
        for replica in bench.replicas:
            assert_ended_cleanly(replica)


@pytest.fixture
def bench(started: Bench) -> Iterator[Bench]:
    """The bench with nothing used of any limit; its node answers in one piece, 3 and 1 tokens."""
    started.node.script = json_answer()
    for name in KEYS:
        started.valkey.delete(state.KEYS.limit(name))
    yield started
    wait_until(lambda: state.unloaded(started.valkey), within_s=5, what="load = 0")


# The shared count


def test_two_replicas_let_exactly_the_limit_through_among_them(bench: Bench) -> None:
    before, begin = len(bench.node.requests), monotonic()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: bench.ask("few", i % 2), range(60)))
    took_s = monotonic() - begin
    passed = sum(answer.status == 200 for answer in answers)
    assert {answer.status for answer in answers} == {200, 429}
    assert 10 <= passed <= 10 + took_s / 6  # one more comes back every 6 s
    assert len(bench.node.requests) - before == passed
    counted = bench.used("few")[0]
    assert passed - took_s / 6 <= counted <= 10  # what was refused was not counted


def test_a_refusal_has_openais_shape_and_tells_the_true_wait(bench: Bench) -> None:
    good = bench.ask("few")
    assert good.status == 200
    assert good.headers[b"x-ratelimit-limit-requests"] == b"10"
    assert good.headers[b"x-ratelimit-remaining-requests"] == b"9"
    assert good.headers[b"x-ratelimit-reset-requests"] == b"6s"
    assert b"x-ratelimit-limit-tokens" not in good.headers
    for _ in range(100):
        refused = bench.ask("few", 1)
        if refused.status == 429:
            break
    assert refused.status == 429
    error = refused.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "10 requests per minute" in error["message"]
    assert refused.headers[b"x-ratelimit-limit-requests"] == b"10"
    assert refused.headers[b"x-ratelimit-remaining-requests"] == b"0"
    # Ten of 6 s each are used, and the oldest of them is on its way back.
    reset = re.fullmatch(rb"5\d(\.\d+)?s", refused.headers[b"x-ratelimit-reset-requests"])
    assert reset, refused.headers
    wait_s = re.search(r"Try again in ([\d.]+)(ms|s)\.", error["message"])
    assert wait_s
    exact = float(wait_s[1]) / (1000 if wait_s[2] == "ms" else 1)
    assert int(refused.headers[b"retry-after"]) == max(1, -(-exact // 1))


def test_whoever_waits_as_long_as_retry_after_says_is_let_in(bench: Bench) -> None:
    for _ in range(200):
        refused = bench.ask("slow")
        if refused.status == 429:
            break
    wait_s = int(refused.headers[b"retry-after"])
    assert 1 <= wait_s <= 2  # 30 a minute
    time.sleep(wait_s)
    assert bench.ask("slow", 1).status == 200


def test_a_key_without_limits_has_no_headers_and_nothing_in_redis(bench: Bench) -> None:
    theirs = [(b"content-type", b"application/json"), (b"x-ratelimit-remaining-tokens", b"42")]
    bench.node.script = json_answer(headers=theirs)
    answer = bench.ask("free")
    assert answer.status == 200
    assert answer.headers[b"x-ratelimit-remaining-tokens"] == b"42"  # a node's own passes
    assert not bench.valkey.exists(state.KEYS.limit("free"))
    limited = bench.ask("both")
    assert limited.headers[b"x-ratelimit-limit-tokens"] == b"1200"
    assert limited.headers[b"x-ratelimit-remaining-tokens"] != b"42"


def test_the_openai_client_knows_the_refusal_and_its_wait(bench: Bench) -> None:
    for _ in range(100):
        if bench.ask("few").status == 429:
            break
    url = bench.replicas[1].url + "/v1"
    with (
        openai.OpenAI(base_url=url, api_key="sk-few", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 6


# Tokens


def usage_event(prompt: int, output: int) -> bytes:
    """The last event of a stream that tells its usage."""
    return event({"object": "chat.completion.chunk", "choices": [], "usage": usage(prompt, output)})


def broken_off(n: int) -> Script:
    """A stream that is reset after ``n`` tokens."""

    async def script(asked: Request, peer: Peer) -> None:
        await sse_answer(events(n)[:-2], chunked=False)(asked, peer)
        await peer.sleep(0.1)
        peer.reset()

    return script


ESTIMATE = len(TEXT) // 4 + 9  # tokens of the prompt
UNTOLD = {"a stream that does not", "a stream that breaks off"}
EXITS: dict[str, tuple[Script, bool, int, float]] = {  # script, stream, status, tokens used
    "one piece": (whole(400, 300), False, 200, 700),
    "a stream that tells its usage": (
        sse_answer([*events(5)[:-1], usage_event(400, 300), DONE_EVENT]), True, 200, 700),
    "a stream that does not": (sse_answer(events(200)), True, 200, ESTIMATE + 200),
    "a stream that breaks off": (broken_off(200), True, 200, ESTIMATE + 200),
    "more than the whole limit": (whole(2000, 3000), False, 200, 5000),
    "the client's mistake": (json_answer(400, {"error": {"message": "no"}}), False, 400, 0),
    "a broken node": (json_answer(500), False, 500, 0),
    "no answer": (reset_before_headers(), False, 502, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", EXITS)
def test_a_request_is_charged_what_it_has_really_used(bench: Bench, name: str) -> None:
    script, stream, status, tokens = EXITS[name]
    bench.node.script = script
    model = "untold" if name in UNTOLD else "m"
    answer = bench.ask("tokens", stream=stream, text=TEXT, max_tokens=1000, model=model)
    assert answer.status == status
    bench.assert_settles("tokens", tokens)


def test_while_it_runs_a_request_is_charged_what_it_may_use(bench: Bench) -> None:
    bench.node.script = sse_answer(events(20), gap_s=0.1)
    with RawClient(bench.replicas[0].port) as running:
        running.send(request("both", stream=True, text=TEXT, max_completion_tokens=1000))
        running.read_events(2)
        assert int(running.headers[b"x-ratelimit-remaining-tokens"]) < 200
        requests = bench.used("both")[0]
        refused = bench.ask("both", 1, max_tokens=900)
        assert refused.status == 429
        assert "1200 tokens per minute" in refused.json()["error"]["message"]
        assert bench.used("both")[0] == requests  # the limit of requests has not moved either
        running.read_all()
        assert running.complete
    bench.node.script = json_answer()
    wait_until(
        lambda: bench.ask("both", 1, max_tokens=900).status == 200, within_s=5, what="given back"
    )


def test_a_request_larger_than_the_whole_limit_is_let_in_when_nothing_is_used(
    bench: Bench,
) -> None:
    bench.node.script = whole(10, 10)
    assert bench.ask("both", max_tokens=10**9).status == 200
    assert bench.ask("both", max_tokens=10**9).status == 429
    assert bench.ask("both", max_tokens=10).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_pays_for_its_prompt_and_what_came(bench: Bench, stream: bool) -> None:
    begun = events(10)[:-2]

    async def script(asked: Request, peer: Peer) -> None:
        if stream:
            await peer.write(STREAM_HEAD + b"connection: close\r\n\r\n" + b"".join(begun))
        await hang()(asked, peer)

    bench.node.script = script
    with RawClient(bench.replicas[0].port) as client:
        asked = request("tokens", stream=stream, text=TEXT, max_tokens=1000, model="untold")
        client.send(asked)
        wait_until(lambda: bench.node.open == 1, what="at the node")
        if stream:
            client.read_events(len(begun))
        client.reset()
    bench.assert_settles("tokens", ESTIMATE + (10 if stream else 0))


def test_a_request_that_finds_no_room_gives_its_tokens_back(bench: Bench) -> None:
    bench.node.script = hang()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(RawClient(bench.replicas[0].port))
            client.send(request("free"))
        wait_until(lambda: bench.node.open == 4, what="the node is full")
        answer = bench.ask("tokens", 1, max_tokens=1500)
        assert (answer.status, answer.json()["error"]["code"]) == (429, "at_capacity")
        bench.assert_settles("tokens", 0)


# Without Redis


def test_without_redis_a_replica_goes_on_with_its_share_and_nobody_hangs(bench: Bench) -> None:
    replica = bench.replicas[1].port
    bench.relay.pause()
    try:
        answers, took_s = [], []
        for _ in range(14):
            begin = monotonic()
            answers.append(ask(replica, request("few")))
            took_s.append(monotonic() - begin)
    finally:
        bench.relay.resume()
    statuses = [answer.status for answer in answers]
    assert statuses[:5] == [200] * 5
    assert statuses.count(200) <= 6  # half of ten, and one that comes back after 12 s
    assert set(statuses) == {200, 429}
    refused = answers[statuses.index(429)]
    assert refused.headers[b"x-ratelimit-limit-requests"] == b"10"
    assert 1 <= int(refused.headers[b"retry-after"]) <= 12
    assert max(took_s) < 3  # two calls of 250 ms each, on a busy machine
    wait_until(
        lambda: b"x-leaseway-degraded" not in bench.ask("free", 1).headers, what="Redis is back"
    )
    # What was asked and not heard of may have been counted there.
    assert int(bench.ask("few", 1).headers[b"x-ratelimit-remaining-requests"]) >= 6
