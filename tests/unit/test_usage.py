"""Token counts are asked for where the client did not say, by adding bytes and changing none."""

from __future__ import annotations

import json

import pytest

from app.gateway.inspect import inspect
from app.gateway.routes import ROUTES

JSON = b"application/json"
ASKED = {"include_usage": True}


def asked(body: bytes, path: str = "/v1/chat/completions", *, ask_usage: bool = True) -> bytes:
    """What goes to the node."""
    call = inspect(ROUTES[path], JSON, body, {"public": "m"}, ask_usage=ask_usage)
    assert call.hides_usage == (call.body.replace(b'"m"', b'"public"') != body)
    return call.body


SAID_NOTHING: dict[str, tuple[bytes, bytes]] = {
    "absent": (
        b' { "model" : "public", "stream":true , "x":1e-7}',
        b' {"stream_options":{"include_usage":true}, "model" : "m", "stream":true , "x":1e-7}',
    ),
    "null": (
        b'{"model":"public","stream_options" : null ,"stream":true}',
        b'{"model":"m","stream_options" : {"include_usage":true} ,"stream":true}',
    ),
    "empty": (
        b'{"model":"public","stream_options":{ },"stream":true}',
        b'{"model":"m","stream_options":{"include_usage":true },"stream":true}',
    ),
    "another option": (
        b'{"model":"public","stream":true,"stream_options":{"continuous_usage_stats" :  false}}',
        b'{"model":"m","stream":true,"stream_options":'
        b'{"include_usage":true,"continuous_usage_stats" :  false}}',
    ),
    "null inside": (
        b'{"model":"public","stream":true,"stream_options":{"a":1,"include_usage": null}}',
        b'{"model":"m","stream":true,"stream_options":{"a":1,"include_usage": true}}',
    ),
    "nested elsewhere": (
        b'{"model":"public","stream":true,"metadata":{"stream_options":{"include_usage":false}}}',
        b'{"stream_options":{"include_usage":true},"model":"m","stream":true,'
        b'"metadata":{"stream_options":{"include_usage":false}}}',
    ),
}


@pytest.mark.parametrize("name", SAID_NOTHING)
def test_a_stream_whose_client_did_not_say_is_asked_for_its_counts(name: str) -> None:
    body, wanted = SAID_NOTHING[name]
    got = asked(body)
    assert got == wanted
    before, after = json.loads(body), json.loads(got)
    assert after.pop("stream_options")["include_usage"] is True
    before.pop("stream_options", None)
    assert after == {**before, "model": "m"}


@pytest.mark.parametrize(
    "said",
    [
        '{"include_usage":true}',
        '{"include_usage":false}',
        '{"include_usage":false,"x":{}}',
        '{"include_usage":"yes"}',
        '"odd"',
        "[]",
        "0",
    ],
)
def test_what_the_client_said_is_not_touched(said: str) -> None:
    body = f'{{"model":"public","stream":true,"stream_options":{said}}}'.encode()
    assert asked(body) == body.replace(b"public", b"m")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"public"}',
        b'{"model":"public","stream":false}',
        b'{"model":"public","stream":null,"stream_options":null}',
    ],
)
def test_an_answer_in_one_piece_is_not_asked(body: bytes) -> None:
    assert asked(body) == body.replace(b"public", b"m")


@pytest.mark.parametrize("path", [p for p, route in ROUTES.items() if not route.form])
def test_only_routes_that_know_the_option_are_asked(path: str) -> None:
    body = b'{"model":"public","stream":true}'
    knows = path in {"/v1/chat/completions", "/v1/completions"}
    assert (b"stream_options" in asked(body, path)) == knows


def test_the_setting_turns_it_off() -> None:
    body = b'{"model":"public","stream":true}'
    assert asked(body, ask_usage=False) == b'{"model":"m","stream":true}'


def test_of_an_option_given_twice_the_last_counts_as_it_does_for_parsers() -> None:
    body = (
        b'{"model":"m","stream":true,"stream_options":{"include_usage":true},"stream_options":{}}'
    )
    call = inspect(ROUTES["/v1/completions"], JSON, body, {}, ask_usage=True)
    assert json.loads(call.body)["stream_options"] == ASKED
