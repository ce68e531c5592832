"""Every command and snippet of the documents, run as it stands there on a real cluster."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from app.admission.keys import hash_key
from app.cluster.embedded import die_with_parent
from app.config import Settings, load
from app.lab.node import NodeConfig
from tests.support.fleet import CHAT, Nodes, chat, pace, plain_http
from tests.support.servers import Gateway, ValkeyServer, wait_until
from tests.support.snippets import DOCUMENTS, TOP, Desk, Snippet, documented_keys, snippets

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

READY = "Ctrl-C ends everything."


def neighbours(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on."""
    while True:
        first = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[int, int]]:
    """A cluster of ``leaseway up`` → the documents' ports and those it really has."""
    gateway, node, store = neighbours(3), neighbours(3), neighbours(1)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "app.cli", "up", "--gateway-port", str(gateway),
         "--node-port", str(node), "--redis-port", str(store)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        said = threading.Event()

        def hear() -> None:
            for line in process.stdout or ():
                if READY in line:
                    said.set()

        ear = threading.Thread(target=hear, daemon=True)
        ear.start()
        try:
            assert said.wait(60), "leaseway up is not ready"
            yield {
                **{8080 + i: gateway + i for i in range(3)},
                **{9101 + i: node + i for i in range(3)},
                6399: store,
            }
        finally:
            process.terminate()
            process.wait(30)
            ear.join(5)
    assert process.returncode == 0


def check_yaml(snippet: Snippet, desk: Desk) -> None:
    """Settings must be such as a replica takes; other YAML must at least be YAML."""
    content = yaml.safe_load(snippet.text)
    assert isinstance(content, dict), snippet.where
    if not snippet.unrun:
        assert set(content) <= set(Settings.model_fields), f"{snippet.where}: no settings"
        load(Path(snippet.where), content=desk.local(snippet.text).encode())
    if snippet.file:
        (desk.folder / snippet.file).write_text(desk.local(snippet.text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(TOP)))
def test_what_the_document_tells_to_run_runs(
    document: Path, ports: dict[int, int], tmp_path: Path
) -> None:
    desk = Desk(tmp_path, ports, ports[6399])
    for snippet in snippets(document):
        if snippet.language == "yaml":
            check_yaml(snippet, desk)
        elif snippet.language == "json":
            json.loads(snippet.text)
        elif snippet.language and not snippet.unrun:
            desk.run(snippet)


def test_a_block_that_is_wrong_is_found(ports: dict[int, int], tmp_path: Path) -> None:
    desk = Desk(tmp_path, ports, ports[6399])
    for language, text in (
        ("sh", "redis-cli ZRANGE 'lw:{default}:nodes' 0 -1\n"),  # a set
        ("sh", "leaseway drain nobody\n"),
        ("sh", "curl -sS http://127.0.0.1:8080/v1/model\n"),
        ("python", "import nothing_of_that_name\n"),
    ):
        with pytest.raises(AssertionError, match=r"docs/wrong\.md:1"):
            desk.run(Snippet("docs/wrong.md", 1, language, text))
    with pytest.raises(Exception, match="nodez"):
        check_yaml(Snippet("docs/wrong.md", 1, "yaml", "nodez: []\n"), desk)


def test_a_running_cluster_has_the_keys_of_the_reference_and_no_other(
    valkey: redis.Redis, valkey_server: ValkeyServer
) -> None:
    """Two clusters side by side: one whose policy is `work`, one of `round_robin`."""
    word = "a-long-key-of-a-test"
    key = {"name": "team-a", "hash": hash_key(word), "rpm": 1000, "admin": True}
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(Nodes(a=NodeConfig(profile=pace(20)), b=NodeConfig()))
        common = {"nodes": nodes.settings(), "keys": [key], "circuit": {"open_s": 60}}
        work = {"scoring": {"policy": "work"}, "prefix": {"pools": ["default"]}}
        turns = {"scoring": {"policy": "round_robin"}, "redis": {"namespace": "rr"}}
        clients = []
        for settings in (work, turns):
            gateway = stack.enter_context(Gateway({**common, **settings}, valkey_server.url))
            client = stack.enter_context(plain_http(gateway.url))
            client.headers["authorization"] = f"Bearer {word}"
            clients.append(client)
            assert client.post(
                CHAT, json=chat("long " * 2000, max_tokens=2, stream=True)
            ).is_success
        admin = clients[0]
        admin.patch("/admin/nodes/b", json={"weight": 2}).raise_for_status()
        admin.post("/admin/nodes/b/circuit", json={"state": "open"}).raise_for_status()
        body = chat("long " * 2000, max_tokens=1000, stream=True)
        with admin.stream("POST", CHAT, json=body) as running:
            chunks = running.iter_bytes()  # kept: what is dropped is closed
            next(chunks)
            wait_until(lambda: valkey.keys("lw:{default}:ttft:*"), what="a sample")
            found = {str(name): str(valkey.type(name)) for name in valkey.keys("*")}
    patterns = {
        re.compile(r"(?:lw|rr):\{default\}:" + re.sub(r"<\w+>", ".+", name)): (name, kind)
        for name, kind in documented_keys().items()
    }
    seen = set()
    for name, kind in found.items():
        documented = [entry for pattern, entry in patterns.items() if pattern.fullmatch(name)]
        assert [one[1] for one in documented] == [kind], f"{name} is a {kind}"
        seen.add(documented[0][0])
    assert seen == set(documented_keys())


def test_the_user_of_the_security_page_is_all_a_replica_needs(
    valkey: redis.Redis, valkey_server: ValkeyServer
) -> None:
    page = (TOP / "docs/security.md").read_text()
    rules = re.search(r"ACL SETUSER leaseway on (.*)", page)
    assert rules
    words = [rule.strip("'") for rule in rules[1].split()]
    password = words[0].removeprefix(">")
    valkey.execute_command("ACL", "SETUSER", "leaseway", "on", *words)  # type: ignore[no-untyped-call]
    url = valkey_server.url.replace("//", f"//leaseway:{password}@")
    try:
        with Nodes(a=NodeConfig()) as nodes, Gateway({"nodes": nodes.settings()}, url) as gateway:
            with plain_http(gateway.url) as client:
                answer = client.post(CHAT, json=chat(max_tokens=2, stream=True))
                assert answer.is_success
                assert "x-leaseway-degraded" not in answer.headers
                assert "leaseway_redis_script_seconds_total{" in client.get("/metrics").text
                client.patch("/admin/nodes/a", json={"weight": 2}).raise_for_status()
            listed = subprocess.run(
                [sys.executable, "-m", "app.cli", "nodes", "--json"],
                env={**os.environ, "REDIS_URL": url}, capture_output=True, check=True,
            )  # fmt: skip
            assert json.loads(listed.stdout)[0]["weight"] == 2
            assert "NOPERM" not in gateway.log
    finally:
        valkey.acl_deluser("leaseway")
