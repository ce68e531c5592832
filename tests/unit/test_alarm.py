"""The lazy timer of a connection."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from app.gateway.alarm import Alarm

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("ahead_s", [-1.0, 0.0, 0.0001, 0.0006, 0.01])
def test_it_rings_however_near_the_time_is(loop: str, ahead_s: float) -> None:
    """uvloop has no timer for a time that has come: its handle cannot be asked for one."""

    async def ring_twice() -> tuple[bool, bool]:
        now = asyncio.get_running_loop().time
        alarm, rung = Alarm(asyncio.get_running_loop()), asyncio.Queue[bool]()
        alarm.set(now() + ahead_s, rung.put_nowait)
        alarm.set(now() + ahead_s / 2, rung.put_nowait)  # asks the first when it rings
        first = await rung.get()
        alarm.set(now() + ahead_s, rung.put_nowait)
        return first, await rung.get()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        late, _ = runner.run(asyncio.wait_for(ring_twice(), 10))
    assert late == (ahead_s == -1.0)


@pytest.mark.parametrize("loop", LOOPS)
def test_it_rings_at_the_earliest_time_and_once(loop: str) -> None:
    async def rings() -> list[str]:
        now = asyncio.get_running_loop().time
        alarm, rung = Alarm(asyncio.get_running_loop()), list[str]()
        alarm.set(now() + 60, lambda _: rung.append("moved"))
        alarm.set(now() + 0.01, lambda _: rung.append("early"))
        alarm.set(now() + 30, lambda _: rung.append("later"))
        await asyncio.sleep(0.05)
        alarm.set(now() + 0.001, lambda _: rung.append("stopped"))
        alarm.stop()
        await asyncio.sleep(0.01)
        return rung

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        assert runner.run(rings()) == ["early"]
