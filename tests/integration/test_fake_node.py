"""The fake node over real sockets: API shapes, every fault, and who gets freed when."""

from __future__ import annotations

import asyncio
import base64
import signal
import ssl
import sys
from array import array
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import openai
import orjson
import pytest

from app.lab.faults import Fault, parse_fault
from app.lab.node import FakeNode, NodeConfig, parse_arguments, serve_node
from app.lab.profiles import A100, IDEAL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CHAT = "/v1/chat/completions"
STEADY = replace(IDEAL, name="steady", step_base_ms=5.0)
"""One token every 5 ms, for answers that must still be under way when something happens."""
ENDLESS = 1_000_000
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Spares each client 100 ms of reading certificates that nobody needs here."""


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=10, trust_env=False, verify=NO_TLS)


@asynccontextmanager
async def serving(
    config: NodeConfig | None = None,
) -> AsyncIterator[tuple[FakeNode, httpx.AsyncClient]]:
    node = await serve_node(config or NodeConfig(profile=IDEAL))
    try:
        async with client_of(node.url) as client:
            yield node, client
    finally:
        await node.close()


async def until(condition: Callable[[], bool], deadline_s: float = 5.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - what others count has no event
            await asyncio.sleep(0.002)


def chat(max_tokens: int | None = 5, **more: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": "tell me a story"}], **more}
    return body if max_tokens is None else {**body, "max_tokens": max_tokens}


async def events(response: httpx.Response) -> list[Any]:
    """Every event of a stream, decoded; the string [DONE] as it is."""
    found: list[Any] = []
    async for line in response.aiter_lines():
        if line:
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else orjson.loads(data))
    return found


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["transfer-encoding"] == "chunked"
        return await events(response)


def settled(node: FakeNode) -> bool:
    """Nothing is held, and every request is accounted for."""
    s = node.stats
    ends = s.completed + s.rejected + s.aborted + s.faulted
    engine = node.engine
    return s.open == 0 and s.started == ends and not (engine.running + engine.waiting)


# API shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_a_chat_stream_has_the_events_in_order(asked: dict[str, bool] | None) -> None:
    async with serving() as (node, client):
        got = await stream(client, CHAT, chat(stream=True, stream_options=asked))
        role, *rest = got
        assert role["object"] == "chat.completion.chunk"
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert rest.pop() == "[DONE]"
        if asked == {"include_usage": True}:
            usage = rest.pop()
            assert usage["choices"] == []
            assert usage["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 5,
                "total_tokens": 8,
            }
        finish = rest.pop()["choices"][0]
        assert (finish["delta"], finish["finish_reason"]) == ({}, "length")
        assert len(rest) == 5
        assert all(event["choices"][0]["delta"]["content"] for event in rest)
        assert len({event["id"] for event in (role, *rest)}) == 1
        await until(lambda: settled(node))


async def test_the_same_request_has_the_same_text_streamed_or_not() -> None:
    async with serving() as (node, client):
        whole = (await client.post(CHAT, json=chat(None))).json()
        got = await stream(client, CHAT, chat(None, stream=True))
        text = "".join(
            event["choices"][0]["delta"].get("content", "") for event in got if event != "[DONE]"
        )
        choice = whole["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] == "stop"
        assert whole["object"] == "chat.completion"
        assert whole["usage"]["completion_tokens"] == len(got) - 3
        assert node.stats.completion_tokens == 2 * whole["usage"]["completion_tokens"]


async def test_completions_stream_and_whole() -> None:
    async with serving() as (_, client):
        body = {"model": "demo", "prompt": "once upon a time", "max_tokens": 3}
        whole = (await client.post("/v1/completions", json=body)).json()
        got = await stream(client, "/v1/completions", {**body, "stream": True})
        assert whole["object"] == "text_completion"
        assert [event["choices"][0]["finish_reason"] for event in got[:-1]] == [
            None,
            None,
            None,
            "length",
        ]
        text = "".join(event["choices"][0]["text"] for event in got[:-1])
        assert whole["choices"][0]["text"] == text
        ids = {**body, "prompt": [1, 2, 3, 4, 5]}
        assert (await client.post("/v1/completions", json=ids)).json()["usage"][
            "prompt_tokens"
        ] == 5


async def test_embeddings_depend_on_the_text() -> None:
    async with serving() as (node, client):
        body = {"model": "demo", "input": ["one text", "another", "one text"], "dimensions": 8}
        page = (await client.post("/v1/embeddings", json=body)).json()
        vectors = [row["embedding"] for row in page["data"]]
        assert [len(vector) for vector in vectors] == [8, 8, 8]
        assert vectors[0] == vectors[2] != vectors[1]
        packed = await client.post("/v1/embeddings", json={**body, "encoding_format": "base64"})
        raw = base64.b64decode(packed.json()["data"][0]["embedding"])
        assert array("f", raw).tolist() == pytest.approx(vectors[0])
        assert node.stats.completion_tokens == 0
        assert node.stats.completed == 2


async def test_the_openai_client_understands_it() -> None:
    async with serving(NodeConfig(profile=IDEAL, api_key="sesame")) as (node, _):
        direct = openai.DefaultAsyncHttpxClient(trust_env=False)
        url = f"{node.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="sesame", http_client=direct) as client:
            answer = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "hi"}], max_tokens=4
            )
            chunks = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=4,
                stream=True,
            )
            text = "".join(
                [chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]
            )
            assert text == answer.choices[0].message.content
            vector = await client.embeddings.create(model="demo", input="hi")
            assert len(vector.data[0].embedding) == 16
            assert [model.id async for model in client.models.list()] == ["demo"]
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("other")


async def test_models_health_and_metrics() -> None:
    async with serving(NodeConfig(profile=STEADY, models=("a", "b"))) as (node, client):
        page = (await client.get("/v1/models")).json()
        assert [card["id"] for card in page["data"]] == ["a", "b"]
        assert (await client.get("/v1/models/b")).json()["object"] == "model"
        assert (await client.get("/health")).status_code == 200
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert f'vllm:{name}{{engine="0",model_name="a"}} 0.0\n' in metrics.text
        assert node.stats.started == 0


@pytest.mark.parametrize(
    ("path", "content", "status", "param"),
    [
        (CHAT, b"{not json", 400, None),
        (CHAT, b"[]", 400, None),
        (CHAT, b'{"messages":[]}', 400, "model"),
        (CHAT, b'{"model":"demo","messages":[]}', 400, "messages"),
        (CHAT, b'{"model":"demo","messages":["hi"]}', 400, "messages"),
        (CHAT, b'{"model":"nope","messages":[{"role":"user","content":"x"}]}', 404, "model"),
        ("/v1/completions", b'{"model":"demo"}', 400, "prompt"),
        ("/v1/completions", b'{"model":"demo","prompt":"x","max_tokens":0}', 400, "max_tokens"),
        ("/v1/completions", b'{"model":"demo","prompt":[[1],["x"]]}', 400, "prompt"),
        ("/v1/embeddings", b'{"model":"demo","input":"x","dimensions":0}', 400, "dimensions"),
        ("/v1/nothing", b"{}", 404, None),
    ],
)
async def test_errors_have_the_openai_shape(
    path: str, content: bytes, status: int, param: str | None
) -> None:
    async with serving() as (node, client):
        response = await client.post(path, content=content)
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert settled(node)
        assert (await client.post(CHAT, json=chat())).status_code == 200  # same connection


async def test_a_prompt_over_the_cache_is_refused() -> None:
    async with serving(NodeConfig(profile=replace(IDEAL, kv_tokens=8))) as (node, client):
        long = {"model": "demo", "prompt": "x" * 400, "stream": True}
        response = await client.post("/v1/completions", json=long)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert settled(node)


async def test_the_api_key_guards_v1() -> None:
    async with serving(NodeConfig(profile=IDEAL, api_key="sesame")) as (_, client):
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.post(CHAT, json=chat())).status_code == 401
        good = {"Authorization": "Bearer sesame"}
        assert (await client.post(CHAT, json=chat(), headers=good)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def raw(node: FakeNode, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_http_1_0_gets_no_chunks_and_pipelined_requests_their_order() -> None:
    body = orjson.dumps(chat(2, stream=True))
    post = b"POST %b HTTP/1.%d\r\nContent-Length: %d\r\n\r\n%b"
    async with serving() as (node, _):
        old = await raw(node, post % (CHAT.encode(), 0, len(body), body))
        assert b"chunked" not in old
        assert old.endswith(b"data: [DONE]\n\n")
        both = await raw(
            node,
            post % (CHAT.encode(), 1, len(body), body)
            + b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n",
        )
        assert both.index(b"[DONE]") < both.index(b'"list"')
        assert (await raw(node, b"NOT HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_the_early_role_option_sends_the_role_before_any_token() -> None:
    hung = Fault(mode="stall", after_tokens=0)
    async with (
        serving(NodeConfig(profile=IDEAL, early_role=True, fault=hung)) as (_, client),
        client.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        line = await anext(response.aiter_lines())
        assert orjson.loads(line[6:])["choices"][0]["delta"]["role"] == "assistant"


# Time, slots, clients that leave or do not read ------------------------------------------------


async def test_time_scale_and_profile_make_the_ttft() -> None:
    for scale in (1.0, 0.1):
        async with serving(NodeConfig(profile=A100, time_scale=scale)) as (_, client):
            loop = asyncio.get_running_loop()
            start = loop.time()
            body = {"model": "demo", "prompt": "x" * 2048, "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert loop.time() - start > 0.035 * scale - 0.002


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_frees_slot_and_kv(streamed: bool) -> None:
    profile = replace(STEADY, slots=1)
    async with serving(NodeConfig(profile=profile)) as (node, client):
        first = asyncio.create_task(client.post(CHAT, json=chat(ENDLESS, stream=streamed)))
        await until(lambda: node.engine.running == 1)
        second = asyncio.create_task(client.post(CHAT, json=chat(ENDLESS, stream=streamed)))
        await until(lambda: node.engine.waiting == 1)
        page = (await client.get("/metrics")).text
        assert 'vllm:num_requests_running{engine="0",model_name="demo"} 1.0' in page
        assert 'vllm:num_requests_waiting{engine="0",model_name="demo"} 1.0' in page
        assert (await client.get("/_fake/stats")).json()["open"] == 2
        for task in (second, first):  # one in line, one running
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: settled(node))
        assert node.stats.aborted == 2
        assert (node.engine.kv_used, node.stats.max_open) == (0, 2)


async def test_a_client_that_does_not_read_costs_no_memory_and_loses_nothing() -> None:
    tokens = 60_000  # some 12 MB of events: more than the sockets take
    async with serving() as (node, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port, limit=4096)
        body = orjson.dumps(chat(tokens, stream=True))
        writer.write(b"POST %b HTTP/1.1\r\nConnection: close\r\n" % CHAT.encode())
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        await until(lambda: node.stats.completion_tokens == tokens, 30)
        (connection,) = node.connections
        assert connection.paused
        assert node.stats.open == 1  # generated, not delivered
        assert node.engine.running == 0
        received, tail = 0, b""
        while data := await reader.read(1 << 20):
            received += (tail + data).count(b"data: {") - tail.count(b"data: {")
            tail = data[-7:]
        assert received == tokens + 2
        assert tail == b"\r\n0\r\n\r\n"
        assert settled(node)
        writer.close()
        await writer.wait_closed()


# Faults ----------------------------------------------------------------------------------------


async def set_fault(client: httpx.AsyncClient, **fault: Any) -> None:
    response = await client.post("/_fake/faults", json=fault)
    assert response.status_code == 200, response.text


async def test_refuse_resets_all_but_the_control_plane() -> None:
    async with serving() as (node, client):
        await set_fault(client, mode="refuse")
        for path in ("/health", "/v1/models"):
            with pytest.raises(httpx.ReadError):
                await client.get(path)
        with pytest.raises(httpx.ReadError):
            await client.post(CHAT, json=chat())
        page = (await client.get("/_fake/stats")).json()
        assert page["faults_served"] == {"refuse": 3}
        assert page["started"] == 0
        await set_fault(client)
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert settled(node)


async def test_hang_never_answers_and_sees_the_client_leave() -> None:
    async with serving() as (node, client):
        await set_fault(client, mode="hang")
        task = asyncio.create_task(client.post(CHAT, json=chat()))
        await until(lambda: node.stats.open == 1)
        assert (await client.get("/health")).status_code == 200
        task.cancel()
        await until(lambda: settled(node))
        assert node.stats.aborted == 1


async def test_slow_multiplies_the_step_time() -> None:
    async with serving(NodeConfig(profile=STEADY)) as (_, client):
        await set_fault(client, mode="slow", factor=10)
        loop = asyncio.get_running_loop()
        start = loop.time()
        assert (await client.post(CHAT, json=chat(2))).status_code == 200
        assert loop.time() - start > 0.098


async def test_status_with_retry_after() -> None:
    async with serving() as (node, client):
        await set_fault(client, mode="status", status=429, retry_after_s=7, delay_ms=1)
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 429
        assert response.headers["retry-after"] == "7"
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert (await client.get("/v1/models")).status_code == 200
        assert settled(node)
        assert node.stats.faulted == 1


async def test_drop_before_headers() -> None:
    async with serving() as (node, client):
        await set_fault(client, mode="drop_before_headers")
        with pytest.raises(httpx.ReadError):
            await client.post(CHAT, json=chat())
        assert settled(node)
        assert node.stats.faulted == 1


async def read_lines(response: httpx.Response, lines: list[str]) -> None:
    """Add lines as they come: what came before a reset counts."""
    async for line in response.aiter_lines():
        lines.append(line)  # noqa: PERF401 - a comprehension would lose them


@pytest.mark.parametrize("after", [0, 3, 5, 50])
async def test_drop_mid_stream_resets_after_that_many_tokens(after: int) -> None:
    async with serving() as (node, client):
        await set_fault(client, mode="drop_mid_stream", after_tokens=after)
        lines: list[str] = []
        async with client.stream("POST", CHAT, json=chat(5, stream=True)) as response:
            with pytest.raises(httpx.ReadError):
                await read_lines(response, lines)
        tokens = min(after, 5)
        assert sum(line.startswith("data: {") for line in lines) == (tokens + 1 if tokens else 0)
        assert "data: [DONE]" not in lines
        await until(lambda: settled(node))
        assert (node.stats.faulted, node.stats.aborted) == (1, 0)


async def test_drop_mid_stream_tears_a_whole_answer() -> None:
    async with serving() as (node, client):
        await set_fault(client, mode="drop_mid_stream", after_tokens=2)
        async with client.stream("POST", CHAT, json=chat()) as response:
            assert response.status_code == 200
            with pytest.raises(httpx.ReadError):
                await response.aread()
        await until(lambda: settled(node))


async def test_error_event_ends_a_stream_and_fails_a_whole_answer() -> None:
    async with serving() as (node, client):
        await set_fault(client, mode="error_event", after_tokens=2)
        got = await stream(client, CHAT, chat(stream=True))
        assert len(got) == 4
        assert got[-1]["error"] == {
            "message": "CUDA out of memory",
            "type": "server_error",
            "code": 500,
        }
        assert (await client.post(CHAT, json=chat())).status_code == 500
        assert settled(node)
        assert node.stats.faulted == 2


async def test_stall_keeps_the_connection_and_goes_silent() -> None:
    async with serving() as (node, client):
        await set_fault(client, mode="stall", after_tokens=1)
        async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
            lines = response.aiter_lines()
            for _ in range(4):  # role event, one token, and the empty lines after them
                await anext(lines)
            assert node.stats.open == 1
            assert node.engine.running == 0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await anext(lines)
        await until(lambda: settled(node))
        assert node.stats.aborted == 1


async def test_loading_like_llama_cpp() -> None:
    async with serving() as (_, client):
        await set_fault(client, mode="loading")
        for response in (await client.get("/health"), await client.post(CHAT, json=chat())):
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "Loading model"
        assert (await client.get("/v1/models")).status_code == 200


async def test_health_fails_alone() -> None:
    async with serving() as (_, client):
        await set_fault(client, health_fails=True, health_delay_ms=1)
        assert (await client.get("/health")).status_code == 503
        assert (await client.post(CHAT, json=chat())).status_code == 200
        await set_fault(client, health_delay_ms=1)
        assert (await client.get("/health")).status_code == 200


async def test_paths_and_probability_choose_the_victims() -> None:
    async with serving() as (_, client):
        await set_fault(client, mode="status", status=500, paths=["/v1/models"])
        assert (await client.get("/v1/models")).status_code == 500
        assert (await client.post(CHAT, json=chat())).status_code == 200

    async def statuses(seed: int) -> list[int]:
        fault = Fault(mode="status", probability=0.5)
        async with serving(NodeConfig(profile=IDEAL, seed=seed, fault=fault)) as (_, client):
            return [(await client.post(CHAT, json=chat())).status_code for _ in range(40)]

    first = await statuses(1)
    assert set(first) == {200, 500}
    assert first == await statuses(1)


@pytest.mark.parametrize(
    "wrong",
    [[], {"mode": "?"}, {"probability": 2}, {"colour": 1}, {"factor": "5"}, {"paths": [1]}],
)
async def test_a_wrong_fault_is_refused_and_changes_nothing(wrong: Any) -> None:
    async with serving() as (_, client):
        await set_fault(client, mode="hang")
        response = await client.post("/_fake/faults", json=wrong)
        assert response.status_code == 400
        assert (await client.get("/_fake/faults")).json()["mode"] == "hang"


async def test_reset_forgets_the_past_but_not_the_present() -> None:
    async with serving(NodeConfig(profile=STEADY)) as (node, client):
        await client.post(CHAT, json=chat(1))
        task = asyncio.create_task(client.post(CHAT, json=chat(ENDLESS)))
        await until(lambda: node.stats.open == 1)
        page = (await client.post("/_fake/reset")).json()
        assert (page["started"], page["completed"], page["open"]) == (1, 0, 1)
        task.cancel()
        await until(lambda: settled(node))


# The command -----------------------------------------------------------------------------------


def test_the_command_line_makes_the_config() -> None:
    config = parse_arguments(
        ["--profile", "xeon", "--model", "a", "--model", "b", "--fault", '{"mode":"slow"}']
    )
    assert (config.name, config.models, config.port) == ("xeon", ("a", "b"), 9101)
    assert config.fault == parse_fault({"mode": "slow", "factor": 5})
    with pytest.raises(SystemExit):
        parse_arguments(["--fault", '{"mode":"?"}'])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_says_where_it_is_and_ends_on_a_signal(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.lab.node", "--profile", "ideal", "--port", "0", "--id", "n1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        line = (await process.stdout.readline()).decode()
        assert line.startswith("fake node n1 on http://127.0.0.1:")
        async with client_of(line.split()[4]) as client:
            assert (await client.get("/_fake/stats")).json()["id"] == "n1"
            # Here the loop is uvloop, whose sockets and write buffers are not asyncio's.
            await set_fault(client, mode="drop_mid_stream", after_tokens=2)
            lines: list[str] = []
            async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
                with pytest.raises(httpx.ReadError):
                    await read_lines(response, lines)
            assert sum(line.startswith("data: {") for line in lines) == 3
            await set_fault(client, mode="refuse")
            with pytest.raises(httpx.ReadError):
                await client.get("/health")
            process.send_signal(number)
            _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
