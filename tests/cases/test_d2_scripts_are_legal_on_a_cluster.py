"""D2: scripts must be legal on a cluster: one slot, all keys declared.

The server of this module runs in cluster mode and owns all slots. On it run the tests written
here, and tests of other cases that between them use every verb and every fault of the link.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.crc import key_slot

from app.admission.keys import hash_key
from app.cluster.embedded import free_port
from app.cluster.scripts import VERBS, constants, text
from app.config import Settings
from tests.cases.conftest import small_settings
from tests.cases.test_a1_release_survives_cancellation import (  # noqa: F401 - collected here too
    test_a_release_that_could_not_be_sent_is_kept_and_sent_when_redis_is_back,
)
from tests.cases.test_a3_counters_never_go_below_zero import (  # noqa: F401
    test_a_negative_counter_does_not_make_its_node_win_and_is_mended_by_its_first_lease,
)
from tests.cases.test_a5_a_killed_replica_does_not_leak import (  # noqa: F401
    test_the_leases_of_a_killed_replica_are_back_within_ttl_and_two_seconds,
)
from tests.support import state
from tests.support.fleet import plain_http
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import events, json_answer, sse_answer, stream_forever
from tests.support.redis_ha import ask_once, load, wait_shared
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, Request

REQUESTS = 50
_KEYED = re.compile(r"^(?!PING|TIME|CLIENT|MULTI|EXEC|EVAL|SCRIPT|KEYS|ECHO|INFO|CLUSTER|ROLE)")


@pytest.fixture(scope="module")
def valkey_server() -> Iterator[ValkeyServer]:
    """In place of the session's server: one in cluster mode."""
    with tempfile.TemporaryDirectory(prefix="leaseway-d2-") as folder:
        server = ValkeyServer(
            "--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--dir", folder
        )  # fmt: skip
        with server, redis.Redis(port=server.port) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(
                lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"),
                what="the cluster is whole",
            )
            yield server


@pytest.fixture(autouse=True)
def no_error_of_a_cluster(valkey: redis.Redis) -> Iterator[None]:
    """A script call may fail only because the script, or its slot, is not there."""
    valkey.config_resetstat()
    yield
    stats: Any = valkey.info("all")
    failed = sum(
        stats[f"cmdstat_{verb}"][how]
        for verb in ("eval", "evalsha")
        for how in ("failed_calls", "rejected_calls")
        if f"cmdstat_{verb}" in stats
    )
    allowed = ("errorstat_NOSCRIPT", "errorstat_CLUSTERDOWN")
    assert failed <= sum(stats[name]["count"] for name in allowed if name in stats), stats
    assert "errorstat_CROSSSLOT" not in stats


def _unescaped(word: str) -> bytes:
    return word.encode().decode("unicode_escape").encode("latin-1")


