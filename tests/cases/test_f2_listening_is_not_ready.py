"""F2: listening is not ready: a model that still loads, and a listener that is no engine at all.

The catalogue's 5 s of loading are a few probe intervals here.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import ask, chat
from tests.support.rawnode import (
    RawNode,
    Script,
    json_answer,
    raw_answer,
    reset_before_headers,
    sse_answer,
)
from tests.support.rawnode import events as answer_of
from tests.support.servers import Gateway, ValkeyServer, wait_until
from tests.support.stagednode import StagedNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, Request

INTERVAL_S = 0.5
# With floor and prior above every time that is measured here all usable nodes are equal: what
# is shown is who may be used, not who is fast.
EQUAL = {"policy": "ttft", "ttft_floor_ms": 10_000, "ttft_prior_ms": 10_000}
WELL = sse_answer(answer_of(2))
LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
HTML = [(b"content-type", b"text/html")]
WEB_PAGE = b"<!doctype html><html><body>It works!</body></html>"
ABSENT = json_answer(404, {"detail": "Not Found"})


def listed(model: str) -> Script:
    """The OpenAI model list."""
    return json_answer(body={"object": "list", "data": [{"id": model, "object": "model"}]})


@dataclass(frozen=True)
class Shape:
    """How an engine shows that it is loading, and later that it is ready; pages by path.

    No pages while it loads means that nothing listens yet. ``lists`` is what the list of models
    says while it loads, where it is not yet the whole one.
    """

    name: str
    engine: str
    loading: dict[str, Script] | None
    ready: dict[str, Script] = field(default_factory=dict)
    lists: Script | None = None
    discovered: bool = False


OK = json_answer(body={"status": "ok"})
EMPTY = json_answer(body=b"")
SHAPES = [
    # tools/server/README.md of llama.cpp: 503 on /health, the model is listed all the same
    Shape("llama.cpp", "llamacpp", {"/health": json_answer(503, LOADING)}, {"/health": OK}),
    Shape("llama.cpp, not named", "auto", {"/health": json_answer(503, LOADING)}, {"/health": OK}),
    # vLLM and SGLang listen when the weights are there; SGLang warms up with /health at 503
    Shape("vllm", "vllm", None, {"/health": EMPTY}),
    Shape("vllm, not named", "auto", None, {"/health": EMPTY}),
    Shape("sglang", "sglang", {"/health": json_answer(503, b"")}, {"/health": EMPTY}),
    Shape("tgi", "tgi", {"/health": json_answer(503, {"error": "unhealthy"})}, {"/health": EMPTY}),
    # an Ollama without models lists null
    Shape("ollama", "ollama", {"/api/tags": json_answer(body={"models": []})},
          {"/api/tags": json_answer(body={"models": [{"name": "x"}]})},
          lists=json_answer(body={"object": "list", "data": None})),
    Shape("ollama, not named", "auto", {"/api/tags": OK}, {"/api/tags": OK},
          lists=json_answer(body={"object": "list", "data": None})),
    Shape("no health page", "generic", {}, lists=json_answer(503, LOADING)),
    Shape("no health page, not named", "auto", {}, lists=json_answer(503, LOADING)),
    Shape("an empty list", "auto", {"/health": OK}, {"/health": OK}, discovered=True,
          lists=json_answer(body={"object": "list", "data": []})),
    Shape("a list that hangs", "vllm", {"/health": EMPTY}, {"/health": EMPTY},
          lists=json_answer(body={}, after_s=60)),
]  # fmt: skip


async def endless(request: Request, peer: Peer) -> None:
    """A page that never ends, and never falls silent either."""
    await peer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n" + WEB_PAGE)
    while True:
        await peer.write(b"<!-- -->\n")
        await peer.sleep(0.1)


offered: list[int] = []  # bytes of the huge page that were taken, one number a probe


async def huge(request: Request, peer: Peer) -> None:
    """As much as the reader takes."""
    offered.append(0)
    await peer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n[")
    while True:
        await peer.write(b"0," * 32_768)
        offered[-1] += 65_536


STRANGERS: dict[str, Script] = {
    "a web server": json_answer(200, WEB_PAGE, HTML),
    "a web page said to be JSON": json_answer(200, WEB_PAGE),
    "a page without end": endless,
    "more than anybody would read": huge,
    "another JSON": json_answer(200, {"status": "ok"}),
    "another list": json_answer(200, {"data": [{"name": "a"}, {"id": 7}, 3]}),
    "data that is no list": json_answer(200, {"data": "models"}),
    "JSON nested deeper than anybody would": json_answer(200, b"[" * 200_000),
    "no text": json_answer(200, b"\xff\xfe\x00"),
    "nothing": json_answer(200, b""),
    "a login": json_answer(302, b"", [(b"location", b"/login")]),
    "a closed door": json_answer(401, {"error": {"message": "no"}}),
    "no HTTP": raw_answer(b"220 mail.example ESMTP\r\n"),
}


class EveryPath(dict[str, Script]):
    """The same answer to whatever is asked."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def get(self, *_: Any) -> Any:
        """The one script."""
        return self._script


