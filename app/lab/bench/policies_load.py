"""What the policy bench asks: the simulator's own scenarios as real requests, drawn from a seed.

The same seed asks every policy the same. How long a generation gets is not in its request (the node
draws it from the prompt), so no policy knows more of it than a gateway would.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Final

import orjson

from app.errors import ConfigError
from app.lab.calls import BYTES_PER_TOKEN, parse_call
from app.lab.profiles import draw_output_tokens
from app.lab.simulate.scenarios import SCENARIOS
from app.lab.simulate.workload import GENERATED_OUTPUT, total_per_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.lab.simulate.scenarios import Scenario

MODEL: Final = "demo"
CLOSED: Final = "closed"
NODE_SEED: Final = 1
"""Of every node: all of them give a prompt the same answer."""
_FILLER: Final = "what the node that takes this will have to read before it says a word "


@dataclass(frozen=True, slots=True)
class Question:
    """One request. Sizes are tokens, `due_s` is on the load's own clock."""

    body: bytes
    prompt_tokens: int
    answer_tokens: int
    """What a whole answer has, no more and no less."""
    heavy: bool
    """A generation, not a classification."""
    lot: float
    """Decides the replica, in [0, 1)."""
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """A fleet and how it is asked: by `per_s` Poisson arrivals, or by clients that wait."""

    name: str
    scenario: Scenario
    per_s: float = 0.0

    @property
    def clients(self) -> int:
        """Of the closed loop; 0 in the open one."""
        return self.scenario.clients

    @property
    def about(self) -> str:
        """One line for people."""
        if self.clients:
            return f"closed loop: {self.scenario.about}"
        return f"open loop: {self.per_s:.1f} requests/s, {self.name} of what the fleet can do"

    def arrivals(self, seed: int, until_s: float) -> list[Question]:
        """The whole open loop, by arrival."""
        chance = Random(f"{seed}:arrivals")
        questions: list[Question] = []
        due_s = chance.expovariate(self.per_s)
        while due_s < until_s:
            questions.append(self._drawn(chance, f"{seed}.{len(questions)}", due_s))
            due_s += chance.expovariate(self.per_s)
        return questions

    def of_client(self, seed: int, client: int) -> Iterator[Question]:
        """What one client of the closed loop asks, one after the other."""
        chance = Random(f"{seed}:client {client}")
        for number in count():
            yield self._drawn(chance, f"{seed}.{client}.{number}", 0.0)

    def _drawn(self, chance: Random, tag: str, due_s: float) -> Question:
        prompt, output, mean = self.scenario.mix(chance)
        heavy = mean == GENERATED_OUTPUT
        body = _body(tag, prompt, None if heavy else output)
        call = parse_call("chat", body, seed=NODE_SEED, models=(MODEL,))
        tokens = draw_output_tokens(call.chance()) if heavy else output
        return Question(body, call.prompt_tokens, tokens, heavy, chance.random(), due_s)


def _body(tag: str, prompt_tokens: int, max_tokens: int | None) -> bytes:
    """A chat of exactly so many tokens; the tag in front keeps prompts from sharing a prefix."""
    size = prompt_tokens * BYTES_PER_TOKEN
    text = f"{tag} {_FILLER * (size // len(_FILLER) + 1)}"[:size]
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    return orjson.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **limit,
        }
    )


def loads_of(text: str) -> list[Load]:
    """`closed,0.5,0.8` as loads. Raises ``ConfigError``."""
    return [_load(name) for name in dict.fromkeys(text.split(","))]


def _load(name: str) -> Load:
    if name == CLOSED:
        return Load(CLOSED, SCENARIOS["closed"])
    try:
        share = float(name)
    except ValueError:
        share = 0.0
    if not 0.01 <= share <= 2:
        raise ConfigError(
            f"load = {name!r}: closed, or a share of the fleet's throughput from 0.01 to 2, "
            "with commas between, as closed,0.8"
        )
    scenario = SCENARIOS["trio"]
    capacity_per_s = total_per_s([spec.profile for spec in scenario.specs], scenario.mix)
    return Load(f"{share:.0%}", scenario, share * capacity_per_s)
