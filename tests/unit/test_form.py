"""Fields of a form are found where they stand, and only where they are fields."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.errors import ApiError
from app.gateway.form import read_fields
from app.gateway.inspect import inspect
from app.gateway.routes import ROUTES

NAMES = frozenset((b"model", b"stream"))
KIND = b"multipart/form-data; boundary=b"
UPLOAD = ROUTES["/v1/audio/transcriptions"]


def part(head: bytes, content: bytes) -> bytes:
    return b"--b\r\n" + head + b"\r\n\r\n" + content + b"\r\n"


def field(name: bytes, content: bytes) -> bytes:
    return part(b'Content-Disposition: form-data; name="' + name + b'"', content)


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


FILE = part(
    b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav',
    b"RIFF\r\n--\r\n--a\r\n\r\n",
)


@given(st.binary(max_size=200), st.binary(max_size=200), st.booleans())
def test_a_field_is_found_beside_any_file(content: bytes, model: bytes, first: bool) -> None:
    assume(b"--b" not in content + model)
    file = part(b'Content-Disposition: form-data; name="file"; filename="x"', content)
    named = field(b"model", model)
    body = form(named, file) if first else form(file, named)
    found = read_fields(KIND, body, NAMES)
    assert found.keys() == {b"model"}
    assert found[b"model"].value == model == body[found[b"model"].begin : found[b"model"].end]


FOUND: dict[str, bytes] = {
    "last": form(FILE, field(b"model", b"m")),
    "first": form(field(b"model", b"m"), FILE),
    "a preamble and an epilogue": b"preamble\r\n" + form(FILE, field(b"model", b"m")) + b"epilogue",
    "no quotes": form(part(b"content-disposition:form-data;name=model", b"m")),
    "capitals": form(part(b'CONTENT-DISPOSITION: FORM-DATA; NAME="model"', b"m")),
    "other headers around it": form(
        part(
            b'X-A: b\r\nContent-Disposition: form-data; name="model"\r\nContent-Type: text/plain',
            b"m",
        )
    ),
    "an escaped name": form(part(rb'Content-Disposition: form-data; name="mod\el"', b"m")),
    "a file name that looks like the field": form(
        part(b'Content-Disposition: form-data; name="file"; filename="; name=\\"model\\""', b"no"),
        part(b'Content-Disposition: form-data; filename="; name=x"; name="model"', b"m"),
    ),
    "a field that only begins alike": form(field(b"model_2", b"no"), field(b"model", b"m")),
    "lines that begin like the boundary": form(
        part(b'Content-Disposition: form-data; name="file"', b"\r\n--bc\r\n--b-\r\n"),
        field(b"model", b"m"),
    ),
    "spaces behind the boundary": form(FILE, field(b"model", b"m")).replace(
        b"--b\r\n", b"--b \t\r\n"
    ),
    "an empty part before it": form(
        part(b'Content-Disposition: form-data; name="prompt"', b""), field(b"model", b"m")
    ),
    "no line end at the very end": form(field(b"model", b"m"))[:-2],
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_the_model_is_found(name: str) -> None:
    body = FOUND[name]
    found = read_fields(KIND, body, NAMES)[b"model"]
    assert found.value == body[found.begin : found.end] == b"m"


@pytest.mark.parametrize(
    "kind",
    [
        b'multipart/form-data; boundary="b"',
        b"Multipart/Form-Data;boundary=b",
        b"multipart/form-data; charset=utf-8; BOUNDARY=b",
        rb'multipart/form-data; boundary="\b"',
    ],
)
def test_the_boundary_is_read_as_clients_write_it(kind: bytes) -> None:
    assert read_fields(kind, FOUND["last"], NAMES)[b"model"].value == b"m"


REFUSED: dict[str, bytes] = {
    "empty": b"",
    "no boundary in it": b"model=m",
    "another boundary": FOUND["last"].replace(b"--b", b"--c"),
    "cut in a file": FOUND["last"][:60],
    "cut before the end": FOUND["last"][:-6],
    "the model twice": form(field(b"model", b"m"), field(b"model", b"n")),
    "two dispositions": form(
        part(
            b'Content-Disposition: form-data; name="model"\r\n'
            b'Content-Disposition: form-data; name="x"',
            b"m",
        )
    ),
    "no disposition": form(part(b"Content-Type: text/plain", b"m")),
    "a part without the end of its headers": b"--b\r\nContent-Disposition: form-data\r\n--b--\r\n",
    "endless headers": form(part(b"X-A: " + b"b" * 10_000, b"m")),
    "very many parts": form(*[field(b"x", b"y")] * 1001),
    "bare LF": FOUND["last"].replace(b"\r\n", b"\n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_two_readers_may_read_differently_is_a_400(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_fields(KIND, REFUSED[name], NAMES)
    assert (caught.value.status, caught.value.kind) == (400, "invalid_request_error")
    assert len(caught.value.message) < 100


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (b"application/json", 415),
        (b"", 415),
        (b"multipart/mixed; boundary=b", 415),
        (b"multipart/form-data", 400),
        (b"multipart/form-data; boundary=", 400),
        (b"multipart/form-data; boundary=b; boundary=c", 400),
        (b"multipart/form-data; boundary=" + b"b" * 71, 400),
    ],
)
def test_what_is_no_form_is_told_so(kind: bytes, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        read_fields(kind, FOUND["last"], NAMES)
    assert caught.value.status == status


def test_an_alias_is_put_in_the_models_place_and_nowhere_else() -> None:
    asked = form(FILE, field(b"prompt", b"whisper"), field(b"model", b"whisper"))
    call = inspect(UPLOAD, KIND, asked, {"whisper": "large-v3-日"})
    served = form(FILE, field(b"prompt", b"whisper"), field(b"model", "large-v3-日".encode()))
    assert (call.asked_model, call.model, call.body) == ("whisper", "large-v3-日", served)
    assert inspect(UPLOAD, KIND, asked, {}).body is asked


@pytest.mark.parametrize(
    ("value", "streams"), [(b"true", True), (b"True", True), (b"1", True), (b"false", False)]
)
def test_stream_is_read_from_its_field(value: bytes, streams: bool) -> None:
    body = form(field(b"stream", value), field(b"model", b"m"))
    assert inspect(UPLOAD, KIND, body, {}).stream is streams


@pytest.mark.parametrize(
    "body",
    [form(FILE), *(form(field(b"model", value)) for value in (b"", b"\xff", b"a\nb"))],
    ids=["none", "empty", "not UTF-8", "two lines"],
)
def test_a_missing_or_odd_model_is_a_400_that_names_it(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        inspect(UPLOAD, KIND, body, {})
    assert (caught.value.status, caught.value.param) == (400, "model")
