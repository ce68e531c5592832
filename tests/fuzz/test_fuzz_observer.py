"""The side observer under arbitrary bytes: they pass unchanged, however they are cut."""

from __future__ import annotations

import itertools
import json
import zlib
from typing import Any

import pytest
from hypothesis import strategies as st

from app.gateway import observe
from app.gateway.observe import EventStream, JsonBody, observer
from tests.fuzz.box import fuzz

WORDS = (
    "choices", "delta", "content", "role", "text", "usage", "prompt_tokens", "completion_tokens",
    "input_tokens", "output_tokens", "finish_reason", "stop", "error", "message", "type", "object",
    "response", "response.completed", "response.failed", "message_start", "message_stop",
    "content_block_delta", "response.output_text.delta", "ping", "code", "index", "", "data: {}",
    '"error":', "\n\n", "é日😀", "[DONE]",
)  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=9),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)
USAGE = st.dictionaries(
    st.sampled_from([word for word in WORDS if word.endswith("_tokens")]),
    st.one_of(st.integers(0, 100), SCALARS),
)
CHOICES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "delta": st.one_of(st.fixed_dictionaries({"content": st.text(max_size=30)}), VALUES),
            "text": st.text(max_size=3),
            "finish_reason": st.sampled_from([None, "stop", "error", ""]),
        },
    ),
    max_size=2,
)
OBJECTS = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "choices": st.one_of(CHOICES, VALUES),
            "usage": st.one_of(USAGE, VALUES),
            "error": VALUES,
            "type": st.sampled_from(WORDS),
            "response": VALUES,
            "x": st.text(max_size=300),
        },
    ),
    VALUES,
)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@st.composite
def lines(draw: st.DrawFn) -> str:
    """The lines of an event, without their ends: fields of any kind and order."""
    text = json.dumps(draw(OBJECTS), ensure_ascii=draw(st.booleans()))
    if draw(st.booleans()):
        text = text.replace('": ', '":').replace(", ", ",")
    if draw(st.integers(0, 9)) == 0:
        text = text[: draw(st.integers(0, len(text)))]  # cut
    space = draw(st.sampled_from(["", " ", "\t", "  "]))
    data = [f"data:{space}{text}"]
    if draw(st.integers(0, 4)) == 0:
        data = [f"data:{space}{part}" for part in text.partition(",")]
    others = draw(
        st.lists(
            st.sampled_from(
                [": x", ":", "id: 1", "event: error", "event:message", "event: response.completed",
                 "data: [DONE]", "data", "error: {}", "error", "retry: 5", "nonsense", "\ufeff"]
            ),
            max_size=2,
        )
    )  # fmt: skip
    return "\n".join([*others, *data] if draw(st.booleans()) else [*data, *others])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Events in one style or a mixture of styles, perhaps with something broken."""
    mixed = draw(st.integers(0, 3)) == 0
    end = draw(ENDS)
    events = []
    for event in draw(st.lists(lines(), max_size=12)):
        end = draw(ENDS) if mixed else end
        blank = end * draw(st.sampled_from([2, 2, 2, 3, 1]))
        events.append(event.replace("\n", end) + blank)
    raw = "".join(events).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        raw = b"\xef\xbb\xbf" + raw
    if draw(st.integers(0, 3)) == 0:
        raw = raw[: draw(st.integers(0, len(raw)))]
    return raw


PIECES = st.lists(
    st.sampled_from(
        [b"\r", b"\n", b"\r\n", b"\n\n", b"data: ", b"data:", b"{", b"}", b'"error":', b'"usage":{',
         b'"choices":[]', b"event: error", b"[DONE]", b"\xef\xbb\xbf", b"\xff", b"\x00", b":", b",",
         b'"prompt_tokens":7', b"error: {}", b" ", b"x" * 50]
    ) | st.binary(max_size=9),
    max_size=40,
).map(b"".join)  # fmt: skip


@st.composite
def cut(draw: st.DrawFn, raws: st.SearchStrategy[bytes]) -> tuple[bytes, list[int]]:
    """Bytes, and where to cut them; more than once at a place makes an empty piece."""
    raw = draw(raws)
    if draw(st.integers(0, 4)) == 0:
        return raw, list(range(1, len(raw)))
    return raw, sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))


def pieces_of(raw: bytes, cuts: list[int]) -> list[bytes]:
    return [raw[a:b] for a, b in itertools.pairwise([0, *cuts, len(raw)])]


def result(seen: EventStream | JsonBody, pieces: list[bytes]) -> tuple[bytes, tuple[Any, ...]]:
    """What came out, and what was seen."""
    out = b"".join([*map(seen.feed, pieces), seen.rest()])
    assert isinstance(seen.tokens, int)
    assert 0 <= seen.prompt_tokens < 2**31
    assert 0 <= seen.output_tokens < 2**31
    assert seen.error is None or 0 < len(seen.error) <= 600
    assert seen.ended or not seen.over
    assert not (isinstance(seen, EventStream) and not seen.between_events)
    flags = seen.first_token, seen.tokens, seen.prompt_tokens, seen.ended, seen.over, seen.error
    return out, flags


@pytest.fixture(params=[False, True], ids=["as it is", "with small bounds"])
def _bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small bounds many events are too large to hold, and streams too long to remember."""
    if request.param:
        for name, size in (("_EVENT_BYTES", 150), ("_RECENT_BYTES", 100), ("_END_BYTES", 60),
                           ("_JSON_BYTES", 200)):  # fmt: skip
            monkeypatch.setattr(observe, name, size)


