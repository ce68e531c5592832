"""Sizes: what counts as prompt, what does not, and what is learned from the usage of nodes."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.gateway.estimate import (
    MEDIA_TOKENS,
    NO_SIZE,
    PRIOR_OUTPUT_TOKENS,
    Size,
    Sizes,
    measure,
)

WORDS = "some words of a prompt, " * 100
BASE64 = base64.b64encode(random.Random(1).randbytes(300_000)).decode()
IMAGE, AUDIO, FILE = (MEDIA_TOKENS[kind] for kind in ("image_url", "input_audio", "file"))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "content", "role", "messages", "input", "tools", "x"]),
            inner | st.sampled_from(["image_url", "text", "base64"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)
MEMBERS = st.sampled_from(["model", "messages", "input", "prompt", "system", "tools", "documents"])


def chat(content: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


# What counts


ROUTES: dict[str, dict[str, Any]] = {
    "chat": chat(WORDS),
    "chat, in parts": chat([{"type": "text", "text": WORDS}]),
    "chat with tools": {**chat(""), "tools": [{"type": "function", "function": {"x": WORDS}}]},
    "completions": {"prompt": WORDS},
    "completions, a batch": {"prompt": [WORDS[:1200], WORDS[1200:]]},
    "responses": {"instructions": WORDS[:1200], "input": WORDS[1200:]},
    "responses, items": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": WORDS}]}
        ]
    },
    "messages": {"system": WORDS[:1200], "messages": [{"role": "user", "content": WORDS[1200:]}]},
    "messages, a document in words": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "source": {"type": "text", "media_type": "text/plain", "data": WORDS},
                    }
                ],
            }
        ]
    },
    "embeddings": {"input": [WORDS[:1200], WORDS[1200:]]},
    "rerank": {"query": WORDS[:1200], "documents": [WORDS[1200:]]},
    "score": {"text_1": WORDS[:1200], "text_2": WORDS[1200:]},
}


@pytest.mark.parametrize("name", ROUTES)
def test_the_prompt_of_each_route_is_its_text(name: str) -> None:
    size = measure({"model": "m", **ROUTES[name]})
    assert len(WORDS) <= size.text_bytes <= len(WORDS) + 100
    assert (size.tokens, size.media) == (0, False)


def test_what_is_no_prompt_does_not_count() -> None:
    plain = measure(chat(WORDS))
    more = {"user": WORDS, "metadata": {"x": WORDS}, "stop": [WORDS], "response_format": WORDS}
    assert measure({**chat(WORDS), **more}) == plain
    assert measure({"model": "m"}) == NO_SIZE


MEDIA: dict[str, tuple[dict[str, Any], int]] = {
    "image": ({"type": "image_url", "image_url": {"url": f"data:a/b;base64,{BASE64}"}}, IMAGE),
    "image somewhere else": ({"type": "image_url", "image_url": {"url": "https://a.b/c"}}, IMAGE),
    "image of responses": ({"type": "input_image", "image_url": f"data:;base64,{BASE64}"}, IMAGE),
    "image of messages": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
        IMAGE,
    ),
    "audio": ({"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}, AUDIO),
    "file": ({"type": "file", "file": {"file_data": BASE64}}, FILE),
    "document of messages": (
        {"type": "document", "source": {"type": "base64", "data": BASE64}},
        FILE,
    ),
    "media of a kind that is not known": ({"type": "smell", "smell": {"data": BASE64}}, IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("name", MEDIA)
def test_media_cost_a_fixed_number_of_tokens_however_long_their_base64_is(name: str) -> None:
    part, price = MEDIA[name]
    size = measure(chat([{"type": "text", "text": WORDS}, part, part]))
    assert (size.tokens, size.media) == (2 * price, True)
    assert len(WORDS) <= size.text_bytes <= len(WORDS) + 100


def test_an_image_that_a_tool_has_returned_is_one() -> None:
    part, price = MEDIA["image of messages"]
    size = measure(chat([{"type": "tool_result", "tool_use_id": "1", "content": [part]}]))
    assert size.tokens == price


TEXTS = {
    "words": "some words " * 30_000,
    "CJK, which has no spaces": "没有空格的文字" * 20_000,
    "code without spaces": "a=b(c);" * 30_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_long_text_is_not_taken_for_media(name: str) -> None:
    text = TEXTS[name]
    for body in (chat(text), chat([{"type": "text", "text": text}]), {"prompt": text}):
        size = measure(body)
        assert abs(size.text_bytes - len(text.encode())) < 100
        assert not size.media


def test_token_ids_are_counted_and_not_guessed() -> None:
    assert measure({"prompt": [7] * 5000}) == Size(0, 5000)
    assert measure({"input": [[7] * 300, [8] * 200]}) == Size(0, 500)
    assert Sizes().prompt_tokens("m", measure({"input": [[7] * 300, [8] * 200]})) == 500


@given(st.text(st.characters(codec="utf-8"), max_size=50), st.integers(0, 3))
def test_the_size_does_not_depend_on_how_the_client_writes_its_json(text: str, way: int) -> None:
    body = chat([{"type": "text", "text": text}, text])
    written = json.dumps(body, ensure_ascii=bool(way % 2), indent=way // 2 or None)
    assert measure(orjson.loads(written)) == measure(body)


@given(JSON, MEMBERS, JSON, MEMBERS)
def test_any_json_object_has_a_size(value: Any, name: str, other: Any, also: str) -> None:
    size = measure({name: value, also: other})
    assert size.text_bytes >= 0
    assert size.tokens >= 0


def test_a_body_as_deep_as_the_parser_takes_is_measured() -> None:
    deep = b"[" * 900 + b'"' + b"words " * 9000 + b'"' + b"]" * 900
    fields = orjson.loads(b'{"messages":' + deep + b',"tools":' + deep + b"}")
    assert measure({"messages": fields["messages"]}).text_bytes == pytest.approx(54_000, abs=10)
    assert measure(fields).text_bytes >= 0


@given(st.lists(st.text(max_size=30), max_size=6))
def test_one_more_turn_makes_it_no_smaller(texts: list[str]) -> None:
    turns = [{"role": "user", "content": text} for text in texts]
    sizes = [measure({"messages": turns[:n]}).text_bytes for n in range(len(turns) + 1)]
    assert sizes == sorted(sizes)


# What is learned


def test_what_nothing_is_known_of_has_the_prior() -> None:
    sizes = Sizes()
    assert sizes.prompt_tokens("m", Size(4000)) == 1000
    assert sizes.prompt_tokens("m", NO_SIZE) == 1
    assert sizes.output_tokens("m", "") == PRIOR_OUTPUT_TOKENS
    assert sizes.output_tokens("m", "", 7) == 7


@given(st.floats(0.6, 30), st.integers(0, 50))
def test_the_bytes_of_a_token_are_learned_per_model(bytes_per_token: float, media: int) -> None:
    sizes, chance = Sizes(), random.Random(7)
    for _ in range(300):
        tokens = chance.randrange(100, 20_000)
        size = Size(round(tokens * bytes_per_token), media)
        sizes.learn("m", "", size, tokens + media, 0)
    assert sizes.bytes_per_token("m") == pytest.approx(bytes_per_token, rel=0.02)
    told = sizes.prompt_tokens("m", Size(round(3000 * bytes_per_token), 17))
    assert told == pytest.approx(3017, rel=0.02)
    assert sizes.prompt_tokens("another", Size(4000)) == 1000


def test_one_huge_prompt_does_not_outweigh_all_others() -> None:
    sizes = Sizes()
    for _ in range(200):
        sizes.learn("m", "", Size(4000), 1000, 0)
    sizes.learn("m", "", Size(10_000_000), 1_000_000, 0)  # 10 bytes a token
    assert sizes.bytes_per_token("m") < 5


@pytest.mark.parametrize(
    ("size", "prompt"),
    [
        (Size(4000), 0),  # no count
        (Size(4000), 3),  # usage without its cached part, or made up
        (Size(4000), 1_000_000),
        (Size(4000, 500), 400),
        (Size(4000, 1024, media=True), 3000),  # what the image has cost is not known
        (Size(0, 500), 500),
        (NO_SIZE, 500),
    ],
)
def test_counts_that_say_nothing_of_text_teach_nothing(size: Size, prompt: int) -> None:
    sizes = Sizes()
    sizes.learn("m", "", size, prompt, 0)
    assert sizes.bytes_per_token("m") == 4


def test_answers_are_learned_per_model_and_key() -> None:
    sizes = Sizes()
    for n in range(400):
        sizes.learn("m", "short", NO_SIZE, 0, 5 + n % 3)
        sizes.learn("m", "long", NO_SIZE, 0, 900 + n % 3)
        sizes.learn("other", "short", NO_SIZE, 0, 50)
    assert sizes.output_tokens("m", "short") == 6
    assert sizes.output_tokens("m", "long") == 901
    assert sizes.output_tokens("other", "short") == 50
    assert sizes.output_tokens("m", "unheard of") == PRIOR_OUTPUT_TOKENS
    assert sizes.output_tokens("m", "long", 300) == 300
    assert sizes.output_tokens("m", "short", 300) == 6


@given(st.lists(st.tuples(st.integers(-5, 2**31), st.integers(-5, 2**31)), max_size=50))
def test_estimates_stay_positive_whatever_nodes_say(said: list[tuple[int, int]]) -> None:
    sizes = Sizes()
    for prompt, output in said:
        sizes.learn("m", "k", Size(1000), prompt, output)
    assert 1 <= sizes.output_tokens("m", "k") < 2**31
    assert 1000 / 32 - 1 <= sizes.prompt_tokens("m", Size(1000)) <= 1000 / 0.5
    assert sizes.output_tokens("m", "k", 1) == 1


def test_names_without_end_take_no_memory_without_end_and_those_in_use_are_kept() -> None:
    sizes = Sizes()
    for n in range(30_000):
        if n % 100 == 0:
            sizes.learn("kept", "kept", Size(1000), 500, 7)
        sizes.learn(f"model-{n}", f"key-{n}", Size(1000), 500, 7)
    assert len(sizes._prompts._sums) == 1024
    assert len(sizes._answers._sums) == 8192
    assert sizes.bytes_per_token("kept") == pytest.approx(2, abs=0.01)
    assert sizes.output_tokens("kept", "kept") == 7
    assert sizes.bytes_per_token("model-0") == 4
