"""The bench of the case suite: small settings, replicas as processes, nodes on raw sockets."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from app.config import Settings
from tests.support.rawnode import RawNode, Script
from tests.support.relay import Relay
from tests.support.servers import Gateway

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

    from tests.support.servers import ValkeyServer

# Words that no replica may ever log: a fault of ours, whatever the test did to it.
_FAULTS = re.compile(r"Traceback|never awaited|was destroyed but|never retrieved|ResourceWarning")


def small_settings(
    nodes: list[RawNode], *, capacity: int = 8, **sections: dict[str, Any]
) -> dict[str, Any]:
    """The catalogue's small settings over nodes ``b1``, ``b2`` …; ``sections`` lie over them."""
    settings: dict[str, dict[str, Any]] = {
        "redis": {"call_timeout_ms": 250},
        "server": {"drain_s": 2},
        "leases": {"ttl_s": 3},
        "circuit": {"failure_threshold": 3, "open_s": 2},
        "timeouts": {"connect_s": 0.5, "first_token_s": 5, "stall_s": 2},
        "retries": {"max_attempts": 3},
    }
    if "health" in Settings.model_fields:
        settings["health"] = {"interval_s": 0.5, "timeout_s": 0.5, "unhealthy_after": 3}
    for name, fields in sections.items():
        settings[name] = settings.get(name, {}) | fields
    listed = [
        {"id": f"b{i}", "url": node.url, "models": list(node.models), "capacity": capacity}
        for i, node in enumerate(nodes, 1)
    ]
    return {**settings, "nodes": listed}


def assert_ended_cleanly(replica: Gateway, *, log_may_show: str | None = None) -> None:
    """SIGTERM ends it with code 0, and it has logged no fault (see ``StartGateway``)."""
    code = replica.stop()
    log = replica.log
    assert code == 0, f"exit code {code}; log:\n{log}"
    if not (log_may_show and log_may_show in log):
        assert not _FAULTS.search(log), log


class StartGateway(Protocol):
    """``gateway(nodes, …)`` starts a replica and stops it when the test ends."""

    def __call__(
        self,
        nodes: list[RawNode],
        *,
        redis_url: str | None = None,
        replica_id: str | None = None,
        capacity: int = 8,
        log_may_show: str | None = None,
        environment: dict[str, str] | None = None,
        **sections: dict[str, Any],
    ) -> Gateway:
        """``sections`` lie over the small settings.

        A traceback or a resource warning in its log fails the test, unless the log also
        contains ``log_may_show``: the fault that the test itself brings about.
        """
        ...


class StartNode(Protocol):
    """``raw_node(script)`` starts a node and stops it when the test ends."""

    def __call__(self, script: Script | None = None) -> RawNode:
        """See ``RawNode``."""
        ...


@pytest.fixture
def raw_node() -> Iterator[StartNode]:
    """Nodes for the test; they stop after the replicas."""
    with contextlib.ExitStack() as stack:
        yield lambda script=None: stack.enter_context(RawNode(script))


@pytest.fixture
def relay(valkey_server: ValkeyServer) -> Iterator[Relay]:
    """A relay in front of Redis."""
    with Relay(valkey_server.port) as relay:
        yield relay


@pytest.fixture
def gateway(
    valkey: redis.Redis, valkey_server: ValkeyServer, raw_node: StartNode, relay: Relay
) -> Iterator[StartGateway]:
    """Replicas for the test. Each must end cleanly and must not have logged a fault."""
    started: list[tuple[Gateway, str | None]] = []
    with contextlib.ExitStack() as stack:

        def start(
            nodes: list[RawNode],
            *,
            redis_url: str | None = None,
            replica_id: str | None = None,
            capacity: int = 8,
            log_may_show: str | None = None,
            environment: dict[str, str] | None = None,
            **sections: dict[str, Any],
        ) -> Gateway:
            replica = Gateway(
                small_settings(nodes, capacity=capacity, **sections),
                redis_url or valkey_server.url,
                replica_id=replica_id,
                environment=environment,
            )
            stack.enter_context(replica)
            started.append((replica, log_may_show))
            return replica

        yield start
        for replica, allowed in started:
            assert_ended_cleanly(replica, log_may_show=allowed)
