"""G4: fail over away from the dead node, remember it, and move the lease."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import json_answer
from tests.support.servers import NO_TLS, Gateway, ValkeyServer, wait_until
from tests.support.stagednode import StagedNode

if TYPE_CHECKING:
    from collections.abc import Iterator

THRESHOLD = 3
ONE_BY_ONE = AT_ONCE = 50
SLOWER_S = 0.06  # than the node that is preferred
WEIGHTS = (16, 4, 1)
MODELS = ["one by one", "at once", "two are gone", "all are gone"]


@dataclass(frozen=True)
class Fleet:
    """Three nodes of one model behind one replica; the first is preferred, then the second."""

    model: str
    valkey: redis.Redis
    gateway: Gateway
    nodes: list[StagedNode]
    ids: list[str]

    def ask(self, _: int = 0) -> RawClient:
        """One request, answered."""
        return ask(self.gateway.port, chat(model=self.model, stream=False))

    def prefers_the_first(self) -> None:
        """All have been probed, and who comes goes to the first one."""
        wait_until(lambda: all(state.scores(self.valkey, self.model).values()), what="probed")
        scores = state.scores(self.valkey, self.model)
        assert sorted(self.ids, key=lambda i: -scores[i]) == self.ids
        assert self.ask().headers[b"x-leaseway-node"].decode() == self.ids[0]
        wait_until(lambda: state.unloaded(self.valkey), within_s=2, what="load = 0")

    def failed(self) -> list[int]:
        """Failed attempts on each node so far."""
        page = httpx.get(f"{self.gateway.url}/metrics", trust_env=False, verify=NO_TLS).text
        counts = Counter[str]()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = sample.labels
                if sample.name == "leaseway_attempts_total" and labels["outcome"] == "failed":
                    counts[labels["node"]] += int(sample.value)
        return [counts[node_id] for node_id in self.ids]


@contextlib.contextmanager
def leases_at_once(valkey: redis.Redis) -> Iterator[list[int]]:
    """How many leases there were, at every instant that was looked at."""
    seen: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            now = state.snapshot(valkey)
            seen.append(max(len(now.leases), sum(now.counters.values())))

    thread = threading.Thread(target=look, name="leases")
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join(5)


def fleet_of(stack: contextlib.ExitStack, model: str) -> list[StagedNode]:
    """Its nodes: a fast one and two that are not."""
    scripts = [json_answer(), json_answer(after_s=SLOWER_S), json_answer(after_s=SLOWER_S)]
    return [stack.enter_context(StagedNode(script, models=(model,))) for script in scripts]


def served(
    stack: contextlib.ExitStack, server: ValkeyServer, models: list[str], open_s: float
) -> list[Fleet]:
    """A fleet for each model; probes say nothing after the first: requests find out."""
    valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
    fleets = [fleet_of(stack, model) for model in models]
    settings = small_settings(
        [node for nodes in fleets for node in nodes],
        capacity=64,
        circuit={"failure_threshold": THRESHOLD, "open_s": open_s},
        health={"interval_s": 3600},
        scoring={"policy": "ttft", "idle_after_s": 3600},
    )
    for i, node in enumerate(settings["nodes"]):
        node["weight"] = WEIGHTS[i % 3]
    gw = stack.enter_context(Gateway(settings, server.url))
    return [
        Fleet(model, valkey, gw, nodes, [f"b{3 * i + n}" for n in (1, 2, 3)])
        for i, (model, nodes) in enumerate(zip(models, fleets, strict=True))
    ]


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[str, Fleet]]:
    """By model; circuits that have opened stay open."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        fleets = served(stack, server, MODELS, open_s=60)
        yield {fleet.model: fleet for fleet in fleets}
        wait_until(lambda: state.unloaded(fleets[0].valkey), within_s=2, what="load = 0")
        assert_ended_cleanly(fleets[0].gateway)


def test_three_requests_find_a_dead_node_and_none_after_them_makes_the_detour(
    fleets: dict[str, Fleet],
) -> None:
    fleet = fleets["one by one"]
    fleet.prefers_the_first()
    fleet.nodes[0].stop()
    with leases_at_once(fleet.valkey) as seen:
        answers = [fleet.ask() for _ in range(ONE_BY_ONE)]
    assert len(seen) > 10
    assert max(seen) == 1, "a request holds one lease at a time, also while it moves"
    assert {done.status for done in answers} == {200}
    attempts = [int(done.headers[b"x-leaseway-attempts"]) for done in answers]
    assert attempts == [2] * THRESHOLD + [1] * (ONE_BY_ONE - THRESHOLD)
    assert fleet.failed() == [THRESHOLD, 0, 0]

    with state.sampling(fleet.valkey) as loads, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(fleet.ask, range(AT_ONCE)))
    assert Counter(done.status for done in answers) == {200: AT_ONCE}
    assert {done.headers[b"x-leaseway-attempts"] for done in answers} == {b"1"}
    assert {done.headers[b"x-leaseway-node"].decode() for done in answers} == set(fleet.ids[1:])
    assert fleet.failed() == [THRESHOLD, 0, 0]
    assert loads.highest[fleet.ids[0]] == 0


