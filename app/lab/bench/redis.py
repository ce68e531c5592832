"""What Redis pays for a request: acquire and release beside a script that does nothing.

Server CPU per call from pipelined calls on an embedded server of its own, the kinds interleaved in
blocks (A B A B), so that a slow moment of the machine meets all of them; and what a node, a lease
and an entry of the prefix index take of its memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import orjson
import redis as client_library
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from app.cluster.embedded import EmbeddedValkey
from app.cluster.scripts import constants, text
from app.config import Scoring, Settings
from app.keys import pool_keys

if TYPE_CHECKING:
    from app.config import Policy

NO_OP = "#!lua\nreturn 1"
KEYS = pool_keys("lw", "bench")
BLOCK = 500  # calls between two readings of the server's CPU clock
MODEL, REPLICA = "bench", "replica-1"


@dataclass(frozen=True, slots=True)
class Cost:
    """One size of pool. CPU in µs per call, of the server process; memory in bytes."""

    policy: str
    nodes: int
    no_op_us: float
    acquire_us: float
    first_token_us: float
    release_us: float
    ratio: float
    """Acquire and release together over a script that does nothing, median over the rounds."""
    node_bytes: float
    lease_bytes: float


class Bench:
    """A server with one pool of ``nodes`` nodes under ``policy``."""

    def __init__(self, server: EmbeddedValkey, policy: Policy) -> None:
        self.client: Any = client_library.Redis(port=server.port)
        settings = Settings(scoring=Scoring(policy=policy))
        verbs = ("register", "acquire", "first_token", "release")
        self.scripts = {
            verb: self.client.script_load(text(verb, constants(settings))) for verb in verbs
        }
        self.scripts["no_op"] = self.client.script_load(NO_OP)
        self.leases = 0

    def _cpu_us(self) -> float:
        used = self.client.info("cpu")
        return float(used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"]) * 1e6

    def memory(self) -> int:
        """Bytes that the data takes."""
        return int(self.client.info("memory")["used_memory"])

    def fill(self, nodes: int) -> None:
        """Register ``nodes`` nodes of unequal weight, one model."""
        pipe = self.client.pipeline(transaction=False)
        for i in range(nodes):
            node = f"node-{i:05}"
            pipe.evalsha(
                self.scripts["register"], 2, KEYS.nodes, KEYS.node(node),
                "", KEYS.prefix, node, MODEL, "ok",
                "url", "http://10.0.0.1:8000", "weight", 1 + i % 10, "capacity", 1_000_000,
                "engine", "vllm", "api_key_env", "", "source", "config",
            )  # fmt: skip
        pipe.execute()

    def run(self, verb: str, ids: list[str]) -> float:
        """CPU-µs per call of one block."""
        pipe, sha = self.client.pipeline(transaction=False), self.scripts[verb]
        for i, lease in enumerate(ids):
            if verb == "acquire":
                pipe.evalsha(
                    sha, 4, KEYS.score(MODEL), KEYS.due(MODEL), KEYS.leases(REPLICA), KEYS.replicas,
                    "", KEYS.prefix, lease, REPLICA, 10_000, 200 + i % 800, 100, (i % 997) / 997,
                )  # fmt: skip
            elif verb == "first_token":
                pipe.evalsha(sha, 1, KEYS.leases(REPLICA), "", KEYS.prefix, lease, 50_000 + i)
            elif verb == "release":
                pipe.evalsha(
                    sha, 1, KEYS.leases(REPLICA),
                    "", KEYS.prefix, lease, "ok", 0, 0.5, 100, 2_000_000,
                )  # fmt: skip
            else:
                pipe.evalsha(sha, 1, KEYS.leases(REPLICA), "", KEYS.prefix, lease, "ok")
        before = self._cpu_us()
        pipe.execute()
        return (self._cpu_us() - before) / len(ids)

    def block(self) -> dict[str, float]:
        """One round: each kind once, the leases of a round are ended in it."""
        ids = [f"{self.leases + i:08x}-lease" for i in range(BLOCK)]
        self.leases += BLOCK
        return {v: self.run(v, ids) for v in ("no_op", "acquire", "first_token", "release")}


async def measure(policy: Policy, nodes: int, rounds: int) -> Cost:
    """Medians over ``rounds`` rounds, on a server of its own."""
    async with EmbeddedValkey() as server:
        bench = Bench(server, policy)
        empty = bench.memory()
        bench.fill(nodes)
        filled = bench.memory()
        blocks = [bench.block() for _ in range(rounds)]
        held = bench.memory()
        ids = [f"{i:08x}-held" for i in range(BLOCK)]
        bench.run("acquire", ids)
        us = {verb: median(block[verb] for block in blocks) for verb in blocks[0]}
        return Cost(
            policy,
            nodes,
            no_op_us=round(us["no_op"], 2),
            acquire_us=round(us["acquire"], 2),
            first_token_us=round(us["first_token"], 2),
            release_us=round(us["release"], 2),
            ratio=round(median((b["acquire"] + b["release"]) / b["no_op"] for b in blocks), 1),
            node_bytes=round((filled - empty) / nodes),
            lease_bytes=round((bench.memory() - held) / BLOCK),
        )


async def run(policies: list[Policy], sizes: list[int], rounds: int, as_json: bool) -> None:
    """Measure and print."""
    costs = [await measure(policy, nodes, rounds) for policy in policies for nodes in sizes]
    if as_json:
        rows = [asdict(cost) for cost in costs]
        print(orjson.dumps({"rows": rows}, option=orjson.OPT_INDENT_2).decode())
        return
    title = f"Server CPU-µs per call, medians of {rounds} rounds; bytes"
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("policy")
    for name in ("nodes", "no-op", "acquire", "first token", "release", "acq. + rel. / no-op",
                 "per node", "per lease"):  # fmt: skip
        table.add_column(name, justify="right")
    for cost in costs:
        table.add_row(
            cost.policy, str(cost.nodes), f"{cost.no_op_us:.1f}", f"{cost.acquire_us:.1f}",
            f"{cost.first_token_us:.1f}", f"{cost.release_us:.1f}", f"{cost.ratio:.1f}",
            f"{cost.node_bytes:.0f} B", f"{cost.lease_bytes:.0f} B",
        )  # fmt: skip
    Console(width=max(110, Console().width)).print(table)
