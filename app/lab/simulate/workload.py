"""Requests: what clients send, and what the gateway is told of it.

The usual mix has two humps: half are classifications (about 200 tokens in, 1 to 16 out), half are
generations (lognormal, 600 in up to 6,000 and 150 out up to 800). The gateway knows the size of a
prompt within 10 %, and of the answer only the mean of its class within 50 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Protocol

from app.lab.profiles import draw_output_tokens
from app.lab.simulate.engine import Engine, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.lab.profiles import Profile

# Draws the sizes of one request in tokens: prompt, answer, and the mean answer of its class.
Mix = Callable[[Random], tuple[int, int, float]]

PROMPT_MEDIAN = 600
PROMPT_SIGMA = 0.85
PROMPT_CAP = 6000
CLASSIFIED_OUTPUT = 8.5
GENERATED_OUTPUT = 179.0
SATURATING = 2000  # requests at once that show what a node can do


class Call:
    """One request on its way. Times are ms, sizes tokens; `told_…` is what the gateway knows."""

    __slots__ = (
        "ahead",
        "at_ms",
        "cached",
        "client",
        "end_ms",
        "failed",
        "first_ms",
        "found_busy",
        "fresh",
        "group",
        "hits",
        "leased_ms",
        "node",
        "number",
        "output",
        "prompt",
        "replica",
        "told_output",
        "told_prompt",
        "tried",
        "turn",
    )

    def __init__(self, number: int, at_ms: float, prompt: int, output: int) -> None:
        self.number = number
        self.at_ms = at_ms
        self.prompt = prompt
        self.output = output
        self.told_prompt = float(prompt)
        self.told_output = float(output)
        self.replica = 0
        self.node = -1
        self.tried: set[int] = set()
        self.leased_ms = 0.0
        self.first_ms: float | None = None
        self.end_ms: float | None = None
        self.failed = False  # on every node that it tried
        self.found_busy = False
        self.fresh = 0.0  # its prompt tokens to prefill, as counted when it was leased
        self.ahead = 0.0  # work ahead of its first token, as counted when it was leased
        self.client = 0  # of a closed loop; of sessions: the session
        self.turn = 0  # of its session
        self.group = 0  # sessions of a group share their system prompt
        self.cached = 0  # of its prompt, on the node that it went to
        self.hits: dict[int, int] = {}  # node: tokens of it that the gateway believes cached there


class Source(Protocol):
    """Where requests come from."""

    def first(self) -> list[Call]:
        """Those that wait for nobody, by arrival."""

    def then(self, call: Call, now_ms: float) -> Call | None:
        """The one that follows when `call` has ended, if any."""


def bimodal(chance: Random) -> tuple[int, int, float]:
    """One request of the usual mix."""
    if chance.random() < 0.5:
        return chance.randint(100, 300), chance.randint(1, 16), CLASSIFIED_OUTPUT
    drawn = round(chance.lognormvariate(math.log(PROMPT_MEDIAN), PROMPT_SIGMA))
    return min(PROMPT_CAP, max(1, drawn)), draw_output_tokens(chance), GENERATED_OUTPUT


def chat(chance: Random) -> tuple[int, int, float]:
    """Prompts all alike; answers are not, or the clients of a closed loop would march in step."""
    return 512, chance.randint(34, 102), 68.0


def conversation(chance: Random) -> tuple[int, int, float]:
    """One turn of `Sessions`, for their saturated throughput."""
    call = Sessions(1, 1.0, 1, 0).some_turn(chance.randrange(1 << 30), 0.0, chance)
    return call.prompt, call.output, GENERATED_OUTPUT


class Drawn:
    """Draws calls of a mix, one number after the other; the replica by chance."""

    def __init__(self, mix: Mix, replicas: int, seed: int) -> None:
        self.chance = Random(f"{seed}:arrivals")
        self._mix = mix
        self._replicas = replicas
        self._number = 0

    def call(self, at_ms: float) -> Call:
        """The next call."""
        prompt, output, mean = self._mix(self.chance)
        call = Call(self._number, at_ms, prompt, output)
        call.told_prompt = prompt * self.chance.uniform(0.9, 1.1)
        call.told_output = mean * self.chance.uniform(0.5, 1.5)
        call.replica = self.chance.randrange(self._replicas)
        self._number += 1
        return call


class OpenLoop:
    """Poisson arrivals that wait for nobody."""

    def __init__(self, drawn: Drawn, requests: int, per_s: float) -> None:
        self._drawn = drawn
        self._requests = requests
        self._per_ms = per_s / 1000

    def first(self) -> list[Call]:
        at_ms, calls = 0.0, []
        for _ in range(self._requests):
            at_ms += self._drawn.chance.expovariate(self._per_ms)
            calls.append(self._drawn.call(at_ms))
        return calls

    def then(self, call: Call, now_ms: float) -> Call | None:  # noqa: ARG002
        return None


class ClosedLoop:
    """Clients that each send, wait for the whole answer, think, and send again."""

    def __init__(self, drawn: Drawn, requests: int, clients: int, think_ms: float) -> None:
        self._drawn = drawn
        self._left = requests - clients
        self._clients = clients
        self._think_ms = think_ms

    def first(self) -> list[Call]:
        # Not all in the same instant: that would be a burst, and no steady loop.
        return [self._drawn.call(self._think_ms * i / self._clients) for i in range(self._clients)]

    def then(self, call: Call, now_ms: float) -> Call | None:  # noqa: ARG002
        if self._left <= 0:
            return None
        self._left -= 1
        return self._drawn.call(now_ms + self._think_ms)


class Sessions:
    """Conversations: each turn sends the whole one again, with a new message behind it.

    Sessions begin by chance; a group of them shares its system prompt. Turns follow when the answer
    has been read. Messages are lognormal, 120 tokens up to 2,000; answers as in the usual mix. Some
    sessions are under way at the start, as many as there will be: the load is even from there on.
    """

    TURNS = 4.0  # of a session, on average (geometric: how many are behind it says nothing)
    GROUPS = 20
    SYSTEM = 300
    THINK_MS = 60_000.0
    MESSAGE_MEDIAN, MESSAGE_SIGMA, MESSAGE_CAP = 120, 0.8, 2000

    def __init__(self, requests: int, per_s: float, replicas: int, seed: int) -> None:
        self._seed = seed
        self._chance = Random(f"{seed}:arrivals")
        self._per_ms = per_s / 1000
        self._end_ms = requests / self._per_ms
        self._replicas = replicas
        self._number = 0

    def some_turn(self, session: int, at_ms: float, chance: Random, least: int = 0) -> Call:
        """A turn of a session, any of them alike, or any from the `least`-th on."""
        call = self._turn(at_ms, session, chance.randrange(self.GROUPS), 0, self.SYSTEM)
        while call.turn < least or chance.random() >= 1 / self.TURNS:
            history = call.prompt + call.output
            call = self._turn(at_ms, session, call.group, call.turn + 1, history)
        return call

    def first(self) -> list[Call]:
        chance, session = self._chance, 0
        thinking = self._per_ms * (1 - 1 / self.TURNS) * self.THINK_MS  # by Little's law
        calls = []
        for session in range(round(thinking)):
            at_ms = chance.expovariate(1 / self.THINK_MS)
            calls.append(self.some_turn(session, at_ms, chance, least=1))
        at_ms = chance.expovariate(self._per_ms / self.TURNS)
        while at_ms < self._end_ms:
            session += 1
            group = chance.randrange(self.GROUPS)
            calls.append(self._turn(at_ms, session, group, 0, self.SYSTEM))
            at_ms += chance.expovariate(self._per_ms / self.TURNS)
        return [self._numbered(call) for call in calls if call.at_ms < self._end_ms]

    def then(self, call: Call, now_ms: float) -> Call | None:
        # Drawn from the session's own chance: what it does must not depend on when others end.
        chance = Random(f"{self._seed}:{call.client}:{call.turn}")
        if chance.random() < 1 / self.TURNS:
            return None
        at_ms = now_ms + chance.expovariate(1 / self.THINK_MS)
        if at_ms >= self._end_ms:
            return None
        history = call.prompt + call.output
        return self._numbered(self._turn(at_ms, call.client, call.group, call.turn + 1, history))

    def _numbered(self, call: Call) -> Call:
        call.number = self._number
        self._number += 1
        return call

    def _turn(self, at_ms: float, session: int, group: int, turn: int, history: int) -> Call:
        chance = Random(f"{self._seed}:{session}:{turn}:sizes")
        drawn = round(chance.lognormvariate(math.log(self.MESSAGE_MEDIAN), self.MESSAGE_SIGMA))
        message = min(self.MESSAGE_CAP, max(1, drawn))
        call = Call(0, at_ms, history + message, draw_output_tokens(chance))
        call.told_prompt = call.prompt * chance.uniform(0.9, 1.1)
        call.told_output = GENERATED_OUTPUT * chance.uniform(0.5, 1.5)
        call.replica = chance.randrange(self._replicas)
        call.client, call.group, call.turn = session, group, turn
        return call


def saturated_per_s(profile: Profile, mix: Mix = bimodal) -> float:
    """Requests per second that a node completes when there is always more to do."""
    chance, engine = Random("saturated"), Engine(profile)
    for number in range(SATURATING):
        prompt, output, _mean = mix(chance)
        engine.submit(Job(Call(number, 0.0, prompt, output)), 0.0)
    done, counted, begun_ms = 0, 0, 0.0
    while done < SATURATING * 0.9:  # its ends do not count: neither is the node full there
        now_ms = engine.until
        ended = len(engine.advance()[1])
        done += ended
        if done >= SATURATING * 0.1:
            counted, begun_ms = counted + ended, begun_ms or now_ms
    return counted / (now_ms - begun_ms) * 1000


def total_per_s(profiles: Sequence[Profile], mix: Mix = bimodal) -> float:
    """Summed saturated throughput of a fleet."""
    known = {profile: saturated_per_s(profile, mix) for profile in dict.fromkeys(profiles)}
    return sum(known[profile] for profile in profiles)
