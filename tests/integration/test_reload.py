"""The settings file is edited while replicas run: what counts at once, waits, or is refused."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from app.admission.keys import hash_key
from tests.cases.conftest import assert_ended_cleanly, small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask
from tests.support.rawnode import RawNode, events, json_answer, sse_answer
from tests.support.redis_ha import load
from tests.support.relay import Relay
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import redis

    from tests.support.servers import ValkeyServer

    Start = Callable[..., Gateway]

OLD, NEW, OTHER = "sk-old-0123456789", "sk-new-0123456789", "sk-other-0123456789"
SECRET = "hunter2-s3cret"


def request(
    key: str | None = None, *, method: str = "POST", path: str = "/v1/chat/completions",
    model: str = "m", stream: bool = False,
) -> bytes:  # fmt: skip
    """The bytes of a request with this key."""
    body = b'{"model":"%s","stream":%s,"messages":[]}' % (
        model.encode(),
        b"true" if stream else b"false",
    )
    body = body if method == "POST" else b""
    lines = [f"{method} {path} HTTP/1.1", "host: g", "content-type: application/json"]
    lines += [f"authorization: Bearer {key}"] if key else []
    lines += [f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status(gw: Gateway, key: str | None = None, **more: Any) -> int:
    """What a caller with this key gets."""
    return ask(gw.port, request(key, **more)).status


def models(gw: Gateway, key: str | None = None) -> set[str]:
    """The names that ``/v1/models`` lists."""
    answer = ask(gw.port, request(key, method="GET", path="/v1/models"))
    return {card["id"] for card in answer.json()["data"]}


def key_entry(*keys: str, name: str = "team", **more: Any) -> dict[str, Any]:
    """An entry of the section ``keys``."""
    hashes = [hash_key(key) for key in keys]
    return {"name": name, "hash": hashes[0] if len(hashes) == 1 else hashes, **more}


def write(gw: Gateway, settings: dict[str, Any] | str) -> None:
    """Edit the file as most editors and tools do: the new one is renamed over it."""
    text = settings if isinstance(settings, str) else yaml.safe_dump(settings)
    beside = gw.file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(gw.file)


def lines(gw: Gateway, *words: str) -> list[str]:
    """The lines of the log that contain all of ``words``."""
    return [line for line in gw.log.splitlines() if all(word in line for word in words)]


@pytest.fixture
def nodes() -> Iterator[list[RawNode]]:
    """Three nodes that serve ``m``."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawNode(json_answer())) for _ in range(3)]


@pytest.fixture
def start(valkey: redis.Redis, valkey_server: ValkeyServer) -> Iterator[Start]:
    """``start(settings)``: a replica that must end cleanly."""
    started: list[Gateway] = []
    with contextlib.ExitStack() as stack:

        def go(settings: dict[str, Any], *, redis_url: str | None = None) -> Gateway:
            gw = stack.enter_context(Gateway(settings, redis_url or valkey_server.url))
            started.append(gw)
            return gw

        yield go
        for gw in started:
            assert_ended_cleanly(gw)


# Keys


def test_a_key_is_rotated_without_a_restart_and_without_a_refusal(
    start: Start, nodes: list[RawNode]
) -> None:
    node = nodes[0]
    settings = small_settings([node])
    gw = start(settings | {"keys": [key_entry(OLD)]})
    pid = gw.pid
    node.script = sse_answer(events(40), gap_s=0.1)
    with RawClient(gw.port) as running:
        running.send(request(OLD, stream=True))
        running.read_events(1)
        node.script = json_answer()
        assert (status(gw, OLD), status(gw, NEW)) == (200, 401)
        write(gw, settings | {"keys": [key_entry(OLD, NEW)]})
        wait_until(lambda: status(gw, NEW) == 200, what="the new key is known")
        assert status(gw, OLD) == 200
        write(gw, settings | {"keys": [key_entry(NEW)]})
        wait_until(lambda: status(gw, OLD) == 401, what="the old key is gone")
        assert status(gw, NEW) == 200
        write(gw, settings | {"keys": [key_entry(OLD)]})
        wait_until(lambda: status(gw, NEW) == 401, what="and back to the first settings")
        assert status(gw, OLD) == 200
        assert running.read_all() == b"".join(events(40))  # what was let in goes on
    assert gw.pid == pid
    assert len(lines(gw, "keys: changed team")) == 3


