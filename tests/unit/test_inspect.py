"""What is read from a request, and that an alias changes the model's bytes and no other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import ApiError
from app.gateway.estimate import measure
from app.gateway.inspect import inspect
from app.gateway.routes import ROUTES
from app.gateway.splice import replace_value

CHAT = ROUTES["/v1/chat/completions"]
JSON = b"application/json"

# JSON objects as text, made so that it is known where the model's value stands


def spaced(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    space = st.text(" \t\n\r", max_size=2)
    return st.tuples(space, inner, space).map("".join)


def spell(text: str, way: int) -> str:
    """``text`` as a JSON string: as it is, in ASCII, or every character escaped."""
    if way < 2:
        return json.dumps(text, ensure_ascii=way == 1).replace("/", "\\/" if way else "/")
    units = text.encode("utf-16-be").hex()
    units = units.upper() if way == 3 else units
    return '"' + "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)) + '"'


def escaped(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(spell, texts, st.integers(0, 3))


CHARACTERS = st.characters(codec="utf-8")
TEXTS = st.one_of(
    st.text(CHARACTERS, max_size=8),
    st.sampled_from(
        ["model", '"model":"x"', "\\", '\\"', "{", "}", "[", "]", ",", ":", "模型", "😀"]
    ),
)
STRINGS = escaped(TEXTS)
ATOMS = st.one_of(
    STRINGS,
    st.sampled_from(["null", "true", "false", "0", "-1.5e+9", "{}", "[]", "[ ]"]),
)


def members(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    names = st.one_of(escaped(st.just("model")), STRINGS)
    member = st.tuples(spaced(names), spaced(values)).map(":".join)
    return st.lists(member, max_size=4).map(lambda parts: "{" + ",".join(parts) + "}")


VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(spaced(inner), max_size=3).map(lambda parts: "[" + ",".join(parts) + "]"),
        members(inner),
    ),
    max_leaves=8,
)


@dataclass(frozen=True)
class Body:
    """A body in pieces: between two of them stands a value of the top-level ``model``."""

    pieces: tuple[bytes, ...]
    models: tuple[bytes, ...]

    def joined(self, models: list[bytes]) -> bytes:
        out = [self.pieces[0]]
        for model, piece in zip(models, self.pieces[1:], strict=True):
            out += [model, piece]
        return b"".join(out)


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """Up to 5 members, of which one to three are the model's, in any place and spelling."""
    others = draw(st.lists(st.tuples(TEXTS.filter(lambda t: t != "model"), VALUES), max_size=4))
    models = draw(st.lists(TEXTS, min_size=1, max_size=3))
    order = draw(st.permutations([*others, *((None, model) for model in models)]))
    space, ways = st.text(" \t\n\r", max_size=2), st.integers(0, 3)
    pieces: list[str] = []
    spelled: list[bytes] = []
    text = draw(space) + "{"
    for i, (name, value) in enumerate(order):
        text += draw(space) + spell("model" if name is None else name, draw(ways))
        text += draw(space) + ":" + draw(space)
        if name is None:
            pieces.append(text)
            spelled.append(spell(value, draw(ways)).encode())
            text = ""
        else:
            text += value
        text += draw(space) + ("," if i < len(order) - 1 else "")
    pieces.append(text + "}" + draw(space))
    return Body(tuple(piece.encode() for piece in pieces), tuple(spelled))


@given(bodies(), TEXTS)
def test_only_the_top_level_models_bytes_change(body: Body, model: str) -> None:
    before = body.joined(list(body.models))
    after = replace_value(before, "model", orjson.dumps(model))
    assert after == body.joined([orjson.dumps(model)] * len(body.models))
    assert orjson.loads(after) == {**orjson.loads(before), "model": model}


@given(bodies())
def test_a_body_without_an_alias_is_handed_on_as_the_same_object(body: Body) -> None:
    raw = body.joined([b'"m"'] * len(body.models))
    fields = orjson.loads(raw)
    if isinstance(fields.get("stream"), bool | None):
        assert inspect(CHAT, JSON, raw, {"other": "x"}).body is raw


def test_nested_models_are_left_alone() -> None:
    body = (
        b'{"a":{"model":"in"},"model" : "gpt","b":[{"model":"in"},"model","x"],'
        b'"c":"\\"model\\":\\"in\\"","model":"gpt"}'
    )
    assert replace_value(body, "model", b'"served"') == (
        b'{"a":{"model":"in"},"model" : "served","b":[{"model":"in"},"model","x"],'
        b'"c":"\\"model\\":\\"in\\"","model":"served"}'
    )


