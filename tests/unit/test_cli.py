"""The command line as an operator uses it; reads of a real server, errors as one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from app import cli
from app.admission.keys import hash_key
from app.cluster.embedded import free_port
from app.cluster.link import Link
from app.cluster.scripts import Scripts, constants
from app.config import Settings
from app.model import Grant, Node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import redis

    from tests.support.servers import ValkeyServer

    Run = Callable[..., tuple[int, str, str]]

COMMANDS = {"serve", "up", "nodes", "scores", "check-config", "schema", "bench"}


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
    assert settings["keys"] == [
        {"name": "team", "hash": "(hidden)", "models": None, "admin": False}
    ]
    assert settings["nodes"][0]["url"] == "http://h:1"
    assert settings["nodes"][0]["api_key_env"] == "NODE_KEY"
    assert settings["scoring"]["alpha"] == 0.5
    assert set(settings) == set(Settings.model_fields)


def test_check_config_without_a_file_prints_the_defaults(run: Run) -> None:
    assert printed(run("check-config")) == Settings().model_dump(mode="json")


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
                constants=constants(Settings()),
            )
            for node in (A, B, C):
                if node.pool == pool:
                    await scripts.register(node)
            if pool == "default":
                granted = await scripts.acquire("l1", "m", replica="r1", ttl_ms=60_000, size=7)
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


@pytest.mark.parametrize("command", ["nodes", "scores"])
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
