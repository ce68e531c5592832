"""L1: big multimodal bodies work, and are bounded in size and in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest

from tests.cases.bench import MIB, Bench, PeakMemory, renewed, running_bench
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import Peer, Request, chunk, json_answer
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TOGETHER = 20
LIMIT_MIB = 64  # the default
IMAGE = base64.b64encode(random.Random(1).randbytes(3 * MIB)).decode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
# One body is read, parsed and perhaps changed in steps that need it twice; of many, one at a time.
ALONE, TOGETHER_TIMES = 4, 3


def body_of(size_mib: float, model: str = "m1", **more: Any) -> bytes:
    """A chat with an image in a content part, of about ``size_mib``."""
    data = (IMAGE * (1 + int(size_mib) // 4))[: int(size_mib * MIB)]
    url = {"url": f"data:image/png;base64,{data}"}
    parts = [{"type": "text", "text": "Was ist das? é"}, {"type": "image_url", "image_url": url}]
    return json.dumps(
        {"model": model, "messages": [{"role": "user", "content": parts}], **more},
        ensure_ascii=False,
    ).encode()


def with_length(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def in_chunks(body: bytes, size: int = 65_536) -> bytes:
    parts = [chunk(body[i : i + size]) for i in range(0, len(body), size)]
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"".join(parts) + b"0\r\n\r\n"


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    # Nothing here is about limits of time: a busy machine may take long over 200 MiB.
    with running_bench(
        capacity=64, aliases={"public": "m1"}, timeouts={"first_token_s": 30}
    ) as bench:
        for stream in (True, False):
            ask(bench.gw.port, chat(model="m1", stream=stream))
        yield bench


@pytest.fixture
def bench(started: Bench) -> Bench:
    return renewed(started)


@pytest.mark.parametrize("size_mib", [0.9, 1.1, 6, 20, 63])
@pytest.mark.parametrize("framed", [with_length, in_chunks])
def test_a_body_up_to_the_limit_reaches_the_node_as_it_is(
    bench: Bench, size_mib: float, framed: Any
) -> None:
    body = body_of(size_mib)
    with PeakMemory(bench.gw) as memory:
        client = ask(bench.gw.port, framed(body), timeout_s=60)
        assert memory.grown <= ALONE * len(body) + 8 * MIB
    assert client.status == 200
    assert bench.node.requests[-1].body == body
    bench.wait_unloaded()


@pytest.mark.parametrize(
    "more",
    [{"stream": True}, {"stream": True, "stream_options": {}},
     {"stream": True, "stream_options": {"include_usage": False}}, {}],
    ids=["usage asked for it", "options without it", "usage refused", "in one piece"],
)  # fmt: skip
@pytest.mark.parametrize("model", ["m1", "public"])
def test_a_big_body_that_is_changed_on_its_way_takes_no_more(
    bench: Bench, model: str, more: dict[str, Any]
) -> None:
    body = body_of(20, model, **more)
    at = monotonic()
    with PeakMemory(bench.gw) as memory:
        client = ask(bench.gw.port, with_length(body), timeout_s=60)
        assert memory.grown <= ALONE * len(body) + 8 * MIB
    assert monotonic() - at < 10
    assert client.status == 200
    reached, sent = bench.node.requests[-1].json(), json.loads(body)
    assert reached["messages"] == sent["messages"]
    assert reached["model"] == "m1"
    bench.wait_unloaded()


@pytest.mark.parametrize(
    "content",
    ['\\"' * (4 * MIB), "\\n" * (4 * MIB), "é" * (4 * MIB), "[" * (8 * MIB), '\\"model\\":' * MIB],
    ids=["quotes", "line ends", "letters of two bytes", "brackets", "what looks like a member"],
)
@pytest.mark.parametrize("model", ["m1", "public"])
def test_big_text_of_any_kind_passes(bench: Bench, content: str, model: str) -> None:
    body = f'{{"x":"{content}","model":"{model}","messages":[]}}'.encode()
    with PeakMemory(bench.gw) as memory:
        client = ask(bench.gw.port, with_length(body), timeout_s=60)
        assert memory.grown <= ALONE * len(body) + 8 * MIB
    assert client.status == 200
    assert bench.node.requests[-1].body == body.replace(b'"public"', b'"m1"')
    bench.wait_unloaded()


@pytest.mark.parametrize("model", ["m1", "public"], ids=["unchanged", "changed"])
def test_twenty_big_bodies_at_once_take_three_times_their_bytes(bench: Bench, model: str) -> None:
    hashes: list[str] = []
    may_answer = threading.Event()

    async def script(request: Request, peer: Peer) -> None:
        body = request.body.replace(b'"model": "m1"', b'"model": "%b"' % model.encode(), 1)
        hashes.append(hashlib.sha256(body).hexdigest())
        while not may_answer.is_set():  # all are in flight at once
            await peer.sleep(0.01)
        await json_answer()(request, peer)

    bench.node.script = script
    bodies = [body_of(10, model, user=f"u{i}") for i in range(TOGETHER)]
    expected = sorted(hashlib.sha256(body).hexdigest() for body in bodies)
    with PeakMemory(bench.gw) as memory, ThreadPoolExecutor(TOGETHER) as pool:
        asked = [
            pool.submit(ask, bench.gw.port, with_length(body), timeout_s=90) for body in bodies
        ]
        wait_until(lambda: len(hashes) == TOGETHER, within_s=60, what="all have arrived")
        assert state.load(bench.valkey, "b1") == TOGETHER
        may_answer.set()
        assert [future.result().status for future in asked] == [200] * TOGETHER
        in_flight = sum(map(len, bodies))
        print(f"RSS +{memory.grown / MIB:.0f} MiB for {in_flight / MIB:.0f} MiB in flight")
        assert memory.grown <= TOGETHER_TIMES * in_flight
    assert sorted(hashes) == expected
    bench.wait_unloaded()


# Above the limit


def assert_refused(bench: Bench, client: RawClient) -> None:
    """413 in the OpenAI shape, and no node has heard of it."""
    assert client.status == 413
    assert client.headers[b"content-type"] == b"application/json"
    error = client.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
    assert str(LIMIT_MIB * MIB) in error["message"]
    assert client.headers[b"connection"] == b"close"
    assert not bench.node.requests
    assert state.unloaded(bench.valkey)


def told_while_sending(bench: Bench, request: bytes) -> RawClient:
    """The answer to a request whose sender goes on sending until it cannot."""
    client = RawClient(bench.gw.port, timeout_s=30)

    def send() -> None:
        try:
            client.send(request)
        except OSError:
            pass  # the gateway has closed: it does not read the rest

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    with client:
        client.read_all()
        thread.join(30)
    return client


def test_a_body_that_announces_more_than_the_limit_is_refused_unread(bench: Bench) -> None:
    for announced in (LIMIT_MIB * MIB + 1, 10**15):
        with RawClient(bench.gw.port) as client, PeakMemory(bench.gw) as memory:
            client.send(HEAD + b"content-length: %d\r\n\r\n" % announced + b'{"model":')
            client.read_all()  # it comes although hardly anything was sent
            assert memory.grown < 8 * MIB
        assert_refused(bench, client)


def test_who_asks_before_sending_is_refused_at_once(bench: Bench) -> None:
    with RawClient(bench.gw.port) as client:
        client.send(
            HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (LIMIT_MIB * MIB + 1)
        )
        client.read_all()
    assert_refused(bench, client)


def test_a_chunked_body_above_the_limit_is_refused_and_not_kept(bench: Bench) -> None:
    request = in_chunks(b'{"model":"m1","x":"' + b"x" * (2 * LIMIT_MIB * MIB), 1 * MIB)
    with PeakMemory(bench.gw) as memory:
        client = told_while_sending(bench, request)
        assert memory.grown <= 3 * LIMIT_MIB * MIB
    assert_refused(bench, client)


def test_the_limit_itself_is_allowed_and_one_byte_more_is_not(bench: Bench) -> None:
    start = b'{"model":"m1","x":"'
    body = start + b"x" * (LIMIT_MIB * MIB - len(start) - 2) + b'"}'
    assert len(body) == LIMIT_MIB * MIB
    for framed in (with_length, in_chunks):
        assert ask(bench.gw.port, framed(body), timeout_s=60).status == 200
    bench.wait_unloaded()
    bench.node.requests.clear()
    for framed in (with_length, in_chunks):
        assert_refused(bench, told_while_sending(bench, framed(body + b" ")))


def test_a_refusal_leaves_the_others_alone(bench: Bench) -> None:
    request = HEAD + b"content-length: %d\r\n\r\n" % (LIMIT_MIB * MIB + 1)
    with ThreadPoolExecutor(8) as pool:
        refused = [pool.submit(ask, bench.gw.port, request) for _ in range(20)]
        good = [pool.submit(ask, bench.gw.port, chat(model="m1", stream=False)) for _ in range(20)]
        assert {future.result().status for future in refused} == {413}
        assert {future.result().status for future in good} == {200}
    bench.wait_unloaded()
