"""What was changed by hand holds: through a loss of Redis, a restart, a new settings file."""

from __future__ import annotations

import contextlib
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from app.cluster.edits import Edit, fields_of
from app.config import NodeSettings
from tests.lua.pool import Pool
from tests.support import state
from tests.support.admin import add, entry, error_of, models, operations, rows
from tests.support.fleet import Fleet, plain_http
from tests.support.rawclient import ask, chat
from tests.support.rawnode import RawNode
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def fleet_over(listed: list[dict[str, Any]]) -> Iterator[Fleet]:
    """Two replicas, whose nodes are those ``listed``."""
    with Fleet(listed, replicas=2, leases={"ttl_s": 1.5}, retries={"max_attempts": 1}) as started:
        yield started


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RawNode]]:
    """Two nodes of the settings file, and one to add."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawNode()) for _ in range(3)]


@pytest.fixture
def spare(nodes: list[RawNode]) -> RawNode:
    """The node to add."""
    return nodes[2]


def serves(fleet: Fleet, model: str) -> None:
    """Wait until both replicas serve a model."""
    for replica in fleet.replicas:
        port = replica.port
        wait_until(
            lambda p=port: ask(p, chat(stream=False, model=model)).status == 200,
            what=f"{model} is served",
        )


def test_without_redis_every_call_says_so_and_nothing_is_changed_by_halves(
    nodes: list[RawNode], spare: RawNode
) -> None:
    with (
        fleet_over([entry("b1", nodes[0])]) as fleet,
        plain_http(fleet.urls[0]) as http,
    ):
        assert http.patch("/admin/nodes/b1", json={"weight": 3}).status_code == 200
        calls = operations(http)
        fleet.valkey.kill()
        for method, path in calls:
            body = {"state": "open"} if "circuit" in path else {"weight": 5}
            if path == "/admin/nodes":
                body = entry("x", spare)
            answer = http.request(method, path, json=body if method != "GET" else None)
            if path == "/admin/config":
                assert answer.status_code == 200
                continue
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (503, "state_unavailable"), (method, path)
            assert answer.headers["retry-after"] == "1"
        fleet.valkey.start()  # empty

        def back() -> bool:
            answer = http.get("/admin/nodes")
            return answer.is_success and [row["id"] for row in answer.json()] == ["b1"]

        wait_until(back, what="Redis is back and filled")
        row = http.get("/admin/nodes/b1").json()
        assert (row["weight"], row["state"], row["circuit"]) == (3, "active", "closed")
        assert row["edited"] == ["weight"]


def test_what_was_changed_by_hand_comes_back_after_a_flush_and_what_was_removed_stays_away(
    nodes: list[RawNode], spare: RawNode
) -> None:
    b1, b2, _ = nodes
    listed = [entry("b1", b1), entry("b2", b2), entry("b3", b2)]
    with (
        fleet_over(listed) as fleet,
        plain_http(fleet.urls[0]) as first,
        plain_http(fleet.urls[1]) as second,
    ):
        add(first, spare, "kept", weight=7)
        add(first, spare, "gone")
        assert first.patch("/admin/nodes/b1", json={"capacity": 3}).is_success
        assert second.post("/admin/nodes/b2/drain").is_success
        assert second.delete("/admin/nodes/b3").is_success
        for http in (first, second):
            wait_until(lambda h=http: "kept" in models(h), what="the picture follows")
        fleet.replicas[0].signal(signal.SIGSTOP)  # its picture still has the node
        assert second.delete("/admin/nodes/gone").is_success
        fleet.replicas[1].signal(signal.SIGSTOP)  # the one that knows better
        fleet.redis.flushall()
        fleet.replicas[0].signal(signal.SIGCONT)
        wait_until(
            lambda: fleet.redis.sismember(state.KEYS.nodes, "gone"), what="back, by an old picture"
        )
        fleet.replicas[1].signal(signal.SIGCONT)

        wait_until(lambda: set(rows(second)) == {"b1", "b2", "kept"}, what="put back")
        beats = {name: fleet.redis.zscore(state.KEYS.replicas, name) or 0 for name in ("r0", "r1")}

        def beaten(times: int) -> bool:
            now = {n: fleet.redis.zscore(state.KEYS.replicas, n) or 0 for n in beats}
            return all(now[n] >= beats[n] + times * 500 for n in beats)

        wait_until(lambda: beaten(3), what="both have looked again, more than once")
        after = rows(second)
        assert set(after) == {"b1", "b2", "kept"}
        assert (after["b1"]["capacity"], after["b1"]["source"]) == (3, "config")
        assert after["b2"]["state"] == "draining"
        assert (after["kept"]["weight"], after["kept"]["source"]) == (7, "admin")
        serves(fleet, "kept")


def test_a_node_that_is_added_right_after_a_flush_does_not_hide_what_was_lost(
    nodes: list[RawNode], spare: RawNode
) -> None:
    listed = [entry("b1", nodes[0]), entry("b2", nodes[1])]
    with fleet_over(listed) as fleet, plain_http(fleet.urls[0]) as http:
        for replica in fleet.replicas:
            replica.signal(signal.SIGSTOP)
        fleet.redis.flushall()
        pool = Pool(fleet.redis)  # an operator at the command line
        pool.now = ""
        wanted = NodeSettings(**entry("x", spare, models=["x"])).node()
        pool.edit("x", Edit(kind="added", fields=fields_of(wanted)).text)
        pool.register("x", ["x"], url=wanted.url, source="admin")
        for replica in fleet.replicas:
            replica.signal(signal.SIGCONT)
        wait_until(lambda: set(rows(http)) == {"b1", "b2", "x"}, what="all are there")
        serves(fleet, "m")


def test_what_was_changed_by_hand_outlives_a_restart_of_all_replicas(
    nodes: list[RawNode], spare: RawNode
) -> None:
    with fleet_over([entry("b1", nodes[0]), entry("b2", nodes[1])]) as fleet:
        with plain_http(fleet.urls[0]) as http:
            add(http, spare, "kept")
            assert http.patch("/admin/nodes/b1", json={"weight": 5}).is_success
            assert http.post("/admin/nodes/b1/disable").is_success
            assert http.delete("/admin/nodes/b2").is_success
        for replica in fleet.replicas:
            replica.stop()
        for replica in fleet.replicas:
            replica.start()
        with plain_http(fleet.urls[1]) as http:
            now = rows(http)
            assert set(now) == {"b1", "kept"}
            assert (now["b1"]["weight"], now["b1"]["state"]) == (5, "disabled")
            assert models(http) == {"m", "kept"}


def test_an_edit_holds_until_the_file_says_something_else_of_the_same_field(
    nodes: list[RawNode], spare: RawNode
) -> None:
    listed = [entry("b1", nodes[0]), entry("b2", nodes[1])]
    with fleet_over(listed) as fleet, plain_http(fleet.urls[0]) as http:

        def edit_file(*entries: dict[str, Any]) -> None:
            for replica in fleet.replicas:
                said = replica.log.count("leaseway.reload: nodes: ")
                settings = yaml.safe_load(replica.file.read_text()) | {"nodes": list(entries)}
                beside = replica.file.with_suffix(".new")
                beside.write_text(yaml.safe_dump(json.loads(json.dumps(settings))))
                beside.replace(replica.file)
                wait_until(
                    lambda r=replica, n=said: r.log.count("leaseway.reload: nodes: ") > n,
                    what="taken over",
                )

        def row(node_id: str) -> dict[str, Any]:
            found: dict[str, Any] = rows(http).get(node_id, {})
            return found

        assert http.patch("/admin/nodes/b1", json={"weight": 5, "capacity": 6}).is_success
        assert http.post("/admin/nodes/b1/drain").is_success
        assert http.delete("/admin/nodes/b2").is_success
        # Of one field: the other stays set by hand, and so does the admin state.
        edit_file(listed[0] | {"capacity": 9}, listed[1])
        wait_until(lambda: row("b1")["capacity"] == 9, what="the file counts")
        assert (row("b1")["weight"], row("b1")["state"]) == (5, "draining")
        wait_until(lambda: row("b1")["edited"] == ["state", "weight"], what="and it is told")
        assert row("b2") == {}
        # A value that was overruled does not come back with the file's old one.
        edit_file(listed[0] | {"capacity": 8}, listed[1] | {"weight": 2})
        wait_until(lambda: row("b1")["capacity"] == 8, what="the file counts")
        # The entry of the node that was taken out has changed: it is back.
        wait_until(lambda: row("b2").get("weight") == 2, what="it is back")
        # A node that was added by hand comes into the file, which has its way from then on.
        assert http.post("/admin/nodes", json=entry("x", spare, weight=3)).is_success
        edit_file(listed[0], listed[1], entry("x", spare, weight=4))
        wait_until(lambda: row("x")["weight"] == 4, what="the file's weight")
        wait_until(lambda: (row("x")["source"], row("x")["edited"]) == ("config", ["state"])
                   or row("x")["edited"] == [], what="the file's node")  # fmt: skip
        edit_file(listed[0])
        wait_until(lambda: row("x") == row("b2") == {}, what="out of the file, and gone")
        assert row("b1")["state"] == "draining"


def test_a_node_of_the_file_that_was_taken_out_can_be_added_again_with_other_values(
    nodes: list[RawNode],
) -> None:
    b1, b2, _ = nodes
    with fleet_over([entry("b1", b1), entry("b2", b2)]) as fleet, plain_http(fleet.urls[0]) as http:
        assert http.delete("/admin/nodes/b1").is_success
        again = http.post("/admin/nodes", json=entry("b1", b1, weight=9))
        assert (again.status_code, again.json()["source"]) == (201, "config")
        fleet.replicas[1].stop()
        fleet.replicas[1].start()  # reads the file, which says 1
        assert http.get("/admin/nodes/b1").json()["weight"] == 9


def test_what_its_writer_did_not_finish_any_replica_finishes(
    nodes: list[RawNode], spare: RawNode
) -> None:
    """An edit is written down first; then its writer may die, or lose Redis."""
    with fleet_over([entry("b1", nodes[0])]) as fleet, plain_http(fleet.urls[0]) as http:
        pool = Pool(fleet.redis)
        pool.now = ""
        wanted = NodeSettings(**entry("x", spare, models=["x"])).node()
        said, version = pool.edit("x", Edit(kind="added", fields=fields_of(wanted)).text)
        assert said == "done"
        wait_until(lambda: http.get("/admin/nodes/x").status_code == 200, what="added")
        serves(fleet, "x")
        assert pool.edit("x", Edit(kind="removed").text, seen=version)[0] == "done"
        wait_until(lambda: http.get("/admin/nodes/x").status_code == 404, what="taken out")
        # Back from an older picture after a loss: the edit is there, its value is not.
        assert http.patch("/admin/nodes/b1", json={"weight": 4}).is_success
        fleet.redis.hset(state.KEYS.node("b1"), "weight", "1")
        fleet.redis.incr(state.KEYS.changes)
        wait_until(lambda: http.get("/admin/nodes/b1").json()["weight"] == 4, what="mended")
