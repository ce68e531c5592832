"""G3: half-open lets through one, in the whole fleet, and late results do not extend it.

The catalogue's times are halved here: a circuit is open for 1 s, late failures come after 0.25 to
0.75 s, and the trial hangs for 1.5 s.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import ask, chat
from tests.support.rawnode import RawNode, close_without_answer, json_answer
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawclient import RawClient
    from tests.support.rawnode import Peer, Request

OPEN_S, HANG_S = 1.0, 1.5
LATE, AT_ONCE = 20, 100
ABOUT_S = 0.4  # how much later than its time the trial may come on a busy machine
WELL = json_answer()
# Room at each node of a model: for all that ask at once; for some of them; and one that has a
# single node.
ROOM = {"roomy": 250, "tight": LATE + 8, "late": 100, "alone": 100}


@dataclass(frozen=True)
class Model:
    """One model on a node that breaks, and on one that is not ready before a test says so."""

    name: str
    valkey: redis.Redis
    gateways: list[Gateway]
    broken: RawNode
    other: RawNode
    ids: tuple[str, str]

    def ask(self, i: int = 0) -> tuple[float, RawClient]:
        """A request through one of the replicas: how long it took, and its answer."""
        begun = monotonic()
        done = ask(self.gateways[i % 2].port, chat(model=self.name, stream=False))
        return monotonic() - begun, done

    @property
    def record(self) -> dict[str, str]:
        """Of the node that breaks."""
        return state.record(self.valkey, self.ids[0])

    @property
    def due(self) -> float | None:
        """When it may be tried."""
        return self.valkey.zscore(state.KEYS.due(self.name), self.ids[0])

    def breaks(self) -> float:
        """It fails until it trips: when that was."""
        while self.record["circuit"] == "closed":
            assert self.ask()[1].status in {500, 502}
            time.sleep(0.01)
        return monotonic()

    def with_late_failures(self, pool: ThreadPoolExecutor) -> list[object]:
        """Twenty requests are on it that will fail after a while; later ones fail at once."""
        taken = 0

        async def script(request: Request, peer: Peer) -> None:
            nonlocal taken
            taken += 1
            if taken <= LATE:
                await peer.sleep(0.25 + 0.5 * taken / LATE)
            await (json_answer(500) if taken % 2 else close_without_answer())(request, peer)

        self.broken.script = script
        late = [pool.submit(self.ask, i) for i in range(LATE)]
        wait_until(lambda: self.broken.open == LATE, what="twenty are in flight")
        return [*late]


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Model]]:
    """By name; all behind two replicas."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        nodes = [stack.enter_context(RawNode(models=(name,))) for name in ROOM for _ in range(2)]
        for other in nodes[1::2]:
            other.probes_fail = True
        settings = small_settings(nodes, circuit={"open_s": OPEN_S, "open_max_s": OPEN_S})
        for fields in settings["nodes"]:
            fields["capacity"] = ROOM[fields["models"][0]]
        gws = [stack.enter_context(Gateway(settings, server.url)) for _ in range(2)]
        yield {
            name: Model(
                name,
                valkey,
                gws,
                nodes[2 * i],
                nodes[2 * i + 1],
                (f"b{2 * i + 1}", f"b{2 * i + 2}"),
            )
            for i, name in enumerate(ROOM)
        }
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        for gw in gws:
            assert_ended_cleanly(gw)


async def hangs_then_fails(request: Request, peer: Peer) -> None:
    """The trial of the case."""
    await peer.sleep(HANG_S)
    await json_answer(500)(request, peer)


@pytest.mark.parametrize("room", ["roomy", "tight"])
def test_of_a_hundred_requests_one_is_the_trial_and_the_others_do_not_wait_for_it(
    models: dict[str, Model], room: str
) -> None:
    model = models[room]
    broken, other = model.broken, model.other
    with ThreadPoolExecutor(LATE + AT_ONCE) as pool:
        late = model.with_late_failures(pool)
        tripped = model.breaks()
        assert broken.open > 0, "they have yet to fail"
        other.probes_fail = False
        wait_until(
            lambda: state.scores(model.valkey, room)[model.ids[1]] > 0,
            within_s=OPEN_S - 0.1,
            what="the other node is up",
        )
        broken.script = hangs_then_fails
        time.sleep(max(0.0, tripped + OPEN_S + 0.025 - monotonic()))
        assert broken.open == 0, "they have failed meanwhile"
        assert len(late) == LATE
        asked = len(broken.requests)
        if room == "tight":
            other.script = json_answer(after_s=0.7)  # its places are taken for a while
        answers = list(pool.map(model.ask, range(AT_ONCE)))

    # One trial in all, and at about its time.
    (trial,) = broken.requests[asked:]
    assert OPEN_S - 0.05 < trial.at - tripped < OPEN_S + ABOUT_S
    assert model.record["opens"] == "2"
    # It was one of these; its client waited for it, and has got an answer all the same.
    statuses = Counter(done.status for _, done in answers)
    slow = [done for took, done in answers if took > HANG_S]
    assert len(slow) == 1
    assert slow[0].status in ({200} if room == "roomy" else {200, 500})
    # The others were answered by the other node, or refused at once.
    if room == "roomy":
        assert statuses == {200: AT_ONCE}
    else:
        assert statuses[200] + statuses[500] + statuses[429] == AT_ONCE
        assert statuses[200] >= ROOM[room] - 1
        assert statuses[429] > 0
    nodes = {done.headers[b"x-leaseway-node"] for _, done in answers if done.status == 200}
    assert nodes == {model.ids[1].encode()}


def test_failures_from_before_the_trip_do_not_move_the_trial(models: dict[str, Model]) -> None:
    model = models["late"]
    with ThreadPoolExecutor(LATE) as pool:
        model.with_late_failures(pool)
        tripped, due = model.breaks(), model.due
        assert due is not None
        while model.broken.open:
            assert (model.due, model.record["opens"]) == (due, "1")
            time.sleep(0.01)
        failed = monotonic()
    assert failed - tripped > 0.3
    model.broken.script = WELL
    asked = len(model.broken.requests)
    wait_until(
        lambda: [model.ask(i)[1].status for i in range(2)] == [200, 200],
        within_s=OPEN_S + 1,
        what="closed again, for both",
    )
    assert OPEN_S - 0.05 < model.broken.requests[asked].at - tripped < OPEN_S + ABOUT_S
    assert model.record["circuit"] == "closed"


def test_there_is_never_more_than_one_request_at_a_half_open_node_however_many_wait(
    models: dict[str, Model],
) -> None:
    """Eight clients of two replicas ask without a pause; the node fails each trial, slowly."""
    model = models["alone"]
    model.broken.script = json_answer(500)
    model.breaks()
    model.broken.script = json_answer(500, after_s=0.15)
    model.broken.max_open, until = 0, monotonic() + 3 * (1.2 * OPEN_S + 0.15)
    asked = len(model.broken.requests)

    def asks(i: int) -> set[int]:
        seen = set()
        while monotonic() < until:
            seen.add(model.ask(i)[1].status)
            time.sleep(0.01)
        return seen

    with ThreadPoolExecutor(8) as pool:
        statuses = set().union(*pool.map(asks, range(8)))
    assert statuses == {503, 500}
    assert model.broken.max_open == 1
    assert 2 <= len(model.broken.requests) - asked <= 4
