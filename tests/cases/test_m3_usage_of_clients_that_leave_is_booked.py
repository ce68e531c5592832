"""M3: what was generated is booked, also for a client that leaves with the last word, or before.

The OpenAI SDK closes its connection at ``[DONE]``: many a stream is complete, and yet its client
gone, before the node has ended the transfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.fleet import plain_http
from tests.support.rawclient import RawClient, chat
from tests.support.rawnode import STREAM_HEAD, Peer, Request, chunk, events
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.servers import Gateway

TOKENS = 10
PARTS = events(TOKENS)  # role, tokens, finish, [DONE]


async def never_ends(_request: Request, peer: Peer) -> None:
    """All events, and then the connection stays open: the transfer has no end."""
    await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for part in PARTS:
        await peer.write(chunk(part))
    await peer.wait_closed()


async def never_finishes(_request: Request, peer: Peer) -> None:
    """Role and tokens, and then no word any more."""
    await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for part in PARTS[: TOKENS + 1]:
        await peer.write(chunk(part))
    await peer.wait_closed()


def metric(replica: Gateway, line: str) -> float:
    """The value of one line of the metrics page, 0 when it is not there."""
    with plain_http(replica.url) as http:
        page = http.get("/metrics").text
    return sum(float(row.rsplit(" ", 1)[1]) for row in page.splitlines() if row.startswith(line))


@pytest.mark.parametrize("whole", [True, False], ids=["at the last word", "in the middle"])
def test_the_tokens_of_a_client_that_has_left_are_booked(
    gateway: StartGateway, raw_node: StartNode, whole: bool
) -> None:
    replica = gateway([raw_node(never_ends if whole else never_finishes)])
    with RawClient(replica.port) as client:
        client.send(chat(stream=True))
        client.read_events(len(PARTS) if whole else TOKENS + 1)
    wait_until(
        lambda: metric(replica, 'leaseway_tokens_total{kind="output",model="m"}') == TOKENS,
        within_s=5,
        what="the tokens are booked",
    )
    assert metric(replica, 'leaseway_attempts_total{node="b1",outcome="failed"}') == 0
