"""The commands on a running cluster, and on one whose replicas have all been killed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import statistics
import subprocess
import sys
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import state
from tests.support.admin import entry, rows
from tests.support.fleet import Fleet, plain_http
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import RawNode, events, sse_answer, stream_forever
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RawNode]]:
    """Two nodes of the settings file, and one to add."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawNode(sse_answer(events(3), gap_s=0.02))) for _ in range(3)]


@pytest.fixture(scope="module")
def fleet(nodes: list[RawNode]) -> Iterator[Fleet]:
    """Two replicas."""
    listed = [entry("b1", nodes[0], weight=2), entry("b2", nodes[1])]
    with Fleet(listed, replicas=2, leases={"ttl_s": 1}) as started:
        yield started
        started.wait_settled()


def runner(fleet: Fleet) -> Run:
    """``runner(fleet)("drain", "b1")``: a command on the Redis of the cluster."""
    environment = {**os.environ, "REDIS_URL": fleet.valkey.url, "COLUMNS": "180"}

    def go(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "app.cli", *args],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return go


@pytest.fixture
def run(fleet: Fleet) -> Run:
    """Commands on the cluster of the module."""
    return runner(fleet)


def printed(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON that a command printed; nothing else and no complaint."""
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def streams(fleet: Fleet, count: int) -> None:
    """Answered streams, that leave samples."""
    for number in range(count):
        assert ask(fleet.replicas[number % 2].port, chat()).status == 200
    fleet.wait_settled()


def window_ms(fleet: Fleet, node: str) -> list[float]:
    """TTFT samples, oldest first."""
    texts = fleet.redis.lrange(state.KEYS.ttft(node), 0, -1)
    return [int(str(text).split(":")[0]) / 1000 for text in reversed(texts)]


def test_nodes_scores_and_replicas_tell_what_redis_holds(fleet: Fleet, run: Run) -> None:
    with plain_http(fleet.urls[0]) as http:
        shown = {row["id"]: row for row in printed(run("nodes", "--json"))}
        told = rows(http)
        for node_id, row in told.items():
            steady = row.keys() - {"ttft_ms", "scores", "samples"}
            assert {name: shown[node_id][name] for name in steady} == {
                name: row[name] for name in steady
            }
    ranked = [(row["node"], row["score"]) for row in printed(run("scores", "--json"))]
    assert {node for node, _ in ranked} == {"b1", "b2"}
    assert ranked == sorted(ranked, key=lambda pair: pair[1], reverse=True)
    living = printed(run("replicas", "--json"))
    assert [(row["replica"], row["leases"], row["expires_in_s"] > 0) for row in living] == [
        ("r0", 0, True),
        ("r1", 0, True),
    ]


def test_leases_are_listed_oldest_first_with_nothing_of_their_content(
    fleet: Fleet, nodes: list[RawNode], run: Run
) -> None:
    answers = [node.script for node in nodes]
    for node in nodes:
        node.script = stream_forever(0.05)
    with contextlib.ExitStack() as stack:
        for replica in fleet.replicas:
            held = stack.enter_context(RawClient(replica.port))
            held.send(chat()).read_events(2)
        page = printed(run("leases", "--json"))
        assert page["total"] == 2
        assert {row["lease"] for row in page["leases"]} == {
            lease.id for lease in state.leases(fleet.redis)
        }
        first = page["leases"][0]
        assert first["replica"] == "r0"  # asked first
        table = run("leases", "--limit", "1")
        assert first["lease"] in table.stdout
        assert "1 more" in table.stdout
        assert printed(run("leases", "--node", "none", "--json")) == {"total": 0, "leases": []}
    for node, script in zip(nodes, answers, strict=True):
        node.script = script
    fleet.wait_settled()


def test_a_node_is_added_changed_drained_and_removed(
    fleet: Fleet, nodes: list[RawNode], run: Run
) -> None:
    spare = nodes[2]
    added = printed(run("add", "x", spare.url, "--model", "x", "--model", "y", "--weight", "3",
                        "--json"))  # fmt: skip
    assert (added["id"], added["models"], added["weight"]) == ("x", ["x", "y"], 3)
    for replica in fleet.replicas:
        port = replica.port
        wait_until(lambda p=port: ask(p, chat(model="y")).status == 200, what="it serves")
    more = ("--slots", "4", "--kv-tokens", "9000", "--engine", "vllm")
    assert printed(run("change", "x", "--capacity", "5", *more, "--json"))["capacity"] == 5
    record = state.record(fleet.redis, "x")
    assert [record[n] for n in ("capacity", "slots", "kv_tokens", "engine")] == [
        "5", "4", "9000", "vllm",
    ]  # fmt: skip
    script, spare.script = spare.script, stream_forever(0.05)
    with RawClient(fleet.replicas[0].port) as held:
        held.send(chat(model="x")).read_events(2)
        draining = run("drain", "x")
        assert (draining.returncode, draining.stdout) == (
            0, "x draining, 1 requests still run on it\n",
        )  # fmt: skip
        assert ask(fleet.replicas[1].port, chat(model="x")).status == 503
        assert run("drain", "x", "--wait", "0.01").returncode == 1
    spare.script = script
    assert run("drain", "x", "--wait", "30").returncode == 0
    assert run("enable", "x").stdout == "x enabled\n"
    assert ask(fleet.replicas[1].port, chat(model="x")).status == 200
    fleet.wait_settled()
    assert run("disable", "x").stdout == "x disabled\n"
    assert state.record(fleet.redis, "x")["state"] == "disabled"
    assert printed(run("remove", "x", "--json")) == {"id": "x", "leases": 0}
    assert not fleet.redis.exists(state.KEYS.node("x"))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["drain", "none"], "there is no node 'none'"),
        (["enable", "none"], "there is no node 'none'"),
        (["remove", "none"], "there is no node 'none'"),
        (["change", "none", "--weight", "2"], "there is no node 'none'"),
        (["change", "b1"], "change wants at least one of the options"),
        (["change", "b1", "--weight", "0"], "weight = 0.0: "),
        (["add", "b1", "http://h:1"], "there is a node 'b1' already"),
        (["add", "y", "ftp://h"], "url = 'ftp://h': right is http://host:port"),
        (["add", "a b", "http://h:1"], "id = 'a b': "),
        (["add", "y", "http://h:1", "--engine", "magic"], "engine = 'magic': "),
        (["add", "y", "http://h:1", "--pool", "east"], "pool = 'east': there are default"),
    ],
)
def test_what_cannot_be_is_one_line(fleet: Fleet, run: Run, command: list[str], says: str) -> None:
    before = fleet.redis.get(state.KEYS.changes)
    done = run(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"leaseway: {says}")
    assert done.stderr.count("\n") == 1
    assert fleet.redis.get(state.KEYS.changes) == before


# top


def test_one_frame_of_top_tells_what_redis_holds(
    fleet: Fleet, nodes: list[RawNode], run: Run
) -> None:
    streams(fleet, 20)
    for node in nodes[:2]:
        node.script = stream_forever(0.05)
    with RawClient(fleet.replicas[1].port) as held:
        held.send(chat()).read_events(3)
        (lease,) = state.leases(fleet.redis)
        frame = run("top", "--once")
        (pool,) = printed(run("top", "--once", "--json"))
    for node in nodes[:2]:
        node.script = sse_answer(events(3), gap_s=0.02)
    assert frame.returncode == 0
    lines = frame.stdout.splitlines()
    assert "pool default" in lines[0]
    assert "2 nodes" in lines[0]
    assert "1/16 in flight" in lines[0]
    assert "r0 (0)" in lines[0]
    assert "r1 (1)" in lines[0]
    shares = []
    for row in pool["nodes"]:
        window = window_ms(fleet, row["id"])
        assert row["ttft_recent_ms"] == pytest.approx(window)
        (line,) = [line for line in lines if line.startswith(row["id"])]
        assert f" {int(row['id'] == lease.node)}/8" in line
        assert " ok " in line
        if window:
            assert row["ttft_p50_ms"] in (
                statistics.median_low(window), statistics.median_high(window),
            )  # fmt: skip
            assert row["ttft_p99_ms"] == max(window)
            curve = re.search(f"[▁▂▃▄▅▆▇█]{{{min(20, len(window))}}}(?= )", line)
            assert curve, line
            assert "█" in curve[0] or max(window[-20:]) < max(window)
            shares.append(row["share"])
    assert sum(shares) == pytest.approx(1)


def test_top_shows_what_keeps_requests_away(fleet: Fleet, run: Run) -> None:
    with plain_http(fleet.urls[0]) as http:
        assert http.post("/admin/nodes/b1/circuit", json={"state": "open"}).is_success
        assert http.post("/admin/nodes/b2/drain").is_success
        lines = run("top", "--once").stdout.splitlines()
        (b1,) = [line for line in lines if line.startswith("b1")]
        (b2,) = [line for line in lines if line.startswith("b2")]
        assert " open " in b1
        assert " draining " in b2
        assert http.post("/admin/nodes/b1/circuit", json={"state": "closed"}).is_success
        assert http.post("/admin/nodes/b2/enable").is_success


def test_top_runs_in_a_terminal_until_it_is_interrupted_and_outlives_an_outage(
    nodes: list[RawNode],
) -> None:
    with Fleet([entry("b1", nodes[0])], replicas=1) as fleet:
        ours, theirs = pty.openpty()
        top = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "app.cli", "top", "--interval", "0.1"],
            env={**os.environ, "REDIS_URL": fleet.valkey.url, "COLUMNS": "150", "LINES": "20"},
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True,
            # A shell's background jobs ignore it, and their children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )  # fmt: skip
        os.close(theirs)
        seen = b""

        def until(words: bytes) -> None:
            nonlocal seen
            deadline = monotonic() + 30
            while words not in seen:
                ready, _, _ = select.select([ours], [], [], max(0, deadline - monotonic()))
                assert ready, f"waited for {words!r}, saw {seen[-3000:]!r}"
                seen += os.read(ours, 65536)
                assert monotonic() < deadline, f"waited for {words!r}, saw {seen[-3000:]!r}"
            seen = b""

        try:
            until(b"b1")
            fleet.valkey.kill()
            until(b"Redis is away")
            fleet.valkey.start()
            until(b"r0 (0)")
            top.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # EIO: the other end is closed
                while os.read(ours, 65536):
                    pass
            _, complaint = top.communicate(timeout=20)
            assert (top.returncode, complaint) == (0, b"")
        finally:
            top.kill()
            top.wait()
            os.close(ours)


def test_every_command_works_when_all_replicas_are_dead(
    nodes: list[RawNode],
) -> None:
    """Last look at a cluster, and the only way to change it."""
    b1, b2, spare = nodes
    with Fleet([entry("b1", b1), entry("b2", b2)], replicas=2, leases={"ttl_s": 1}) as fleet:
        run = runner(fleet)
        streams(fleet, 6)
        for replica in fleet.replicas:
            replica.kill()
        wait_until(
            lambda: all(row["expires_in_s"] < 0 for row in printed(run("replicas", "--json"))),
            what="their heartbeats have run out",
        )
        assert [row["id"] for row in printed(run("nodes", "--json"))] == ["b1", "b2"]
        assert len(printed(run("scores", "--json"))) == 2
        frame = run("top", "--once")
        assert frame.returncode == 0
        assert "no replica alive" in frame.stdout
        assert run("drain", "b1").returncode == 0
        assert run("remove", "b2").returncode == 0
        assert run("add", "x", spare.url, "--model", "x").returncode == 0
        for replica in fleet.replicas:
            replica.start()
        with plain_http(fleet.urls[0]) as http:
            now = rows(http)
            assert set(now) == {"b1", "x"}
            assert now["b1"]["state"] == "draining"
        wait_until(
            lambda: ask(fleet.replicas[1].port, chat(model="x")).status == 200, what="it serves"
        )
        fleet.wait_settled()