def test_an_alias_reaches_the_node_in_the_body() -> None:
    call = inspect(
        CHAT, JSON, b'{"stream": true,"model":"gpt-4o-mini"}', {"gpt-4o-mini": "l\u00e4"}
    )
    assert (call.asked_model, call.model, call.stream) == ("gpt-4o-mini", "lä", True)
    assert call.body == '{"stream": true,"model":"lä"}'.encode()


@pytest.mark.parametrize("kind", [b"application/json; charset=utf-8", b"Application/JSON", JSON])
def test_json_content_types_are_taken(kind: bytes) -> None:
    assert not inspect(CHAT, kind, b'{"model":"m"}', {}).stream


@pytest.mark.parametrize("value", ["null", "false"])
def test_stream_may_be_null_or_false(value: str) -> None:
    assert not inspect(CHAT, JSON, b'{"model":"m","stream":%s}' % value.encode(), {}).stream


def test_a_call_says_what_its_prompt_consists_of() -> None:
    words = "x y " * 1000
    image = {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": [words, image]}]})
    call = inspect(CHAT, JSON, body, {})
    assert call.size == measure(orjson.loads(body))
    assert call.size.text_bytes >= 4000
    assert call.size.media


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 0),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9}, 9),
        ({"max_output_tokens": 11}, 11),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": None}, 0),
        ({"max_tokens": -5}, 0),
        ({"max_tokens": True}, 0),
        ({"max_tokens": "7"}, 0),
        ({"max_tokens": 7.5}, 0),
        ({"max_tokens": 2**62}, 2**62),
    ],
)
def test_the_most_that_may_be_generated_is_what_the_client_says(
    fields: dict[str, Any], most: int
) -> None:
    body = orjson.dumps({"model": "m", **fields})
    assert inspect(CHAT, JSON, body, {}).max_output_tokens == most


BAD: dict[str, tuple[bytes, dict[str, Any]]] = {
    "empty": (b"", {"code": "invalid_json", "message": "empty"}),
    "white space": (b" \r\n", {"code": "invalid_json", "message": "empty"}),
    "half an object": (b"{bad", {"code": "invalid_json", "message": "not valid JSON"}),
    "invalid UTF-8": (b'{"model":"\xff"}', {"code": "invalid_json", "message": "UTF-8"}),
    "half a surrogate": (b'{"model":"\\ud800"}', {"code": "invalid_json"}),
    "an array": (b'[{"model":"m"}]', {"code": "invalid_json", "message": "object"}),
    "a string": (b'"model"', {"code": "invalid_json", "message": "object"}),
    "too deep": (b'{"model":"m","a":' + b"[" * 5000 + b"]" * 5000 + b"}", {"code": "invalid_json"}),
    "no model": (b'{"messages":[]}', {"code": "missing_required_parameter", "param": "model"}),
    "null model": (b'{"model":null}', {"code": "missing_required_parameter", "param": "model"}),
    "empty model": (b'{"model":""}', {"code": "invalid_value", "param": "model"}),
    "number as model": (b'{"model":5}', {"code": "invalid_type", "param": "model"}),
    "list as model": (b'{"model":["m"]}', {"code": "invalid_type", "param": "model"}),
    "long model": (b'{"model":"' + b"x" * 257 + b'"}', {"code": "invalid_value", "param": "model"}),
    "two lines": (b'{"model":"a\\nb"}', {"code": "invalid_value", "param": "model"}),
    "stream as text": (
        b'{"model":"m","stream":"yes"}',
        {"code": "invalid_type", "param": "stream"},
    ),
    "stream as number": (b'{"model":"m","stream":1}', {"code": "invalid_type", "param": "stream"}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_a_400_that_names_the_field(name: str) -> None:
    body, said = BAD[name]
    with pytest.raises(ApiError) as caught:
        inspect(CHAT, JSON, body, {})
    error = caught.value
    assert (error.status, error.kind) == (400, "invalid_request_error")
    assert error.code == said["code"]
    assert error.param == said.get("param")
    assert said.get("message", "") in error.message
    assert not error.param or f"'{error.param}'" in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize("kind", [b"", b"text/plain", b"application/jsonp", b"multipart/form-data"])
def test_another_content_type_is_a_415(kind: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        inspect(CHAT, kind, b'{"model":"m"}', {})
    assert (caught.value.status, caught.value.code) == (415, "unsupported_media_type")
