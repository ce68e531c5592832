"""Load of engines from their metrics pages: each engine's, several versions', and bad ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cluster.signals import Signals, read, scrape
from app.lab.node import NodeConfig, serve_node
from app.lab.profiles import A100
from app.model import Node
from tests.support.rawnode import (
    Peer,
    RawNode,
    Request,
    close_without_answer,
    hang,
    raw_answer,
    sized,
    write_then_reset,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# The pages are those of the engines, shortened; names, labels and order are theirs.

VLLM = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 11223.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 23.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 4.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct",\
reason="capacity"} 3.0
# HELP vllm:gpu_cache_usage_perc GPU KV-cache usage. 1 means 100 percent usage. DEPRECATED
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.5
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.4375
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",\
model_name="meta-llama/Llama-3.1-8B-Instruct"} 1029.0
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",\
model_name="meta-llama/Llama-3.1-8B-Instruct"} 1052.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",calculate_kv_scales="False",\
cpu_kvcache_space_bytes="None",enable_prefix_caching="True",engine="0",\
gpu_memory_utilization="0.9",num_cpu_blocks="None",num_gpu_blocks="27103",\
num_gpu_blocks_override="None",prefix_caching_hash_algo="builtin",sliding_window="None",\
swap_space="4",swap_space_bytes="4294967296"} 1.0
"""

VLLM_V0 = b"""\
# HELP vllm:cache_config_info information of cache_config
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="573",\
num_cpu_blocks="1024",sliding_window="None",swap_space_bytes="4294967296"} 1.0
# HELP vllm:num_requests_running Number of requests currently running on GPU.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="qwen"} 8.0
# HELP vllm:num_requests_swapped Number of requests swapped to CPU.
# TYPE vllm:num_requests_swapped gauge
vllm:num_requests_swapped{model_name="qwen"} 2.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="qwen"} 5.0
# HELP vllm:gpu_cache_usage_perc GPU KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="qwen"} 0.96875
# HELP vllm:cpu_cache_usage_perc CPU KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:cpu_cache_usage_perc gauge
vllm:cpu_cache_usage_perc{model_name="qwen"} 0.0
"""

VLLM_TWO_ENGINES = b"""\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="8",engine="0",kv_cache_size_tokens="463459",\
num_gpu_blocks="320"} 1.0
vllm:cache_config_info{block_size="8",engine="1",kv_cache_size_tokens="463459",\
num_gpu_blocks="320"} 1.0
"""

SGLANG = b"""\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="qwen",pp_rank="0",tp_rank="0"} 14.0
# HELP sglang:num_used_tokens The number of used tokens.
# TYPE sglang:num_used_tokens gauge
sglang:num_used_tokens{engine_type="unified",model_name="qwen",pp_rank="0",tp_rank="0"} 123859.0
# HELP sglang:token_usage The token usage.
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="qwen",pp_rank="0",tp_rank="0"} 0.28
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="qwen",pp_rank="0",tp_rank="0"} 6.0
# HELP sglang:num_grammar_queue_reqs The number of requests in the grammar waiting queue.
# TYPE sglang:num_grammar_queue_reqs gauge
sglang:num_grammar_queue_reqs{engine_type="unified",model_name="qwen",pp_rank="0",tp_rank="0"} 1.0
# HELP sglang:cache_hit_rate The prefix cache hit rate.
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{engine_type="unified",model_name="qwen",pp_rank="0",tp_rank="0"} 0.0075
# HELP sglang:max_total_num_tokens Maximum total number of tokens in the KV cache pool.
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{engine_type="unified",model_name="qwen",pp_rank="0",tp_rank="0"} \
442354.0
"""

SGLANG_RANKS = b"""\
sglang:num_running_reqs{dp_rank="0",engine_type="unified",tp_rank="0"} 4.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",tp_rank="1"} 4.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",tp_rank="2"} 7.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",tp_rank="3"} 7.0
sglang:num_queue_reqs{dp_rank="0",engine_type="unified",tp_rank="0"} 0.0
sglang:num_queue_reqs{dp_rank="1",engine_type="unified",tp_rank="2"} 3.0
sglang:token_usage{dp_rank="0",engine_type="unified",tp_rank="0"} 0.2
sglang:token_usage{dp_rank="1",engine_type="unified",tp_rank="2"} 0.6
"""

