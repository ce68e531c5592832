"""Fake nodes as processes, so that one can be killed by its pid."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any, Self

import httpx

from app.cluster.embedded import die_with_parent, free_port
from tests.support.fleet import MODEL
from tests.support.servers import NO_TLS, wait_until


class NodeProcess:
    """``with NodeProcess("a100", "a100") as node``: a fake node of a profile."""

    def __init__(self, name: str, profile: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._profile = profile
        self.process: subprocess.Popen[bytes] | None = None

    def settings(self, **fields: Any) -> dict[str, Any]:
        """Its entry in the settings file."""
        return {"id": self.name, "url": self.url, "models": [MODEL], "capacity": 40, **fields}

    def started(self) -> int:
        """Requests that have ever reached it."""
        page = httpx.get(f"{self.url}/_fake/stats", trust_env=False, verify=NO_TLS, timeout=10)
        return int(page.json()["started"])

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.started() >= 0
        return False

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.lab.node", "--profile", self._profile, "--id", self.name,
             "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call
        )  # fmt: skip
        wait_until(self._answers, within_s=20, what=f"node {self.name} is up")
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
