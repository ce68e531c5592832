"""F3: every ejection has a way back, with active probes and without.

The catalogue's open time of 2 s is 0.3 s here, so that ten rounds are short.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    Script,
    hang,
    json_answer,
    reset_before_headers,
    stream_forever,
)
from tests.support.servers import Gateway, ValkeyServer, wait_until
from tests.support.stagednode import StagedNode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cases.conftest import StartGateway

OPEN_S, CONNECT_S, FIRST_TOKEN_S, TTL_S = 0.3, 0.3, 0.7, 1.0
TRIAL_S = CONNECT_S + FIRST_TOKEN_S  # no trial is waited for longer
# Floor and prior above every time that is measured here: all usable nodes are equal.
SMALL: dict[str, Any] = {
    "scoring": {"policy": "ttft", "ttft_floor_ms": 10_000, "ttft_prior_ms": 10_000},
    "leases": {"ttl_s": TTL_S},
    "circuit": {"open_s": OPEN_S},
    "timeouts": {"connect_s": CONNECT_S, "first_token_s": FIRST_TOKEN_S},
}
WELL = json_answer()
BAD = json_answer(500)
NODES = 20  # at least as many as there are tests; each takes one
NO_ANSWER: dict[str, Script] = {"500": BAD, "reset": reset_before_headers(), "silence": hang()}
PROBES, NO_PROBES = 0.25, 3600  # interval, s
in_both = pytest.mark.parametrize(
    "places", [PROBES, NO_PROBES], ids=["probes", "no probes"], indirect=True
)


@dataclass(frozen=True)
class Place:
    """A node with a model of its own, behind one replica."""

    valkey: redis.Redis
    port: int
    node: StagedNode
    id: str

    @property
    def circuit(self) -> str:
        """As the fleet sees it."""
        return state.record(self.valkey, self.id)["circuit"]

    @property
    def request(self) -> bytes:
        """For its model, answered in one piece."""
        return chat(model=self.node.models[0], stream=False)

    def ask(self) -> int:
        """One request: the status."""
        return ask(self.port, self.request).status

    def break_down(self, script: Script = BAD) -> float:
        """Three requests fail, and the circuit opens: when that was."""
        self.node.script = script
        for _ in range(3):
            assert self.ask() in {500, 502, 504}
        wait_until(lambda: self.circuit == "open", within_s=1, what="the circuit opens")
        return monotonic()

    def comes_back(self, within_s: float) -> float:
        """Ask until the node answers again; when the request came that it answered.

        Nobody but a trial reaches it before, and one good answer is enough.
        """
        before = len(self.node.requests)
        wait_until(lambda: self.ask() == 200, within_s=within_s, what=f"{self.id} is tried again")
        wait_until(lambda: self.circuit == "closed", within_s=1, what="the circuit closes")
        assert len(self.node.requests) == before + 1
        assert [self.ask() for _ in range(5)] == [200] * 5
        return self.node.requests[before].at

    @contextlib.contextmanager
    def on_trial(self, request: bytes | None = None) -> Iterator[RawClient]:
        """A client whose request is the trial: it has reached the node."""
        before, until = len(self.node.requests), monotonic() + 3 * OPEN_S
        while monotonic() < until:
            with RawClient(self.port) as client:
                client.send(request or self.request)
                wait_until(
                    lambda c=client: len(self.node.requests) > before or _refused(c),
                    what="leased or refused",
                )
                if len(self.node.requests) > before:
                    yield client
                    return
        raise AssertionError("no trial")


def _refused(client: RawClient) -> bool:
    with contextlib.suppress(TimeoutError):
        client._socket.settimeout(0.01)
        client.read_head()
    return client.status == 503


@pytest.fixture(scope="module", params=[PROBES], ids=["probes"])
def places(request: pytest.FixtureRequest) -> Iterator[list[Place]]:
    """Nodes nobody has used before, behind one replica."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        models = [f"m{i}" for i in range(1, NODES)] + ["m1"]  # the first and the last are a pair
        nodes = [stack.enter_context(StagedNode(models=(model,))) for model in models]
        settings = small_settings([*nodes], health={"interval_s": request.param}, **SMALL)
        gateway = stack.enter_context(Gateway(settings, server.url))
        yield [Place(valkey, gateway.port, node, f"b{i}") for i, node in enumerate(nodes, 1)]
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        assert_ended_cleanly(gateway)


@pytest.fixture
def place(places: list[Place]) -> Place:
    """One of them."""
    return places.pop(1)


@in_both
@pytest.mark.parametrize("how", ["500", "reset"])
def test_a_node_that_failed_three_times_is_tried_after_its_open_time_and_one_good_answer_closes(
    place: Place, how: str
) -> None:
    tripped = place.break_down(NO_ANSWER[how])
    asked = len(place.node.requests)
    place.node.script = WELL
    while monotonic() < tripped + OPEN_S - 0.1:
        assert place.ask() == 503
    assert len(place.node.requests) == asked, "nobody is sent there while it is open"
    assert place.comes_back(tripped + OPEN_S + 1 - monotonic()) >= tripped + OPEN_S - 0.1


@pytest.mark.parametrize("places", [NO_PROBES], ids=["no probes"], indirect=True)
def test_a_node_that_breaks_and_recovers_ten_times_comes_back_each_time_as_soon(
    place: Place,
) -> None:
    for _ in range(10):
        tripped = place.break_down()
        place.node.script = WELL
        place.comes_back(tripped + OPEN_S + 1 - monotonic())