SGLANG_PRIORITIES = b"""\
sglang:num_running_reqs{priority="",tp_rank="0"} 14.0
sglang:num_running_reqs{priority="-1",tp_rank="0"} 5.0
sglang:num_running_reqs{priority="0",tp_rank="0"} 9.0
sglang:num_queue_reqs{priority="",tp_rank="0"} 2.0
sglang:num_queue_reqs{priority="-1",tp_rank="0"} 2.0
"""

LLAMACPP = b"""\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 143
# HELP llamacpp:n_busy_slots_per_decode Average number of busy slots per llama_decode() call
# TYPE llamacpp:n_busy_slots_per_decode gauge
llamacpp:n_busy_slots_per_decode 1.85
# HELP llamacpp:predicted_tokens_seconds Average generation throughput in tokens/s.
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds 22.7601
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 46
"""
LLAMACPP_2024 = (
    LLAMACPP
    + b"""\
# HELP llamacpp:kv_cache_usage_ratio KV-cache usage. 1 means 100 percent usage.
# TYPE llamacpp:kv_cache_usage_ratio gauge
llamacpp:kv_cache_usage_ratio 0.75
# HELP llamacpp:kv_cache_tokens KV-cache tokens.
# TYPE llamacpp:kv_cache_tokens gauge
llamacpp:kv_cache_tokens 3072
"""
)
PROPS = {
    "default_generation_settings": {"n_ctx": 1024, "params": {"n_predict": -1}},
    "total_slots": 4,
    "chat_template": "{% for message in messages %}…",
}

TGI = b"""\
# TYPE tgi_request_count counter
tgi_request_count 253

# TYPE tgi_queue_size gauge
tgi_queue_size 7

# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 12

# TYPE tgi_batch_current_max_tokens gauge
tgi_batch_current_max_tokens 12000

# TYPE tgi_request_generated_tokens histogram
tgi_request_generated_tokens_bucket{le="1"} 0
tgi_request_generated_tokens_sum 8123
"""
INFO = {
    "model_id": "meta-llama/Llama-3.1-8B-Instruct", "max_concurrent_requests": 128,
    "max_total_tokens": 4096, "max_batch_total_tokens": 16000, "max_batch_size": None,
    "version": "3.3.4",
}  # fmt: skip

PAGES: dict[str, tuple[bytes, Any, Signals]] = {
    "vllm": (VLLM, None, Signals(4, 23, 0.4375, None, 27103 * 16)),
    "vllm, before V1": (VLLM_V0, None, Signals(7, 8, 0.96875, None, 573 * 16)),
    "vllm, two engines": (VLLM_TWO_ENGINES, None, Signals(2, 8, 0.5, None, 2 * 463459)),
    "sglang": (SGLANG, None, Signals(7, 14, 0.28, None, 442354)),
    "sglang, ranks": (SGLANG_RANKS, None, Signals(3, 11, 0.4)),
    "sglang, priorities": (SGLANG_PRIORITIES, None, Signals(2, 14)),
    "llama.cpp": (LLAMACPP, PROPS, Signals(46, 4, None, 4)),
    "llama.cpp of 2024": (LLAMACPP_2024, PROPS, Signals(46, 4, 0.75, 4)),
    "llama.cpp without limits": (LLAMACPP, None, Signals(46, 4)),
    "tgi": (TGI, INFO, Signals(7, 12, 0.75, None, 16000)),
    "tgi with a batch size": (TGI, {**INFO, "max_batch_size": 32}, Signals(7, 12, 0.75, 32, 16000)),
    "tgi without limits": (TGI, None, Signals(7, 12)),
}


@pytest.mark.parametrize("name", PAGES)
def test_each_engine_is_understood(name: str) -> None:
    page, limits, signals = PAGES[name]
    said = b"" if limits is None else orjson.dumps(limits)
    assert read(page, said) == signals
    assert read(page.replace(b"\n", b"\r\n"), said) == signals


