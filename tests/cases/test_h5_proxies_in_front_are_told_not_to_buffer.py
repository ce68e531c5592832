"""H5: behind a proxy with default settings, and for an old client, a stream stays a stream.

The node sends an event only once the client has the one before it. Time plays no part: where
anything holds back a single event, nothing moves any more, and the stall timer ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.nginx import MISSING, NGINX, nginx
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    STREAM_HEAD,
    Peer,
    Request,
    chunk,
    events,
    json_answer,
    write_then_reset,
)

if TYPE_CHECKING:
    from tests.cases.conftest import StartGateway, StartNode

needs_nginx = pytest.mark.skipif(NGINX is None, reason=MISSING)
KEPT_ALIVE = 'proxy_http_version 1.1; proxy_set_header Connection "";'
PARTS = events(12)


class Lockstep:
    """A node's script: event n + 1 leaves when ``seen`` is n, and not before.

    ``sent`` is how many have left: the client can hold it against what it has.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.sent = 0

    async def __call__(self, _request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for part in PARTS:
            while self.seen < self.sent:
                await peer.sleep(0.001)
            self.sent += 1
            await peer.write(chunk(part))
        await peer.write(b"0\r\n\r\n")


def read_in_lockstep(client: RawClient, script: Lockstep) -> None:
    """Read event after event; each is here before the node has sent the next."""
    for n in range(1, len(PARTS) + 1):
        body = client.read_events(n)
        assert body == b"".join(PARTS[:n])
        assert script.sent <= n + 1
        script.seen = n
    client.read_all()
    assert client.body == b"".join(PARTS)


def old(request: bytes) -> bytes:
    """The same request of an HTTP/1.0 client."""
    return request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)


@needs_nginx
@pytest.mark.parametrize("more", ["", KEPT_ALIVE], ids=["defaults", "HTTP/1.1 to the replica"])
def test_through_nginx_with_default_buffering_each_event_arrives_before_the_next_is_sent(
    gateway: StartGateway, raw_node: StartNode, more: str
) -> None:
    script = Lockstep()
    replica = gateway([raw_node(script)])
    with nginx(replica.port, more) as port, RawClient(port) as client:
        client.send(chat(stream=True))
        assert client.read_head() == 200
        assert client.headers[b"content-type"].startswith(b"text/event-stream")
        assert b"content-length" not in client.headers
        read_in_lockstep(client, script)
        assert client.complete


@needs_nginx
def test_an_nginx_that_does_not_listen_to_the_replica_holds_the_stream_back(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    """The contrast, without which the test above could not fail."""
    script = Lockstep()
    replica = gateway([raw_node(script)])
    deaf = "proxy_ignore_headers X-Accel-Buffering;"
    with nginx(replica.port, deaf) as port, RawClient(port, timeout_s=1) as client:
        client.send(chat(stream=True))
        with pytest.raises(TimeoutError):
            client.read_events(1)
        assert script.sent == 1


def test_the_headers_of_a_stream_forbid_buffering_and_come_before_the_second_event(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    script = Lockstep()
    replica = gateway([raw_node(script)])
    with RawClient(replica.port) as client:
        client.send(chat(stream=True))
        assert client.read_head() == 200
        assert script.sent <= 1
        assert client.headers[b"content-type"] == b"text/event-stream"
        assert client.headers[b"cache-control"] == b"no-cache"
        assert client.headers[b"x-accel-buffering"] == b"no"
        assert b"content-length" not in client.headers
        read_in_lockstep(client, script)
        assert client.complete


def test_an_http_1_0_client_gets_each_event_unframed_and_the_end_by_the_close(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    script = Lockstep()
    replica = gateway([raw_node(script)])
    with RawClient(replica.port) as client:
        client.send(old(chat(stream=True)))
        assert client.read_head() == 200
        assert b"transfer-encoding" not in client.headers
        assert b"content-length" not in client.headers
        read_in_lockstep(client, script)
        assert client.ended


def test_an_http_1_0_client_gets_a_whole_answer_with_its_length_and_errors_too(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    replica = gateway([raw_node(json_answer())])
    for request, status in ((chat(stream=False), 200), (chat(stream=False, model="x"), 404)):
        answer = ask(replica.port, old(request))
        assert answer.status == status
        assert answer.complete
        assert int(answer.headers[b"content-length"]) == len(answer.body)
        assert b"transfer-encoding" not in answer.headers


def test_an_http_1_0_stream_that_breaks_off_ends_with_an_error_event(
    gateway: StartGateway, raw_node: StartNode
) -> None:
    head = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"
    torn = head + b"".join(map(chunk, PARTS[:4]))
    replica = gateway([raw_node(write_then_reset(torn))])
    answer = ask(replica.port, old(chat(stream=True)))
    *whole, error, rest = answer.body.split(b"\n\n")
    assert b"\n\n".join([*whole, b""]) == b"".join(PARTS[:4])
    assert error.startswith(b'data: {"error":')
    assert rest == b""