@in_both
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "in one piece"])
def test_a_trial_whose_client_leaves_frees_its_place_for_the_next_request(
    place: Place, stream: bool
) -> None:
    place.break_down(BAD)
    place.node.script = hang()
    with place.on_trial(chat(model=place.node.models[0], stream=stream)) as client:
        assert place.circuit == "half_open"
        assert place.ask() == 503, "one trial at a time"
        client.close()
    left = monotonic()
    place.node.script = WELL
    place.comes_back(within_s=1)
    assert monotonic() - left < TRIAL_S, "nobody waited for the trial's time to run out"
    assert state.record(place.valkey, place.id)["opens"] == "0"


def test_a_trial_whose_client_leaves_after_the_first_token_has_told_enough(place: Place) -> None:
    place.break_down(BAD)
    place.node.script = stream_forever(0.05)
    with place.on_trial(chat(model=place.node.models[0])) as client:
        client._socket.settimeout(5)
        client.read_events(3)
        wait_until(lambda: place.circuit == "closed", within_s=1, what="it closes")
        client.reset()
    place.node.script = WELL
    assert [place.ask() for _ in range(5)] == [200] * 5


def test_a_trial_that_is_answered_with_429_waits_as_told_and_comes_back(place: Place) -> None:
    place.break_down(BAD)
    place.node.script = json_answer(429, headers=[(b"retry-after", b"1")])
    wait_until(lambda: place.ask() == 429, within_s=OPEN_S + 1, what="the trial")
    answered, asked = monotonic(), len(place.node.requests)
    place.node.script = WELL
    wait_until(lambda: place.circuit == "open", within_s=1, what="not half open any more")
    while monotonic() < answered + 0.8:
        assert place.ask() == 503
    assert len(place.node.requests) == asked
    place.comes_back(answered + 1 + 1 - monotonic())


def test_a_trial_that_is_the_clients_own_mistake_frees_its_place_at_once(place: Place) -> None:
    place.break_down(BAD)
    place.node.script = json_answer(400, {"error": {"message": "too long"}})
    wait_until(lambda: place.ask() == 400, within_s=OPEN_S + 1, what="the trial")
    assert place.ask() == 400, "the next one is a trial as well"
    place.node.script = WELL
    place.comes_back(within_s=1)


@pytest.mark.parametrize("how", ["500", "silence"])
def test_a_trial_that_fails_doubles_the_time_and_is_never_half_open_for_longer_than_a_trial(
    place: Place, how: str
) -> None:
    place.break_down(BAD)
    place.node.script = NO_ANSWER[how]
    with place.on_trial():
        began = monotonic()
        wait_until(lambda: place.circuit == "open", within_s=TRIAL_S + 1, what="the trial is over")
        failed = monotonic()
    assert failed - began < TRIAL_S + 0.5
    place.node.script = WELL
    while monotonic() < failed + 2 * OPEN_S - 0.2:
        assert place.ask() == 503
    place.comes_back(failed + 1.2 * 2 * OPEN_S + 1 - monotonic())


def test_a_node_that_is_gone_for_both_probes_and_requests_comes_back_for_both(
    place: Place,
) -> None:
    place.node.shut()
    place.break_down(BAD)
    until = monotonic() + 1.5
    while monotonic() < until:
        assert place.ask() in {502, 503}
        time.sleep(0.02)
    assert state.record(place.valkey, place.id)["health"] == "down"
    opens = int(state.record(place.valkey, place.id)["opens"])
    place.node.script = WELL
    place.node.listen()
    place.comes_back(OPEN_S * 1.2 * 2 ** (opens - 1) + 1)


def test_the_trial_of_a_replica_that_is_frozen_or_killed_is_free_once_its_leases_are(
    valkey: redis.Redis, gateway: StartGateway
) -> None:
    with StagedNode() as node:
        sections = {**SMALL, "timeouts": {"connect_s": CONNECT_S, "first_token_s": 20}}
        victim, gw = (gateway([node], **sections) for _ in range(2))
        through_victim, through_other = (
            Place(valkey, replica.port, node, "b1") for replica in (victim, gw)
        )
        for how in (signal.SIGSTOP, signal.SIGKILL):
            through_victim.break_down()
            node.script = hang()
            with through_victim.on_trial(chat()):
                assert through_other.circuit == "half_open"
                victim.kill() if how == signal.SIGKILL else victim.signal(how)
                ended = monotonic()
                node.script = WELL
                trial = through_other.comes_back(within_s=TTL_S + 2)
                assert trial - ended < TTL_S + 1.5
                if how == signal.SIGSTOP:
                    victim.signal(signal.SIGCONT)
            # What the first trial comes to in the end changes nothing.
            wait_until(lambda: state.unloaded(valkey), within_s=TTL_S + 2, what="load = 0")
            assert [through_other.ask() for _ in range(5)] == [200] * 5
            if how == signal.SIGSTOP:
                wait_until(victim.ready, within_s=5, what="it is back")


def test_where_another_node_answers_nobody_notices(places: list[Place]) -> None:
    """Of two equals one breaks: it is left out, tried by one request, and used again."""
    broken, other = places[0], places[-1]
    assert broken.node.models == other.node.models

    def all_well_until(done: Callable[[], bool], within_s: float) -> None:
        def asked() -> bool:
            assert broken.ask() == 200
            return done()

        wait_until(asked, within_s=within_s, what="done")

    for _ in range(3):
        broken.node.script = BAD
        all_well_until(lambda: broken.circuit == "open", 5)
        asked = len(broken.node.requests)
        broken.node.script = WELL
        all_well_until(lambda: broken.circuit == "closed", OPEN_S + 1)
        all_well_until(lambda n=asked: len(broken.node.requests) > n + 3, 5)  # type: ignore[misc]