def test_models_limits_expiry_and_admin_of_a_key_change_at_once(
    start: Start, nodes: list[RawNode]
) -> None:
    settings = small_settings(nodes[:1])

    def with_key(**more: Any) -> dict[str, Any]:
        return settings | {"keys": [key_entry(OLD, **more), key_entry(OTHER, name="other")]}

    admin = {"method": "GET", "path": "/admin/nodes"}
    gw = start(with_key())
    assert status(gw, OLD, **admin) == 403
    write(gw, with_key(admin=True))
    wait_until(lambda: status(gw, OLD, **admin) == 200, what="an admin")
    write(gw, with_key(models=["another"]))
    wait_until(lambda: status(gw, OLD) == 403, what="another model only")
    write(gw, with_key(rpm=1))
    wait_until(lambda: status(gw, OLD) == 200, what="m again")
    wait_until(lambda: status(gw, OLD) == 429, what="one request a minute")
    write(gw, with_key(rpm=1000))
    wait_until(lambda: status(gw, OLD) == 200, what="a thousand")
    write(gw, with_key(expires="2020-01-01"))
    wait_until(lambda: status(gw, OLD) == 401, what="expired")
    assert b"expired" in ask(gw.port, request(OLD)).body
    assert status(gw, OTHER) == 200


def test_an_open_gateway_is_closed_by_an_edit_and_a_closed_one_is_never_opened(
    start: Start, nodes: list[RawNode]
) -> None:
    settings = small_settings(nodes[:1])
    gw = start(settings)
    assert status(gw) == 200
    write(gw, settings | {"keys": [key_entry(OLD)]})
    wait_until(lambda: status(gw) == 401, what="closed")
    for opened in (settings, settings | {"keys": []}, "# nothing\n", ""):
        before = len(lines(gw, "settings refused"))
        write(gw, opened)
        wait_until(lambda n=before: len(lines(gw, "settings refused")) > n, what="refused")
        assert (status(gw), status(gw, OLD)) == (401, 200)
    assert lines(gw, "keys = []", "restart to open it")
    assert lines(gw, "is empty")


# Ways to change a file


def in_place(file: Path, text: str) -> None:
    """Truncated and written."""
    file.write_text(text)


def with_the_time_and_size_of_before(file: Path, text: str) -> None:
    """As some tools copy: only the content tells."""
    before = file.stat()
    text += "#" * (before.st_size - len(text))
    with file.open("r+") as opened:
        opened.write(text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size, before.st_mtime_ns, before.st_ino,
    )  # fmt: skip


