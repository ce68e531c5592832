"""Choosing without Redis: the last picture, this replica's own leases, its share of the caps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.cluster.local import Local
from app.cluster.score import COLUMNS, Constants, Work
from app.config import Circuit, Scoring
from app.model import Ask, Node, Refusal

ASK = Ask("m", prompt_tokens=512, output_tokens=100)


def local(now: list[float] | None = None) -> Local:
    clock = now or [0.0]
    return Local(Circuit(), Scoring(), lambda: 0.0, lambda: clock[0])


def node(name: str, **fields: object) -> Node:
    return replace(Node(name, f"http://{name}", models=("m",), base=1.0), **fields)  # type: ignore[arg-type]


def learned(rate: float, tpot_ms: float = 20.0) -> tuple[float, ...]:
    """The row of an idle node that is known: tokens of work per ms, ms per token decoded."""
    known = Work(Constants())
    known.worked, known.waited_ms, known.best_rate = rate * 100, 100.0, rate
    known.decoded, known.decoding_ms, known.best_tpot = 10.0, tpot_ms * 10, tpot_ms
    return (0.0, 0.0, 0.0, *(getattr(known, name) for name in COLUMNS[3:]))


def picked(view: Local, nodes: list[Node], ask: Ask = ASK, replicas: int = 1) -> str:
    choice = view.pick(ask, nodes, replicas, ())
    assert isinstance(choice, Node)
    return choice.id


def test_own_leases_count_once_for_each_replica_and_until_they_end() -> None:
    view, nodes = local(), [node("a", base=2.0), node("b", base=1.5)]
    assert picked(view, nodes) == "a"
    view.leased("x", "a", 10)
    assert picked(view, nodes) == "b"
    view.leased("y", "b", 10)
    view.leased("z", "b", 10)
    assert picked(view, nodes) == "a"
    view.ended("x", "a")
    view.ended("y", "b")
    view.ended("z", "b")
    assert picked(view, nodes) == "a"


def test_a_capacity_is_divided_by_the_replicas() -> None:
    view, nodes = local(), [node("a", capacity=9)]
    for i in range(3):
        assert picked(view, nodes, replicas=3) == "a"
        view.leased(f"x{i}", "a", 10)
    assert view.pick(ASK, nodes, 3, ()) == Refusal("full", 1000)
    assert picked(view, nodes, replicas=2) == "a"


def test_a_streak_opens_the_circuit_here_and_a_good_answer_ends_it() -> None:
    now = [0.0]
    view, nodes = local(now), [node("a", base=2.0), node("b")]
    for _ in range(Circuit().failure_threshold):
        assert picked(view, nodes) == "a"
        view.failed("a")
    assert picked(view, nodes) == "b"
    now[0] = Circuit().open_s * 1.3
    assert picked(view, nodes) == "a"
    view.failed("a")  # still the same streak: at once, for longer
    assert picked(view, nodes) == "b"
    view.answered("a")
    assert picked(view, nodes) == "a"


# Policy work


def test_work_ranks_by_the_cost_of_the_very_request() -> None:
    """A fast prefill with a slow decode for the long prompt, the other for the long answer."""
    nodes = [node("reads", row=learned(20.0, 200.0)), node("writes", row=learned(5.0, 10.0))]
    assert picked(local(), nodes, Ask("m", 4000, output_tokens=1)) == "reads"
    assert picked(local(), nodes, Ask("m", 16, output_tokens=800)) == "writes"


@pytest.mark.parametrize("replicas", [1, 4])
def test_work_counts_what_waits_ahead_and_forgets_it_with_the_first_token(replicas: int) -> None:
    view = local()
    nodes = [node("a", row=learned(10.0)), node("b", row=learned(9.0))]
    assert picked(view, nodes, replicas=replicas) == "a"
    view.leased("x", "a", 4096)
    assert picked(view, nodes, replicas=replicas) == "b"
    view.heard("x")
    view.leased("y", "b", 512)
    assert picked(view, nodes, replicas=replicas) == "a"
    view.ended("x", "a")
    view.ended("y", "b")
    assert picked(view, nodes, replicas=replicas) == "a"


def test_work_says_what_score_py_says() -> None:
    """Two own leases of three replicas, one of them waiting: six in flight, three waiting."""
    view, row = local(), learned(10.0)
    view.leased("x", "a", 700)
    view.leased("y", "a", 300)
    view.heard("y")
    right = Work(Constants())
    right.load(row)
    right.inflight, right.waiting, right.queued = 6, 3, 2100.0
    at = max(right.sampled_at, right.ended_at)
    right.silent_since = at
    alone = view._score(node("a", row=row), ASK, 3)
    assert alone == pytest.approx(1000 / right.cost(at, 512, 100))


def test_a_silence_of_before_does_not_make_a_node_hung_now() -> None:
    known = list(learned(10.0))
    known[COLUMNS.index("waiting")] = 1
    known[COLUMNS.index("silent_since")] = -60_000.0
    nodes = [node("a", row=tuple(known)), node("b", row=learned(2.0))]
    view = local()
    view.leased("x", "a", 16)
    assert picked(view, nodes) == "a"