def test_every_key_of_every_script_call_of_fifty_requests_is_in_one_slot(
    valkey: redis.Redis, valkey_server: ValkeyServer, gateway: StartGateway, raw_node: StartNode
) -> None:
    admin: Any = valkey
    whole, broken, turn = sse_answer(events(3)), json_answer(500), itertools.count(1)

    async def script(request: Request, peer: Peer) -> None:
        await (whole if next(turn) % 10 else broken)(request, peer)

    nodes = [raw_node(script) for _ in range(3)]
    with state.monitoring(valkey, valkey_server.port) as seen:
        gw = gateway(nodes, replica_id="gw1", capacity=64)  # register, claim, observe, sweep, reap
        asked = [ask_once(gw.port, chat()) for _ in range(REQUESTS)]
        assert all(one.good for one in asked)
        for node in nodes:
            node.script = stream_forever(0.05)
        with RawClient(gw.port) as held:
            held.send(chat()).read_events(2)
            (lease,) = state.leases(valkey)
            # Lost: the heartbeat puts it back.
            admin.delete(state.KEYS.leases("gw1"), state.KEYS.active(lease.node))
            wait_until(lambda: len(state.leases(valkey)) == 1, within_s=3, what="put back")
            state.assert_counters_equal_leases(valkey)
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
        with plain_http(gw.url) as http:  # edit, circuit
            assert http.patch("/admin/nodes/b1", json={"weight": 2}).status_code == 200
            order = {"state": "closed"}
            assert http.post("/admin/nodes/b1/circuit", json=order).status_code == 200
        admin.delete(state.KEYS.edits, state.KEYS.changes)  # restore
        wait_until(lambda: admin.exists(state.KEYS.edits), within_s=5, what="edits are put back")
        key = {"name": "k", "hash": hash_key("sk-k"), "rpm": 5, "tpm": 1000}
        limited = small_settings(nodes, capacity=64, health={"signals": True}) | {"keys": [key]}
        for node in nodes:
            node.script = whole
            node.metrics_page = b"vllm:num_requests_waiting 3\nvllm:num_requests_running 8\n"
        with Gateway(limited, valkey_server.url) as gw3:  # admit, settle, look, signal
            head, _, body = chat().partition(b"\r\n\r\n")
            with_key = head + b"\r\nauthorization: Bearer sk-k\r\n\r\n" + body
            assert ask(gw3.port, with_key).status == 200
            wait_until(
                lambda: admin.hget(state.KEYS.node("b1"), "engine_waiting") == "3",
                within_s=5,
                what="what the engine says is kept",
            )
        gateway(nodes[:2], replica_id="gw2", capacity=64)  # b3 is no longer configured
        assert admin.smembers(state.KEYS.nodes) == {"b1", "b2"}

    verbs: Counter[str] = Counter()
    by_digest = {
        hashlib.sha1(text(verb, constants(Settings(**settings))).encode()).hexdigest(): verb  # noqa: S324
        for settings in (small_settings(nodes), limited)
        for verb in VERBS
    }
    slot, inside = -1, 0
    for one in seen:
        if one.verb in {"EVALSHA", "EVAL"} and one.source != "lua":
            if state._SNAPSHOT.split()[0] in one.words[1] and "#!lua" not in one.words[1]:
                slot = -1  # this test's own read
                continue
            sent = one.words[1]
            if one.verb == "EVAL":
                sent = hashlib.sha1(_unescaped(sent)).hexdigest()  # noqa: S324
            verb = by_digest[sent]
            verbs[verb] += 1
            n = int(one.words[2])
            keys, arguments = one.words[3 : 3 + n], one.words[3 + n :]
            assert n >= 1, "a script without keys goes to any server"
            assert all(key.startswith(state.KEYS.prefix) for key in keys), one
            slots = {key_slot(key.encode()) for key in keys}
            assert len(slots) == 1, one
            (slot,) = slots
            assert arguments[1] == state.KEYS.prefix, "the one documented name among the values"
            assert not any(value.startswith("lw:") for value in arguments[2:]), one
        elif one.source == "lua" and slot >= 0 and _KEYED.match(one.verb):
            inside += 1
            assert key_slot(one.words[1].encode()) == slot, one
    print(f"{inside} keys touched by {dict(verbs)}")
    assert set(verbs) == set(VERBS), "every verb was seen"
    assert verbs["acquire"] >= REQUESTS
    assert verbs["move"] >= 3
    assert inside > 10 * REQUESTS


def test_slots_that_are_down_for_a_moment_are_redis_away_and_no_error(
    valkey: redis.Redis, valkey_server: ValkeyServer, gateway: StartGateway, raw_node: StartNode
) -> None:
    admin: Any = valkey
    gws = [
        gateway([raw_node(sse_answer(events(3)))], capacity=64,
                redis_url=f"redis+cluster://127.0.0.1:{valkey_server.port}")
    ]  # fmt: skip
    slot = key_slot(b"default")
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(load([gw.port for gw in gws]))
        wait_until(lambda: len(asked.asked) > 10, what="under way")
        admin.execute_command("CLUSTER", "DELSLOTS", slot)
        stack.callback(wait_shared, [gw.port for gw in gws], within_s=5)
        stack.callback(admin.execute_command, "CLUSTER", "ADDSLOTS", slot)
        wait_until(lambda: sum(one.degraded for one in asked.asked) > 10, what="degraded")
    print(asked.figures())
    assert not asked.bad, asked.bad[:3]
    for gw in gws:
        assert "is away: CLUSTERDOWN" in gw.log
        assert ask(gw.port).status == 200