def test_fifty_at_once_that_find_a_dead_node_each_try_it_once_and_hold_one_lease_each(
    fleets: dict[str, Fleet],
) -> None:
    fleet = fleets["at once"]
    fleet.prefers_the_first()
    fleet.nodes[0].stop()
    with leases_at_once(fleet.valkey) as seen, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(fleet.ask, range(AT_ONCE)))
    assert max(seen) <= AT_ONCE
    assert Counter(done.status for done in answers) == {200: AT_ONCE}
    attempts = Counter(int(done.headers[b"x-leaseway-attempts"]) for done in answers)
    assert set(attempts) <= {1, 2}
    assert attempts[2] >= THRESHOLD
    assert fleet.failed() == [attempts[2], 0, 0], "each detour is one attempt on the dead node"
    wait_until(lambda: state.unloaded(fleet.valkey), within_s=2, what="load = 0")
    assert state.record(fleet.valkey, fleet.ids[0])["circuit"] == "open"


def test_with_two_dead_nodes_a_request_tries_each_once_and_ends_on_the_third(
    fleets: dict[str, Fleet],
) -> None:
    fleet = fleets["two are gone"]
    fleet.prefers_the_first()
    for node in fleet.nodes[:2]:
        node.stop()
    with leases_at_once(fleet.valkey) as seen:
        answers = [fleet.ask() for _ in range(ONE_BY_ONE)]
    assert max(seen) == 1
    assert {done.status for done in answers} == {200}
    assert {done.headers[b"x-leaseway-node"].decode() for done in answers} == {fleet.ids[2]}
    attempts = [int(done.headers[b"x-leaseway-attempts"]) for done in answers]
    assert max(attempts) <= 3
    assert fleet.failed() == [THRESHOLD, THRESHOLD, 0]
    assert sum(attempts) == ONE_BY_ONE + 2 * THRESHOLD
    assert attempts[-1] == 1


def test_with_all_nodes_dead_every_node_is_tried_once_and_then_the_client_is_told(
    fleets: dict[str, Fleet],
) -> None:
    fleet = fleets["all are gone"]
    fleet.prefers_the_first()
    for node in fleet.nodes:
        node.stop()
    for n in range(1, THRESHOLD + 1):
        done = fleet.ask()
        assert done.status == 502
        assert done.json()["error"]["code"] == "connect"
        assert fleet.failed() == [n, n, n]
    done = fleet.ask()
    assert (done.status, done.json()["error"]["code"]) == (503, "no_node_available")
    assert int(done.headers[b"retry-after"]) >= 1
    assert fleet.failed() == [THRESHOLD] * 3
    wait_until(lambda: state.unloaded(fleet.valkey), within_s=2, what="load = 0")


def test_after_the_threshold_the_dead_node_gets_its_trials_and_nothing_else() -> None:
    open_s = 0.5
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        (fleet,) = served(stack, server, ["m"], open_s)
        fleet.prefers_the_first()
        fleet.nodes[0].stop()
        detours: list[float] = []
        until = monotonic() + 3
        while monotonic() < until:
            begun, done = monotonic(), fleet.ask()
            assert done.status == 200
            attempts = int(done.headers[b"x-leaseway-attempts"])
            assert attempts <= 2
            if attempts == 2:
                detours.append(begun)
        first, trials = detours[:THRESHOLD], detours[THRESHOLD:]
        assert first[-1] - first[0] < open_s, "the first three one after another"
        waits = [trial - before for before, trial in zip(detours[2:], trials, strict=False)]
        assert len(waits) == 2
        for wait_s, open_for_s in zip(waits, (open_s, 2 * open_s), strict=True):
            assert open_for_s - 0.1 < wait_s < 1.2 * open_for_s + 0.4
        assert fleet.failed() == [len(detours), 0, 0]
        wait_until(lambda: state.unloaded(fleet.valkey), within_s=2, what="load = 0")
        assert_ended_cleanly(fleet.gateway)
