"""A real engine, llama.cpp's server, behind two replicas: what a fake node cannot prove.

The model is tiny and random, and greedy, so it says the same each time. The server takes one
request at a time, and answers no page meanwhile: the busiest kind of node there is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import openai
import pytest

from app.cluster.embedded import die_with_parent, free_port
from app.lab.node import NodeConfig
from app.lab.profiles import IDEAL
from tests.support.fleet import CHAT, NO_TLS, POOL, Fleet, Nodes, plain_http
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv-engine"
MODEL, EMBEDDER = "tiny", "tiny-embed"
ENDLESS = 30_000  # tokens, of which the engine makes some hundreds a second
HELLO: list[Any] = [{"role": "user", "content": "hello"}]

pytestmark = pytest.mark.skipif(
    not (HOME / ".installed").exists(),
    reason="llama-cpp-python could not be built here: make engine",
)


class Engine:
    """``with Engine(folder) as engine``: a llama.cpp server that has loaded its model."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._log = folder / "engine.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All that it has written."""
        return self._log.read_text()

    def __enter__(self) -> Self:
        python, model = str(HOME / "bin" / "python"), str(self._folder / "tiny.gguf")
        subprocess.run([python, "-m", "tests.engine.make_model", model], cwd=ROOT, check=True)
        served = {"model": model, "n_threads": 1, "verbose": False}
        config = self._folder / "engine.json"
        config.write_text(json.dumps({
            "host": "127.0.0.1",
            "port": self.port,
            # By default it breaks off a stream when anybody else asks for anything, its list of
            # models included: made for one user, and wrong for every shared engine.
            "interrupt_requests": False,
            "models": [
                {**served, "model_alias": MODEL, "n_ctx": 32768},
                {**served, "model_alias": EMBEDDER, "n_ctx": 512, "embedding": True},
            ],
        }))  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-m", "llama_cpp.server", "--config_file", str(config)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call
            )
        wait_until(self._answers, within_s=60, what=f"the engine is up; see {self._log}")
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        with contextlib.suppress(httpx.TransportError), plain_http(self.url) as http:
            return http.get("/v1/models").status_code == 200
        return False


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for the tests that leave it alive."""
    with Engine(tmp_path_factory.mktemp("engine")) as started:
        yield started


@pytest.fixture(scope="module")
def fleet(engine: Engine) -> Iterator[Fleet]:
    """Two replicas before it. Its models are discovered; probes are quick to give up."""
    node = {"id": "llama", "url": engine.url, "capacity": 4}
    health = {"interval_s": 0.2, "timeout_s": 0.3, "unhealthy_after": 3}
    with Fleet([node], replicas=2, health=health) as started:
        yield started
        started.wait_settled()


def sdk(url: str) -> openai.OpenAI:
    """A client that never retries behind the test's back."""
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=60,
        http_client=openai.DefaultHttpxClient(trust_env=False, verify=NO_TLS),
    )


def chat(client: openai.OpenAI, tokens: int) -> list[Any]:
    """A whole answer: text, reason and usage."""
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=tokens, temperature=0
    )
    choice = answer.choices[0]
    assert answer.usage is not None
    return [choice.message.content, choice.finish_reason, answer.usage.to_dict()]


def chat_streamed(client: openai.OpenAI, tokens: int) -> list[Any]:
    """The same streamed: the text of each event, and the reason."""
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=tokens, temperature=0, stream=True
        )
    )
    deltas = [chunk.choices[0].delta.content for chunk in chunks]
    return [deltas, chunks[-1].choices[0].finish_reason]


def booked(fleet: Fleet, kind: str) -> float:
    """Tokens of a kind that the replicas have booked for the model."""
    total = 0.0
    for url in fleet.urls:
        with plain_http(url) as http:
            page = http.get("/metrics").text
        for line in page.splitlines():
            if line.startswith(f'leaseway_tokens_total{{kind="{kind}",model="{MODEL}"}}'):
                total += float(line.rsplit(" ", 1)[1])
    return total


def samples(fleet: Fleet) -> list[int]:
    """The TTFT window of the engine: newest first, in µs."""
    window = fleet.redis.lrange(f"{POOL}ttft:llama", 0, -1)
    return [int(str(sample).split(":")[0]) for sample in window]


def test_every_replica_lists_the_models_that_the_engine_names(fleet: Fleet) -> None:
    for url in fleet.urls:
        with sdk(url) as client:
            assert sorted(model.id for model in client.models.list()) == [MODEL, EMBEDDER]


