"""Nodes behind TLS: what is trusted streams byte for byte, what is not is a failed connect."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.authority import Authority
from tests.support.fleet import CHAT, MODEL_LIST, Fleet, chat, plain_async_http

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")

# Everything that a relay could be tempted to tidy up: line ends, comments, spaces, other fields,
# a character cut in two, an event without data, no blank line at the end.
STREAM = (
    b": hello\r\n\r\n"
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'event: message\nid: 7\ndata:{"choices":[{"index":0,"delta":{"content":"\xc3\xa9\xf0\x9f\xa6'
    b'\x99"}}] }  \n\n'
    b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"two lines"}}]}\r\n\r\n'
    b"retry: 10\n\n"
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
    b": the end"
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The one that the replicas trust."""
    return Authority(tmp_path_factory.mktemp("trusted"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that they have never heard of."""
    return Authority(tmp_path_factory.mktemp("stranger"))


async def stream_oddly(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, served: set[object] | None = None
) -> None:
    """Answer every request with STREAM, in pieces that end anywhere but where events do.

    ``served`` collects the peers that asked for one (probes do not).
    """
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"GET "):
                writer.write(MODEL_LIST)
                continue
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            if served is not None:
                served.add(writer.get_extra_info("peername"))
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            for start in range(0, len(STREAM), 7):
                piece = STREAM[start : start + 7]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def refuse_in_plain_text(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Do what an HTTP server does with a TLS handshake."""
    await reader.read(1024)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
    writer.close()


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take what comes and never begin a handshake."""
    try:
        while await reader.read(1024):
            pass
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] = stream_oddly,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """The port of a node; at the end its handlers see their connections close."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        await serve(reader, writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.wait_for(asyncio.gather(*(task for task in tasks if task)), 5)


def node(name: str, port: int, scheme: str = "https") -> dict[str, object]:
    return {"id": name, "url": f"{scheme}://127.0.0.1:{port}", "models": [name]}


async def test_a_stream_through_tls_is_byte_exact_and_its_connection_is_kept(
    authority: Authority,
) -> None:
    seen: set[object] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stream_oddly(reader, writer, seen)

    async with listening(serve, authority.context("IP:127.0.0.1")) as port:
        trust = {"SSL_CERT_FILE": str(authority.file)}
        with Fleet([node("tls", port)], replicas=1, environment=trust) as fleet:
            await fleet.nodes_well("tls")
            async with plain_async_http() as http:
                for _ in range(5):
                    body = {**chat(stream=True), "model": "tls"}
                    answer = await http.post(fleet.urls[0] + CHAT, json=body)
                    assert answer.status_code == 200
                    assert answer.content == STREAM
            fleet.wait_settled()
            # The first is lost when its release overtakes the call that brings the script.
            assert fleet.redis.llen("lw:{default}:ttft:tls") in {4, 5}
        assert len(seen) == 1


async def test_what_cannot_be_trusted_never_becomes_ready_and_the_log_says_why(
    authority: Authority, stranger: Authority
) -> None:
    async with AsyncExitStack() as stack:
        ports = {
            "unknown-ca": listening(context=stranger.context("IP:127.0.0.1")),
            "wrong-name": listening(context=authority.context("DNS:elsewhere.example")),
            "not-tls": listening(refuse_in_plain_text),
            "silent": listening(say_nothing),
        }
        nodes = [node(name, await stack.enter_async_context(at)) for name, at in ports.items()]
        nodes.append(node("plain", await stack.enter_async_context(listening()), "http"))
        with Fleet(
            nodes,
            replicas=1,
            environment={"SSL_CERT_FILE": str(authority.file)},
            timeouts={"connect_s": 1},
        ) as fleet:
            await fleet.nodes_well("plain")
            async with plain_async_http() as http:

                async def ask(model: str) -> tuple[int, object]:
                    body = {**chat(stream=True), "model": model}
                    answer = await http.post(fleet.urls[0] + CHAT, json=body)
                    good = answer.content == STREAM
                    return answer.status_code, good or answer.json()["error"]["code"]

                for name in ports:  # they never became ready, so nobody is sent there
                    assert await ask(name) == (503, "no_node_available")
                assert await ask("plain") == (200, True)
            fleet.wait_settled()
            # The reasons are in the log for whoever reads it at 3 am.
            log = fleet.replicas[0].log.lower()
            for name in ports:
                assert f"node {name}: health new → new; miss " in log
            assert log.count("certificate verify failed") == 2
