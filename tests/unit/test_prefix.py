"""Hashes of prefixes: who shares the first n shares the prefix, and nobody else does."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.gateway.estimate import BYTES_PER_TOKEN, MEDIA_TOKENS
from app.gateway.prefix import EDGES, MOST_BLOCKS, Block, Prefixes

MINE = Prefixes("salt of a deployment")
CHARACTERS = st.characters(codec="utf-8")
# Turns long enough for edges to fall before, in and after them.
TEXTS = st.builds(
    lambda text, times: text * times, st.text(CHARACTERS, max_size=20), st.integers(1, 90)
)
PARTS = st.one_of(
    TEXTS.map(lambda text: {"type": "text", "text": text}),
    TEXTS.map(lambda text: {"type": "image_url", "image_url": {"url": f"data:,{text}"}}),
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": TEXTS | st.lists(PARTS, max_size=2)}
)
TALKS = st.lists(TURNS, min_size=1, max_size=6)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "content", "text", "role", "messages", "input", "x"]),
            inner | st.sampled_from(["image_url", "text", "input_text"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


def hashes(body: Any, **more: Any) -> list[str]:
    return [block.hash for block in MINE.blocks("m", body, **more)]


def shared(one: list[str], other: list[str]) -> int:
    """How many lead both; after the first that differs none may be the same."""
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if count is None:
        return min(len(one), len(other))
    assert not set(one[count:]) & set(other[count:])
    return count


# A conversation


@given(TALKS, st.booleans())
def test_one_more_turn_shares_all_the_blocks_before_it(
    talk: list[dict[str, Any]], system: bool
) -> None:
    first = {"system": "words " * 200} if system else {}
    chains = [hashes({**first, "messages": talk[:n]}) for n in range(len(talk) + 1)]
    for before, after in pairwise(chains):
        assert after[: len(before)] == before
    assert all(len(chain) == len(set(chain)) for chain in chains)


@given(TALKS, TALKS, TALKS)
def test_two_that_part_ways_share_what_comes_before_and_nothing_after(
    common: list[dict[str, Any]], mine: list[dict[str, Any]], yours: list[dict[str, Any]]
) -> None:
    mine, yours = (
        [{"role": who, "content": "x"}, *more] for who, more in (("a", mine), ("b", yours))
    )
    one, other = (hashes({"messages": [*common, *more]}) for more in (mine, yours))
    lead = hashes({"messages": common})
    count = shared(one, other)
    assert one[: len(lead)] == other[: len(lead)] == lead
    assert count - len(lead) <= 1  # what tells them apart is shorter than a block


@given(TALKS, st.integers(0, 5))
def test_a_change_in_an_early_message_changes_all_that_comes_after(
    talk: list[dict[str, Any]], which: int
) -> None:
    which %= len(talk)
    changed = [*talk]
    changed[which] = {**talk[which], "role": "user, in a way"}
    filled = [{"role": "user", "content": "more " * 500}]
    one, other = (hashes({"messages": [*turns, *filled]}) for turns in (talk, changed))
    before = hashes({"messages": talk[:which]})
    assert len(before) <= shared(one, other) < len(one)
    assert one[-1] not in other


def reordered(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        names = chance.sample(sorted(value), len(value))
        return {name: reordered(value[name], chance) for name in names}
    return [reordered(item, chance) for item in value] if isinstance(value, list) else value


@given(TALKS, st.integers(0, 2**32), st.sampled_from([None, 1, "\t"]), st.booleans())
def test_order_of_names_space_and_escapes_do_not_matter(
    talk: list[dict[str, Any]], seed: int, indent: int | str | None, escaped: bool
) -> None:
    body = {"messages": talk, "tools": [{"type": "function", "function": {"name": "f", "x": "y"}}]}
    other = reordered(body, random.Random(seed))
    written = json.dumps(other, ensure_ascii=escaped, indent=indent)
    assert hashes(orjson.loads(written)) == hashes(body)


@given(TEXTS)
def test_a_text_is_the_same_text_however_it_is_put(text: str) -> None:
    ways: list[Any] = [
        text,
        [{"type": "text", "text": text}],
        [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}],
        [{"text": text, "type": "input_text"}],
    ]
    filled = {"role": "user", "content": "more " * 500}
    chains = [hashes({"messages": [{"role": "user", "content": way}, filled]}) for way in ways]
    assert chains[0]
    assert all(chain == chains[0] for chain in chains)


def test_the_mark_of_what_to_cache_may_move_on() -> None:
    """As Claude Code does: the last block of each turn is marked, and no earlier one."""
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA" * 300}}
    mark = {"cache_control": {"type": "ephemeral"}}
    question = {"role": "user", "content": [image]}
    marked = {"role": "user", "content": [{**image, **mark}]}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    answer = {"role": "assistant", "content": "words " * 500}
    first = hashes({"tools": [{**tool, **mark}], "messages": [marked]})
    second = hashes({"tools": [tool], "messages": [question, answer]})
    assert len(first) >= 8
    assert second[: len(first)] == first


# What stands where


def test_tools_and_system_prompt_come_before_the_turns() -> None:
    turns = [{"role": "user", "content": "words " * 1000}]
    tools = [{"type": "function", "function": {"name": "f", "description": "words " * 200}}]
    plain = hashes({"messages": turns})
    for body in (
        {"tools": tools, "messages": turns},
        {"system": "be kind " * 100, "messages": turns},
        {"instructions": "be kind " * 100, "input": turns},
    ):
        assert not set(hashes(body)) & set(plain)
        # Whatever comes after them, they are shared.
        other = {**body, "messages": [], "input": [{"role": "user", "content": "other " * 1000}]}
        assert shared(hashes(body), hashes(other)) >= 1


def test_prompts_of_completions_and_responses_have_prefixes_too() -> None:
    text = "words of a prompt, " * 200
    for name in ("prompt", "input"):
        short, long = hashes({name: text}), hashes({name: text + text})
        assert len(short) >= 7
        assert len(short) - 1 <= shared(short, long) < len(long)  # the end of a string is its own
        ids = list(range(5000))
        short, long = hashes({name: ids[:4000]}), hashes({name: ids})
        assert shared(short, long) >= len(short) - 1


IMAGE = base64.b64encode(random.Random(1).randbytes(400_000)).decode()


@pytest.mark.parametrize("at", [0, 100_000, 400_000])
def test_media_are_told_apart_by_their_content_and_weigh_what_they_cost(at: int) -> None:
    def asked(data: str) -> dict[str, Any]:
        url = {"url": f"data:image/png;base64,{data}"}
        part = {"type": "image_url", "image_url": url}
        return {
            "messages": [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        }

    other = IMAGE[:at] + "~" * 60_000 + IMAGE[at + 60_000 :]
    one = MINE.blocks("m", asked(IMAGE))
    assert one == MINE.blocks("m", asked(IMAGE))
    assert not {b.hash for b in one} & set(hashes(asked(other)))
    price = MEDIA_TOKENS["image_url"]
    assert price * 7 / 8 <= one[-1].tokens <= price + 20


# Bounds


def test_blocks_grow_so_that_a_prompt_of_any_size_has_few() -> None:
    blocks = MINE.blocks("m", {"prompt": "x" * (2 * EDGES[-1])})
    assert len(blocks) == MOST_BLOCKS == len(EDGES)
    assert [block.tokens for block in blocks] == [int(edge / BYTES_PER_TOKEN) for edge in EDGES]
    steps = [b - a for a, b in zip((0, *EDGES), EDGES, strict=False)]
    assert steps == sorted(steps)
    assert steps[0] == 512
    assert all(step <= max(512, edge / 8) for step, edge in zip(steps, (0, *EDGES), strict=False))
    assert EDGES[-1] > 500_000 * BYTES_PER_TOKEN


@pytest.mark.parametrize("edge", EDGES[:20])
def test_a_block_is_there_when_it_is_whole(edge: int) -> None:
    frame = len(b'["","')  # a first prompt, its end, and the begin of another
    count = EDGES.index(edge)
    assert len(hashes({"prompt": ["x" * (edge - frame), ""]})) == count + 1
    assert len(hashes({"prompt": "x" * (edge - 4)})) == count


def test_tokens_follow_from_what_a_token_has_been_learned_to_be() -> None:
    body = {"prompt": "x" * 2000}
    told = MINE.blocks("m", body, bytes_per_token=2.0)
    assert told[0] == Block(hashes(body)[0], 256)
    assert [block.hash for block in told] == hashes(body)


# Who shares


def test_deployments_models_owners_and_cache_salts_share_nothing() -> None:
    body = {"messages": [{"role": "user", "content": "words " * 1000}]}
    chains = [
        MINE.blocks("m", body),
        MINE.blocks("other", body),
        MINE.blocks("m", body, "team-a"),
        MINE.blocks("m", body, "team-b"),
        MINE.blocks("mteam", body, "-a"),
        Prefixes("another salt").blocks("m", body),
        Prefixes().blocks("m", body),
        MINE.blocks("m", {**body, "cache_salt": "x"}),
        MINE.blocks("m", {**body, "reasoning_effort": "high"}),
    ]
    found = [block.hash for chain in chains for block in chain]
    assert len(found) == len(set(found)) == 9 * len(chains[0])
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in found)


def test_all_replicas_of_a_deployment_agree() -> None:
    body = {"messages": [{"role": "user", "content": "words " * 200}]}
    assert Prefixes("s").blocks("m", body) == Prefixes("s").blocks("m", {**body, "stream": True})
    # Written down: it may not change between two versions that share an index.
    assert Prefixes("s").blocks("m", body)[0].hash == "895aad84757ffce2"


# Anything


@given(JSON)
def test_it_never_raises_and_is_bounded_and_the_same_each_time(value: Any) -> None:
    for body in (value, {"messages": value}, {"input": value, "tools": value, "system": value}):
        blocks = MINE.blocks("m", body)
        assert blocks == MINE.blocks("m", body)
        assert len(blocks) <= MOST_BLOCKS


def test_what_cannot_be_written_down_has_no_prefix() -> None:
    deep = orjson.loads(b"[" * 1000 + b'"' + b"x" * 9000 + b'"' + b"]" * 1000)
    nested: Any = "x"
    for _ in range(450):
        nested = [{"role": "tool", "content": nested}]
    odd: list[Any] = [deep, "\ud800" * 900, 2**70, {"x": deep}, {"content": nested}]
    for value in odd:
        assert hashes({"messages": [value, "x" * 9000]}) == []
        assert hashes({"messages": ["x" * 9000], "cache_salt": value}) == []


def test_a_prompt_that_begins_elsewhere_has_no_prefix() -> None:
    body = {"input": "x" * 9000, "previous_response_id": "resp_1"}
    assert hashes(body) == []
    assert hashes({**body, "previous_response_id": None})
