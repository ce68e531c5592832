"""A whole cluster for a test: N replicas over one Valkey, in front of fake nodes.

The nodes run in a thread of this process, so a test reads their own counters, the truth, at
any instant. Replicas and Valkey are processes. Everything ends with its ``with`` block.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import ssl
import subprocess
import threading
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import httpx
import redis
import uvloop

from app.lab.node import FakeNode, NodeConfig, serve_node
from app.lab.profiles import IDEAL, Profile
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODEL = "demo"
CHAT = "/v1/chat/completions"
# What a hand-written node answers to a probe, whatever the page.
MODEL_LIST = (
    b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"data":[]}'
)
POOL = "lw:{default}:"
ENDLESS = 1_000_000
# Spares each HTTP client 100 ms of reading certificates that nobody needs here.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

# Counters, leases and replicas of the pool as they stand between two scripts: one instant.
_BOOKS = """#!lua
local prefix = ARGV[1]
local books = {active = {}, leases = {}, owners = {}}
for _, key in ipairs(redis.call('KEYS', prefix .. 'active:*')) do
  books.active[string.sub(key, #prefix + 8)] = tonumber(redis.call('GET', key))
end
for _, key in ipairs(redis.call('KEYS', prefix .. 'leases:*')) do
  local records = redis.call('HVALS', key)
  books.owners[string.sub(key, #prefix + 8)] = #records
  for _, record in ipairs(records) do
    local node = string.match(record, '^%S+')
    books.leases[node] = (books.leases[node] or 0) + 1
  end
end
books.replicas = redis.call('ZRANGE', prefix .. 'replicas', 0, -1)
return cjson.encode(books)
"""


def pace(token_ms: float) -> Profile:
    """A node that emits a token of every answer each ``token_ms``, however many there are."""
    return replace(IDEAL, name="pace", step_base_ms=token_ms)


def chat(content: str = "hello", **more: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def plain_http(url: str = "") -> httpx.Client:
    """A client without TLS, proxies and retries."""
    return httpx.Client(base_url=url, trust_env=False, verify=NO_TLS, timeout=20)


def plain_async_http() -> httpx.AsyncClient:
    """The same for asyncio, with as many connections as it takes."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=60, limits=limits)


def ready(replica: Gateway) -> bool:
    """Whether ``/readyz`` says 200. Fails when the process has ended."""
    assert replica.process is not None
    assert replica.process.poll() is None, f"the replica ended:\n{replica.log}"
    connection = http.client.HTTPConnection("127.0.0.1", replica.port, timeout=2)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    return False


class Nodes:
    """``with Nodes(a=NodeConfig(...)) as nodes``: fake nodes by id, in one thread's loop.

    ``nodes["a"].stats`` may be read, and ``nodes["a"].fault`` assigned, from any thread.
    """

    def __init__(self, **configs: NodeConfig) -> None:
        self._configs = configs
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nodes", daemon=True)
        self._nodes: dict[str, FakeNode] = {}

    @property
    def ids(self) -> list[str]:
        """Node ids, sorted."""
        return sorted(self._nodes)

    def settings(self, **fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The ``nodes`` section; ``fields`` by node id go over the defaults."""
        return [
            {
                "id": node_id,
                "url": node.url,
                "models": list(node.config.models),
                "capacity": 1000,
                **fields.get(node_id, {}),
            }
            for node_id, node in self._nodes.items()
        ]

    def open(self) -> dict[str, int]:
        """The truth: requests that each node is working on now."""
        return {node_id: node.stats.open for node_id, node in self._nodes.items()}

    def started(self) -> dict[str, int]:
        """Requests that have ever reached each node."""
        return {node_id: node.stats.started for node_id, node in self._nodes.items()}

    def __getitem__(self, node_id: str) -> FakeNode:
        return self._nodes[node_id]

    def __enter__(self) -> Self:
        self._thread.start()
        for node_id, config in self._configs.items():
            served = asyncio.run_coroutine_threadsafe(
                serve_node(replace(config, node_id=node_id)), self._loop
            )
            self._nodes[node_id] = served.result(5)
        return self

    def __exit__(self, *exc: object) -> None:
        for node in self._nodes.values():
            asyncio.run_coroutine_threadsafe(node.close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@dataclass(frozen=True, slots=True)
class Books:
    """Shared state at one instant. ``owners``: leases by replica; ``replicas``: heartbeats."""

    active: dict[str, int]
    leases: dict[str, int]
    owners: dict[str, int]
    replicas: list[str]

    @property
    def held(self) -> int:
        """Leases over all replicas."""
        return sum(self.owners.values())

    def wrong(self) -> str:
        """What breaks an invariant of DESIGN section 3, "" when nothing does."""
        if min(self.active.values(), default=0) < 0:
            return f"a counter is negative: {self}"
        if +Counter(self.active) != Counter(self.leases):
            return f"counters differ from leases: {self}"
        if set(self.owners) - set(self.replicas):
            return f"leases without an owner: {self}"
        return ""


def read_books(client: redis.Redis) -> Books:
    """The books of the default pool. Raises ``redis.ConnectionError`` while Redis is away."""
    read = json.loads(str(client.eval(_BOOKS, 0, POOL)))
    # cjson writes an empty table as {}.
    return Books(read["active"], read["leases"], read["owners"], list(read["replicas"]))


class Watch:
    """Reads the books all the time in a thread: invariants hold always, not just at the end."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port, socket_timeout=5, decode_responses=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.seen = 0
        self.most_held = 0
        self.wrong: list[str] = []

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            with contextlib.suppress(redis.ConnectionError, redis.BusyLoadingError):
                books = read_books(self._client)
                self.seen += 1
                self.most_held = max(self.most_held, books.held)
                if wrong := books.wrong():
                    self.wrong.append(wrong)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(5)
        self._client.close()


class Fleet:
    """``with Fleet(nodes) as fleet``: ready replicas over a Valkey of their own.

    ``sections`` are sections of the settings file and go over the small defaults below. A
    clean exit also asserts that every replica still running ends with code 0, and that no
    replica has logged an error.
    """

    def __init__(
        self,
        nodes: list[dict[str, Any]],
        *,
        replicas: int = 3,
        environment: dict[str, str] | None = None,
        **sections: Any,
    ) -> None:
        settings = {
            "nodes": nodes,
            "server": {"drain_s": 5},
            "timeouts": {"connect_s": 5},
            "health": {"interval_s": 0.3},
            # What is asserted here is not how fast a busy test machine answers.
            "redis": {"call_timeout_ms": 2000},
            **sections,
        }
        self.valkey = ValkeyServer()
        self.replicas = [
            Gateway(settings, self.valkey.url, replica_id=f"r{i}", environment=environment)
            for i in range(replicas)
        ]
        self.redis = redis.Redis(port=self.valkey.port, decode_responses=True)

    @property
    def urls(self) -> list[str]:
        """Base URLs of the replicas, without a path."""
        return [replica.url for replica in self.replicas]

    def books(self) -> Books:
        """Shared state now."""
        return read_books(self.redis)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Watch]:
        """Invariants are read all through the block, and asserted at its end."""
        with Watch(self.valkey.port) as watch:
            yield watch
        assert watch.seen > 10
        assert not watch.wrong, f"{len(watch.wrong)} of {watch.seen}: {watch.wrong[0]}"

    def active(self) -> dict[str, int]:
        """Leases in flight by node, nodes at 0 left out."""
        return dict(+Counter(self.books().active))

    def settled(self) -> bool:
        """Whether no lease is left anywhere."""
        books = self.books()
        return not books.held and not any(books.active.values())

    def wait_settled(self, within_s: float = 5.0) -> None:
        """Wait until no lease is left and every counter is 0."""
        wait_until(self.settled, within_s=within_s, what="all leases given back")

    async def nodes_well(self, *names: str) -> None:
        """Wait until the nodes have been probed: those in the test's own loop answer only now."""
        deadline = asyncio.get_running_loop().time() + 20
        while any(self.redis.hget(f"{POOL}node:{name}", "health") != "ok" for name in names):
            assert asyncio.get_running_loop().time() < deadline, "nodes are not well"
            await asyncio.sleep(0.02)

    def __enter__(self) -> Self:
        self.valkey.start()
        try:
            for replica in self.replicas:
                replica.start(wait=False)
            for replica in self.replicas:
                wait_until(partial(ready, replica), within_s=20, what=f"{replica.url} is ready")
        except BaseException:
            self._end(clean=False)
            raise
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        self._end(clean=exc_type is None)

    def _end(self, *, clean: bool) -> None:
        running = [replica.process for replica in self.replicas if replica.process]
        try:
            codes = _end_all(running, kindly=clean)
        finally:
            logs = [replica.log for replica in self.replicas]
            for replica in self.replicas:
                replica.process = None
                replica.__exit__()  # removes its folder
            self.redis.close()
            self.valkey.kill()
        if clean:
            assert codes == [0] * len(running), "\n".join(logs)
            for log in logs:
                assert "ERROR" not in log, log
                assert "Traceback" not in log, log


def _end_all(processes: list[subprocess.Popen[bytes]], *, kindly: bool) -> list[int]:
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM if kindly else signal.SIGKILL)
    for process in processes:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes]
