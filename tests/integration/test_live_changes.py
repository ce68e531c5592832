"""Nodes come, drain and go through the admin API while requests run, and no request notices."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from app.cluster.edits import Edit
from tests.support import state
from tests.support.admin import entry, models, rows
from tests.support.fleet import Fleet, plain_http
from tests.support.rawnode import RawNode, events, sse_answer
from tests.support.redis_ha import load
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

    from tests.support.redis_ha import Load

FAIR = (1 / 6, 1 / 2)  # of three equal nodes, each within half and one and a half of a third


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RawNode]]:
    """Three equal nodes: first token after 50 ms, an answer after 250 ms."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawNode(sse_answer(events(3), gap_s=0.05))) for _ in range(3)]


@pytest.fixture(scope="module", params=["ttft", "work"])
def fleet(nodes: list[RawNode], request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Three replicas over the first two nodes."""
    listed = [entry("b1", nodes[0], capacity=100), entry("b2", nodes[1], capacity=100)]
    with Fleet(listed, scoring={"policy": request.param}) as started:
        yield started
        started.wait_settled()


@pytest.fixture
def admins(fleet: Fleet) -> Iterator[list[httpx.Client]]:
    """An operator at each replica."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(plain_http(url)) for url in fleet.urls]


class Shares:
    """Who gets how much of the load, by the nodes' own count."""

    def __init__(self, running: Load, nodes: list[RawNode]) -> None:
        self._running = running
        self._nodes = nodes

    def of_last(self, requests: int = 150) -> float:
        """The share of the last node in the next so many requests of the load."""
        before = [len(node.requests) for node in self._nodes]
        asked = len(self._running.asked)
        wait_until(
            lambda: len(self._running.asked) >= asked + requests, within_s=60, what="load goes on"
        )
        got = [len(node.requests) - n for node, n in zip(self._nodes, before, strict=True)]
        return got[-1] / sum(got)


def test_a_node_is_added_drained_and_removed_under_load_without_a_failed_request(
    fleet: Fleet, nodes: list[RawNode], admins: list[httpx.Client]
) -> None:
    first, second, third = admins
    new = nodes[2]
    ports = [replica.port for replica in fleet.replicas]
    told: dict[str, float] = {}
    with fleet.watched(), load(ports, hands=12, gap_s=0.01) as running:
        shares = Shares(running, nodes)
        told["before"] = shares.of_last(60)
        assert first.post("/admin/nodes", json=entry("x", new, capacity=100)).status_code == 201
        wait_until(lambda: len(new.requests) > 20, what="the new node works")
        told["added"] = shares.of_last()
        assert second.post("/admin/nodes/x/drain").status_code == 200
        wait_until(lambda: third.get("/admin/nodes/x/drain").json()["done"], what="drained")
        told["drained"] = shares.of_last(60)
        last = len(new.requests)
        assert third.post("/admin/nodes/x/enable").status_code == 200
        wait_until(lambda: len(new.requests) > last + 20, what="it works again")
        told["enabled"] = shares.of_last()
        assert first.delete("/admin/nodes/x").status_code == 200  # with its requests running
        wait_until(lambda: not fleet.redis.exists(state.KEYS.node("x")), what="its last has ended")
        told["removed"] = shares.of_last(60)
    print(running.figures(), {name: f"{share:.2f}" for name, share in told.items()})
    assert not running.bad, running.bad[:3]
    assert not any(one.degraded for one in running.asked)
    assert (told["before"], told["drained"], told["removed"]) == (0, 0, 0)
    for name in ("added", "enabled"):
        assert FAIR[0] < told[name] < FAIR[1], told
    fleet.wait_settled()
    for admin in admins:
        wait_until(lambda a=admin: set(rows(a)) == {"b1", "b2"}, what="as it was")


def test_a_weight_moves_load_at_once_and_no_request_fails(
    fleet: Fleet, nodes: list[RawNode], admins: list[httpx.Client], request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["fleet"] == "work":
        return  # which forgets the weight of a node that it has seen work
    ports = [replica.port for replica in fleet.replicas]
    with fleet.watched(), load(ports, hands=12, gap_s=0.01) as running:
        shares = Shares(running, nodes[:2])
        even = shares.of_last()
        assert admins[0].patch("/admin/nodes/b2", json={"weight": 5}).status_code == 200
        heavy = shares.of_last()
        assert admins[1].patch("/admin/nodes/b2", json={"weight": 1}).status_code == 200
    print(running.figures(), f"even {even:.2f}, five times the weight {heavy:.2f}")
    assert not running.bad, running.bad[:3]
    assert even + 0.1 < heavy


# Two at once


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that run beside each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def edit_of(fleet: Fleet, node_id: str) -> Edit:
    return Edit.parse(fleet.redis.hget(state.KEYS.edits, node_id))  # type: ignore[arg-type]


def test_of_many_who_add_or_remove_the_same_node_one_does(
    nodes: list[RawNode], admins: list[httpx.Client]
) -> None:
    def race(name: str) -> None:
        def add(admin: httpx.Client, weight: int) -> int:
            body = entry(name, nodes[2], models=[name], weight=weight)
            return admin.post("/admin/nodes", json=body).status_code

        def remove(admin: httpx.Client) -> int:
            return admin.delete(f"/admin/nodes/{name}").status_code

        added = at_once(*(partial(add, a, weight) for weight, a in enumerate(admins * 3, 1)))
        assert Counter(added) == {201: 1, 409: 8}
        assert rows(admins[0])[name]["weight"] == added.index(201) + 1
        assert Counter(at_once(*(partial(remove, a) for a in admins * 2))) == {200: 1, 404: 5}

    for turn in range(5):
        race(f"y{turn}")


def test_two_who_change_different_things_of_a_node_both_have_their_way(
    fleet: Fleet, admins: list[httpx.Client]
) -> None:
    def change(admin: httpx.Client, field: str, values: range) -> list[int]:
        return [admin.patch("/admin/nodes/b1", json={field: value}).status_code for value in values]

    asked = at_once(
        lambda: change(admins[0], "weight", range(2, 42)),
        lambda: change(admins[1], "capacity", range(101, 141)),
    )
    assert asked == [[200] * 40, [200] * 40]
    for admin in admins:
        row = rows(admin)["b1"]
        assert (row["weight"], row["capacity"]) == (41, 140)
    assert edit_of(fleet, "b1").fields == {"weight": "41.0", "capacity": "140"}


def test_after_a_storm_of_changes_redis_and_every_replica_agree(
    fleet: Fleet, nodes: list[RawNode], admins: list[httpx.Client]
) -> None:
    def storm(admin: httpx.Client, seed: int) -> set[int]:
        chance, seen = random.Random(seed), set()
        for _ in range(40):
            name = chance.choice(["s1", "s2"])
            path = f"/admin/nodes/{name}"
            method, target, body = chance.choice([
                ("POST", "/admin/nodes", entry(name, nodes[2], models=[name])),
                ("DELETE", path, None),
                ("PATCH", path, {"weight": chance.randint(1, 9)}),
                ("POST", f"{path}/drain", None),
                ("POST", f"{path}/enable", None),
            ])  # fmt: skip
            seen.add(admin.request(method, target, json=body).status_code)
        return seen

    seen = at_once(*(partial(storm, admin, seed) for seed, admin in enumerate(admins)))
    assert set.union(*seen) <= {200, 201, 404, 409}, seen
    # Whatever a replica had yet to finish, it has when it has looked twice at the last change.
    version = fleet.redis.incr(state.KEYS.changes)
    print(f"storm over at version {version}: {seen}")

    def agree() -> bool:
        wanted = {name for name in ("s1", "s2") if edit_of(fleet, name).kind == "added"}
        there = {n for n in ("s1", "s2") if fleet.redis.sismember(state.KEYS.nodes, n)}
        listed = [models(admin) & {"s1", "s2"} for admin in admins]
        return wanted == there and all(names == wanted for names in listed)

    wait_until(agree, what="all agree")
    for name, row in rows(admins[0]).items():
        edit = edit_of(fleet, name)
        if edit.kind == "added":
            assert float(edit.fields["weight"]) == row["weight"]
            assert (edit.state or "active") == row["state"]
            assert admins[0].delete(f"/admin/nodes/{name}").status_code == 200
