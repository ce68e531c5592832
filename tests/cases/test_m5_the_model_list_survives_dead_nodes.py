"""M5: /v1/models survives dead nodes, and asks none."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import RawNode
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

GETS = 20
# Which node serves what: well, refused (it was well before), silent after the handshake, deaf.
MODELS = {
    "well": ("shared", "only-well", "public/with/slash"),
    "refused": ("shared", "only-refused"),
    "silent": ("shared", "only-silent"),
    "deaf": ("shared", "only-deaf"),
}
LISTED = sorted({model for models in MODELS.values() for model in models} | {"alias"})


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: g\r\n\r\n".encode()


@contextlib.contextmanager
def _silent() -> Iterator[tuple[int, list[int]]]:
    """A port that takes connections and never answers; its list grows by one for each."""
    with RawNode() as node:
        taken: list[int] = []

        async def converse(sock: socket.socket, number: int) -> None:
            taken.append(number)
            with sock:
                await asyncio.sleep(3600)

        node._converse = converse  # type: ignore[method-assign]
        yield node.port, taken


@contextlib.contextmanager
def _deaf() -> Iterator[int]:
    """A port whose backlog is full: the kernel drops every further SYN."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port: int = listener.getsockname()[1]
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                filler.connect(("127.0.0.1", port))
        yield port


class Bench:
    """A replica over the four nodes, all probed for a while; ``ports`` by the nodes' names."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.server = stack.enter_context(ValkeyServer())
        self.valkey = stack.enter_context(redis.Redis(port=self.server.port, decode_responses=True))
        self.well = stack.enter_context(RawNode(models=MODELS["well"]))
        silent_port, self.taken = stack.enter_context(_silent())
        leaving = stack.enter_context(contextlib.ExitStack())
        ports = {
            "well": self.well.port,
            "refused": leaving.enter_context(RawNode(models=MODELS["refused"])).port,
            "silent": silent_port,
            "deaf": stack.enter_context(_deaf()),
        }
        settings: dict[str, Any] = small_settings([]) | {"aliases": {"alias": "only-refused"}}
        settings["nodes"] = [
            {"id": name, "url": f"http://127.0.0.1:{port}", "models": list(MODELS[name])}
            for name, port in ports.items()
        ]
        self.gw = stack.enter_context(Gateway(settings, self.server.url))
        wait_until(lambda: self._health("refused") == "ok", what="it is well")
        leaving.close()
        wait_until(lambda: self._health("refused") == "down", what="it is known to be down")
        for name in ("silent", "deaf"):
            wait_until(
                lambda n=name: int(state.record(self.valkey, n)["misses"]) >= 3, what="missed"
            )

    def _health(self, name: str) -> str:
        return state.record(self.valkey, name)["health"]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        yield bench
        assert_ended_cleanly(bench.gw)


def listed(client: RawClient) -> list[str]:
    """The names in a list that is as the OpenAI API has it."""
    assert client.status == 200
    assert client.headers[b"content-type"] == b"application/json"
    page = client.json()
    assert page["object"] == "list"
    for card in page["data"]:
        assert set(card) == {"id", "object", "created", "owned_by"}
        assert card["object"] == "model"
    return [card["id"] for card in page["data"]]


def test_the_list_is_the_union_without_duplicates_and_comes_at_once(bench: Bench) -> None:
    took = []
    for _ in range(GETS):
        at = monotonic()
        client = ask(bench.gw.port, _get("/v1/models"))
        took.append(monotonic() - at)
        # The documented rule: a model stays listed while a node is configured for it.
        assert sorted(listed(client)) == LISTED
    assert median(took) < 0.2, took


def test_each_model_is_found_by_its_name_whether_its_node_is_up_or_not(bench: Bench) -> None:
    for name in LISTED:
        client = ask(bench.gw.port, _get(f"/v1/models/{name}"))
        assert (client.status, client.json()["id"]) == (200, name)
    assert ask(bench.gw.port, _get("/v1/models/nobody")).status == 404
    assert ask(bench.gw.port, _get("/v1/models/only")).status == 404


def test_no_get_asks_a_node(bench: Bench) -> None:
    # More requests than the probes of that time could ever be.
    before = bench.well.probes, bench.well.connections, len(bench.taken)
    at = monotonic()
    gets = 200
    for i in range(gets):
        ask(bench.gw.port, _get("/v1/models" if i % 2 else "/v1/models/only-silent"))
    probes = 4 + 4 * (monotonic() - at) / 0.5
    after = bench.well.probes, bench.well.connections, len(bench.taken)
    for then, now in zip(before, after, strict=True):
        assert now - then < min(probes, gets / 2)
    assert not bench.well.requests


def test_a_dead_node_does_not_keep_its_model_from_a_node_that_is_well(bench: Bench) -> None:
    for _ in range(GETS):
        client = ask(bench.gw.port, chat(stream=False, model="shared"))
        assert (client.status, client.headers[b"x-leaseway-node"]) == (200, b"well")
    wait_until(lambda: state.unloaded(bench.valkey), within_s=2, what="load = 0")
    bench.well.requests.clear()


def test_a_model_whose_only_node_is_down_is_no_unknown_model(bench: Bench) -> None:
    client = ask(bench.gw.port, chat(stream=False, model="only-refused"))
    assert client.status in {502, 503}
    assert client.json()["error"]["code"] != "model_not_found"
    wait_until(lambda: state.unloaded(bench.valkey), within_s=2, what="load = 0")


def test_the_list_is_there_while_redis_is_frozen(bench: Bench) -> None:
    assert bench.server.process is not None
    bench.server.process.send_signal(signal.SIGSTOP)
    try:
        took = []
        for _ in range(GETS):
            at = monotonic()
            assert sorted(listed(ask(bench.gw.port, _get("/v1/models")))) == LISTED
            took.append(monotonic() - at)
        assert median(took) < 0.2, took
    finally:
        bench.server.process.send_signal(signal.SIGCONT)
    wait_until(bench.gw.ready, within_s=10, what="shared state is back")


def test_discovered_models_stay_when_their_node_dies(bench: Bench) -> None:
    with RawNode(models=("found-1", "found-2", "shared")) as node:
        settings: dict[str, Any] = small_settings([node])
        settings["nodes"][0]["models"] = "discovered"
        bench.valkey.flushall()
        with Gateway(settings, bench.server.url) as gw:
            wait_until(
                lambda: (
                    listed(ask(gw.port, _get("/v1/models"))) == ["found-1", "found-2", "shared"]
                ),
                what="the models are found",
            )
            node.probes_fail = True
            wait_until(
                lambda: state.record(bench.valkey, "b1")["health"] == "down", what="it is down"
            )
            for _ in range(GETS):
                names = listed(ask(gw.port, _get("/v1/models")))
                assert names == ["found-1", "found-2", "shared"]
            assert_ended_cleanly(gw)
