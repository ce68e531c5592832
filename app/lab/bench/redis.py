"""What Redis pays for a request: acquire and release beside a script that does nothing.

Server CPU per call from pipelined calls on an embedded server of its own, the kinds interleaved in
blocks (A B A B), so that a slow moment of the machine meets all of them; and what a node, a lease
and an entry of the prefix index take of its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, cast, get_args

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from app.cluster.embedded import EmbeddedValkey
from app.cluster.link import Link
from app.cluster.scripts import constants, text
from app.config import Policy, Prefix, Scoring, Settings
from app.errors import ConfigError
from app.keys import pool_keys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NO_OP = "#!lua\nreturn 1"
KEYS = pool_keys("lw", "bench")
CHAIN = 8  # blocks of a prompt
BLOCK = 100  # calls between two readings of the CPU clock; leases that a replica holds
MODEL, REPLICA = "bench", "replica-1"
TIMED = ("no_op", "acquire", "first_token", "release")


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
    """One pool under ``policy``, on a server of its own that ``link`` leads to."""

    def __init__(self, link: Link, policy: Policy, *, follows: bool = False) -> None:
        self._link = link
        self._follows = follows
        prefix = Prefix(pools=["bench"] if follows else [], node_tokens=10**9)
        made = constants(Settings(scoring=Scoring(policy=policy), prefix=prefix), "bench")
        self._texts = {verb: text(verb, made) for verb in ("register", *TIMED[1:])}
        self._texts["no_op"] = NO_OP
        self._digests: dict[str, str] = {}
        self._leases = 0

    async def load(self) -> None:
        """Make the scripts known."""
        for verb, source in self._texts.items():
            self._digests[verb] = await self._link.call("SCRIPT", "LOAD", source)

    async def _info(self, section: str, *names: str) -> float:
        """The sum of some numbers of ``INFO``."""
        told = dict(
            line.split(":", 1)
            for line in str(await self._link.call("INFO", section)).splitlines()
            if ":" in line
        )
        return sum(float(told[name]) for name in names)

    async def bytes_of(self, pattern: str) -> float:
        """Memory of the keys that match, as the server counts it."""
        keys = await self._link.call("KEYS", pattern)
        sizes = [self._link.call("MEMORY", "USAGE", key, "SAMPLES", 0) for key in keys]
        return float(sum(await asyncio.gather(*sizes)))

    async def _cpu_us(self) -> float:
        names = ("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
        return 1e6 * await self._info("cpu", *names)

    async def fill(self, nodes: int) -> None:
        """Register ``nodes`` nodes of unequal weight, one model."""
        for start in range(0, nodes, 500):
            ids = [f"node-{i:05}" for i in range(start, min(nodes, start + 500))]
            await asyncio.gather(*(self._call("register", i, node) for i, node in enumerate(ids)))

    def _call(self, verb: str, i: int, name: str) -> asyncio.Future[Any]:
        """Call ``verb`` for the node or the lease of this name."""
        keys: tuple[str, ...] = (KEYS.leases(REPLICA),)
        rest: tuple[str | int | float, ...] = ()
        if verb == "register":
            keys = (KEYS.nodes, KEYS.node(name))
            rest = (MODEL, "ok", "url", "http://10.0.0.1:8000", "weight", 1 + i % 10, "capacity",
                    1_000_000, "engine", "vllm", "api_key_env", "", "source", "config")  # fmt: skip
        elif verb == "acquire":
            keys = (KEYS.score(MODEL), KEYS.due(MODEL), KEYS.leases(REPLICA), KEYS.replicas)
            rest = (REPLICA, 10_000, 200 + i % 800, 100, i % 997 / 997, self._blocks(name))
        elif verb == "first_token":
            rest = (50_000 + i,)
        elif verb == "release":
            rest = ("ok", 0, 0.5, 100, 2_000_000)
        return self._link.call(
            "EVALSHA", self._digests[verb], len(keys), *keys, "", KEYS.prefix, name, *rest
        )

    def _blocks(self, lease: str) -> str:
        """A prompt that no other shares anything with."""
        if not self._follows:
            return ""
        number = lease.partition("-")[0]
        return " ".join(f"{number}{i:08x} {128 * (i + 1)}" for i in range(CHAIN))

    async def run(self, verb: str, leases: list[str]) -> float:
        """CPU-µs per call of one block."""
        before = await self._cpu_us()
        await asyncio.gather(*(self._call(verb, i, lease) for i, lease in enumerate(leases)))
        return (await self._cpu_us() - before) / len(leases)

    def mint(self) -> list[str]:
        """The ids of a block of leases."""
        self._leases += BLOCK
        return [f"{self._leases + i:08x}-lease" for i in range(BLOCK)]

    async def block(self) -> dict[str, float]:
        """One round: each kind once; its leases are ended in it."""
        leases = self.mint()
        return {verb: await self.run(verb, leases) for verb in TIMED}


@contextlib.asynccontextmanager
async def ready(policy: Policy, *, follows: bool = False) -> AsyncIterator[Bench]:
    """A bench on a server of its own."""
    async with EmbeddedValkey() as server:
        link = Link(server.url, budget_s=60, name="bench", tag="bench")
        await link.start()
        try:
            bench = Bench(link, policy, follows=follows)
            await bench.load()
            yield bench
        finally:
            await link.close()


async def entry_bytes() -> float:
    """Memory of one block of a prompt, in the index and in the cache of its node."""
    async with ready("work", follows=True) as bench:
        await bench.fill(10)
        for _ in range(8):
            leases = bench.mint()
            await bench.run("acquire", leases)
            await bench.run("release", leases)
        blocks = await bench.bytes_of(KEYS.blocks) + await bench.bytes_of(KEYS.cached("*"))
        return blocks / (8 * BLOCK * CHAIN)


async def measure(policy: Policy, nodes: int, rounds: int) -> Cost:
    """Medians over ``rounds`` rounds, on a server of its own."""
    async with ready(policy) as bench:
        await bench.fill(nodes)
        filled = await bench.bytes_of(KEYS.prefix + "*")
        blocks = [await bench.block() for _ in range(rounds)]
        await bench.run("acquire", bench.mint())
        held = await bench.bytes_of(KEYS.leases(REPLICA))
        us = {verb: median(block[verb] for block in blocks) for verb in TIMED}
        return Cost(
            policy,
            nodes,
            no_op_us=round(us["no_op"], 2),
            acquire_us=round(us["acquire"], 2),
            first_token_us=round(us["first_token"], 2),
            release_us=round(us["release"], 2),
            ratio=round(median((b["acquire"] + b["release"]) / b["no_op"] for b in blocks), 1),
            node_bytes=round(filled / nodes),
            lease_bytes=round(held / BLOCK),
        )


async def run(policies: list[str], sizes: list[int], rounds: int, as_json: bool) -> None:
    """Measure and print. Raises ``ConfigError`` for a policy that there is not."""
    for policy in policies:
        if policy not in get_args(Policy):
            known = ", ".join(get_args(Policy))
            raise ConfigError(f"no policy is called {policy!r}: {known}")
    costs = [
        await measure(cast("Policy", policy), nodes, rounds)
        for policy in policies
        for nodes in sizes
    ]
    entry = round(await entry_bytes())
    if as_json:
        report = {"rows": [asdict(cost) for cost in costs], "prefix_entry_bytes": entry}
        print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
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
    console = Console(width=max(110, Console().width))
    console.print(table)
    console.print(f"A block of a prompt in the prefix index takes {entry} bytes.")
