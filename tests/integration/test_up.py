"""``leaseway up``: a cluster in one command, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import openai
import pytest
import redis

from app.cluster.embedded import die_with_parent
from tests.support.fleet import MODEL, NO_TLS, POOL
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai.types.chat import ChatCompletionMessageParam

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
READY = "Ctrl-C ends everything."
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")


def free_range(count: int) -> int:
    """The first of ``count`` neighbouring ports that nobody listens on."""
    while True:
        first = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


class Up:
    """``with Up() as up``: the command, running and ready.

    Its processes are known by a mark in their environment, which no change of parent or session
    hides, as children of those (Valkey writes its title over its environment), and by having
    been seen before: id and time of birth.
    """

    def __init__(self) -> None:
        self._mark = f"UP_TEST_MARK={os.getpid()}-{random.getrandbits(64):x}"
        self.gateway_port, self.node_port = free_range(3), free_range(3)
        self.redis_port = free_range(1)
        self.folder = Path(tempfile.mkdtemp(prefix="up-test-"))  # for its temporary files
        self.said: list[str] = []
        self._known: dict[int, str] = {}
        self.process: subprocess.Popen[str]
        self.ready_s = 0.0

    @property
    def ports(self) -> list[int]:
        """Every port that it was told to use."""
        three = range(3)
        return [
            *(self.gateway_port + i for i in three),
            *(self.node_port + i for i in three),
            self.redis_port,
        ]

    @property
    def environment(self) -> dict[str, str]:
        """For commands that read from its Redis."""
        return {**os.environ, "REDIS_URL": f"redis://127.0.0.1:{self.redis_port}/0"}

    def processes(self) -> dict[int, str]:
        """Command lines of all its living processes, by id; zombies have none."""
        found: dict[int, str] = {}
        for folder in 2 * list(Path("/proc").glob("[0-9]*")):  # again, for children seen first
            pid = int(folder.name)
            with contextlib.suppress(OSError):
                stat = (folder / "stat").read_text().rpartition(")")[2].split()  # proc(5)
                parent, born = int(stat[1]), stat[19]
                marked = self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command and (marked or parent in found or self._known.get(pid) == born):
                    found[pid] = command
                    self._known[pid] = born
        return found

    def listening(self) -> list[int]:
        """Which of its ports somebody answers on."""
        found = []
        for port in self.ports:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=2).close()
                found.append(port)
        return found

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)

    def said_so(self) -> bool:
        """Whether it has printed what to try."""
        assert self.process.poll() is None, "".join(self.said)
        return any(READY in line for line in self.said)

    def __enter__(self) -> Self:
        name, _, value = self._mark.partition("=")
        start = monotonic()
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "app.cli", "up",
                "--gateway-port", str(self.gateway_port),
                "--node-port", str(self.node_port),
                "--redis-port", str(self.redis_port),
            ],
            env={
                **os.environ,
                "PYTHONWARNINGS": "error",
                "TMPDIR": str(self.folder),
                name: value,
            },
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call
        )  # fmt: skip
        threading.Thread(target=self._hear, daemon=True).start()
        try:
            wait_until(self.said_so, within_s=30, what="up is ready")
        except BaseException:
            self.__exit__()
            raise
        self.ready_s = monotonic() - start
        self.processes()  # get to know them
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.folder)  # killed outright it cannot tidy up

    def sdk(self, replica: int) -> openai.OpenAI:
        """A client of one replica."""
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.gateway_port + replica}/v1",
            api_key="unused",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False, verify=NO_TLS),
        )


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    """One cluster for the tests that only look."""
    with Up() as running:
        yield running


@pytest.fixture
def shared(up: Up) -> Iterator[redis.Redis]:
    """A client of its Valkey."""
    with redis.Redis(port=up.redis_port, decode_responses=True) as client:
        yield client


def active(client: redis.Redis) -> dict[str, int]:
    nodes = map(str, client.smembers(f"{POOL}nodes"))
    return {node: int(client.get(f"{POOL}active:{node}") or 0) for node in nodes}


def ranking(client: redis.Redis) -> list[tuple[str, float]]:
    """Nodes and scores, best first, as redis-cli shows them."""
    pairs = client.zrevrange(f"{POOL}score:{MODEL}", 0, -1, withscores=True)
    return [(str(pair[0]), float(pair[1])) for pair in pairs]


def read_json(up: Up, command: str) -> list[dict[str, Any]]:
    """What ``leaseway <command> --json`` prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "app.cli", command, "--json"],
        env=up.environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_it_starts_three_replicas_three_nodes_and_a_valkey(up: Up) -> None:
    commands = "\n".join(up.processes().values())
    assert len(up.processes()) == 8  # and itself
    assert commands.count("app.cli serve") == 3
    assert commands.count("app.lab.node") == 3
    assert sorted(up.listening()) == sorted(up.ports)
    told = "".join(up.said)
    assert f"127.0.0.1:{up.gateway_port}-{up.gateway_port + 2}" in told
    assert f"redis-cli -p {up.redis_port}" in told


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_chat_streams_through_each_replica_and_redis_shows_it(
    up: Up, shared: redis.Redis, replica: int
) -> None:
    wait_until(lambda: not any(active(shared).values()), what="idle before")
    with up.sdk(replica) as sdk:
        raw = sdk.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, max_tokens=40, stream=True
        )
        node = raw.headers["x-leaseway-node"]
        with raw.parse() as stream:
            text = next(stream).choices[0].delta.content or ""
            assert active(shared)[node] == 1
            assert sum(active(shared).values()) == 1
            while_running = dict(ranking(shared))
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
    assert len(text.split()) == 40
    wait_until(lambda: not any(active(shared).values()), what="active is 0 after the stream")
    idle = dict(ranking(shared))
    assert set(idle) == {"a100", "rtx4090", "xeon"}
    assert idle[node] > 0
    assert while_running[node] < idle[node] * 1.01  # the running stream had halved it
    newest = str(shared.lrange(f"{POOL}ttft:{node}", 0, 0)[0])
    ttft_us, prompt_tokens, taken_at_ms = map(int, newest.split(":"))
    assert 1_000 < ttft_us < 10_000_000
    assert prompt_tokens > 0
    seconds, _ = shared.time()
    assert abs(seconds * 1000 - taken_at_ms) < 60_000


