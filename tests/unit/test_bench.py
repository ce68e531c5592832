"""The bench may be slow or fast, but it must never count an error as a success."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app.lab.bench import run as bench
from app.lab.bench.backend import STREAMS, listen
from app.lab.bench.cpu import Cores, choose_cores, cpu_seconds, family
from app.lab.bench.load import Report, closed_loop, exchange_with, open_loop
from app.lab.bench.nginx import nginx
from app.lab.bench.peers import Peer, backend
from app.lab.bench.processes import BenchError, running
from app.lab.bench.rows import Sample, rows_of
from app.lab.bench.workloads import DONE_EVENT, WORKLOADS

NOT_PINNED = Cores(None, None)
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
ANSWER = b'{"ok":true}'


@asynccontextmanager
async def url_of_backend() -> AsyncIterator[str]:
    async with await listen(0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def url_answering(response: bytes, *, then_close: bool = False) -> AsyncIterator[str]:
    """A server that has one answer to everything."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(65536):
                writer.write(response)
                if then_close:
                    break
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


# --- workloads and backend


@pytest.mark.parametrize("name", WORKLOADS)
async def test_every_workload_comes_back_whole(name: str) -> None:
    async with url_of_backend() as url:
        report = await closed_loop(exchange_with(url, WORKLOADS[name], "demo"), 4, 0.3)
    assert report.requests > 0
    assert (report.errors, report.reasons) == (0, {})


async def test_open_loop_sends_the_same_arrivals_for_the_same_seed() -> None:
    async with url_of_backend() as url:
        exchange = exchange_with(url, WORKLOADS["json"], "demo")
        reports = [await open_loop(exchange, 4, 0.3, 100, seed=3) for _ in range(2)]
    assert reports[0].requests == reports[1].requests > 0
    assert [report.errors for report in reports] == [0, 0]


def test_sizes_are_those_of_the_published_table() -> None:
    assert WORKLOADS["json"].answer_bytes == 600
    assert all(270 <= len(each.request_body("demo")) <= 350 for each in WORKLOADS.values())
    assert len(WORKLOADS["burst"].sse_events()) == 64
    assert len(WORKLOADS["paced"].sse_events()) == 20
    assert sum(map(len, STREAMS["burst"].turns)) == 64


async def test_a_stream_is_what_openai_sends() -> None:
    workload = WORKLOADS["burst"]
    async with url_of_backend() as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/chat/completions", content=workload.request_body("demo"))
    events = response.text.split("\n\n")[:-1]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert response.content.endswith(DONE_EVENT)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == len(chunks) - 3


async def test_backend_answers_probes_and_refuses_nonsense() -> None:
    async with url_of_backend() as url, httpx.AsyncClient(base_url=url) as client:
        models = await client.get("/v1/models")
        health = await client.get("/health")
        absent = await client.get("/metrics")
        nonsense = await client.post("/v1/chat/completions", content=b"{")
    assert models.json()["data"][0]["id"] == "demo"
    assert [r.status_code for r in (health, absent, nonsense)] == [200, 404, 400]


# --- the load generator's judgement


def sized(status: str, body: bytes, announced: int | None = None) -> bytes:
    length = len(body) if announced is None else announced
    return f"HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("response", "then_close", "reason"),
    [
        (sized("503 Service Unavailable", b"x" * 600), False, "status 503"),
        (sized("200 OK", ANSWER), False, "length 11, not 600"),
        (sized("200 OK", ANSWER, announced=600), True, "closed before the answer ended"),
        (b"what?\r\n\r\n", False, "malformed"),
    ],
)
async def test_a_wrong_answer_is_an_error(response: bytes, then_close: bool, reason: str) -> None:
    async with url_answering(response, then_close=then_close) as url:
        report = await closed_loop(exchange_with(url, WORKLOADS["json"], "demo"), 2, 0.2)
    assert report.requests == 0
    assert report.errors > 0
    assert set(report.reasons) == {reason}


async def test_a_connection_that_ends_after_its_answer_is_no_error() -> None:
    body = b"x" * 600
    response = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 600\r\n\r\n" + body
    async with url_answering(response, then_close=True) as url:
        report = await closed_loop(exchange_with(url, WORKLOADS["json"], "demo"), 2, 0.2)
    assert report.requests > 2
    assert report.errors == 0