def test_chat_completions_and_embeddings_are_what_the_engine_says_itself(
    engine: Engine, fleet: Fleet
) -> None:
    for url in fleet.urls:
        with sdk(engine.url) as direct, sdk(url) as through:
            assert chat(through, 12) == chat(direct, 12)
            streamed = chat_streamed(through, 12)
            assert streamed == chat_streamed(direct, 12)
            assert "".join(text or "" for text in streamed[0]) == chat(direct, 12)[0]
            texts, vectors = [], []
            for client in (through, direct):
                answer = client.completions.create(
                    model=MODEL, prompt="once", max_tokens=9, temperature=0
                )
                texts.append(answer.choices[0].text)
            for client in (through, direct):
                rows = client.embeddings.create(
                    model=EMBEDDER, input="once", encoding_format="float"
                )
                vectors.append(rows.data[0].embedding)
            assert texts[0]
            assert texts[0] == texts[1]
            assert vectors[0]
            assert vectors[0] == vectors[1]


def test_usage_is_booked_and_each_stream_leaves_a_ttft_sample(fleet: Fleet) -> None:
    fleet.wait_settled()
    before, had = booked(fleet, "output"), len(samples(fleet))
    ask = {"model": MODEL, "messages": HELLO, "temperature": 0}
    for url in fleet.urls:
        with plain_http(url) as http:
            whole = http.post(CHAT, json={**ask, "max_tokens": 12}).json()
            assert whole["usage"]["completion_tokens"] == 12
            events = http.post(CHAT, json={**ask, "max_tokens": 10, "stream": True}).text
            assert events.rstrip().endswith("data: [DONE]")
    wait_until(lambda: booked(fleet, "output") == before + 44, what="2 * (12 + 10) tokens booked")
    wait_until(lambda: len(samples(fleet)) == had + 2, what="a sample for each stream")
    assert all(0 < sample < 60_000_000 for sample in samples(fleet))


def test_a_client_that_leaves_makes_the_engine_stop(engine: Engine, fleet: Fleet) -> None:
    left = engine.log.count("Disconnected from client")
    with sdk(fleet.urls[0]) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=ENDLESS, temperature=0, stream=True
        )
        for _ in range(4):
            next(stream)
        assert fleet.active() == {"llama": 1}
        stream.close()
    wait_until(
        lambda: engine.log.count("Disconnected from client") == left + 1,
        what="the engine saw its client leave",
    )
    fleet.wait_settled()
    with sdk(engine.url) as direct:  # it serves one at a time: an answer means that it is free
        assert chat(direct, 2)[1] == "length"


def test_an_engine_too_busy_for_its_pages_but_delivering_stays_in_service(fleet: Fleet) -> None:
    seen = set()
    with sdk(fleet.urls[0]) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=1200, temperature=0, stream=True
        )
        for _ in stream:
            seen.add(fleet.redis.hget(f"{POOL}node:llama", "health"))
    assert seen == {"ok"}
    with sdk(fleet.urls[1]) as client:
        assert chat(client, 2)[1] == "length"


def test_an_engine_killed_in_mid_stream_ends_in_an_error_and_another_node_goes_on(
    tmp_path: Path,
) -> None:
    spare = NodeConfig(profile=IDEAL, models=(MODEL,))
    with Engine(tmp_path) as engine, Nodes(spare=spare) as nodes:
        llama = {"id": "llama", "url": engine.url, "capacity": 4, "weight": 1000}
        with Fleet([llama, *nodes.settings(spare={"weight": 0.001})], replicas=2) as fleet:
            body = {"model": MODEL, "messages": HELLO, "max_tokens": ENDLESS, "stream": True}
            lines = []
            with (
                plain_http(fleet.urls[0]) as http,
                http.stream("POST", CHAT, json=body) as answer,
            ):
                assert answer.headers["x-leaseway-node"] == "llama"
                for line in answer.iter_lines():
                    lines += [line] if line else []
                    if len(lines) == 5:
                        engine.kill()
            *events, last = (json.loads(line.removeprefix("data: ")) for line in lines)
            assert len(events) >= 5
            assert all(event["choices"] for event in events)
            assert set(last) == {"error"}
            assert last["error"]["type"] == "upstream_error"
            fleet.wait_settled()
            with plain_http(fleet.urls[1]) as http:
                after = http.post(CHAT, json={**body, "stream": False, "max_tokens": 3})
            assert after.status_code == 200
            assert after.headers["x-leaseway-node"] == "spare"