@pytest.mark.usefixtures("_bounds")
@pytest.mark.parametrize("raws", [streams(), PIECES], ids=["streams", "bytes"])
def test_any_bytes_in_any_pieces_pass_and_are_seen_alike(raws: st.SearchStrategy[bytes]) -> None:
    def check(case: tuple[bytes, list[int]]) -> None:
        raw, pieces = case[0], pieces_of(*case)
        whole, seen = result(EventStream(), [raw])
        assert whole == raw
        assert result(EventStream(), pieces) == (raw, seen)
        # With the usage event left out: the same is seen, and the same is left.
        hidden, also_seen = result(EventStream(hide_usage=True), [raw])
        assert also_seen == seen
        assert result(EventStream(hide_usage=True), pieces) == (hidden, seen)
        assert len(hidden) <= len(raw)
        if b'"usage"' not in raw or b'"choices"' not in raw:
            assert hidden == raw

    fuzz(check, cut(raws), share=1 / 7)


def test_what_a_stream_breaks_off_with_never_raises() -> None:
    def check(case: tuple[bytes, list[int]]) -> None:
        raw, pieces = case[0], pieces_of(*case)
        seen = EventStream()
        out = b"".join(map(seen.feed, pieces))
        seen.conclude()
        seen.conclude()
        assert raw.startswith(out)
        assert isinstance(seen.tokens, int)

    fuzz(check, cut(st.one_of(streams(), PIECES)), share=1 / 7)


def test_any_body_in_one_piece_passes_and_is_seen_alike() -> None:
    bodies = st.one_of(
        OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False)).map(
            lambda text: text.encode("utf-8", "surrogatepass")
        ),
        PIECES,
    )

    def check(case: tuple[bytes, list[int]]) -> None:
        raw, pieces = case[0], pieces_of(*case)
        whole, seen = result(JsonBody(), [raw])
        assert whole == raw
        assert result(JsonBody(), pieces) == (raw, seen)

    fuzz(check, cut(bodies), share=1 / 7)


def test_compressed_bytes_pass_and_are_seen_like_plain_ones() -> None:
    def check(case: tuple[bytes, list[int]]) -> None:
        raw, pieces = case[0], pieces_of(*case)
        packer = zlib.compressobj(wbits=31)
        packed = [packer.compress(p) + packer.flush(zlib.Z_SYNC_FLUSH) for p in pieces]
        packed.append(packer.flush())
        _, plain = result(EventStream(), [raw])
        seen = observer(b"gzip", events=True)
        assert [*map(seen.feed, packed), seen.rest()] == [*packed, b""]
        found = seen.first_token, seen.tokens, seen.prompt_tokens, seen.ended, seen.over, seen.error
        assert found == plain
        noise = observer(b"gzip", events=True)  # what says that it is compressed and is not
        assert b"".join([*map(noise.feed, pieces), noise.rest()]) == raw

    fuzz(check, cut(streams()), share=1 / 7)
