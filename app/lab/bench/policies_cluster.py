"""A whole cluster for one run: Redis, the fake fleet, the replicas; each a process of its own.

Fresh for every run: no policy inherits what another, or an earlier round, has taught the nodes.
"""

from __future__ import annotations

import json
import ssl
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from app.cluster.embedded import free_port
from app.lab.bench.cpu import Cores
from app.lab.bench.peers import SERVE, environment, redis_server
from app.lab.bench.policies_load import MODEL
from app.lab.bench.processes import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from app.lab.bench.policies_load import Load
    from app.lab.bench.processes import Child

NOT_PINNED: Final = Cores(None, None)
START_S: Final = 60.0  # seven processes start at once
# Spares each HTTP client 100 ms of reading certificates that nobody needs here.
NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True, slots=True)
class Entrant:
    """What is compared: a policy on so many replicas."""

    policy: str
    replicas: int

    def __str__(self) -> str:
        return f"{self.policy} x{self.replicas}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where it listens, and whose CPU time it costs."""

    replicas: tuple[str, ...]
    """Base URLs."""
    nodes: dict[str, str]
    """Base URLs by node id."""
    pids: dict[str, int]
    """Of every process, by a name for people."""

    def leases(self) -> int:
        """Held now, over all nodes, by the word of Redis."""
        return sum(row["active"] for row in self._node_rows())

    def nodes_well(self) -> bool:
        """Whether a replica is up and every node's first probe was good."""
        with suppress(httpx.HTTPError):
            rows = self._node_rows()
            return len(rows) == len(self.nodes) and all(row["health"] == "ok" for row in rows)
        return False

    def _node_rows(self) -> list[dict[str, Any]]:
        page = httpx.get(
            f"{self.replicas[0]}/admin/nodes", timeout=2, trust_env=False, verify=NO_TLS
        )
        rows: list[dict[str, Any]] = page.raise_for_status().json()
        return rows


@contextmanager
def running_cluster(entrant: Entrant, load: Load, scale: float, scratch: Path) -> Iterator[Cluster]:
    """Everything ready; ended, in reverse order, with the block. Raises ``BenchError``."""
    with ExitStack() as stack:
        redis, redis_url = stack.enter_context(redis_server(scratch, NOT_PINNED))
        children = {"redis": redis}
        nodes = {}
        for spec in load.scenario.specs:
            port = free_port()
            nodes[spec.name] = f"http://127.0.0.1:{port}"
            command = [
                sys.executable, "-m", "app.lab.bench.policies_node", "--scenario",
                load.scenario.name, "--node", spec.name, "--port", str(port),
                "--time-scale", str(scale),
            ]  # fmt: skip
            children[spec.name] = stack.enter_context(running(spec.name, command, scratch, None))
        settings = scratch / "leaseway.yaml"
        settings.write_text(json.dumps(_settings(entrant, load, nodes)))  # JSON is YAML
        urls = tuple(f"http://127.0.0.1:{free_port()}" for _ in range(entrant.replicas))
        for number, url in enumerate(urls, 1):
            name = f"replica-{number}"
            command = [*SERVE, "--config", str(settings), "--replica-id", name,
                       "--port", url.rpartition(":")[2]]  # fmt: skip
            env = environment() | {"REDIS_URL": redis_url}
            children[name] = stack.enter_context(running(name, command, scratch, None, env))
        cluster = Cluster(urls, nodes, {name: child.pid for name, child in children.items()})
        _wait_until_up(cluster, children)
        yield cluster


def _settings(entrant: Entrant, load: Load, nodes: dict[str, str]) -> dict[str, Any]:
    """Defaults, but for two limits: only the policy may decide how much a node is given."""
    return {
        "scoring": {"policy": entrant.policy},
        "timeouts": {"first_token_s": 3600},
        "nodes": [
            {
                "id": spec.name,
                "url": nodes[spec.name],
                "weight": spec.weight,
                "capacity": spec.capacity,
                "models": [MODEL],
            }
            for spec in load.scenario.specs
        ],
    }


def _wait_until_up(cluster: Cluster, children: dict[str, Child]) -> None:
    for number, url in enumerate(cluster.replicas, 1):

        def ready(url: str = url) -> bool:
            with suppress(httpx.HTTPError):
                page = httpx.get(f"{url}/readyz", timeout=1, trust_env=False, verify=NO_TLS)
                return page.status_code == 200 and page.json()["status"] == "ok"
            return False

        children[f"replica-{number}"].wait_until(ready, "200 from /readyz", START_S)
    children["replica-1"].wait_until(cluster.nodes_well, "good first probe of every node", START_S)