def renamed_over(file: Path, text: str) -> None:
    """A new file takes the name."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(file)


def removed_and_made_anew(file: Path, text: str) -> None:
    """For a moment there is none."""
    file.unlink()
    file.write_text(text)


@pytest.mark.parametrize(
    "change", [in_place, with_the_time_and_size_of_before, renamed_over, removed_and_made_anew]
)
def test_every_way_to_change_the_file_is_noticed(
    start: Start, nodes: list[RawNode], change: Callable[[Path, str], None]
) -> None:
    settings = small_settings(nodes[:1])
    gw = start(settings | {"keys": [key_entry(OLD), key_entry(OTHER, name="other")]})
    change(gw.file, yaml.safe_dump(settings | {"keys": [key_entry(NEW)]}))
    wait_until(lambda: status(gw, NEW) == 200, what="the new key is known")
    assert status(gw, OLD) == 401


def test_a_config_map_that_kubernetes_swaps_is_noticed(
    start: Start, nodes: list[RawNode], tmp_path: Path
) -> None:
    """leaseway.yaml → ..data/leaseway.yaml, ..data → ..1; an update swaps ..data by a rename."""
    settings = small_settings(nodes[:1])
    gw = start(settings | {"keys": [key_entry(OLD)]})

    def mount(version: int, *keys: str) -> None:
        folder = tmp_path / f"..{version}"
        folder.mkdir()
        entries = [key_entry(key, name=f"k{i}") for i, key in enumerate(keys)]
        (folder / "leaseway.yaml").write_text(yaml.safe_dump(settings | {"keys": entries}))
        link = tmp_path / "..data_tmp"
        link.symlink_to(folder.name)
        link.replace(tmp_path / "..data")

    mount(1, OLD)
    link = gw.file.with_suffix(".link")
    link.symlink_to(tmp_path / "..data" / "leaseway.yaml")
    link.replace(gw.file)
    mount(2, OLD, NEW)
    wait_until(lambda: status(gw, NEW) == 200, what="the first swap is noticed")
    mount(3, NEW)
    wait_until(lambda: status(gw, OLD) == 401, what="the second swap is noticed")
    assert status(gw, NEW) == 200


def test_sighup_reads_the_file_and_says_so(start: Start, nodes: list[RawNode]) -> None:
    settings = small_settings(nodes[:1])
    gw = start(settings | {"keys": [key_entry(OLD)]})
    gw.signal(signal.SIGHUP)
    wait_until(lambda: lines(gw, "reading", str(gw.file)), what="SIGHUP is heard")
    assert status(gw, OLD) == 200
    write(gw, settings | {"keys": [key_entry(NEW)]})
    gw.signal(signal.SIGHUP)
    wait_until(lambda: status(gw, NEW) == 200, what="the new key is known")
    write(gw, "keys: [")
    for n in (1, 2):
        gw.signal(signal.SIGHUP)
        wait_until(lambda n=n: len(lines(gw, "settings refused")) >= n, what="said again")


# Refused edits

BAD: dict[str, tuple[str | bytes, list[str]]] = {
    "syntax": ("server: {port: [}", ["not valid YAML", "line 1, column 17"]),
    "unknown key": ("server: {prot: 1}", ["server.prot", "unknown key", "remove it"]),
    "bad value": ("scoring: {alpha: 2}", ["scoring.alpha = 2", "less than or equal to 1"]),
    "bad key": (f"keys: [{{name: a, hash: {SECRET}}}]", ["keys.0.hash = (hidden)", "sha256:"]),
    "a secret for a section": (f"redis: 'redis://:{SECRET}@h'", ["redis = (hidden)"]),
    "two at once": (
        "circuit: {open_s: a}\nleases: {ttl_s: b}",
        ["circuit.open_s = 'a'", "leases.ttl_s = 'b'"],
    ),
    "no text": (b"\xff\xfe\xfa", ["not valid YAML"]),
    "a word": (SECRET, ["top level must be a mapping"]),
}


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Callable[[], int]]:
    """How often the file has been opened since (inotify(7), IN_OPEN)."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(fd, os.fsencode(file), 0x20) > 0
    seen = 0

    def count() -> int:
        nonlocal seen
        with contextlib.suppress(BlockingIOError):
            events = os.read(fd, 65536)
            while events:
                (_, _, _, length) = struct.unpack_from("iIII", events)
                events = events[16 + length :]
                seen += 1
        return seen

    try:
        yield count
    finally:
        os.close(fd)


def test_a_bad_edit_is_refused_once_with_its_reason_and_the_old_settings_stay(
    start: Start, nodes: list[RawNode]
) -> None:
    settings = small_settings(nodes[:1]) | {"keys": [key_entry(OLD)], "aliases": {"public": "m"}}
    gw = start(settings)
    for n, (content, reasons) in enumerate(BAD.values(), 1):
        gw.file.write_bytes(content if isinstance(content, bytes) else content.encode())
        wait_until(lambda n=n: len(lines(gw, "settings refused")) == n, what=f"refused: {reasons}")
        with opened(gw.file) as looks:
            wait_until(lambda looks=looks: looks() >= 3, what="it has looked again")
        said = lines(gw, "settings refused")
        assert len(said) == n
        assert " ERROR " in said[-1]
        for reason in [str(gw.file), *reasons]:
            assert reason in said[-1]
        assert (status(gw, OLD), status(gw, OLD, model="public")) == (200, 200)
    assert SECRET not in gw.log
    assert status(gw, NEW) == 401
    write(gw, settings | {"keys": [key_entry(NEW)]})
    wait_until(lambda: status(gw, NEW) == 200, what="a good edit counts")


