"""The cluster under test: one Valkey, a relay and a replica three times, four fake nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self

from app.cluster.embedded import die_with_parent
from tests.chaos.clients import get, post
from tests.chaos.schedule import NODES, REPLICAS
from tests.support.relay import Relay
from tests.support.servers import Gateway, ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TTL_S: Final = 2.0
CAPACITY: Final = 24
CONNECT_S: Final = 0.5
FIRST_TOKEN_S: Final = 5.0
OPEN_MAX_S: Final = 4.0
DRAIN_S: Final = 8
# The last failure of a fault may come one patience late; then the circuit is open, at most for
# its longest time with jitter; then its one trial may be lost (a client that leaves frees it,
# a killed replica does not).
ALONE_RECOVERY_S: Final = FIRST_TOKEN_S + 1.2 * OPEN_MAX_S  # a replica alone makes no trials
RECOVERY_S: Final = ALONE_RECOVERY_S + CONNECT_S + FIRST_TOKEN_S + 1.0
_TIME_SCALE: Final = 4.0  # an a100 four times slower: 40 ms a token, so that two cores suffice


def settings(nodes: dict[str, int]) -> dict[str, Any]:
    """Small times everywhere; ``nodes`` is id → port."""
    return {
        "server": {"drain_s": DRAIN_S},
        "leases": {"ttl_s": TTL_S},
        "circuit": {"failure_threshold": 3, "open_s": 1, "open_max_s": OPEN_MAX_S},
        "health": {"interval_s": 0.5, "timeout_s": 0.5, "unhealthy_after": 3},
        "timeouts": {"connect_s": CONNECT_S, "first_token_s": FIRST_TOKEN_S, "stall_s": 2},
        "retries": {"max_attempts": len(nodes)},
        "nodes": [
            {
                "id": node,
                "url": f"http://127.0.0.1:{port}",
                "models": ["demo"],
                "capacity": CAPACITY,
            }
            for node, port in nodes.items()
        ],
    }


def quiet_port(chance: Random) -> int:
    """A free port below the ephemeral range: nobody else gets it while its server is down."""
    while True:
        port = chance.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


async def until(
    condition: Callable[[], Awaitable[bool]], within_s: float, what: str, every_s: float = 0.05
) -> None:
    """Wait until the condition holds. Raises ``TimeoutError`` with ``what``."""
    deadline = monotonic() + within_s
    while not await condition():
        if monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(every_s)


class Node:
    """A fake node as a process on a fixed port. All have one seed, so all give one answer."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it and wait until it listens."""
        self.process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            [sys.executable, "-m", "app.lab.node", "--profile", "a100", "--port", str(self.port),
             "--id", self.name, "--time-scale", str(_TIME_SCALE)],
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call
        )  # fmt: skip
        await until(self._answers, 30, f"node {self.name} is up")

    async def _answers(self) -> bool:
        return (await get(self.port, "/_fake/stats"))[0] == 200

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def set_fault(self, **fault: Any) -> None:
        """Put a fault in force; without arguments none is."""
        status, body = await post(self.port, "/_fake/faults", json.dumps(fault).encode())
        assert status == 200, body

    async def open(self) -> int:
        """Requests that it works on now."""
        status, body = await get(self.port, "/_fake/stats")
        return int(json.loads(body)["open"]) if status == 200 else -1


class Bench:
    """``async with Bench() as bench``: everything is up and ready."""

    def __init__(self) -> None:
        chance = Random()  # ports are no part of the plan
        self.valkey = ValkeyServer()
        self.valkey.port = quiet_port(chance)
        self.relays = {name: Relay(self.valkey.port) for name in REPLICAS}
        self.nodes = {name: Node(name, quiet_port(chance)) for name in NODES}
        config = settings({node.name: node.port for node in self.nodes.values()})
        self.replicas: dict[str, Gateway] = {}
        for name in REPLICAS:
            # One keeps its id when it comes back, the others get a new one, as in production.
            replica = Gateway(
                config, self.relays[name].url, replica_id=name if name == "r0" else None
            )
            replica.port = quiet_port(chance)
            replica.url = f"http://127.0.0.1:{replica.port}"
            self.replicas[name] = replica
        self._stack = contextlib.ExitStack()

    async def start_replica(self, name: str) -> None:
        """Start the process and wait until it is ready."""
        self.replicas[name].start(wait=False)
        await until(lambda: self._ready(name), 60, f"replica {name} is ready")

    async def _ready(self, name: str) -> bool:
        replica = self.replicas[name]
        assert replica.process is not None
        assert replica.process.poll() is None, f"replica {name} ended:\n{replica.log[-2000:]}"
        return (await get(replica.port, "/readyz"))[0] == 200

    async def ids(self) -> dict[str, str]:
        """Ids of the living replicas, by name."""
        found = {}
        for name, replica in self.replicas.items():
            status, body = await get(replica.port, "/healthz")
            found[name] = json.loads(body)["replica"] if status == 200 else "no answer"
        return found

    async def __aenter__(self) -> Self:
        try:
            self._stack.callback(self.valkey.kill)
            await asyncio.to_thread(self.valkey.start)
            for relay in self.relays.values():
                self._stack.enter_context(relay)
            for node in self.nodes.values():
                self._stack.callback(node.kill)
                await node.start()
            for name, replica in self.replicas.items():
                self._stack.callback(replica.__exit__)
                self._stack.callback(replica.kill)
                await self.start_replica(name)
        except BaseException:
            self._stack.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self._stack.close)
