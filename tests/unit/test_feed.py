"""The dashboard's feed: one read for all, none for nobody, and never more than it may show."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cluster.overview import NodeView, Overview
from app.control import feed
from app.control.feed import Feed
from app.errors import ApiError, RedisAway

VENDOR = Path(feed.__file__).parent / "static" / "vendor"


def view(node_id: str, **fields: Any) -> NodeView:
    """A node that is well, but for ``fields``."""
    plain: dict[str, Any] = {
        "id": node_id, "pool": "default", "url": "http://secret-host", "models": ["m"],
        "engine": "auto", "state": "active", "health": "ok", "circuit": "closed", "weight": 1.0,
        "capacity": 8, "active": 1, "ttft_ms": None, "samples": 0, "tokens_per_s": None,
        "streak": 0, "epoch": 1, "source": "config", "edited": [], "scores": {"m": 1.0},
        "ttft_p50_ms": None, "ttft_p99_ms": None, "ttft_recent_ms": [], "share": None,
    }  # fmt: skip
    return NodeView(**plain | fields)


class Reads:
    """In the place of ``overview``: counts, and answers ``nodes`` or raises ``fault``."""

    def __init__(self) -> None:
        self.count = 0
        self.nodes = [view("a")]
        self.fault: Exception | None = None

    async def __call__(self, *_: Any) -> Overview:
        self.count += 1
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        return Overview(pool="default", at_ms=self.count, nodes=self.nodes, replicas=[])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Reads without pauses between them."""
    made = Reads()
    monkeypatch.setattr(feed, "overview", made)
    monkeypatch.setattr(feed, "_EVERY_S", 0.0)
    monkeypatch.setattr(feed, "_REST", 0)
    return made


def made_feed() -> tuple[Feed, Any]:
    """A feed and its replica, of one pool."""
    pool = SimpleNamespace(name="default", link=None, scripts=SimpleNamespace(keys=None))
    replica: Any = SimpleNamespace(id="r0", leaving=False, pools={"default": pool})
    return Feed(replica), replica


async def next_of(looked: Feed, news: asyncio.Event) -> tuple[str, Any]:
    """The next event: its name and its data."""
    await news.wait()
    news.clear()
    name, data = looked.event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_nothing_is_read_before_the_first_viewer_or_after_the_last(reads: Reads) -> None:
    looked, _ = made_feed()
    await asyncio.sleep(0)
    assert reads.count == 0
    with looked.viewed() as first, looked.viewed() as second:
        assert await next_of(looked, first) == await next_of(looked, second)
    reading = looked._reading
    assert reading is not None
    await reading
    count = reads.count
    await asyncio.sleep(0)
    assert (looked.event, looked._reading, reads.count) == (b"", None, count)
    with looked.viewed() as again:
        assert (await next_of(looked, again))[1]["pools"][0]["at_ms"] == count + 1


async def test_who_comes_while_others_look_sees_the_last_picture_at_once(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_EVERY_S", 3600.0)
    looked, _ = made_feed()
    with looked.viewed() as first:
        await next_of(looked, first)
        with looked.viewed() as second:
            assert (await next_of(looked, second))[0] == "picture"
    assert reads.count == 1
    assert looked._reading is not None
    looked._reading.cancel()


async def test_the_pause_grows_with_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    times = iter([100.0, 100.5, 200.0, 200.01])

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 2:
            looked._viewers.clear()

    monkeypatch.setattr(feed, "_EVERY_S", 1.0)
    monkeypatch.setattr(feed, "_REST", 9)
    monkeypatch.setattr(feed, "monotonic", lambda: next(times))
    looked, _ = made_feed()
    looked._viewers.add(asyncio.Event())

    async def at_once(*_: Any) -> Overview:
        raise RedisAway("a read that does not sleep")

    monkeypatch.setattr(feed, "overview", at_once)
    monkeypatch.setattr("app.control.feed.asyncio.sleep", sleep)
    await looked._read_on()
    assert pauses == [pytest.approx(4.5), pytest.approx(0.99)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (RedisAway("redis:6379: not connected"), "redis:6379: not connected"),
        (ValueError("could not convert"), "could not convert"),
        (KeyError("weight"), "weight"),
    ],
)
async def test_what_cannot_be_read_is_told_and_the_next_read_is_made(
    reads: Reads, fault: Exception, said: str
) -> None:
    looked, _ = made_feed()
    reads.fault = fault
    with looked.viewed() as news:
        name, data = await next_of(looked, news)
        assert (name, data["replica"]) == ("away", "r0")
        assert said in data["why"]
        reads.fault = None
        while name == "away":
            name, _ = await next_of(looked, news)
        assert name == "picture"


async def test_of_many_nodes_those_in_trouble_come_first_and_totals_count_all(
    reads: Reads,
) -> None:
    most = feed._MOST_NODES
    sick = [view(f"z{n}", health="down", active=0) for n in range(3)]
    busy = view("y", active=7)
    reads.nodes = [*(view(f"n{n:04}") for n in range(most + 50)), *sick, busy]
    looked, _ = made_feed()
    with looked.viewed() as news:
        pool = (await next_of(looked, news))[1]["pools"][0]
    shown = [row["id"] for row in pool["nodes"]]
    assert len(shown) == most
    assert shown == sorted(shown)
    assert {"z0", "z1", "z2", "y"} <= set(shown)
    assert pool["total"] == {
        "nodes": most + 54, "active": most + 57, "capacity": 8 * (most + 54),
    }  # fmt: skip


async def test_addresses_of_nodes_are_not_told(reads: Reads) -> None:
    looked, _ = made_feed()
    with looked.viewed() as news:
        await next_of(looked, news)
    assert b"secret-host" not in looked.event


async def test_a_replica_that_leaves_takes_nobody_and_wakes_who_looks(reads: Reads) -> None:
    looked, replica = made_feed()
    looked.require_place()
    with looked.viewed() as news:
        await next_of(looked, news)
        replica.leaving = True
        await news.wait()
        assert looked.ended
        with pytest.raises(ApiError, match="leaves"):
            looked.require_place()


def test_the_vendored_library_is_the_release_that_is_named() -> None:
    listed = [
        line.split()
        for line in (VENDOR / "README.md").read_text().splitlines()
        if line[:4] == "    "
    ]
    assert {name for _, name in listed} == {"uPlot.iife.min.js", "uPlot.min.css"}
    for digest, name in listed:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
    assert "Leon Sorokin" in (VENDOR / "LICENSE").read_text()