def test_a_file_that_is_gone_or_unreadable_changes_nothing(
    start: Start, nodes: list[RawNode]
) -> None:
    settings = small_settings(nodes[:1]) | {"keys": [key_entry(OLD)]}
    gw = start(settings)
    gw.file.unlink()
    wait_until(lambda: lines(gw, "settings refused", "cannot be read"), what="missed")
    assert status(gw, OLD) == 200
    gw.file.mkdir()
    gw.signal(signal.SIGHUP)
    wait_until(lambda: lines(gw, "settings refused", "Is a directory"), what="missed")
    assert status(gw, OLD) == 200
    gw.file.rmdir()
    write(gw, settings | {"keys": [key_entry(NEW)]})
    wait_until(lambda: status(gw, NEW) == 200, what="it is back")


def test_what_needs_a_restart_is_named_without_its_value_and_the_rest_counts(
    start: Start, nodes: list[RawNode]
) -> None:
    settings = small_settings(nodes[:1]) | {"keys": [key_entry(OLD)]}
    gw = start(settings)
    changed = settings | {
        "keys": [key_entry(NEW)],
        "scoring": {"alpha": 0.123},
        "redis": {"call_timeout_ms": 333, "namespace": SECRET},
    }
    write(gw, changed)
    wait_until(lambda: status(gw, NEW) == 200, what="the key counts")
    wait_until(lambda: lines(gw, "restart"), what="the rest is named")
    (line,) = lines(gw, "restart")
    assert line.endswith("scoring.alpha") or "scoring.alpha" in line
    assert "redis.call_timeout_ms" in line
    assert "redis.namespace" in line
    assert "leases" not in line
    assert "keys" not in line
    for value in (SECRET, "0.123", "333"):
        assert value not in gw.log
    write(gw, changed | {"keys": [key_entry(NEW), key_entry(OLD, name="old")]})
    wait_until(lambda: len(lines(gw, "restart")) == 2, what="it is named as long as it waits")


# Aliases and nodes


def test_aliases_count_at_once_in_requests_and_in_the_list(
    start: Start, nodes: list[RawNode]
) -> None:
    settings = small_settings(nodes[:1])
    gw = start(settings | {"aliases": {"one": "m", "two": "m"}})
    assert models(gw) == {"m", "one", "two"}
    write(gw, settings | {"aliases": {"two": "m", "three": "m"}})
    wait_until(lambda: models(gw) == {"m", "two", "three"}, what="the list follows")
    assert (status(gw, model="one"), status(gw, model="three")) == (404, 200)
    assert nodes[0].requests[-1].json()["model"] == "m"
    (line,) = lines(gw, "aliases:")
    assert line.endswith("aliases: added three; removed one")


def test_nodes_come_and_go_by_editing_the_file_under_load_without_a_failed_request(
    start: Start, nodes: list[RawNode], valkey: redis.Redis
) -> None:
    b1, b2, b3 = nodes
    for node in nodes:
        node.script = sse_answer(events(5), gap_s=0.01)
    whole = small_settings(nodes, leases={"ttl_s": 60})  # no heartbeat for 20 s but by an edit
    entries = whole["nodes"]

    def fleet(*listed: int) -> dict[str, Any]:
        return whole | {"nodes": [entries[i - 1] for i in listed]}

    replicas = [start(fleet(1, 2)), start(fleet(1, 2))]

    def edit(*listed: int) -> None:
        before = [len(said(replica)) for replica in replicas]
        for replica in replicas:
            write(replica, fleet(*listed))
        for replica, n in zip(replicas, before, strict=True):
            wait_until(lambda r=replica, n=n: len(said(r)) > n, what="taken over")

    def said(replica: Gateway) -> list[str]:
        return [line.partition("nodes: ")[2] for line in lines(replica, "leaseway.reload: nodes:")]

    def registered() -> set[str]:
        return set(valkey.smembers(state.KEYS.nodes))  # type: ignore[arg-type]

    with load([gw.port for gw in replicas], hands=6, gap_s=0.01) as running:
        wait_until(lambda: len(b1.requests) > 10 and len(b2.requests) > 10, what="under way")
        edit(1, 2, 3)
        wait_until(lambda: len(b3.requests) > 10, what="the new node works")
        edit(2, 3)
        wait_until(lambda: registered() == {"b2", "b3"}, what="the old one is taken out")
        wait_until(lambda: not valkey.exists(state.KEYS.node("b1")), what="and has finished")
        last = len(b1.requests)
        edit(3)
        wait_until(lambda: registered() == {"b3"}, what="another one")
        assert len(b1.requests) == last  # since it was taken out it has got nothing
        edit(1, 3)
        wait_until(lambda: len(b1.requests) > last + 10, what="the first one is back")
        now = len(running.asked)
        wait_until(lambda: len(running.asked) > now + 100, what="on with it")
    print(running.figures())
    assert not running.bad, running.bad[:3]
    assert not any(one.degraded for one in running.asked)
    wait_until(lambda: state.unloaded(valkey), within_s=5, what="no lease is left")
    for replica in replicas:
        assert said(replica) == ["added b3", "removed b1", "removed b2", "added b1"]


