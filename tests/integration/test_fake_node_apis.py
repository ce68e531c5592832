"""The fake node's other APIs: tools, schemas, Anthropic messages, responses, audio, ranking."""

from __future__ import annotations

import wave
from io import BytesIO
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest

from app.lab.faults import Fault
from app.lab.node import NodeConfig
from app.lab.profiles import IDEAL
from tests.support.fleet import CHAT, NO_TLS, Nodes, plain_http

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.lab.node import FakeNode

HELLO = "tell me about rivers"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 300}, "minItems": 2},
        "unit": {"enum": ["C", "F"]},
        "sure": {"type": ["boolean", "null"]},
        "more": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "kind": {"const": "forecast"},
    },
    "$defs": {"City": {"type": "object", "properties": {"name": {"type": "string"}}}},
}
CHAT_BODY = {"messages": [{"role": "user", "content": HELLO}]}
# API → its body, its body with a tool, the path from an answer to its text.
APIS: dict[str, dict[str, Any]] = {
    CHAT: CHAT_BODY,
    "/v1/messages": {**CHAT_BODY, "max_tokens": 500},
    "/v1/responses": {"input": HELLO},
}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    "/v1/messages": {"name": "weather", "input_schema": SCHEMA},
    "/v1/responses": {"type": "function", "name": "weather", "parameters": SCHEMA},
}
FORMATS: dict[str, dict[str, Any]] = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/v1/responses": {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


@pytest.fixture(scope="module")
def node() -> Iterator[FakeNode]:
    """A node that answers at once."""
    with Nodes(n=NodeConfig(profile=IDEAL)) as nodes:
        yield nodes["n"]


@pytest.fixture
def http(node: FakeNode) -> Iterator[httpx.Client]:
    """A client of it; nothing is open when the test is over."""
    with plain_http(node.url) as client:
        yield client
    s = node.stats
    assert s.started == s.completed + s.rejected + s.aborted + s.faulted
    node.fault = Fault()


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every event that carries JSON; a named one carries its name as ``type`` too."""
    answer = http.post(path, json={"model": "demo", "stream": True, **body})
    assert answer.headers["content-type"] == "text/event-stream"
    return events(answer.text)


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if fields.get("data", "[DONE]") != "[DONE]":
            found.append(orjson.loads(fields["data"]))
            assert "event" not in fields or fields["event"] == found[-1]["type"]
    return found


def text_of(path: str, answer: Any) -> str:
    """The text, or the arguments of the tool, of an answer in one piece."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls")
        return str(calls[0]["function"]["arguments"] if calls else message["content"])
    if path == "/v1/messages":
        (block,) = answer["content"]
        return (
            str(block["text"]) if block["type"] == "text" else orjson.dumps(block["input"]).decode()
        )
    (item,) = answer["output"]
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def joined(path: str, got: list[dict[str, Any]]) -> str:
    """The same of a stream: all its deltas."""
    if path == CHAT:
        deltas = [event["choices"][0]["delta"] for event in got]
        pieces = [
            delta["tool_calls"][0]["function"]["arguments"]
            if "tool_calls" in delta
            else delta.get("content") or ""
            for delta in deltas
        ]
        return "".join(pieces)
    if path == "/v1/messages":
        deltas = [event["delta"] for event in got if event["type"] == "content_block_delta"]
        return "".join(delta.get("text") or delta.get("partial_json") or "" for delta in deltas)
    return "".join(event["delta"] for event in got if event["type"].endswith(".delta"))


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("with_tool", [False, True])
def test_a_stream_says_what_the_whole_answer_says(
    http: httpx.Client, path: str, with_tool: bool
) -> None:
    body = APIS[path] | ({"tools": [TOOLS[path]]} if with_tool else {})
    answer, got = whole(http, path, body), streamed(http, path, body)
    text = text_of(path, answer)
    assert text
    assert joined(path, got) == text


