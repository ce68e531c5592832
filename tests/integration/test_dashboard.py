"""``/dashboard`` without a browser: who may see it, what its events say, and what they cost."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import pytest

from app.admission.keys import hash_key
from tests.support import state
from tests.support.admin import entry, error_of
from tests.support.fleet import Fleet, plain_http
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import RawNode, events, sse_answer
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

KEYS = [
    {"name": "ops", "hash": hash_key("sk-ops"), "admin": True},
    {"name": "app", "hash": hash_key("sk-app")},
]
OPS = {"authorization": "Bearer sk-ops"}
HOSTILE = '</script><img src=x onerror=alert(1)>\r\n\r\nevent: picture\ndata: {}\n\n"'
STATIC = "/dashboard/static/"


@pytest.fixture(scope="module")
def node() -> Iterator[RawNode]:
    """A node that streams."""
    with RawNode(sse_answer(events(3))) as started:
        yield started


@pytest.fixture(scope="module")
def fleet(node: RawNode) -> Iterator[Fleet]:
    """Two replicas that ask for keys."""
    listed = [entry("b1", node, weight=2), entry("b2", node)]
    with Fleet(listed, replicas=2, keys=KEYS, leases={"ttl_s": 1}) as started:
        yield started


@pytest.fixture
def http(fleet: Fleet) -> Iterator[httpx.Client]:
    """A client without a key."""
    with plain_http(fleet.urls[0]) as client:
        yield client


@contextlib.contextmanager
def viewer(port: int) -> Iterator[RawClient]:
    """An admin who looks on."""
    request = (
        "GET /dashboard/events HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer sk-ops\r\n\r\n"
    )
    with RawClient(port) as client:
        yield client.send(request.encode())


def told(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of every whole event: exactly one line of each."""
    found = []
    for part in body.split(b"\n\n")[:-1]:
        name, data = part.decode().split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def pool_of(event: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """The only pool of a picture."""
    name, data = event
    assert name == "picture", data
    (pool,) = data["pools"]
    assert isinstance(pool, dict)
    return pool


def wait_ended(client: RawClient) -> None:
    """Wait until the stream has ended properly, though events come all the time."""

    def ended() -> bool:
        client.read_events(client.body.count(b"\n\n") + 1)
        return client.complete

    wait_until(ended, what="the stream ends")


class Markup(HTMLParser):
    """What a page asks for, and what of it is inline."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.inline: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag
        for name, value in attrs:
            if name in {"src", "href", "action", "srcset"}:
                self.asked.append(value or "")
            if name.startswith("on") or name == "style":
                self.inline.append(f"{tag} {name}")

    def handle_data(self, data: str) -> None:
        if self._in in {"script", "style"} and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - as HTMLParser has it
        self._in = ""


def test_the_page_and_all_its_files_are_served_under_a_policy_that_lets_nothing_else_in(
    http: httpx.Client,
) -> None:
    page = http.get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    markup = Markup(page.text)
    assert not markup.inline
    base = f"{http.base_url}/dashboard"
    # Relative, so that it works below any path of a proxy.
    assert all(not asked.startswith("/") and not urlsplit(asked).scheme for asked in markup.asked)
    files = [http.get(urljoin(base, asked)) for asked in sorted(set(markup.asked))]
    assert {urlsplit(str(file.url)).path.removeprefix(STATIC) for file in files} == {
        "dashboard.css", "dashboard.js", "icon.svg", "vendor/uPlot.iife.min.js",
        "vendor/uPlot.min.css",
    }  # fmt: skip
    modules = [http.get(f"{STATIC}{name}.js") for name in ("cards", "charts", "history", "stream")]
    for answer in (page, *files, *modules):
        assert answer.status_code == 200, answer.url
        policy = dict(
            part.strip().split(" ", 1)
            for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self' data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    kinds = {file.headers["content-type"].split(";")[0] for file in (*files, *modules)}
    assert kinds == {"text/css", "text/javascript", "image/svg+xml"}


@pytest.mark.parametrize(
    "name",
    [
        "", "nothing.js", "vendor/README.md", "dashboard.html", "../dashboard.py",
        "..%2fdashboard.py", "vendor/..%2f..%2fadmin.py", "%2fetc%2fpasswd", "vendor",
    ],
)  # fmt: skip
def test_no_other_file_is_served(fleet: Fleet, name: str) -> None:
    request = f"GET {STATIC}{name} HTTP/1.1\r\nhost: gateway\r\n\r\n".encode()
    with RawClient(fleet.replicas[0].port) as client:
        client.send(request).read_all()
    assert client.status == 404
    assert client.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("key", "status", "code"),
    [
        (None, 401, "invalid_api_key"),
        ("sk-no", 401, "invalid_api_key"),
        ("sk-app", 403, "not_admin"),
    ],
)
def test_the_events_are_for_admins(
    http: httpx.Client, key: str | None, status: int, code: str
) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = http.get("/dashboard/events", headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


def test_pictures_say_what_redis_holds(fleet: Fleet) -> None:
    for number in range(6):
        served = ask(fleet.replicas[number % 2].port, _asked())
        assert served.status == 200
    fleet.wait_settled()

    def says_so() -> bool:
        with viewer(fleet.replicas[0].port) as client:
            pool = pool_of(told(client.read_events(1))[0])
        assert client.headers[b"content-type"].startswith(b"text/event-stream")
        assert client.headers[b"cache-control"] == b"no-store"
        assert client.headers[b"x-accel-buffering"] == b"no"
        assert pool["pool"] == "default"
        return all(_agrees(fleet, row) for row in pool["nodes"]) and pool["total"] == {
            "nodes": 2, "active": 0, "capacity": 16,
        }  # fmt: skip

    wait_until(says_so, what="pictures and Redis agree")  # samples arrive off the client's path


def _asked() -> bytes:
    return chat().replace(b"host: gateway", b"host: gateway\r\nauthorization: Bearer sk-app")


def _agrees(fleet: Fleet, row: dict[str, Any]) -> bool:
    """Whether a row is the record of its node, by keys that anybody can read."""
    name = row["id"]
    record = state.record(fleet.redis, name)
    samples = [str(s).split(":") for s in fleet.redis.lrange(state.KEYS.ttft(name), 0, -1)]
    ttft_ms = sorted(int(sample[0]) / 1000 for sample in samples)
    middle = ttft_ms[len(ttft_ms) // 2] if ttft_ms else None
    highest = ttft_ms[-1] if ttft_ms else None
    return (
        row["scores"] == {"m": state.scores(fleet.redis)[name]}
        and all(row[word] == record[word] for word in ("state", "health", "circuit"))
        and row["active"] == state.load(fleet.redis, name)
        and row["capacity"] == int(record["capacity"])
        and row["weight"] == float(record["weight"])
        and row["samples"] == len(samples)
        and (row["ttft_p50_ms"], row["ttft_p99_ms"]) == (middle, highest)
    )


def test_many_viewers_cost_one_read_a_second_together(fleet: Fleet) -> None:
    replica = fleet.replicas[0]
    with state.monitoring(fleet.redis, fleet.valkey.port) as seen, contextlib.ExitStack() as stack:
        viewers = [stack.enter_context(viewer(replica.port)) for _ in range(30)]
        pictures = {
            pool_of(event)["at_ms"] for one in viewers for event in told(one.read_events(3))
        }
    windows = [one.words[1] for one in seen if one.verb == "LRANGE"]
    assert len(pictures) >= 3
    for name in ("b1", "b2"):
        # The first picture may be one that was there, and the last viewer may leave during a read.
        assert abs(windows.count(state.KEYS.ttft(name)) - len(pictures)) <= 1
    at = sorted(pictures)
    assert all(later - earlier >= 900 for earlier, later in itertools.pairwise(at))


def test_viewers_are_bounded_and_who_leaves_gives_the_place_back(
    fleet: Fleet, http: httpx.Client
) -> None:
    replica = fleet.replicas[0]

    def has_room() -> bool:
        with viewer(replica.port) as client:
            return client.read_head() == 200

    with contextlib.ExitStack() as stack:
        viewers = [stack.enter_context(viewer(replica.port)) for _ in range(100)]
        wait_until(lambda: not has_room(), what="it is full")
        refused = http.get("/dashboard/events", headers=OPS)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "no_place")
        assert refused.headers["retry-after"] == "1"
        assert http.get("/dashboard").status_code == 200
        viewers[7].reset()
        wait_until(has_room, what="a place is free")
    wait_until(has_room, what="all places are free")


def test_a_viewer_whose_key_is_taken_back_sees_no_more(fleet: Fleet) -> None:
    replica = fleet.replicas[1]
    before = replica.file.read_text()
    with viewer(replica.port) as client:
        client.read_events(1)
        replica.file.write_text(before.replace(hash_key("sk-ops"), hash_key("sk-new")))
        os.kill(replica.pid, signal.SIGHUP)
        wait_ended(client)
    replica.file.write_text(before)
    os.kill(replica.pid, signal.SIGHUP)

    def let_in_again() -> bool:
        with viewer(replica.port) as client:
            return client.read_head() == 200

    wait_until(let_in_again, what="the old key is good again")


def test_hostile_names_stay_inside_their_event(fleet: Fleet) -> None:
    record: Any = state.record(fleet.redis, "b1")
    fleet.redis.hset(
        state.KEYS.node(HOSTILE), mapping=record | {"models": HOSTILE.replace("\n", "")}
    )
    fleet.redis.sadd(state.KEYS.nodes, HOSTILE)
    try:
        with viewer(fleet.replicas[0].port) as client:

            def shown() -> list[str]:
                client.read_events(client.body.count(b"\n\n") + 1)
                return [row["id"] for row in pool_of(told(client.body)[-1])["nodes"]]

            wait_until(lambda: HOSTILE in shown(), what="it is shown")
    finally:
        fleet.redis.srem(state.KEYS.nodes, HOSTILE)
        fleet.redis.delete(state.KEYS.node(HOSTILE))


def test_without_keys_it_is_as_open_as_the_admin_api_and_says_when_redis_is_away(
    node: RawNode,
) -> None:
    with (
        Fleet([entry("b1", node)], replicas=1) as fleet,
        RawClient(fleet.replicas[0].port) as client,
    ):
        client.send(b"GET /dashboard/events HTTP/1.1\r\nhost: gateway\r\n\r\n").read_events(1)
        fleet.valkey.kill()

        def last() -> str:
            client.read_events(client.body.count(b"\n\n") + 1)
            return told(client.body)[-1][0]

        wait_until(lambda: last() == "away", what="it says that Redis is away")
        why = told(client.body)[-1][1]
        assert why["replica"] == "r0"
        assert "not connected" in why["why"] or "connection" in why["why"].lower()
        with plain_http(fleet.urls[0]) as http:
            assert http.get("/dashboard").status_code == 200
        fleet.valkey.start()
        wait_until(lambda: last() == "picture", what="it is back")


def test_a_replica_that_leaves_ends_the_stream_and_does_not_wait_for_viewers(
    node: RawNode,
) -> None:
    with Fleet([entry("b1", node)], replicas=1, server={"drain_s": 60}) as fleet:
        replica = fleet.replicas[0]
        with RawClient(replica.port, timeout_s=30) as client:
            client.send(b"GET /dashboard/events HTTP/1.1\r\nhost: gateway\r\n\r\n").read_events(1)
            replica.signal(signal.SIGTERM)
            wait_ended(client)
        assert replica.stop() == 0  # within 15 s, a quarter of `drain_s`
