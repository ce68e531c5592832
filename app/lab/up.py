"""``leaseway up``: a whole cluster on loopback, for a first look and for development.

Embedded Valkey, three unequal fake nodes and three replicas, each a process of its own. Ctrl-C
or SIGTERM ends all of them; if this process is killed outright, the kernel ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import yaml

from app.cluster.embedded import EmbeddedValkey, die_with_parent
from app.errors import LeasewayError
from app.lab.profiles import PROFILES

FLEET = ("a100", "rtx4090", "xeon")
MODEL = "demo"
_REPLICAS = 3


async def run(*, gateway_port: int, node_port: int, redis_port: int, config: Path | None) -> None:
    """Start everything, say what to try, wait for a signal, end everything.

    ``config`` is a settings file whose nodes are replaced by the fake fleet.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leaseway-up-")))
        valkey = await stack.enter_async_context(EmbeddedValkey(redis_port))
        file = _settings_file(folder, config, node_port)
        children = Children()
        stack.push_async_callback(children.end)
        for offset, name in enumerate(FLEET):
            children.start("app.lab.node", "--profile", name, "--port", str(node_port + offset))
        environment = {**os.environ, "REDIS_URL": valkey.url}
        for offset in range(_REPLICAS):
            children.start(
                "app.cli", "serve", "--config", str(file), "--port", str(gateway_port + offset),
                "--replica-id", f"replica-{offset + 1}", environment=environment,
            )  # fmt: skip
        for offset in range(_REPLICAS):
            await children.wait_ready(f"http://127.0.0.1:{gateway_port + offset}/readyz", ended)
        if not ended.is_set():
            print(_what_to_try(gateway_port, redis_port), flush=True)
        await children.wait_or(ended)


def _settings_file(folder: Path, config: Path | None, node_port: int) -> Path:
    raw = (yaml.safe_load(config.read_text()) or {}) if config else {}
    raw["nodes"] = [
        {
            "id": name,
            "url": f"http://127.0.0.1:{node_port + offset}",
            "weight": PROFILES[name].weight_k,
            "models": [MODEL],
        }
        for offset, name in enumerate(FLEET)
    ]
    file = folder / "leaseway.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


class Children:
    """Processes that end with this one."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *args: str, environment: dict[str, str] | None = None) -> None:
        """Start ``python -m module args`` in a session of its own (Ctrl-C reaches us only)."""
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *args],
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call, no locks taken
            )
        )

    def _check(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                command = " ".join(map(str, process.args[2:]))  # type: ignore[index]
                raise LeasewayError(f"{command} ended with code {process.returncode}")

    async def wait_ready(self, url: str, ended: asyncio.Event) -> None:
        """Wait until ``url`` answers 200. Raises when a child ends or 30 s have passed."""
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(30):
            while not ended.is_set():
                self._check()
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(url)).status_code == 200:
                        return
                await asyncio.sleep(0.05)

    async def wait_or(self, ended: asyncio.Event) -> None:
        """Wait for ``ended``. Raises when a child ends before."""
        while not ended.is_set():
            self._check()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.5)

    async def end(self) -> None:
        """SIGTERM to all, last started first; SIGKILL to what is left after 10 s."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
        for process in reversed(self._processes):
            try:
                await asyncio.to_thread(process.wait, 10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _what_to_try(gateway_port: int, redis_port: int) -> str:
    return f"""
Three replicas on 127.0.0.1:{gateway_port}-{gateway_port + 2} over three unequal nodes. Try:

  curl -N http://127.0.0.1:{gateway_port}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{MODEL}", "stream": true, "max_tokens": 20,
         "messages": [{{"role": "user", "content": "Hello"}}]}}'
  redis-cli -p {redis_port} ZREVRANGE 'lw:{{default}}:score:{MODEL}' 0 -1 WITHSCORES
  leaseway top
  leaseway nodes

Ctrl-C ends everything.
"""