@pytest.mark.parametrize("path", APIS)
def test_a_schema_is_kept_by_answers_and_by_arguments(http: httpx.Client, path: str) -> None:
    for more in (FORMATS[path], {"tools": [TOOLS[path]]}):
        value = orjson.loads(text_of(path, whole(http, path, APIS[path] | more)))
        assert isinstance(value.pop("city")["name"], str)
        assert value.pop("days") == [300, 300]
        assert value.pop("unit") in {"C", "F"}
        assert isinstance(value.pop("sure"), bool)
        assert isinstance(value.pop("more"), float)
        assert value == {"kind": "forecast"}


@pytest.mark.parametrize("path", APIS)
def test_a_tool_is_not_called_when_told_not_to_or_once_its_result_is_here(
    http: httpx.Client, path: str
) -> None:
    tools = {"tools": [TOOLS[path]]}
    none: Any = {"type": "none"} if path == "/v1/messages" else "none"
    results: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "tool", "tool_call_id": "c", "content": "rain"}]},
        "/v1/messages": {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain"}],
                }
            ]
        },
        "/v1/responses": {
            "input": [{"type": "function_call_output", "call_id": "c", "output": "rain"}]
        },
    }
    for more in ({"tool_choice": none}, results[path]):
        assert text_of(path, whole(http, path, APIS[path] | tools | more))[0] != "{"


@pytest.mark.parametrize("path", APIS)
def test_the_named_tool_is_the_one_called(http: httpx.Client, path: str) -> None:
    other = orjson.loads(orjson.dumps(TOOLS[path]).replace(b"weather", b"time"))
    named: dict[str, Any] = {
        CHAT: {"type": "function", "function": {"name": "time"}},
        "/v1/messages": {"type": "tool", "name": "time"},
        "/v1/responses": {"type": "function", "name": "time"},
    }
    body = APIS[path] | {"tools": [TOOLS[path], other], "tool_choice": named[path]}
    assert b'"name":"time"' in orjson.dumps(whole(http, path, body))