async def test_nobody_listening_is_an_error() -> None:
    async with url_of_backend() as url:
        pass
    report = await closed_loop(exchange_with(url, WORKLOADS["json"], "demo"), 2, 0.1)
    assert report.requests == 0
    assert set(report.reasons) == {"connect"}


# --- CPU accounting

BURN = """
import sys, time
while time.process_time() < 0.4: pass
print("burnt", flush=True)
sys.stdin.read()
"""


def test_cpu_of_a_process_that_burns_a_known_time() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        spent = cpu_seconds(family(process.pid))
        process.communicate()
    assert 0.3 <= spent <= 0.8


def test_a_family_includes_the_children() -> None:
    child = "import subprocess,sys; subprocess.run([sys.executable,'-c','input()'])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 10
        while len(family(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        members = family(process.pid)
        process.communicate(b"\n")
    assert members[0] == process.pid
    assert len(members) == 2


# --- rows


def sample(peer: str, number: int, cpu_us: float | None, first_ms: float = 1.0) -> Sample:
    report = Report(100, 0, 1.0, first_ms, 2 * first_ms, 3.0, 4.0)
    return Sample("json", peer, number, report, cpu_us)


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    figures = [("gateway", 100, 90, 300), ("nginx", 50, 60, 100)]
    samples = [sample(peer, n, us) for peer, *each in figures for n, us in enumerate(each)]
    gateway, baseline = rows_of(samples, "nginx")
    assert gateway.ratios == (2.0, 1.5, 3.0)
    assert (gateway.ratio, gateway.cpu_us) == (2.0, 100)
    assert baseline.ratio == 1.0


def test_added_first_byte_is_over_direct_in_the_same_round() -> None:
    samples = [
        sample(peer, number, None, first_ms)
        for number, pair in enumerate([(3.0, 1.0), (9.0, 2.0), (2.0, 1.0)])
        for peer, first_ms in zip(("gateway", "direct"), pair, strict=True)
    ]
    gateway, direct = rows_of(samples, "nginx")
    assert (gateway.added_p50_ms, gateway.added_p99_ms) == (2.0, 4.0)
    assert (gateway.ratio, direct.added_p50_ms) == (None, None)


# --- starting and ending


def test_a_child_is_ended_when_the_block_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        pytest.raises(ZeroDivisionError),
        running("sleeper", command, tmp_path, None) as child,
    ):
        raise ZeroDivisionError
    assert child.process.returncode == -signal.SIGTERM


def test_a_child_that_dies_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such setting')"]
    with (
        pytest.raises(BenchError, match="no such setting"),
        running("gateway", command, tmp_path, None) as child,
    ):
        child.wait_until(lambda: False, "200 from /readyz")


def test_missing_nginx_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with (
        pytest.raises(BenchError, match="apt-get install nginx-light"),
        nginx("http://127.0.0.1:1", tmp_path, NOT_PINNED),
    ):
        pass


@pytest.mark.skipif(not NGINX, reason="nginx is not installed")
def test_nginx_passes_streams_on_and_is_ended(tmp_path: Path) -> None:
    with (
        backend(tmp_path, NOT_PINNED) as direct,
        nginx(direct.url, tmp_path, NOT_PINNED) as peer,
    ):
        exchange = exchange_with(peer.url, WORKLOADS["burst"], "demo")
        report = asyncio.run(closed_loop(exchange, 4, 0.3))
    assert report.requests > 0
    assert report.errors == 0
    assert len(peer.pids) == 2, "master and one worker"
    assert not any(Path(f"/proc/{pid}").exists() for pid in peer.pids[:1])


def test_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["jsom"], rounds=1, seconds=0.1, json_out=True)
    assert "jsom" in capsys.readouterr().err


def test_one_round_end_to_end(tmp_path: Path) -> None:
    """The backend stands in for the proxy too: the harness does not care what it measures."""
    before = os.sched_getaffinity(0)
    cores = choose_cores()
    with backend(tmp_path, cores) as direct:
        peer = Peer("nginx", direct.url, pids=(os.getpid(),))
        rows = bench.run_gateway_bench(
            [peer, direct], ["json", "ttfb"], rounds=1, seconds=0.3, cores=cores
        )
    assert [(row.workload, row.peer, row.errors) for row in rows] == [
        ("json", "nginx", 0),
        ("ttfb", "nginx", 0),
        ("ttfb", "direct", 0),
    ]
    assert rows[0].cpu_us is not None
    assert os.sched_getaffinity(0) == before