OTHERS = {
    "nothing": b"",
    "a web page": b"<html>sglang:num_running_reqs 1</html>\n",
    "another program": b"# TYPE up gauge\nup 1\nprocess_cpu_seconds_total 3\n",
    "names that only begin alike": b"vllm:num_requests_running_total 3\n",
    "a name in a label": b'up{job="\\\nvllm:num_requests_running"} 1\n',
    "a name in the help": b"# HELP up As vllm:num_requests_running 3\n",
    "a number that is cut off": b"vllm:num_requests_running 12",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_pages_say_nothing(name: str) -> None:
    assert read(OTHERS[name]) is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300", "9" * 3000, "x", ""])
def test_a_number_that_makes_no_sense_is_none(value: str) -> None:
    bad = f'vllm:num_requests_running{{engine="1"}} {value}\n'.encode()
    assert read(bad) is None
    assert read(bad + b'vllm:num_requests_running{engine="0"} 3\n') == Signals(0, 3)
    share = f"vllm:num_requests_running 3\nvllm:kv_cache_usage_perc {value}\n".encode()
    assert read(share) == Signals(0, 3)


def test_shares_are_at_most_one() -> None:
    assert read(b"vllm:num_requests_running 3\nvllm:kv_cache_usage_perc 1.02\n") == Signals(0, 3, 1)
    full = orjson.dumps({"max_batch_total_tokens": 9000})
    assert read(TGI, full) == Signals(7, 12, 1, None, 9000)


@pytest.mark.parametrize(
    "limits",
    [b"[]", b"{", b"null", b'{"total_slots":null}', b'{"total_slots":-1}', b'{"total_slots":"4"}',
     b'{"total_slots":true}', b'{"total_slots":1e99}', b"\xff\xfe"],
)  # fmt: skip
def test_limits_that_make_no_sense_are_none(limits: bytes) -> None:
    assert read(LLAMACPP, limits) == Signals(46, 4)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_may_be_cut_off_anywhere(name: str) -> None:
    """What is left says less, never something else: no number is read in part."""
    page, _, whole = PAGES[name]
    whole = whole._replace(slots=None)
    for end in range(len(page)):
        found = read(page[:end])
        if found is None:
            continue
        assert found.running <= whole.running
        assert found.waiting <= whole.waiting
        if b"engine=" not in page and b"rank=" not in page:
            assert found.running == whole.running
            assert found.kv_used in {None, whole.kv_used}


PIECES = st.one_of(
    st.sampled_from(
        [b"vllm:num_requests_running", b"vllm:kv_cache_usage_perc", b"vllm:cache_config_info",
         b"sglang:num_running_reqs", b"tgi_batch_current_size", b"{", b"}", b'="', b'"', b"\\",
         b" ", b"\n", b"\r", b"\t", b"num_gpu_blocks", b"block_size", b"engine", b"1", b"9", b"e",
         b"-", b"NaN", b"#", b",", b"__name__", b" # {} 1", b"\x00", b"\xff", "٣".encode()]
    ),
    st.binary(max_size=5),
)  # fmt: skip


@given(st.lists(PIECES, max_size=40).map(b"".join), st.binary(max_size=20))
def test_no_page_raises(page: bytes, limits: bytes) -> None:
    for text in (page, b'vllm:num_requests_running{engine="' + page + b'"} 1\n' + page + b"\n"):
        found = read(text, limits)
        if found is not None:
            assert found.running >= 0
            assert found.waiting >= 0
            assert found.kv_used is None or 0 <= found.kv_used <= 1


def test_what_is_parsed_is_bounded() -> None:
    """A parser that takes a microsecond for a byte must not see megabytes of them."""
    line = b'vllm:num_requests_running{engine="%d",x="' + b"x" * 900 + b'"} 1\n'
    assert read(b"".join(line % n for n in range(50))) == Signals(0, 50)
    assert read(b"".join(line % n for n in range(5000))) is None  # no sum of a part of them
    long = b'vllm:num_requests_running{x="' + b"\\" * 1_000_000 + b'"} 9\n'
    assert read(long + b"vllm:num_requests_running 2\n") == Signals(0, 2)


# Over real sockets


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        yield client


def answering(pages: dict[str, bytes]) -> Any:
    async def script(request: Request, peer: Peer) -> None:
        page = pages.get(request.target)
        await peer.write(sized(404 if page is None else 200, page or b"no such page"))

    return script


def node_at(raw: RawNode, engine: str = "auto", **more: Any) -> Node:
    return Node(id="b1", url=raw.url, engine=engine, **more)


@pytest.mark.parametrize("name", PAGES)
async def test_a_node_is_asked_for_its_pages(client: httpx.AsyncClient, name: str) -> None:
    page, limits, signals = PAGES[name]
    pages = {"/metrics": page}
    if limits is not None:
        pages |= {"/props": orjson.dumps(limits), "/info": orjson.dumps(limits)}
    with RawNode(answering(pages)) as raw:
        assert await scrape(client, node_at(raw)) == signals
        assert raw.requests[0].target == "/metrics"
        assert len(raw.requests) == (1 if name.startswith(("vllm", "sglang")) else 2)


async def test_a_node_is_shown_its_key(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_B1", "sk-of-b1")
    with RawNode(answering({"/metrics": VLLM})) as raw:
        assert await scrape(client, node_at(raw, "vllm", api_key_env="KEY_OF_B1"))
        assert raw.requests[0].header(b"authorization") == b"Bearer sk-of-b1"


@pytest.mark.parametrize("engine", ["ollama", "generic"])
async def test_an_engine_without_metrics_is_not_asked(
    client: httpx.AsyncClient, engine: str
) -> None:
    with RawNode(answering({"/metrics": VLLM})) as raw:
        assert await scrape(client, node_at(raw, engine)) is None
        assert raw.requests == []


BROKEN: dict[str, Any] = {
    "no such page": answering({}),
    "a page that is switched off": raw_answer(sized(501, VLLM)),
    "closed": close_without_answer(),
    "reset": write_then_reset(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + VLLM),
    "cut off": raw_answer(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + VLLM[:900]),
    "not HTTP": raw_answer(b"\x00\xff" * 100 + b"\r\n\r\n"),
    "too large": raw_answer(sized(200, VLLM + b"#" * 5_000_000)),
    "bad gzip": raw_answer(sized(200, VLLM, [(b"content-encoding", b"gzip")])),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_page_that_does_not_come_is_no_news(client: httpx.AsyncClient, name: str) -> None:
    with RawNode(BROKEN[name]) as raw:
        assert await scrape(client, node_at(raw)) is None
        assert len(raw.requests) == 1


async def test_a_node_that_hangs_is_left_after_the_timeout() -> None:
    async with httpx.AsyncClient(timeout=0.2, trust_env=False) as client:
        with RawNode(hang()) as raw:
            assert await scrape(client, node_at(raw)) is None
        gone = node_at(raw)
        assert await scrape(client, gone) is None


async def test_limits_that_do_not_come_take_nothing_away(client: httpx.AsyncClient) -> None:
    async def script(request: Request, peer: Peer) -> None:
        if request.target == "/metrics":
            await peer.write(sized(200, LLAMACPP))
        else:
            peer.reset()

    with RawNode(script) as raw:
        assert await scrape(client, node_at(raw, "llamacpp")) == Signals(46, 4)


async def test_a_fake_node_tells_its_load(client: httpx.AsyncClient) -> None:
    fake = await serve_node(NodeConfig(profile=A100))
    try:
        node = Node(id="a100", url=fake.url, engine="vllm")
        assert await scrape(client, node) == Signals(0, 0, 0.0)
        turns = [{"role": "user", "content": "go"}]
        body = {"model": "demo", "stream": True, "max_tokens": 10**6, "messages": turns}
        path = fake.url + "/v1/chat/completions"
        async with client.stream("POST", path, json=body) as answer:
            parts = answer.aiter_raw()
            await anext(parts)  # its first token: it runs, and has reserved all of the cache
            second = asyncio.create_task(client.post(path, json=body))
            async with asyncio.timeout(5):
                while fake.engine.waiting == 0:  # noqa: ASYNC110 - what others count has no event
                    await asyncio.sleep(0.002)
            assert await scrape(client, node) == Signals(1, 1, 1.0)
            second.cancel()
    finally:
        await fake.close()