@pytest.mark.parametrize("listed", [["m"], "discovered"])
def test_a_node_that_changes_its_url_is_found_at_the_new_one(
    start: Start, nodes: list[RawNode], listed: list[str] | str
) -> None:
    b1, b2, _ = nodes
    settings = small_settings([b1])
    entry = settings["nodes"][0] | {"models": listed}
    gw = start(settings | {"nodes": [entry]})
    wait_until(lambda: status(gw) == 200, what="b1 serves")
    b1.probes_fail = True
    b1.script = json_answer(500)
    write(gw, settings | {"nodes": [entry | {"url": b2.url, "capacity": 7}]})
    wait_until(lambda: status(gw) == 200, what="b2 serves")
    assert b2.requests


def test_nodes_of_a_new_pool_wait_for_a_restart_and_the_log_says_so(
    start: Start, nodes: list[RawNode]
) -> None:
    settings = small_settings(nodes[:2])
    first, second = settings["nodes"]
    second |= {"pool": "east", "models": ["far"]}
    gw = start(settings | {"nodes": [first]})
    write(gw, settings | {"keys": [key_entry(NEW)]})
    wait_until(lambda: lines(gw, "restart to use the new pools east"), what="said")
    assert (status(gw, NEW), status(gw, NEW, model="far")) == (200, 404)


def test_edits_during_an_outage_of_redis_count_here_at_once_and_there_when_it_is_back(
    start: Start, nodes: list[RawNode], valkey: redis.Redis, valkey_server: ValkeyServer
) -> None:
    b1, b2, _ = nodes
    settings = small_settings(nodes[:2])
    first, second = settings["nodes"]
    with Relay(valkey_server.port) as relay:
        gw = start(settings | {"nodes": [first], "keys": [key_entry(OLD)]}, redis_url=relay.url)
        relay.refuse = True
        relay.reset_all()
        write(gw, settings | {"nodes": [second], "keys": [key_entry(NEW)]})
        wait_until(lambda: status(gw, NEW) == 200, what="the new key is known")
        wait_until(lambda: ask(gw.port, request(NEW)).headers[b"x-leaseway-node"] == b"b2",
                   what="the new node serves")  # fmt: skip
        assert status(gw, OLD) == 401
        relay.refuse = False
        wait_until(lambda: valkey.smembers(state.KEYS.nodes) == {"b2"}, what="Redis has been told")
        assert not b1.open
        assert b2.requests


def test_many_edits_in_a_row_end_in_the_last_one(start: Start, nodes: list[RawNode]) -> None:
    settings = small_settings(nodes[:1])
    gw = start(settings | {"keys": [key_entry(OLD)]})
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: [status(gw, OLD) for _ in range(60)])
        for i in range(60):
            write(gw, settings | {"keys": [key_entry(OLD), key_entry(f"sk-{i}", name="more")]})
        assert set(asking.result()) == {200}
    wait_until(lambda: status(gw, "sk-59") == 200, what="the last edit counts")
    assert status(gw, "sk-58") == 401
