"""Redis behind Sentinel: a primary that is killed under load, and starts that go wrong."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from time import monotonic
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from app.cluster.address import Resolver
from app.errors import ConfigError
from tests.support import state
from tests.support.rawclient import RawClient, chat
from tests.support.rawnode import RawNode, events, sse_answer, stream_forever
from tests.support.redis_ha import Sentinels, load, undegraded, wait_shared
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WHOLE = events(5)
HELD = 3


def _settings(nodes: list[RawNode], **sections: Any) -> dict[str, Any]:
    return {
        "server": {"drain_s": 3, "notice_s": 0},
        "leases": {"ttl_s": 3},
        "health": {"interval_s": 0.5, "timeout_s": 1},
        "timeouts": {"connect_s": 2, "stall_s": 10},
        "nodes": [
            {"id": f"b{i}", "url": node.url, "models": ["m"], "capacity": 64}
            for i, node in enumerate(nodes, 1)
        ],
        **sections,
    }


@contextlib.contextmanager
def _replicas(
    nodes: list[RawNode], url: str, n: int = 2, *, says: str = "ok"
) -> Iterator[list[Gateway]]:
    """Replicas that say so when ready, must end with code 0 and may not have logged a fault."""
    replicas = [Gateway(_settings(nodes), url, replica_id=f"gw{i}") for i in range(1, n + 1)]
    with contextlib.ExitStack() as stack:
        for replica in replicas:
            stack.callback(replica.__exit__)
            replica.start(wait=False)
        for replica in replicas:
            wait_until(lambda r=replica: _status(r) == says, within_s=20, what=f"it says {says}")
        yield replicas
        for replica in replicas:
            assert replica.stop() == 0, replica.log
            assert "Traceback" not in replica.log, replica.log
            assert "ERROR" not in replica.log, replica.log


def _status(replica: Gateway) -> str:
    """What ``/readyz`` says, with 200; "" before it listens."""
    assert replica.process is not None
    assert replica.process.poll() is None, f"the replica ended:\n{replica.log}"
    try:
        answer = httpx.get(f"{replica.url}/readyz", timeout=2, trust_env=False)
    except httpx.TransportError:
        return ""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["status"])


def test_a_primary_killed_under_load_costs_no_request_and_its_successor_has_the_truth() -> None:
    with (
        Sentinels() as ha,
        RawNode(stream_forever(0.05)) as b1,
        RawNode(stream_forever(0.05)) as b2,
        _replicas([b1, b2], ha.url()) as replicas,
    ):
        ports = [replica.port for replica in replicas]
        nodes = [b1, b2]
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(RawClient(port)) for port in ports * HELD]
            for client in held:
                client.send(chat()).read_events(2)
            for node in nodes:
                node.script = sse_answer(WHOLE, 0.01)
            old = ha.primary
            with load(ports) as asked:
                wait_until(lambda: len(asked.asked) > 40, what="under way")
                assert not any(one.degraded for one in asked.asked)
                old.kill()
                killed = monotonic()
                wait_until(
                    lambda: ha.primary is not old and ha.primary.role == "master",
                    within_s=15,
                    what="a new primary",
                )
                elected = monotonic()
                shared_s = wait_shared(ports, within_s=5)
                assert [_status(replica) for replica in replicas] == ["ok", "ok"]
                # The old primary comes back empty and believes that it is one.
                old.start()
                rejoined = monotonic()
                wait_until(
                    lambda: old.role == "slave", within_s=25, what="the old one is a replica"
                )
                demoted = monotonic()
                at = len(asked.asked)
                wait_until(lambda: len(asked.asked) > at + 40, what="on with it")
            print(
                f"new primary after {elected - killed:.1f} s, shared {shared_s:.2f} s later; "
                f"old one a replica after {demoted - rejoined:.1f} s; {asked.figures()}"
            )
            assert not asked.bad, asked.bad[:3]
            assert all(one.body == b"".join(WHOLE) for one in asked.asked)
            assert any(one.degraded for one in asked.asked), "the outage was noticed"
            assert not any(one.degraded for one in asked.since(rejoined)), "the old one did harm"

            now = ha.primary.client
            assert not any(client.ended for client in held)
            wait_until(
                lambda: sum(state.snapshot(now).by_leases.values()) == len(held),
                within_s=2,
                what="the leases of the running streams alone",
            )
            state.assert_counters_equal_leases(now)
            assert state.snapshot(now).by_leases == {
                f"b{i}": node.open for i, node in enumerate(nodes, 1) if node.open
            }
            state.assert_scores_equal_records(now)
        wait_until(lambda: state.unloaded(now), within_s=2, what="load = 0")
        for replica in replicas:  # one line each time, not one per request
            assert replica.log.count(" is away: ") <= 2, replica.log
            assert replica.log.count(" is back") == replica.log.count(" is away: "), replica.log


def test_a_start_before_the_sentinels_serves_degraded_and_joins_when_they_are_there() -> None:
    with (
        Sentinels(up=False) as ha,
        RawNode(sse_answer(WHOLE)) as b1,
        _replicas([b1], ha.url(), n=1, says="degraded") as [replica],
    ):
        assert _status(replica) == "degraded"
        (line,) = [line for line in replica.log.splitlines() if "starting without Redis" in line]
        assert "WARNING" in line
        assert f"127.0.0.1:{ha.sentinel_ports[0]}" in line
        assert "No master found for 'mymaster'" in line
        with load([replica.port]) as asked:
            wait_until(lambda: len(asked.asked) > 10, what="under way")
            assert all(one.degraded for one in asked.asked)
            ha.start_sentinels()
            took_s = wait_shared([replica.port], within_s=5)
            wait_until(lambda: _status(replica) == "ok", within_s=5, what="ready says so")
        print(f"joined {took_s:.1f} s after the sentinels were up; {asked.figures()}")
        assert not asked.bad, asked.bad[:3]
        assert replica.log.count("starting without Redis") == 1


def test_a_wrong_service_name_is_a_degraded_start_with_a_clear_line() -> None:
    with (
        Sentinels() as ha,
        RawNode(sse_answer(WHOLE)) as b1,
        _replicas([b1], ha.url("nosuch"), n=1, says="degraded") as [replica],
    ):
        assert _status(replica) == "degraded"
        assert not undegraded([replica.port])
        assert len(b1.requests) == 1, "served all the same"
        (line,) = [line for line in replica.log.splitlines() if "starting without Redis" in line]
        assert "WARNING" in line
        assert "No master found for 'nosuch'" in line
        assert len(replica.log.splitlines()) <= 4, replica.log


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://127.0.0.1:26379", "the Sentinel service is missing"),
        ("redis+sentinel://127.0.0.1/mymaster", "'127.0.0.1' is not host:port"),
        ("redis+cluster://127.0.0.1:6379,other", "'other' is not host:port"),
        ("redis+cluster:///", "is not host:port"),
        ("redis+raft://127.0.0.1:6379", "unknown form 'redis+raft'"),
        ("redis://127.0.0.1:port", "port"),
    ],
)
def test_a_bad_url_is_refused_with_a_message_that_says_what_is_right(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^redis\.url: .*; right is redis://host") as refused:
        Resolver(url, tag="default", timeout_s=1)
    assert says in str(refused.value)


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:26379", "http://127.0.0.1:6379"])
def test_a_bad_url_stops_the_start(url: str, tmp_path: Path) -> None:
    file = tmp_path / "leaseway.yaml"
    file.write_text("nodes: []\n")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "app.cli", "serve", "-c", str(file), "--port", "0"],
        env={**os.environ, "REDIS_URL": url},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == 2, ended
    assert "Traceback" not in ended.stderr
    message = ended.stderr.splitlines()[-1]
    assert message.startswith("leaseway: ")
    assert "redis.url" in message
    assert "right is redis://host" in message
