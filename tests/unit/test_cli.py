"""The command line as an operator uses it; reads of a real server, errors as one line."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from app import cli
from app.admission.keys import hash_key
from app.cluster.embedded import free_port
from app.cluster.link import Link
from app.cluster.scripts import Scripts, constants
from app.config import KeySettings, Scoring, Settings
from app.model import Grant, Node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import redis

    from tests.support.servers import ValkeyServer

    Run = Callable[..., tuple[int, str, str]]

COMMANDS = {
    "serve", "up", "check-config", "schema", "bench", "hash-key", "simulate",
    "nodes", "scores", "replicas", "leases", "add", "change", "drain", "enable", "disable",
    "remove", "top",
}  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(*args)``: what ``leaseway`` says, as (exit code, stdout, stderr)."""
    for name in list(os.environ):
        if name.startswith("LEASEWAY_") or name == "REDIS_URL":
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")

    def go(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leaseway", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return go


def printed(result: tuple[int, str, str]) -> Any:
    """The JSON that a command printed; nothing else and no complaint."""
    code, out, err = result
    assert (code, err) == (0, "")
    return json.loads(out)


def test_help_lists_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert {word for word in out.split() if word in COMMANDS} == COMMANDS
    for command in COMMANDS:
        code, out, _ = run(command, "--help")
        assert code == 0
        assert command in out


def test_a_wrong_option_is_a_usage_error(run: Run) -> None:
    code, out, err = run("serve", "--prot", "1")
    assert code == 2
    assert out == ""
    assert "--prot" in err


def test_the_installed_command_runs() -> None:
    command = [sys.executable, "-W", "error", "-m", "app.cli", "schema"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert json.loads(done.stdout) == Settings.model_json_schema()


def test_the_schema_knows_every_section_and_nothing_else(run: Run) -> None:
    schema = printed(run("schema"))
    assert set(schema["properties"]) == set(Settings.model_fields)
    assert schema["additionalProperties"] is False


def test_check_config_prints_the_settings_in_force_without_secrets(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "leaseway.yaml"
    file.write_text(
        "redis: {url: 'redis://:s3cret@h:1/0'}\n"
        "nodes: [{id: a, url: 'http://h:1/v1/', models: [m], api_key_env: NODE_KEY}]\n"
        f"keys: [{{name: team, hash: '{hash_key('sk-team')}'}}]\n"
    )
    monkeypatch.setenv("LEASEWAY_SCORING__ALPHA", "0.5")
    monkeypatch.setenv("NODE_KEY", "nk-s3cret")
    code, out, err = run("check-config", "-c", str(file))
    settings = printed((code, out, err))
    for secret in ("s3cret", hash_key("sk-team"), hash_key("sk-team").removeprefix("sha256:")):
        assert secret not in out
    assert settings["redis"]["url"] == "(set)"
    (key,) = settings["keys"]
    assert key == KeySettings(name="team", hash=hash_key("sk-team")).model_dump() | {
        "hash": "(hidden)"
    }
    assert settings["nodes"][0]["url"] == "http://h:1"
    assert settings["nodes"][0]["api_key_env"] == "NODE_KEY"
    assert settings["scoring"]["alpha"] == 0.5
    assert set(settings) == set(Settings.model_fields)


def test_check_config_without_a_file_prints_the_defaults(run: Run) -> None:
    assert printed(run("check-config")) == Settings().model_dump(mode="json")


# Keys


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """``typed(content)``: what a command finds on stdin."""
    return lambda content: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def entry(out: str) -> KeySettings:
    """The printed entry, pasted into a settings file."""
    (key,) = yaml.safe_load(out)
    return KeySettings(**key)


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n", b" \n\n"])
def test_hash_key_prints_an_entry_to_paste_and_never_the_key(
    run: Run, typed: Callable[[bytes], None], ending: bytes
) -> None:
    typed(b"sk-0123456789-of-a-team" + ending)
    code, out, err = run("hash-key", "--name", "team-b")
    assert (code, err) == (0, "")
    assert entry(out) == KeySettings(name="team-b", hash=hash_key("sk-0123456789-of-a-team"))
    assert "sk-0123456789" not in out


def test_hash_key_makes_a_new_key_each_time_and_shows_it_beside_the_entry(run: Run) -> None:
    made = set()
    for _ in range(3):
        code, out, err = run("hash-key", "--new")
        assert code == 0
        key = err.split()[-1]
        assert re.fullmatch(r"lw-[A-Za-z0-9_-]{43}", key)
        assert entry(out).hash == hash_key(key)
        assert key not in out  # `>> leaseway.yaml` keeps no key
        made.add(key)
    assert len(made) == 3


def test_hash_key_hashes_bytes_as_a_client_sends_them(
    run: Run, typed: Callable[[bytes], None]
) -> None:
    typed("schlüssel-密钥-0123456789\n".encode())
    assert entry(run("hash-key")[1]).hash == hash_key("schlüssel-密钥-0123456789")
    typed(b"\xff\xfe-0123456789abcdef")
    assert entry(run("hash-key")[1]).hash == hash_key(b"\xff\xfe-0123456789abcdef")


def test_hash_key_warns_of_a_key_that_can_be_guessed(
    run: Run, typed: Callable[[bytes], None]
) -> None:
    typed(b"hunter2")
    code, out, err = run("hash-key")
    assert (code, entry(out).hash) == (0, hash_key("hunter2"))
    assert err.count("\n") == 1
    assert "can be guessed" in err
    assert "hunter2" not in out + err


@pytest.mark.parametrize("name", ["123", "1.5", "null", "yes", "2027-12-31"])
def test_hash_key_quotes_a_name_that_yaml_would_take_for_something_else(
    run: Run, name: str
) -> None:
    assert entry(run("hash-key", "--new", "--name", name)[1]).name == name


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"  \n", b"sk-one-0123456789\nsk-two-0123456789\n"]
)
def test_hash_key_wants_one_key(run: Run, typed: Callable[[bytes], None], content: bytes) -> None:
    typed(content)
    code, out, err = run("hash-key")
    assert (code, out) == (2, "")
    assert err.startswith("leaseway: hash-key wants one key")
    assert "sk-" not in err


def test_hash_key_refuses_a_name_that_the_settings_would_refuse(
    run: Run, typed: Callable[[bytes], None]
) -> None:
    typed(b"sk-0123456789-of-a-team")
    code, out, err = run("hash-key", "--name", "team b")
    assert (code, out) == (2, "")
    assert err.startswith("leaseway: name = 'team b'")
    assert err.count("\n") == 1


def test_hash_key_asks_at_a_terminal_and_does_not_echo(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with (tmp_path / "out").open("w+") as out:
        asked = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "app.cli", "hash-key"],
            stdin=theirs,
            stdout=out,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(theirs)
        seen = b""
        while b"API key" not in seen:
            seen += os.read(ours, 1000)
        os.write(ours, b"sk-typed-0123456789\n")
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while more := os.read(ours, 1000):
                seen += more
        os.close(ours)
        assert asked.wait(20) == 0
        out.seek(0)
        assert entry(out.read()).hash == hash_key("sk-typed-0123456789")
    assert b"sk-typed" not in seen


# Reads of a real server

A = Node("a", "http://127.0.0.1:9001", weight=4, capacity=8, models=("m", "n"), engine="vllm")
B = Node("b", "http://127.0.0.1:9002", weight=1, capacity=2, models=("m",))
C = Node("c", "http://127.0.0.1:9003", pool="east", models=("far",))


@pytest.fixture
async def registered(valkey: redis.Redis, valkey_server: ValkeyServer) -> None:
    """Three nodes in two pools; a lease on ``a`` that has seen a first token after 200 ms."""
    link = Link(valkey_server.url, budget_s=2, name="test")
    await link.start()
    try:
        for pool in ("default", "east"):
            scripts = Scripts(
                link,
                namespace="lw",
                pool=pool,
                constants=constants(Settings(scoring=Scoring(policy="ttft"))),
            )
            for node in (A, B, C):
                if node.pool == pool:
                    await scripts.register(node)
            if pool == "default":
                granted = await scripts.acquire(
                    "l1", "m", replica="r1", ttl_ms=60_000, size=7, output=100
                )
                assert isinstance(granted, Grant)
                assert granted.node_id == "a"
                assert await scripts.first_token("l1", replica="r1", ttft_us=200_000)
    finally:
        await link.close()


@pytest.fixture
def config(tmp_path: Path, valkey_server: ValkeyServer) -> str:
    file = tmp_path / "leaseway.yaml"
    file.write_text(
        f"redis: {{url: '{valkey_server.url}'}}\n"
        "nodes: [{id: c, url: 'http://127.0.0.1:9003', pool: east}]\n"  # names the other pool
    )
    return str(file)


@pytest.mark.usefixtures("registered")
def test_nodes_prints_the_live_profile_of_every_pool(run: Run, config: str) -> None:
    rows = {row["id"]: row for row in printed(run("nodes", "--json", "-c", config))}
    assert [(row["id"], row["pool"]) for row in rows.values()] == [
        ("a", "default"),
        ("b", "default"),
        ("c", "east"),
    ]
    a = rows["a"]
    assert (a["url"], a["models"], a["engine"]) == (A.url, ["m", "n"], "vllm")
    assert (a["weight"], a["capacity"], a["active"]) == (4, 8, 1)
    assert (a["state"], a["health"], a["circuit"], a["streak"]) == ("active", "ok", "closed", 0)
    assert (a["ttft_ms"], a["samples"], a["tokens_per_s"]) == (200, 1, None)
    # score = K / ((C + 1) * T / T_base) = 4 / (2 * 200 / 50)
    assert a["scores"] == {"m": pytest.approx(0.5), "n": pytest.approx(0.5)}
    b = rows["b"]
    assert (b["active"], b["samples"], b["ttft_ms"]) == (0, 0, None)
    assert b["scores"] == {"m": pytest.approx(0.5)}  # 1 / (1 * 100 / 50), the prior
    assert rows["c"]["scores"] == {"far": pytest.approx(0.5)}


@pytest.mark.usefixtures("registered")
def test_scores_prints_each_ranking_best_first(run: Run, config: str, valkey: redis.Redis) -> None:
    valkey.zadd("lw:{default}:score:m", {"b": 0.75})
    assert printed(run("scores", "--json", "-c", config)) == [
        {"pool": "default", "model": "m", "node": "b", "score": 0.75},
        {"pool": "default", "model": "m", "node": "a", "score": 0.5},
        {"pool": "default", "model": "n", "node": "a", "score": 0.5},
        {"pool": "east", "model": "far", "node": "c", "score": 0.5},
    ]


@pytest.mark.usefixtures("registered")
def test_tables_show_the_same_to_people(run: Run, config: str) -> None:
    code, out, err = run("nodes", "-c", config)
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if "│ a " in line]
    assert [cell.strip() for cell in line.strip("│ \n").split("│")] == [
        "a", "m, n", "active", "ok", "closed", "1", "8", "4", "200", "1", "-", "m 0.5, n 0.5",
    ]  # fmt: skip
    code, out, err = run("scores", "-c", config)
    assert (code, err) == (0, "")
    assert sum("0.5" in line for line in out.splitlines()) == 4


def test_an_empty_server_has_no_nodes(run: Run, config: str, valkey: redis.Redis) -> None:
    assert printed(run("nodes", "--json", "-c", config)) == []
    assert printed(run("scores", "--json", "-c", config)) == []


@pytest.mark.parametrize("command", ["nodes", "scores", "replicas", "leases", "top"])
def test_a_server_that_does_not_answer_is_one_line(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("REDIS_URL", f"redis://:s3cret@127.0.0.1:{port}/0")
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert err.startswith(f"leaseway: cannot read from Redis: 127.0.0.1:{port}: ")
    assert err.count("\n") == 1
    assert "s3cret" not in err