def test_a_structured_answer_that_is_cut_off_says_so(http: httpx.Client) -> None:
    answer = whole(http, CHAT, {**CHAT_BODY, **FORMATS[CHAT], "max_tokens": 2})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2
    answer = whole(http, "/v1/responses", {"input": HELLO, "max_output_tokens": 2})
    assert (answer["status"], answer["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )


def test_the_events_of_a_message_and_of_a_response_are_in_order(http: httpx.Client) -> None:
    got = streamed(http, "/v1/messages", {**CHAT_BODY, "max_tokens": 2})
    assert [event["type"] for event in got] == [
        *("message_start", "content_block_start", "ping", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert got[-2]["usage"] == {"input_tokens": 5, "output_tokens": 2}
    got = streamed(http, "/v1/responses", {"input": HELLO, "max_output_tokens": 1})
    assert [event["type"].removeprefix("response.") for event in got] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "incomplete",
    ]
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    assert got[-1]["response"]["usage"]["output_tokens"] == 1


@pytest.mark.parametrize(("path", "last"), [("/v1/messages", "error"), ("/v1/responses", "error")])
def test_an_error_event_has_the_shape_of_its_api(
    http: httpx.Client, node: FakeNode, path: str, last: str
) -> None:
    node.fault = Fault(mode="error_event", after_tokens=1)
    got = streamed(http, path, APIS[path])
    assert got[-1]["type"] == last
    assert "CUDA out of memory" in str(got[-1])


def form(**fields: str) -> dict[str, Any]:
    return {
        "data": {"model": "demo", **fields},
        "files": {"file": ("x.wav", bytes(range(256)) * 300, "audio/wav")},
    }


def test_a_transcript_is_the_same_in_every_format(http: httpx.Client) -> None:
    path = "/v1/audio/transcriptions"
    text = http.post(path, **form()).json()["text"]
    got = {kind: http.post(path, **form(response_format=kind)) for kind in
           ("text", "srt", "vtt", "verbose_json")}  # fmt: skip
    assert got["text"].text == text + "\n"
    assert got["srt"].text.startswith("1\n00:00:00,000 --> ")
    assert got["vtt"].text.startswith("WEBVTT\n\n00:00:00.000 --> ")
    assert got["verbose_json"].json()["text"] == text
    assert text in got["srt"].text
    assert text in got["vtt"].text
    *deltas, done = events(http.post(path, **form(stream="true")).text)
    assert "".join(event["delta"] for event in deltas) == done["text"] == text
    assert done["usage"]["input_tokens"] == 120


def test_speech_is_a_sound_and_an_image_is_an_image(http: httpx.Client) -> None:
    body = {"model": "demo", "input": HELLO, "response_format": "wav"}
    answer = http.post("/v1/audio/speech", json=body)
    assert answer.headers["content-type"] == "audio/wav"
    with wave.open(BytesIO(answer.content)) as sound:
        assert sound.getnframes() == 4000
    image = whole(http, "/v1/images/generations", {"prompt": HELLO})
    assert image["data"][0]["b64_json"].startswith("iVBORw0KGgo")


def test_ranking_orders_the_documents_and_agrees_with_scoring(http: httpx.Client) -> None:
    documents = ["one", "two", "three"]
    ranked = whole(http, "/v1/rerank", {"query": "q", "documents": documents})["results"]
    scores = whole(http, "/v1/score", {"text_1": "q", "text_2": documents})["data"]
    assert sorted(row["index"] for row in ranked) == [0, 1, 2]
    assert [row["relevance_score"] for row in ranked] == sorted(
        (row["score"] for row in scores), reverse=True
    )
    assert all(row["relevance_score"] == scores[row["index"]]["score"] for row in ranked)
    best = whole(http, "/v1/rerank", {"query": "q", "documents": documents, "top_n": 1})
    assert best["results"] == ranked[:1]


def test_what_is_cut_into_tokens_can_be_put_together_again(http: httpx.Client) -> None:
    cut = whole(http, "/tokenize", {"prompt": "grüße, 世界"})
    assert cut["count"] == len(cut["tokens"])
    assert whole(http, "/detokenize", {"tokens": cut["tokens"]}) == {"prompt": "grüße, 世界"}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {**CHAT_BODY}),
    ("/v1/responses", {"input": []}),
    ("/v1/responses", {"input": ["x"]}),
    ("/v1/rerank", {"query": "q"}),
    ("/v1/score", {"text_1": "x"}),
    ("/detokenize", {"tokens": ["x"]}),
    ("/v1/audio/transcriptions", {}),
]


@pytest.mark.parametrize(("path", "body"), BAD)
def test_a_bad_request_is_refused_in_the_shape_of_its_api(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json={"model": "demo", **body})
    assert answer.status_code == 400
    page = answer.json()
    assert page["error"]["message"]
    assert (page.get("type") == "error") == (path == "/v1/messages")


@pytest.mark.parametrize("bad", [{"response_format": "mp3"}, {"model": ""}])
def test_a_bad_form_is_refused(http: httpx.Client, bad: dict[str, str]) -> None:
    assert http.post("/v1/audio/transcriptions", **form(**bad)).status_code == 400
    torn = http.post(
        "/v1/audio/transcriptions",
        content=b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ndemo',
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    assert "cut off" in torn.json()["error"]["message"]


def test_an_anthropic_client_is_known_by_its_own_header() -> None:
    with (
        Nodes(n=NodeConfig(profile=IDEAL, api_key="sesame")) as nodes,
        httpx.Client(base_url=nodes["n"].url, trust_env=False, verify=NO_TLS) as http,
    ):
        body = {"model": "demo", **CHAT_BODY, "max_tokens": 1}
        refused = http.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})
        assert refused.json()["error"]["type"] == "authentication_error"
        good = http.post("/v1/messages", json=body, headers={"x-api-key": "sesame"})
        assert good.status_code == 200