@dataclass(frozen=True)
class Bench:
    """One replica; a node for each shape and each stranger, with a model of its own; and one
    ready node that serves all of these models."""

    valkey: redis.Redis
    gateway: Gateway
    shaped: list[StagedNode]
    strangers: list[StagedNode]
    ready: RawNode

    @property
    def models(self) -> list[str]:
        """Of the shapes, then of the strangers; node ``b<n>`` serves ``m<n>``."""
        return [node.models[0] for node in self.shaped + self.strangers]

    def ask(self, model: str) -> None:
        """A request for this model: whatever its node is like, nobody sees an error."""
        done = ask(self.gateway.port, chat(model=model))
        assert (done.status, done.complete) == (200, True), (model, done.body)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        shaped, strangers = [], []
        for n, shape in enumerate(SHAPES, 1):
            pages = {"/v1/models": shape.lists or listed(f"m{n}"), **(shape.loading or {})}
            node = StagedNode(json_answer(503, LOADING), pages=pages, models=(f"m{n}",))
            shaped.append(stack.enter_context(node))
            if shape.loading is None:
                node.shut()
        for n, script in enumerate(STRANGERS.values(), len(SHAPES) + 1):
            node = StagedNode(json_answer(200, WEB_PAGE, HTML), pages=EveryPath(script),
                              models=(f"m{n}",))  # fmt: skip
            strangers.append(stack.enter_context(node))
        ready = RawNode(WELL, models=tuple(n.models[0] for n in shaped + strangers))
        stack.enter_context(ready)
        settings = small_settings([*shaped, *strangers, ready], scoring=EQUAL)
        for fields, shape in zip(settings["nodes"], SHAPES, strict=False):
            fields["engine"] = shape.engine
            if shape.discovered:
                fields["models"] = "discovered"
        gateway = stack.enter_context(Gateway(settings, server.url))
        yield Bench(valkey, gateway, shaped, strangers, ready)
        assert_ended_cleanly(gateway)


def test_no_request_reaches_a_node_before_it_is_ready_and_all_are_used_soon_after(
    bench: Bench,
) -> None:
    valkey = bench.valkey
    names = {f"b{n}": shape.name for n, shape in enumerate(SHAPES, 1)}
    names |= {f"b{n}": stranger for n, stranger in enumerate(STRANGERS, len(SHAPES) + 1)}
    nodes = dict(zip(names, bench.shaped + bench.strangers, strict=True))

    def usable() -> list[str]:
        return [
            names[node_id]
            for node_id, node in nodes.items()
            if state.scores(valkey, node.models[0]).get(node_id)
        ]

    until = time.monotonic() + 4 * INTERVAL_S
    while time.monotonic() < until:
        for model in bench.models:
            bench.ask(model)
        assert not usable()
    assert not [names[node_id] for node_id, node in nodes.items() if node.requests]
    for node_id in names:
        record = state.record(valkey, node_id)
        learned = record["circuit"], record["streak"], record["bad"]
        assert learned == ("closed", "0", "0.0000"), names[node_id]

    for node, shape in zip(bench.shaped, SHAPES, strict=True):
        node.script = WELL
        node.pages = {"/v1/models": listed(node.models[0]), **shape.ready}
        if shape.loading is None:
            node.listen()
    shapes = [shape.name for shape in SHAPES]
    wait_until(lambda: usable() == shapes, within_s=2 * INTERVAL_S + 0.5, what="all are usable")
    for node, shape in zip(bench.shaped, SHAPES, strict=True):
        for _ in range(100):  # equals are drawn by chance
            if not node.requests:
                bench.ask(node.models[0])
        assert node.requests, shape.name

    for node, model in zip(bench.strangers, bench.models[len(SHAPES) :], strict=True):
        bench.ask(model)
        assert node.asked
        assert not node.requests
    assert usable() == shapes
    assert max(offered) < 32 * 1024 * 1024, "nobody reads a page without end"


