"""Redis behind TLS: what is trusted carries the shared state, what is not counts as away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Self

import pytest
import redis

from app.cluster.embedded import free_port
from app.lab.node import NodeConfig
from tests.support.authority import Authority
from tests.support.fleet import CHAT, Nodes, chat, plain_http, ready
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


class TlsFront:
    """``with TlsFront(port, context, to)``: TLS on ``port``, the plain server on ``to``.

    (The packaged Valkey is built without TLS.) ``opened`` counts connections with a good handshake.
    """

    def __init__(self, port: int, context: ssl.SSLContext, to: int) -> None:
        self.port = port
        self.opened = 0
        self._context = context
        self._to = to
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._handlers: set[asyncio.Task[None] | None] = set()
        self._server: asyncio.Server

    async def _start(self) -> None:
        self._server = await asyncio.start_server(
            self._pair, "127.0.0.1", self.port, ssl=self._context
        )

    async def _pair(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self._handlers.add(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65_536):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    async def _stop(self) -> None:
        self._server.close()
        await asyncio.wait_for(asyncio.gather(*(one for one in self._handlers if one)), 10)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(5)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(15)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The one that the replicas trust."""
    return Authority(tmp_path_factory.mktemp("trusted"))


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """One node."""
    with Nodes(a=NodeConfig()) as started:
        yield started


def shared(gateway: Gateway) -> bool:
    """Whether a request through the replica is served from shared state."""
    with plain_http(gateway.url) as client:
        answer = client.post(CHAT, json=chat(max_tokens=1, stream=True))
    assert answer.status_code == 200
    return "x-leaseway-degraded" not in answer.headers


def test_the_shared_state_may_live_behind_tls(
    authority: Authority, valkey: redis.Redis, valkey_server: ValkeyServer, nodes: Nodes
) -> None:
    context = authority.context("IP:127.0.0.1")
    trust = {"SSL_CERT_FILE": str(authority.file)}
    with TlsFront(free_port(), context, valkey_server.port) as front:
        url = f"rediss://127.0.0.1:{front.port}/0"
        settings = {"nodes": nodes.settings()}
        with Gateway(settings, url, environment=trust) as gateway:
            assert shared(gateway)
            wait_until(lambda: valkey.llen("lw:{default}:ttft:a") == 1, what="a sample in Redis")
            before = front.opened
            listed = subprocess.run(
                [sys.executable, "-m", "app.cli", "nodes", "--json"],
                env={**os.environ, **trust, "REDIS_URL": url}, capture_output=True, check=True,
            )  # fmt: skip
            assert [row["id"] for row in json.loads(listed.stdout)] == ["a"]
            assert front.opened > before


@pytest.mark.parametrize("fault", ["a stranger's certificate", "another name"])
def test_a_redis_that_is_not_trusted_is_away(
    fault: str, authority: Authority, tmp_path: Path, valkey: redis.Redis,
    valkey_server: ValkeyServer, nodes: Nodes,
) -> None:  # fmt: skip
    if fault == "another name":
        context = authority.context("DNS:redis.example")
    else:
        context = Authority(tmp_path).context("IP:127.0.0.1")
    trust = {"SSL_CERT_FILE": str(authority.file)}
    with TlsFront(free_port(), context, valkey_server.port) as front:
        url = f"rediss://127.0.0.1:{front.port}/0"
        gateway = Gateway({"nodes": nodes.settings()}, url, environment=trust)
        try:
            gateway.start(wait=False)
            wait_until(lambda: ready(gateway), within_s=20, what="serving alone")
            assert not shared(gateway)
            assert "certificate verify failed" in gateway.log.lower()
            assert valkey.keys("*") == []
        finally:
            gateway.stop()


def test_a_cluster_may_live_behind_tls(authority: Authority, tmp_path: Path, nodes: Nodes) -> None:
    """One server with all slots, that tells the address of the TLS front as its own."""
    port = free_port()
    options = {
        "cluster-enabled": "yes", "cluster-config-file": "nodes.conf", "dir": str(tmp_path),
        "cluster-port": str(free_port()), "cluster-announce-ip": "127.0.0.1",
        "cluster-announce-port": str(port),
    }  # fmt: skip
    trust = {"SSL_CERT_FILE": str(authority.file)}
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    with (
        ValkeyServer(*flags) as server,
        TlsFront(port, authority.context("IP:127.0.0.1"), server.port) as front,
        redis.Redis(port=server.port, decode_responses=True) as client,
    ):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(
            lambda: client.cluster("INFO")["cluster_state"] == "ok", what="the cluster is up"
        )
        url = f"rediss+cluster://127.0.0.1:{front.port}"
        with Gateway({"nodes": nodes.settings()}, url, environment=trust) as gateway:
            assert shared(gateway)
            wait_until(lambda: client.llen("lw:{default}:ttft:a") == 1, what="a sample in Redis")
