"""Settings: documented to the last field, refused with a reason, and silent about secrets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from app import cli, main
from app.admission.keys import hash_key
from app.config import KeySettings, NodeSettings, Settings, load
from app.errors import ConfigError

YAML = Path(__file__).parents[2] / "config" / "leaseway.yaml"
SECRET = "hunter2-s3cret"  # must never be seen in a message
HASH = hash_key("sk-of-a-test")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("LEASEWAY_") or name == "REDIS_URL":
            monkeypatch.delenv(name)


def refused(tmp_path: Path, text: str, **more: Any) -> str:
    """The message with which a file is refused; it names the file and hides the secret."""
    file = tmp_path / "given.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file, **more)
    message = str(caught.value)
    assert str(file) in message
    assert SECRET not in message
    return message


def accepted(tmp_path: Path, text: str, **more: Any) -> Settings:
    file = tmp_path / "given.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, **more)


# The documented file


def documented() -> dict[str, Any]:
    """The file with its commented examples as values: sections, and one entry of each list."""
    text = YAML.read_text(encoding="utf-8")
    raw: dict[str, Any] = yaml.safe_load(text)
    for section in ("nodes", "keys"):
        block = re.search(rf"^{section}: \[\].*\n((?:# .*\n?)+)", text, re.MULTILINE)
        assert block, f"no example of {section}"
        (raw[section],) = yaml.safe_load(re.sub(r"(?m)^# ", "", block[1]))
    return raw


def test_every_default_of_the_file_is_the_models() -> None:
    assert load(YAML) == Settings() == load(None)


@pytest.mark.parametrize("section", [n for n in Settings.model_fields if n != "aliases"])
def test_every_setting_is_in_the_file_with_a_comment(section: str) -> None:
    entries: dict[str, type[BaseModel]] = {"nodes": NodeSettings, "keys": KeySettings}
    model: Any = entries.get(section) or Settings.model_fields[section].annotation
    assert set(documented()[section]) == set(model.model_fields)
    for name in model.model_fields:
        line = re.search(rf"^(?:  |# - |#   ){name}: [^#\n]*#\s*\S", YAML.read_text(), re.MULTILINE)
        assert line, f"{section}.{name}: no line with a comment"


def test_the_examples_of_nodes_and_keys_load_with_their_defaults(tmp_path: Path) -> None:
    raw = documented()
    node, key = raw["nodes"], raw["keys"]
    key["hash"] = HASH
    settings = accepted(tmp_path, yaml.safe_dump({"nodes": [node], "keys": [key]}))
    assert settings.nodes[0].models == ["llama3"]
    for entry, model, examples in (
        (node, NodeSettings, {"id", "url", "models", "api_key_env", "slots", "kv_tokens"}),
        (key, KeySettings, {"name", "hash", "models"}),
    ):
        for name, field in model.model_fields.items():
            if name not in examples:
                assert entry[name] == field.default, name


def test_the_example_of_an_alias_is_one() -> None:
    found = re.search(r"^aliases: \{\}.*\n# (\S+: \S+)$", YAML.read_text(), re.MULTILINE)
    assert found
    assert Settings(aliases=yaml.safe_load(found[1])).aliases == {"gpt-4o-mini": "llama3"}


def test_numbers_have_their_unit_in_the_name() -> None:
    plain = {"port", "alpha", "window", "failure_threshold", "max_attempts", "weight", "capacity",
             "failure_rate", "min_samples", "unhealthy_after", "top_k"}  # fmt: skip
    units = ("_ms", "_s", "_mib", "_tokens", "_share", "_times")
    for section, field in Settings.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            for name, setting in model.model_fields.items():
                kind = setting.annotation
                if kind in {int, float} and name not in plain:
                    assert name.endswith(units), f"{section}.{name}"


# What is refused: (file, what the message says)

NODE = "nodes: [{id: gpu-1, url: %s}]"
KEY = f"keys: [{{name: a, hash: '{HASH}', %s}}]"
MODELS = "nodes: [{id: gpu-1, url: 'http://h:1', models: %s}]"
REFUSED = {
    "unknown section": ("sevrer: {port: 1}", ["sevrer", "unknown key", "remove it or correct"]),
    "unknown key": ("server: {prot: 1}", ["server.prot", "unknown key", "remove it or correct"]),
    "unknown key of a node": (
        "nodes: [{id: a, url: 'http://h', wieght: 1}]",
        ["nodes.0.wieght", "unknown key"],
    ),
    "unknown key of a key": (
        f"keys: [{{name: a, hash: '{HASH}', modles: [m]}}]",
        ["keys.0.modles", "unknown key"],
    ),
    "wrong type": ("server: {port: abc}", ["server.port", "'abc'", "valid integer"]),
    "a part of a port": ("server: {port: 80.5}", ["server.port", "80.5", "valid integer"]),
    "yes for a number": ("server: {port: yes}", ["server.port", "True", "true or false"]),
    "a word for a section": ("server: 8080", ["server", "8080", "valid dictionary"]),
    "a mapping for a list": ("nodes: {id: a}", ["nodes", "'a'", "valid list"]),
    "too high": ("server: {port: 70000}", ["server.port", "70000", "less than or equal to 65535"]),
    "too low": ("retries: {max_attempts: 0}", ["retries.max_attempts", "0", "greater than or"]),
    "not positive": ("circuit: {open_s: 0}", ["circuit.open_s", "0", "greater than 0"]),
    "alpha above 1": ("scoring: {alpha: 1.5}", ["scoring.alpha", "1.5", "less than or equal to 1"]),
    "not a number": ("scoring: {alpha: .nan}", ["scoring.alpha", "nan", "Input should be"]),
    "infinite": ("timeouts: {stall_s: .inf}", ["timeouts.stall_s", "inf", "finite"]),
    "unknown policy": ("scoring: {policy: best}", ["scoring.policy", "'best'", "'ttft'"]),
    "crossed bounds": (
        "circuit: {open_s: 5, open_max_s: 1}",
        ["circuit", "open_max_s", "at least open_s"],
    ),
    "key given twice": (
        "server:\n  port: 1\n  host: h\n  port: 2",
        ["line 4", "'port'", "given twice; keep one"],
    ),
    "section given twice": (
        "server: {port: 1}\nserver: {port: 2}",
        ["line 2", "'server'", "given twice; keep one"],
    ),
    "a list for a key": ("? [a, b]\n: c", ["line 1", "['a', 'b']", "quote it"]),
    "a number for a section": ("server: {port: 1}\n7: x", ["line 2", "7", "quote it"]),
    "node id given twice": (
        "nodes: [{id: a, url: 'http://h:1'}, {id: a, url: 'http://h:2'}]",
        ["nodes", "id 'a'", "given twice; each needs its own"],
    ),
    "key name given twice": (
        f"keys: [{{name: a, hash: '{HASH}'}}, {{name: a, hash: '{HASH}'}}]",
        ["keys", "name 'a'", "given twice; each needs its own"],
    ),
    "node without id": ("nodes: [{url: 'http://h'}]", ["nodes.0.id", "must be given"]),
    "node without url": ("nodes: [{id: a}]", ["nodes.0.url", "must be given"]),
    "bad node id": ("nodes: [{id: a b, url: 'http://h'}]", ["nodes.0.id", "'a b'", "pattern"]),
    "url with a query": (NODE % "'http://h:1?key=x'", ["nodes.0.url", "?key=x", "query"]),
    "url with an empty query": (NODE % "'http://h:1?'", ["nodes.0.url", "h:1?", "query"]),
    "url with a fragment": (NODE % "'http://h:1#a'", ["nodes.0.url", "h:1#a", "fragment"]),
    "url with credentials": (
        NODE % f"'http://me:{SECRET}@h:1'",
        ["nodes.0.url", "(hidden)", "no user or password", "api_key_env"],
    ),
    "url without a scheme": (NODE % "'10.0.0.5:8000'", ["nodes.0.url", "10.0.0.5", "http://host"]),
    "url with another scheme": (NODE % "'ftp://h:1'", ["nodes.0.url", "ftp://h:1", "http://host"]),
    "url without a host": (NODE % "'http://'", ["nodes.0.url", "'http://'", "http://host"]),
    "url with a space": (NODE % "'http://h:1/a b'", ["nodes.0.url", "/a b", "no spaces"]),
    "url with a space before": (NODE % "' http://h:1'", ["nodes.0.url", "' http://h:1'", "spaces"]),
    "url with a newline": (NODE % '"http://h:1\\n"', ["nodes.0.url", "\\n", "no spaces"]),
    "url with a high port": (NODE % "'http://h:99999'", ["nodes.0.url", "99999", "http://host"]),
    "url with port 0": (NODE % "'http://h:0'", ["nodes.0.url", "h:0", "http://host"]),
    "url with half an address": (NODE % "'http://[::1'", ["nodes.0.url", "[::1", "http://host"]),
    "url that is a number": (NODE % "5", ["nodes.0.url", "5", "valid string"]),
    "no models": (MODELS % "[]", ["nodes.0.models", "[]", "at least 1 item"]),
    "empty model": (MODELS % "['']", ["nodes.0.models.0", "''", "pattern"]),
    "model of two lines": (MODELS % '["a\\nb"]', ["nodes.0.models.0", "a\\nb", "pattern"]),
    "model too long": (MODELS % f"[{'x' * 257}]", ["nodes.0.models.0", "xxx", "pattern"]),
    "models as a word": (MODELS % "llama", ["nodes.0.models", "'llama'", "valid list"]),
    "model in two pools": (
        "nodes: [{id: a, url: 'http://h', models: [llama]},"
        " {id: b, url: 'http://h', models: [llama], pool: east}]",
        ["nodes", "'llama'", "'default'", "'east'", "a model lives in one pool"],
    ),
    "alias of an alias": (
        "aliases: {a: b, b: c}",
        ["aliases.a", "'b'", "an alias itself; name a served model"],
    ),
    "bad hash": (f"keys: [{{name: a, hash: {SECRET}}}]", ["keys.0.hash", "(hidden)", "sha256:"]),
    "upper-case hash": (
        f"keys: [{{name: a, hash: '{HASH.upper()}'}}]",
        ["keys.0.hash", "(hidden)", "sha256:"],
    ),
    "no hash": ("keys: [{name: a, hash: []}]", ["keys.0.hash", "(hidden)", "sha256:"]),
    "bad hash among good ones": (
        f"keys: [{{name: a, hash: ['{HASH}', {SECRET}]}}]",
        ["keys.0.hash", "(hidden)", "leaseway hash-key"],
    ),
    "one hash for two keys": (
        f"keys: [{{name: a, hash: '{HASH}'}}, {{name: b, hash: ['{HASH}']}}]",
        ["keys", "'a' and 'b'", "a hash in common", "its own"],
    ),
    "no requests": (KEY % "rpm: 0", ["keys.0.rpm", "0", "greater than or equal to 1"]),
    "half a token": (KEY % "tpm: 0.5", ["keys.0.tpm", "0.5", "valid integer"]),
    "limit that is a word": (KEY % "tpm: none", ["keys.0.tpm", "'none'", "valid integer"]),
    "expiry as a number": (KEY % "expires: 20271231", ["keys.0.expires", "20271231", "2027-12-31"]),
    "expiry as a word": (KEY % "expires: soon", ["keys.0.expires", "'soon'", "valid datetime"]),
    "expiry of no day": (KEY % "expires: '2027-02-30'", ["keys.0.expires", "2027-02-30"]),
    "key without a name": (f"keys: [{{hash: {SECRET}}}]", ["keys.0.name", "must be given"]),
    "key that is a word": (f"keys: [{SECRET}]", ["keys.0", "(hidden)", "valid dictionary"]),
    "keys that are a word": (f"keys: {SECRET}", ["keys", "(hidden)", "valid list"]),
    "bad redis url": (
        f"redis: {{url: 'http://:{SECRET}@h'}}",
        ["redis.url", "(hidden)", "rediss"],
    ),
    "list of redis urls": (
        f"redis: {{url: ['redis://:{SECRET}@h']}}",
        ["redis.url", "(hidden)", "valid string"],
    ),
    "redis as a word": (f"redis: 'redis://:{SECRET}@h'", ["redis", "(hidden)", "dictionary"]),
    "call timeout": ("redis: {call_timeout_ms: 1}", ["redis.call_timeout_ms", "1", "equal to 10"]),
    "top-level list": (f"- {SECRET}", ["top level", "a list", "mapping of sections"]),
    "top-level word": (SECRET, ["top level", "a str", "mapping of sections"]),
    "syntax": ("server: {port: [}", ["not valid YAML", "line 1, column 17", "expected"]),
    "syntax beside a secret": (
        f"redis: {{url: redis://:{SECRET}@h: 1}}",
        ["not valid YAML", "line 1, column", "expected"],
    ),
    "control characters": ("server: {host: \x07}", ["not valid YAML", "special characters"]),
    "python objects": ("server: !!python/name:os.system", ["not valid YAML", "line 1, column 9"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_setting_is_refused_with_file_key_value_and_remedy(name: str, tmp_path: Path) -> None:
    text, said = REFUSED[name]
    message = refused(tmp_path, text)
    for part in said:
        assert part in message
    # One line for each fault: only this one file has two.
    assert len(message.splitlines()) == (2 if name == "key without a name" else 1)


def test_two_bad_settings_are_two_lines(tmp_path: Path) -> None:
    message = refused(tmp_path, "server: {port: a}\nleases: {ttl_s: b}")
    assert [line.count("given.yaml: ") for line in message.splitlines()] == [1, 1]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            load(path)
        assert str(path) in str(caught.value)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not valid YAML") as caught:
        load(binary)
    assert str(binary) in str(caught.value)


def test_an_override_does_not_hide_a_bad_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "server = 5" in refused(tmp_path, "server: 5", port=9)
    monkeypatch.setenv("REDIS_URL", f"redis://:{SECRET}@h:1/0")
    assert "redis = (hidden)" in refused(tmp_path, f"redis: {SECRET}")


# What is accepted


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://b:1", "http://b:1"),
        ("http://b:1/", "http://b:1"),
        ("http://b:1/v1", "http://b:1"),
        ("http://b:1/v1/", "http://b:1"),
        ("http://b:1/prefix/v1/", "http://b:1/prefix"),
        ("https://b/a%20b/", "https://b/a%20b"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://b:1/v1beta", "http://b:1/v1beta"),
    ],
)
def test_a_base_url_loses_its_final_v1_and_slash_and_keeps_its_prefix(
    given: str, base: str
) -> None:
    assert NodeSettings(id="a", url=given).url == base


@pytest.mark.parametrize(
    ("given", "instant"),
    [
        ("2027-12-31", datetime(2027, 12, 31, tzinfo=UTC)),
        ("'2027-12-31'", datetime(2027, 12, 31, tzinfo=UTC)),
        ("2027-12-31T18:00:00Z", datetime(2027, 12, 31, 18, tzinfo=UTC)),
        ("2027-12-31 18:00:00", datetime(2027, 12, 31, 18, tzinfo=UTC)),
        ("2027-12-31T18:00:00+02:00", datetime(2027, 12, 31, 16, tzinfo=UTC)),
        ("null", None),
    ],
)
def test_an_expiry_is_an_instant_in_utc(
    tmp_path: Path, given: str, instant: datetime | None
) -> None:
    (key,) = accepted(tmp_path, KEY % f"expires: {given}").keys
    assert key.expires == instant


def test_a_key_may_have_several_hashes(tmp_path: Path) -> None:
    other = hash_key("sk-the-next")
    (key,) = accepted(tmp_path, f"keys: [{{name: a, hash: ['{HASH}', '{other}']}}]").keys
    assert key.hashes == [HASH, other]
    (key,) = accepted(tmp_path, f"keys: [{{name: a, hash: '{HASH}'}}]").keys
    assert key.hashes == [HASH]


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert accepted(tmp_path, "") == Settings()
    assert accepted(tmp_path, "# nothing yet\n") == Settings()


def test_yaml_anchors_and_merges_work(tmp_path: Path) -> None:
    settings = accepted(
        tmp_path,
        "nodes:\n- &a {id: a, url: 'http://h:1', models: [m]}\n- {<<: *a, id: b}\n",
    )
    assert [(node.id, node.url, node.models) for node in settings.nodes] == [
        ("a", "http://h:1", ["m"]),
        ("b", "http://h:1", ["m"]),
    ]


def test_the_environment_goes_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEASEWAY_SCORING__ALPHA", "0.25")
    monkeypatch.setenv("REDIS_URL", "redis://from-environment:1/0")
    settings = accepted(
        tmp_path,
        "scoring: {alpha: 0.75, window: 7}\nredis: {url: 'redis://from-file:1/0', namespace: x}",
    )
    assert (settings.scoring.alpha, settings.scoring.window) == (0.25, 7)
    assert settings.redis.url == "redis://from-environment:1/0"
    assert settings.redis.namespace == "x"
    assert load(None).scoring.alpha == 0.25


def test_a_bad_value_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEWAY_SCORING__ALPHA", "2")
    with pytest.raises(ConfigError, match=r"scoring\.alpha = '2': .* less than or equal to 1"):
        load(None)
    monkeypatch.setenv("LEASEWAY_SCORING__ALPHA", "1")
    monkeypatch.setenv("LEASEWAY_NODES", "not json")
    with pytest.raises(ConfigError, match=r"environment: .*nodes"):
        load(None)
    monkeypatch.delenv("LEASEWAY_NODES")
    monkeypatch.setenv("LEASEWAY_SCORING__ALHPA", "1")
    with pytest.raises(ConfigError, match=r"scoring\.alhpa: unknown key"):
        load(None)


def test_the_port_option_goes_over_the_file(tmp_path: Path) -> None:
    server = accepted(tmp_path, "server: {port: 1, host: h}", port=9).server
    assert (server.port, server.host) == (9, "h")


# Through the command line


def leaseway(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "app.cli", *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize("command", ["check-config", "serve", "nodes"])
def test_a_bad_file_ends_a_command_with_one_line_and_code_2(command: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("server: {prot: 8080}")
    done = leaseway(command, "--config", str(file))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"leaseway: {file}: server.prot: unknown key; remove it or correct its name"
    ]


@pytest.mark.parametrize("name", ["syntax", "a list for a key", "top-level list", "infinite"])
def test_no_bad_file_shows_a_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(REFUSED[name][0])
    monkeypatch.setattr(sys, "argv", ["leaseway", "serve", "-c", str(file), "--port", "1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"leaseway: {file}: ")
    assert err.count("\n") == 1


def test_an_open_door_to_the_network_is_refused_at_start(tmp_path: Path) -> None:
    file = tmp_path / "open.yaml"
    file.write_text("server: {host: 0.0.0.0}")
    done = leaseway("serve", "-c", str(file), REDIS_URL="redis://127.0.0.1:1/0")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("leaseway: ")
    for part in ("server.host", "'0.0.0.0'", "configure keys", "127.0.0.1", "open_without_keys"):
        assert part in line


@pytest.mark.parametrize(
    ("server", "keys", "may"),
    [
        ({}, [], True),
        ({"host": "::1"}, [], True),
        ({"host": "localhost"}, [], True),
        ({"host": "127.8.9.1"}, [], True),
        ({"host": "::"}, [], False),
        ({"host": ""}, [], False),
        ({"host": "10.0.0.1"}, [], False),
        ({"host": "gateway.internal"}, [], False),
        ({"host": "0.0.0.0", "open_without_keys": True}, [], True),
        ({"host": "0.0.0.0"}, [{"name": "a", "hash": HASH}], True),
    ],
)
def test_without_keys_only_loopback_is_bound(
    server: dict[str, Any], keys: list[dict[str, Any]], may: bool
) -> None:
    settings = Settings.model_validate({"server": server, "keys": keys})
    if may:
        main._refuse_open_door(settings)
    else:
        with pytest.raises(ConfigError, match=r"server\.host"):
            main._refuse_open_door(settings)


# Telemetry


@pytest.mark.parametrize("word", ["off", "false", '"off"', "json"])
def test_an_access_log_is_json_or_off_however_yaml_reads_it(tmp_path: Path, word: str) -> None:
    settings = accepted(tmp_path, f"telemetry: {{access_log: {word}}}")
    assert settings.telemetry.access_log == ("json" if word == "json" else "off")


@pytest.mark.parametrize(
    ("setting", "right"),
    [
        ("access_log: on", "quote a word"),
        ("access_log: text", "'json' or 'off'"),
        ("tracing: otlp", "boolean"),
        ("otlp_endpoint: collector:4318", "http://host:4318"),
        ("otlp_endpoint: 'http://:4318'", "http://host:4318"),
        ("otlp_endpoint: 'http://h:4318/?a=b'", "without /v1/traces"),
        (f"otlp_endpoint: 'http://user:{SECRET}@h:4318'", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_bad_telemetry_stops_the_start(tmp_path: Path, setting: str, right: str) -> None:
    message = refused(tmp_path, f"telemetry: {{{setting}}}")
    assert f"telemetry.{setting.partition(':')[0]} = " in message
    assert right in message