def test_the_commands_tell_what_redis_holds(up: Up, shared: redis.Redis) -> None:
    with up.sdk(0) as sdk:
        sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    wait_until(lambda: not any(active(shared).values()), what="idle")
    rows = {row["id"]: row for row in read_json(up, "nodes")}
    assert set(rows) == shared.smembers(f"{POOL}nodes")
    for node, row in rows.items():
        record = shared.hgetall(f"{POOL}node:{node}")
        assert row["url"] == record["url"]
        assert row["weight"] == float(record["weight"])
        assert row["active"] == 0
        assert row["samples"] == shared.llen(f"{POOL}ttft:{node}")
        assert row["scores"] == {MODEL: shared.zscore(f"{POOL}score:{MODEL}", node)}
    ranked = [(row["node"], row["score"]) for row in read_json(up, "scores")]
    assert ranked == ranking(shared)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_under_a_stream_ends_everything_and_leaves_nothing(number: signal.Signals) -> None:
    with Up() as up:
        assert len(list(up.folder.iterdir())) == 2  # settings, and Valkey's
        with up.sdk(1) as sdk:
            stream = sdk.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=1000, stream=True
            )
            next(stream)
            up.process.send_signal(number)
            # The nodes end too: the client hears of it at once and is not left hanging.
            with pytest.raises(openai.APIError, match="broke off"):
                list(stream)
        assert up.process.wait(15) == 0, "".join(up.said)
        assert up.processes() == {}
        assert up.listening() == []
        assert list(up.folder.iterdir()) == []
        assert "Traceback" not in "".join(up.said)


def test_killing_it_outright_leaves_no_child() -> None:
    with Up() as up:
        assert len(up.processes()) == 8
        up.process.kill()
        up.process.wait(5)
        wait_until(lambda: not up.processes(), what="the kernel ends its children")
        assert up.listening() == []


def test_a_taken_port_is_told_and_leaves_nothing() -> None:
    with socket.socket() as taken:
        up = Up()
        taken.bind(("127.0.0.1", up.gateway_port + 1))
        taken.listen()
        with pytest.raises(AssertionError), up:
            pytest.fail("it cannot be ready")
        assert up.process.returncode == 2
        assert up.processes() == {}
        assert "ended with code" in up.said[-1]
        assert not up.folder.exists()
