"""One replica over raw nodes for all tests of a file, what it has booked, and its memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import redis
from prometheus_client.parser import text_string_to_metric_families

from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import ask
from tests.support.rawnode import Peer, RawNode, Request, chunk, json_answer
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.support.rawnode import Script

MIB = 1024 * 1024


@dataclass(frozen=True)
class Booked:
    """What a replica has counted since its start, over all nodes and models.

    ``samples`` are first tokens; ``ok``, ``failed`` … are attempts by their outcome.
    """

    prompt: int = 0
    output: int = 0
    samples: int = 0
    ok: int = 0
    failed: int = 0
    saturated: int = 0

    def __sub__(self, before: Booked) -> Booked:
        """What was counted since ``before``."""
        names = [field.name for field in fields(self)]
        return Booked(**{name: getattr(self, name) - getattr(before, name) for name in names})


@dataclass(frozen=True)
class Bench:
    """A replica, its nodes ``b1`` … and its Redis. Each node serves ``m`` and, alone, ``m1`` …"""

    gw: Gateway
    nodes: list[RawNode]
    valkey: redis.Redis

    @property
    def node(self) -> RawNode:
        """The first node."""
        return self.nodes[0]

    def booked(self) -> Booked:
        """What the replica has counted so far."""
        page = ask(self.gw.port, b"GET /metrics HTTP/1.1\r\nhost: g\r\n\r\n").body.decode()
        found: dict[str, int] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = {
                    "leaseway_tokens_total": sample.labels.get("kind"),
                    "leaseway_ttft_seconds_count": "samples",
                    "leaseway_attempts_total": sample.labels.get("outcome"),
                }.get(sample.name)
                if name is not None:
                    found[name] = found.get(name, 0) + int(sample.value)
        return Booked(**found)

    def streak(self, node: str = "b1") -> int:
        """Failures in a row in the record of a node."""
        return int(state.record(self.valkey, node)["streak"])

    def wait_unloaded(self) -> None:
        """Within 2 s no lease is left, and every counter is 0."""
        wait_until(lambda: state.unloaded(self.valkey), within_s=2, what="load = 0")


@contextlib.contextmanager
def running_bench(
    count: int = 1,
    *,
    capacity: int = 8,
    keys: list[dict[str, Any]] | None = None,
    **sections: dict[str, Any],
) -> Iterator[Bench]:
    """A bench of ``count`` nodes whose failures open no circuit; it must end cleanly."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        nodes = [RawNode(models=(f"m{i}", "m")) for i in range(1, count + 1)]
        for node in nodes:
            stack.enter_context(node)
        sections.setdefault("circuit", {"failure_threshold": 10_000, "failure_rate": 1})
        settings = small_settings(nodes, capacity=capacity, **sections)
        if keys is not None:
            settings["keys"] = keys
        gw = stack.enter_context(Gateway(settings, server.url))
        yield Bench(gw, nodes, valkey)
        assert_ended_cleanly(gw)


def renewed(bench: Bench) -> Bench:
    """``bench`` with nodes that answer well and have seen nothing."""
    for node in bench.nodes:
        node.script = json_answer()
        node.requests.clear()
        node.left.clear()
    return bench


def in_pieces(head: bytes, pieces: Iterable[bytes], *, sized: bool = True) -> Script:
    """Answer with ``head`` and then each of ``pieces`` in a write: as a chunk, or as it is.

    Not ``sized``, the body ends with the connection.
    """
    framing = b"transfer-encoding: chunked" if sized else b"connection: close"

    async def script(request: Request, peer: Peer) -> None:
        peer.keep_alive = sized
        await peer.write(head + framing + b"\r\n\r\n")
        for piece in pieces:
            await peer.write(chunk(piece) if sized else piece)
            await peer.sleep(0)
        if sized:
            await peer.write(b"0\r\n\r\n")

    return script


def cut_every(raw: bytes, size: int) -> list[bytes]:
    """``raw`` in pieces of ``size`` bytes."""
    return [raw[i : i + size] for i in range(0, len(raw), size)]


class PeakMemory:
    """``with PeakMemory(gw) as memory:``: by how much resident memory ever grew in the block."""

    def __init__(self, gw: Gateway) -> None:
        self._process = Path(f"/proc/{gw.pid}")
        self._before = 0

    def _read(self, name: str) -> int:
        lines = (self._process / "status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) * 1024

    @property
    def grown(self) -> int:
        """Bytes."""
        return max(0, self._read("VmHWM") - self._before)

    def __enter__(self) -> Self:
        (self._process / "clear_refs").write_text("5")  # the peak starts anew: proc(5)
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        pass
