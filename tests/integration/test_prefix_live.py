"""What one replica has sent to a node is a prefix that all know of; prompts stay out of Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from app.lab.faults import Fault
from app.lab.node import NodeConfig
from tests.lua.oracle import Lease
from tests.support.fleet import CHAT, POOL, Fleet, Nodes, chat, pace, plain_async_http

SECRET = "the quick brown fox of one tenant "


def conversation(turns: int) -> dict[str, Any]:
    """Some 250 tokens a turn."""
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} {SECRET}" * 30}
        for i in range(2 * turns - 1)
    ]
    return {**chat(max_tokens=2), "messages": messages}


def the_lease(fleet: Fleet) -> Lease:
    """The only one."""
    (record,) = [
        record
        for replica in ("r0", "r1")
        for record in fleet.redis.hvals(f"{POOL}leases:{replica}")
    ]
    return Lease.parse(str(record))


@pytest.mark.parametrize("followed", [True, False])
async def test_the_next_turn_through_another_replica_costs_what_is_new_in_it(
    followed: bool,
) -> None:
    with (
        Nodes(a=NodeConfig(profile=pace(1.0))) as nodes,
        Fleet(
            nodes.settings(),
            replicas=2,
            scoring={"policy": "work"},
            prefix={"pools": ["default"] if followed else []},
        ) as fleet,
    ):
        async with plain_async_http() as http:
            first, second = fleet.urls
            answer = await http.post(first + CHAT, json=conversation(3))
            assert answer.status_code == 200
            fleet.wait_settled()
            nodes["a"].fault = Fault(mode="hang")
            asking = asyncio.create_task(http.post(second + CHAT, json=conversation(4)))
            async with asyncio.timeout(20):
                while not nodes.open()["a"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            lease = the_lease(fleet)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if followed:
            assert lease.fresh < lease.size / 2, lease
        else:
            assert lease.fresh == lease.size > 500, lease
        assert bool(fleet.redis.exists(f"{POOL}prefix")) == followed
        with redis.Redis(port=fleet.valkey.port) as raw:
            everything = b"".join(raw.dump(name) or b"" for name in raw.keys("*"))
        assert everything
        assert b"quick" not in everything
        fleet.wait_settled()