def test_a_good_node_whose_place_a_web_server_takes_is_out(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    pages = {"/health": EMPTY, "/v1/models": listed("m")}
    with StagedNode(WELL, pages=pages) as b1:
        gateway([b1, raw_node(WELL)], scoring=EQUAL)
        assert state.record(valkey, "b1")["health"] == "ok"
        b1.pages = EveryPath(json_answer(200, WEB_PAGE, HTML))
        wait_until(
            lambda: state.record(valkey, "b1")["health"] == "down",
            within_s=5 * INTERVAL_S,
            what="b1 is out",
        )


LOADING_WORDS = [
    "Loading model",
    "The model is loading",
    "Model demo/llama is currently loading",
    "model still loading, please retry",
]


def test_a_node_that_says_in_its_answers_that_it_loads_costs_no_client_an_error_and_stays_closed(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    """Its pages say ready, so requests do reach it: they go on to another node."""
    b1, b2 = raw_node(), raw_node(WELL)
    gw = gateway([b1, b2], scoring=EQUAL)
    for message in LOADING_WORDS:
        asked = len(b1.requests)
        b1.script = json_answer(503, {"error": {"message": message}})
        wait_until(
            lambda n=asked: ask(gw.port, chat()).status == 200 and len(b1.requests) > n,
            within_s=4,
            what=f"b1 was asked: {message}",
        )
        record = state.record(valkey, "b1")
        assert (record["circuit"], record["streak"]) == ("closed", "0"), message
        assert state.scores(valkey)["b1"] == 0, "it is left alone for a while"
    asked = len(b1.requests)
    b1.script = WELL
    wait_until(
        lambda: ask(gw.port, chat()).status == 200 and len(b1.requests) > asked,
        within_s=4 * INTERVAL_S,
        what="b1 is used",
    )


def test_a_node_that_broke_and_loads_again_is_used_soon_after_it_is_ready(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    """Its circuit is open meanwhile, and its time for a trial comes and goes while it loads."""
    pages = {"/health": OK, "/v1/models": listed("m")}
    with StagedNode(reset_before_headers(), pages=dict(pages)) as b1:
        gw = gateway([b1, raw_node(WELL)], scoring=EQUAL)

        def asked() -> bool:
            assert ask(gw.port, chat()).status == 200
            return state.record(valkey, "b1")["circuit"] == "open"

        wait_until(asked, what="its circuit opens")
        b1.pages = {**pages, "/health": json_answer(503, LOADING)}
        b1.script = json_answer(503, LOADING)
        wait_until(lambda: state.record(valkey, "b1")["health"] == "loading", what="it loads")
        opens, before = state.record(valkey, "b1")["opens"], len(b1.requests)
        due = valkey.zscore(state.KEYS.due("m"), "b1")
        wait_until(
            lambda: asked() and valkey.zscore(state.KEYS.due("m"), "b1") != due,
            what="its time has come, and it could not be tried",
        )
        assert len(b1.requests) == before
        assert state.record(valkey, "b1")["opens"] == opens, "the back-off does not grow"
        b1.script, b1.pages = WELL, pages
        wait_until(
            lambda: not asked() and len(b1.requests) > before,
            within_s=2 * INTERVAL_S + 0.5,
            what="it is used",
        )
        assert state.record(valkey, "b1")["circuit"] == "closed"
