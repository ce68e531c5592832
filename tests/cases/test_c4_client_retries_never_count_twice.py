"""C4: the Redis client's own retries must not repeat a counting command."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import events, sse_answer, stream_forever
from tests.support.servers import wait_until

if TYPE_CHECKING:
    import redis

    from tests.cases.conftest import StartGateway, StartNode
    from tests.support.rawnode import Peer, Request
    from tests.support.relay import Relay
    from tests.support.servers import ValkeyServer

REQUESTS, HELD = 50, 5
BUDGET_S = 0.25


def test_replies_withheld_for_a_second_count_nothing_twice_and_cost_one_budget(
    valkey: redis.Redis,
    valkey_server: ValkeyServer,
    gateway: StartGateway,
    raw_node: StartNode,
    relay: Relay,
) -> None:
    node = raw_node(sse_answer(events(5), 0.03))
    gw = gateway([node], redis_url=relay.url, capacity=64)
    draw = random.Random(7)

    def request(wait_s: float) -> tuple[RawClient, float]:
        time.sleep(wait_s)
        begin = time.monotonic()
        return ask(gw.port, chat()), time.monotonic() - begin

    with state.monitoring(valkey, valkey_server.port) as seen, state.sampling(valkey):
        with ThreadPoolExecutor(REQUESTS) as pool:
            asked = [pool.submit(request, draw.uniform(0, 2)) for _ in range(REQUESTS)]
            time.sleep(0.5)
            relay.withhold_replies(1)
            answers = [one.result() for one in asked]
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")
        wait_until(gw.ready, within_s=5, what="in touch again")
    _assert_served([client for client, _ in answers])
    slowest = max(took for _, took in answers)
    print(f"slowest answer {slowest * 1e3:.0f} ms; "
          f"{Counter(client.status for client, _ in answers)}")  # fmt: skip
    # An answered stream takes 0.2 s; a call that Redis does not answer adds its budget, once.
    assert slowest < 0.2 + BUDGET_S + 0.5
    _assert_each_lease_counted_once(seen)
    assert ask(gw.port, chat()).complete


def test_a_reset_after_each_fifth_script_call_counts_nothing_twice(
    valkey: redis.Redis,
    valkey_server: ValkeyServer,
    gateway: StartGateway,
    raw_node: StartNode,
    relay: Relay,
) -> None:
    forever, short = stream_forever(0.05), sse_answer(events(5), 0.01)

    async def script(request: Request, peer: Peer) -> None:
        held = (request.header(b"x-request-id") or b"").startswith(b"held")
        await (forever if held else short)(request, peer)

    node = raw_node(script)
    gw = gateway([node], redis_url=relay.url, capacity=64)
    with (
        state.monitoring(valkey, valkey_server.port) as seen,
        state.sampling(valkey),
        contextlib.ExitStack() as stack,
    ):
        for i in range(HELD):
            client = stack.enter_context(RawClient(gw.port))
            client.send(chat(request_id=f"held-{i}")).read_events(2)
            assert client.status == 200
        relay.reset_every_nth_script(5)

        with ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(lambda _: ask(gw.port, chat()), range(2 * REQUESTS)))
        relay.reset_after_forwarding(None)
        wait_until(
            lambda: state.load(valkey, "b1") == len(state.leases(valkey)) == node.open == HELD,
            within_s=2,
            what="load(b1) = true(b1)",
        )
        stack.close()
        wait_until(lambda: state.unloaded(valkey), within_s=2, what="load(b1) = 0")
    print(f"{relay.resets} resets; {len(answers)} served")
    # Between a reset and the new connection requests are served without Redis: fewer calls.
    assert relay.resets >= REQUESTS // 5
    _assert_served(answers)
    _assert_each_lease_counted_once(seen)


def _assert_served(answers: list[RawClient]) -> None:
    assert all(client.complete and client.status == 200 for client in answers)


@dataclass
class _Run:
    """One script call and what it did."""

    call: state.Seen
    did: list[state.Seen] = field(default_factory=list)

    @property
    def arguments(self) -> tuple[str, ...]:
        """ARGV after clock and prefix."""
        return self.call.words[3 + int(self.call.words[2]) + 2 :]

    def count(self, verb: str) -> int:
        """How often it moved a counter of load."""
        return sum(
            one.verb == verb and one.words[1].startswith(state.KEYS.active("")) for one in self.did
        )


def _assert_each_lease_counted_once(seen: list[state.Seen]) -> None:
    runs: list[_Run] = []
    for one in seen:
        if one.verb in {"EVALSHA", "EVAL"}:
            runs.append(_Run(one))
        elif one.source == "lua":
            runs[-1].did.append(one)
    asked: Counter[str] = Counter()
    leases: set[str] = set()
    up = down = 0
    for run in runs:
        if run.call.words[2] == "4":  # acquire and move: the lease id comes first
            asked[run.arguments[0]] += run.call.verb == "EVALSHA"
        written = sum(one.verb == "HSETNX" for one in run.did)
        assert run.count("INCR") <= written, "no count without its lease"
        leases |= {one.words[2] for one in run.did if one.verb == "HSETNX"}
        up, down = up + run.count("INCR"), down + run.count("DECR")
    assert max(asked.values()) == 1, "nothing sends an acquire twice"
    assert up == down
    assert REQUESTS // 4 <= up <= len(leases)
