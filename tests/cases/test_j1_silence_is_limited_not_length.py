"""J1: limit silence, not length; and before the first byte be patient.

The catalogue's stream of 8 s + 90 s is 6 s + 8 s here, its comments of 30 s are 8 s: every
limit is still exceeded several times over (stall 1 s, first byte 8 s, and httpx' 5 s).
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    chunk,
    content_event,
    events,
    hang,
    json_answer,
)
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, Request

STALL_S, FIRST_S = 1.0, 8.0
PREFILL_S, GAP_S, LONG = 6.0, 0.6, events(10)
COMMENTS = 14
COMMENT = b": still loading\n\n"
SHORT = events(3)


async def _paced(peer: Peer, parts: list[bytes], gap_s: float) -> None:
    for part in parts:
        await peer.sleep(gap_s)
        await peer.write(chunk(part))


async def _script(request: Request, peer: Peer) -> None:
    """What the client asks for by its request id."""
    kind = (request.header(b"x-request-id") or b"").decode()
    if kind == "silent":
        await hang()(request, peer)
    elif kind == "patient-json":
        await json_answer(after_s=PREFILL_S)(request, peer)
    else:
        if kind == "patient":
            await peer.sleep(PREFILL_S)
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        if kind == "patient":
            await _paced(peer, LONG, GAP_S)
        elif kind == "comments":
            await _paced(peer, [COMMENT] * COMMENTS, GAP_S)
            await _paced(peer, SHORT, GAP_S)
        elif kind == "stalls":
            await _paced(peer, [ROLE_EVENT, content_event("a ")], 0.1)
            await peer.sleep(60)
        await peer.write(b"0\r\n\r\n")


def _timed(port: int, kind: str) -> tuple[RawClient, float]:
    begin = monotonic()
    client = ask(port, chat(request_id=kind, stream=kind != "patient-json"), timeout_s=60)
    return client, monotonic() - begin


def test_patience_before_the_first_byte_and_no_limit_on_a_stream_that_flows(
    valkey: redis.Redis, gateway: StartGateway, raw_node: StartNode
) -> None:
    node = raw_node(_script)
    gw = gateway(
        [node], timeouts={"stall_s": STALL_S, "first_token_s": FIRST_S}, retries={"max_attempts": 1}
    )
    kinds = ("patient", "patient-json", "comments", "stalls", "silent")
    with ThreadPoolExecutor(len(kinds)) as pool:
        answers = dict(zip(kinds, pool.map(_timed, itertools.repeat(gw.port), kinds), strict=True))
    print(", ".join(f"{kind} {took_s:.1f} s" for kind, (_, took_s) in answers.items()))

    client, took_s = answers["patient"]
    assert client.complete
    assert client.body == b"".join(LONG)
    assert took_s > PREFILL_S + len(LONG) * GAP_S
    client, took_s = answers["patient-json"]
    assert client.status == 200
    assert client.complete
    assert took_s > PREFILL_S
    client, took_s = answers["comments"]
    assert client.complete
    assert client.body == COMMENT * COMMENTS + b"".join(SHORT)
    assert took_s > FIRST_S, "no timer ran from the start of the request"

    # The limits themselves are in force: what is silent for longer ends.
    client, took_s = answers["stalls"]
    assert STALL_S < took_s < STALL_S + 2
    assert client.body.startswith(ROLE_EVENT + content_event("a "))
    assert b'"error"' in client.body.splitlines()[-2]
    assert DONE_EVENT not in client.body
    assert FINISH_EVENT not in client.body
    client, took_s = answers["silent"]
    assert client.status == 504
    assert FIRST_S < took_s < FIRST_S + 2
    assert client.json()["error"]["code"] == "first_byte_timeout"

    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert {request.header(b"x-request-id") for request, _ in node.left} == {b"stalls", b"silent"}
    assert len(node.requests) == len(kinds), "nothing was asked twice"
