"""One run of the policy bench: a load on a cluster, the nodes' own counters, and how much to trust.

Arrivals never wait for answers in the open loop, and a time to first token counts from when its
request was due: a queue in the client would show, not hide.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from app.lab.bench.policies_client import Answer, Clients, Clock
from app.lab.bench.policies_cluster import NO_TLS, Cluster, Entrant
from app.lab.bench.policies_trust import Cpu, Trust, beats_late_s
from app.lab.bench.processes import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.lab.bench.policies_load import Load, Question

WARM_UP_S: Final = 5.0  # not counted: windows and rates start empty
DRAIN_S: Final = 15.0  # answers not whole this long after the last request are given up
SETTLE_S: Final = 10.0  # for the cluster to hear of those


@dataclass(frozen=True, slots=True)
class Counts:
    """A node's own counters at one moment."""

    started: int
    completed: int
    open: int


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that one run left. Times are seconds of the load's clock."""

    entrant: Entrant
    load: str
    seed: int
    answers: Sequence[Answer]
    begin_s: float
    end_s: float
    """What was due between these counts."""
    given_up_s: float
    """When what had not ended by then was left alone."""
    before: dict[str, Counts]
    """By node, when counting began."""
    after: dict[str, Counts]
    """When it ended."""
    given_up: dict[str, Counts]
    final: dict[str, Counts]
    """When nothing was under way any more."""
    leases_left: int
    trust: Trust


async def measure(
    entrant: Entrant, cluster: Cluster, load: Load, *, seed: int, seconds: float, scale: float
) -> Run:
    """Warm up, count for `seconds`, let the rest drain."""
    begin_s, end_s = WARM_UP_S, WARM_UP_S + seconds
    # Drawn before the clock starts: drawing costs time.
    arrivals = [] if load.clients else load.arrivals(seed, end_s)
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=20) as pages:
        clock = Clock(scale)
        clients = Clients(cluster.replicas, clock)
        sending = asyncio.create_task(
            closed_loop(clients, clock, load, seed, end_s)
            if load.clients
            else open_loop(clients, clock, arrivals)
        )
        try:
            await clock.reach(begin_s)
            lag, cpu = asyncio.create_task(beats_late_s(clock, end_s)), Cpu.now(cluster.pids)
            before = await counts(pages, cluster)
            await clock.reach(end_s)
            after = await counts(pages, cluster)
            trust = cpu.until(Cpu.now(cluster.pids), await lag)
            await asyncio.wait({sending}, timeout=(end_s + DRAIN_S - clock.now_s()) * scale)
            given_up = await counts(pages, cluster)
        finally:
            sending.cancel()
            await asyncio.wait({sending})
        if not sending.cancelled():
            sending.result()  # a fault of the bench itself must not look like a quiet run
        clients.close()
        final = await settled(pages, cluster)
    return Run(
        entrant=entrant,
        load=load.name,
        seed=seed,
        answers=clients.answers,
        begin_s=begin_s,
        end_s=end_s,
        given_up_s=end_s + DRAIN_S,
        before=before,
        after=after,
        given_up=given_up,
        final=final,
        leases_left=await leases_left(cluster),
        trust=trust,
    )


async def open_loop(clients: Clients, clock: Clock, arrivals: Sequence[Question]) -> None:
    """Each when it is due, whatever became of those before."""
    async with asyncio.TaskGroup() as asking:
        for question in arrivals:
            await clock.reach(question.due_s)
            replica = clients.replica_of(question)
            asking.create_task(clients.ask(question, question.due_s, replica))


async def closed_loop(
    clients: Clients, clock: Clock, load: Load, seed: int, until_s: float
) -> None:
    """Clients that each ask, wait for the whole answer, think, and ask again."""
    think_s = load.scenario.think_ms / 1000

    async def one(client: int) -> None:
        # Not all in the same instant: that would be a burst, and no steady loop.
        due_s = think_s * client / load.clients
        for question in load.of_client(seed, client):
            if due_s >= until_s:
                return
            await clock.reach(due_s)
            await clients.ask(question, due_s, client % clients.replicas)
            due_s = clock.now_s() + think_s

    async with asyncio.TaskGroup() as asking:
        for client in range(load.clients):
            asking.create_task(one(client))


async def counts(pages: httpx.AsyncClient, cluster: Cluster) -> dict[str, Counts]:
    """The nodes' counters now."""
    return {
        name: Counts(page["started"], page["completed"], page["open"])
        for name, page in zip(cluster.nodes, await _stats(pages, cluster), strict=True)
    }


async def settled(pages: httpx.AsyncClient, cluster: Cluster) -> dict[str, Counts]:
    """The nodes' counters once nothing is open. Raises ``BenchError`` if that never comes."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while open_now := sum(page["open"] for page in await _stats(pages, cluster)):
        if asyncio.get_running_loop().time() > deadline:
            raise BenchError(f"the nodes still work on {open_now} requests that nobody waits for")
        await asyncio.sleep(0.05)
    return await counts(pages, cluster)


async def leases_left(cluster: Cluster) -> int:
    """Leases still held when everything has ended; a release may be a moment behind its answer."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while held := await asyncio.to_thread(cluster.leases):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.05)
    return held


async def _stats(pages: httpx.AsyncClient, cluster: Cluster) -> list[dict[str, Any]]:
    got = await asyncio.gather(*(pages.get(f"{url}/_fake/stats") for url in cluster.nodes.values()))
    return [page.raise_for_status().json() for page in got]
