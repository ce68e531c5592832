"""Carries out a plan: strikes at the planned time, undoes the fault, keeps the truth."""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING, Any

import redis

from tests.chaos.bench import until
from tests.chaos.schedule import EVERY_NODE, KINDS, NODES, Step

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.chaos.bench import Bench
    from tests.chaos.truth import Truth

_STATUSES = (500, 502, 503, 429)


class Injector:
    """Faults on a bench. ``report`` is told what a fault itself has shown to be wrong."""

    def __init__(self, bench: Bench, truth: Truth, report: Callable[[str, str], None]) -> None:
        self._bench = bench
        self._truth = truth
        self._report = report
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._strikes: dict[str, Callable[[Step], Awaitable[None]]] = {
            "replica": self._replica,
            "node": self._node,
            "redis": self._redis,
            "relay": self._relay,
        }

    async def run(self, steps: Sequence[Step]) -> None:
        """The whole plan; returns when the last fault is undone."""
        async with asyncio.TaskGroup() as group:
            for step in steps:
                due = self._truth.origin + step.at_s
                await asyncio.sleep(max(0.0, due - monotonic()))
                group.create_task(self._strike(step))

    async def _strike(self, step: Step) -> None:
        family = KINDS[step.kind].family
        targets = NODES if step.target == EVERY_NODE else (step.target,)
        # A node and the replica's relay are targets of their own; one fault at a time on each.
        locks = [self._turns[f"{family} {target}"] for target in targets]
        for lock in locks:
            await lock.acquire()
        try:
            with self._truth.fault(step.kind, step.target):
                await self._strikes[family](step)
        finally:
            for lock in locks:
                lock.release()

    async def _replica(self, step: Step) -> None:
        replica = self._bench.replicas[step.target]
        if step.kind.startswith("replica.freeze"):
            replica.signal(signal.SIGSTOP)
            await asyncio.sleep(step.seconds)
            replica.signal(signal.SIGCONT)
            return
        if step.kind == "replica.kill":
            replica.kill()
        else:
            await self._end_kindly(step.target)
        await asyncio.sleep(step.seconds)
        await self._bench.start_replica(step.target)

    async def _end_kindly(self, name: str) -> None:
        replica = self._bench.replicas[name]
        process = replica.process
        assert process is not None
        process.terminate()

        async def ended() -> bool:
            return process.poll() is not None

        try:
            await until(ended, 20, "it ends")
        except TimeoutError:
            self._report("exit", f"replica {name} still runs 20 s after SIGTERM")
        else:
            if process.returncode:
                self._report("exit", f"replica {name} left with code {process.returncode}")
        replica.kill()

    async def _node(self, step: Step) -> None:
        nodes = NODES if step.target == EVERY_NODE else (step.target,)
        if step.kind == "node.kill":
            node = self._bench.nodes[step.target]
            node.kill()
            await asyncio.sleep(step.seconds)
            await node.start()
        elif step.kind == "node.freeze":
            process = self._bench.nodes[step.target].process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(step.seconds)
            process.send_signal(signal.SIGCONT)
        else:
            for name in nodes:
                await self._bench.nodes[name].set_fault(**node_fault(step))
            await asyncio.sleep(step.seconds)
            for name in nodes:
                await self._bench.nodes[name].set_fault()

    async def _redis(self, step: Step) -> None:
        valkey = self._bench.valkey
        if step.kind == "redis.restart":
            valkey.kill()
            await asyncio.sleep(step.seconds)
            await asyncio.to_thread(valkey.start)
        elif step.kind == "redis.freeze":
            assert valkey.process is not None
            valkey.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(step.seconds)
            valkey.process.send_signal(signal.SIGCONT)
        else:
            with redis.Redis(port=valkey.port) as client:
                client.flushall() if step.kind == "redis.flush" else client.script_flush()

    async def _relay(self, step: Step) -> None:
        relay = self._bench.relays[step.target]
        with ExitStack() as undo:
            if step.kind == "relay.delay":
                undo.callback(setattr, relay, "delay_replies_s", 0.0)
                relay.delay_replies_s = step.value
            elif step.kind == "relay.pause":
                undo.callback(relay.resume)
                relay.pause()
            elif step.kind == "relay.refuse":
                undo.callback(setattr, relay, "refuse", False)
                relay.refuse = True
                relay.reset_all()
            elif step.kind == "relay.reset":
                relay.reset_all()
            elif step.kind == "relay.cut":
                relay.cut_next_reply()
            elif step.kind == "relay.lost_answers":
                undo.callback(relay.reset_after_forwarding, None)
                relay.reset_every_nth_script(round(step.value))
            await asyncio.sleep(step.seconds)


def node_fault(step: Step) -> dict[str, Any]:
    """The fields of the fake node's fault for a step."""
    mode = step.kind.removeprefix("node.")
    if mode == "blackout":
        return {"mode": "status", "status": 500}
    if mode == "status":
        status = _STATUSES[min(int(step.value), len(_STATUSES) - 1)]
        return {"mode": "status", "status": status, "retry_after_s": 1 if status == 429 else None}
    if mode == "flaky":
        return {"mode": "status", "status": 500, "probability": step.value}
    if mode == "slow":
        return {"mode": "slow", "factor": step.value}
    if mode in {"drop_mid_stream", "error_event", "stall"}:
        return {"mode": mode, "after_tokens": int(step.value)}
    return {"mode": mode}
