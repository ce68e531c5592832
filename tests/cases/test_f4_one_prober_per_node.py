"""F4: one prober per node, not one per replica.

The catalogue's 30 intervals of 1 s are 10 of 0.5 s here.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING

import httpx

from tests.support import state
from tests.support.rawnode import Script, hang, json_answer
from tests.support.servers import NO_TLS, wait_until
from tests.support.stagednode import StagedNode

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway
    from tests.support.servers import Gateway

INTERVAL_S, INTERVALS, REPLICAS = 0.5, 10, 4
HEALTH = json_answer(body={"status": "ok"})
LIST = json_answer(body={"object": "list", "data": [{"id": "m"}]})
LOADING = json_answer(503, {"error": {"message": "Loading model"}})


def seen_by(gw: Gateway, node_id: str) -> str:
    """The health of a node as this replica tells it."""
    rows = httpx.get(f"{gw.url}/admin/nodes", trust_env=False, verify=NO_TLS).json()
    rows = rows if isinstance(rows, list) else rows["nodes"]
    return str(next(row["health"] for row in rows if row["id"] == node_id))


def gaps(node: StagedNode, since: float) -> list[float]:
    """Times between the requests for its pages."""
    times = [since, *(at for _, at in node.asked if at >= since), monotonic()]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_four_replicas_make_one_probe_where_one_would_and_all_know_what_it_said(
    valkey: redis.Redis, gateway: StartGateway
) -> None:
    with (
        StagedNode(pages={"/health": HEALTH, "/v1/models": LIST}) as paged,
        StagedNode(pages={"/v1/models": LIST}) as pageless,
        StagedNode(pages={"/health": HEALTH, "/v1/models": LIST}) as hung,
    ):
        nodes = [paged, pageless, hung]
        gws = [gateway([*nodes], health={"interval_s": INTERVAL_S}) for _ in range(REPLICAS)]
        hung.pages = {"/health": hang()}
        wait_until(lambda: state.record(valkey, "b3")["health"] == "down", what="b3 is out")
        since = monotonic()
        time.sleep(INTERVALS * INTERVAL_S)
        for node in nodes:
            asked = [path for path, at in node.asked if at >= since]
            intervals = (monotonic() - since) / INTERVAL_S
            # At least as many as say something on a machine that is busy with other things.
            assert intervals / 2 <= len(asked) <= 1.5 * intervals, asked
            assert median(gaps(node, since)) < 1.5 * INTERVAL_S
            assert max(gaps(node, since)) < 2 * INTERVAL_S + 0.25

        for pages, health in (({"/health": LOADING}, "loading"), (paged.pages, "ok")):
            paged.pages = pages
            wait_until(
                lambda h=health: {seen_by(gw, "b1") for gw in gws} == {h},
                within_s=2 * INTERVAL_S + 0.5,
                what=f"all replicas know that b1 is {health}",
            )

        # The duty is nobody's own: whoever is left does it all.
        for gw in gws[1:]:
            gw.kill()
        since = monotonic()
        time.sleep(6 * INTERVAL_S)
        for node in nodes:
            assert max(gaps(node, since)) < 3 * INTERVAL_S


def test_a_node_that_hangs_holds_up_no_other_nodes_probes(
    valkey: redis.Redis, gateway: StartGateway
) -> None:
    """However patient a probe is, and however many of them wait."""
    good: dict[str, Script] = {"/health": HEALTH, "/v1/models": LIST}
    with contextlib.ExitStack() as stack:
        b1, *holes = [stack.enter_context(StagedNode(pages=dict(good))) for _ in range(21)]
        gateway([b1, *holes], health={"interval_s": INTERVAL_S, "timeout_s": 4})
        for hole in holes:
            hole.pages = {"/health": hang()}
        began = monotonic()
        wait_until(lambda: all(hole.asked[-1][1] > began for hole in holes), what="all hang")
        since = monotonic()
        time.sleep(6 * INTERVAL_S)
        assert max(gaps(b1, since)) < 2 * INTERVAL_S + 0.25
        assert state.record(valkey, "b1")["misses"] == "0"
