"""Metrics by themselves: what they count, what they cannot be made to hold, what they cost."""

from __future__ import annotations

import asyncio
import io
import json
import random
import threading
import timeit
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from app.gateway.routes import ROUTES
from app.telemetry import access, families
from app.telemetry.access import AccessLog
from app.telemetry.exchange import Exchange
from app.telemetry.families import Timings
from app.telemetry.metrics import Metrics
from tests.support.servers import wait_until

BOUNDS = (0.1, 0.2, 0.4, 1.0)


def series(metrics: Metrics) -> int:
    """Samples on the page."""
    return sum(len(family.samples) for family in metrics.registry.collect())


def exchange(model: str = "m", route: str = "/v1/chat/completions") -> Exchange:
    """A request that was answered well by its second node."""
    one = Exchange(b"id", route, "chat", "openai")
    one.received = one.started
    one.leased_as(model, one.started + 0.25, degraded=False)
    one.attempts, one.node, one.first_token = 2, "n", one.started + 0.5
    one.read(5, 11, one.started + 2.5)
    return one


@given(st.lists(st.floats(0, 10), max_size=60))
def test_timings_show_what_the_librarys_histogram_shows(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    timings = Timings("t_seconds", "T.", ("a",), buckets_s=BOUNDS, registry=ours)
    histogram = Histogram("t_seconds", "T.", ("a",), buckets=BOUNDS, registry=theirs)
    timings.of("x")
    histogram.labels("x")
    for one in values:
        timings.of("x")(one)
        histogram.labels("x").observe(one)
    assert generate_latest(ours) == generate_latest(theirs)


def test_a_name_given_twice_is_refused() -> None:
    registry = CollectorRegistry()
    Timings("t_seconds", "T.", (), buckets_s=BOUNDS, registry=registry)
    with pytest.raises(ValueError, match="t_seconds"):
        Timings("t_seconds", "T.", (), buckets_s=BOUNDS, registry=registry)


def test_times_of_a_request() -> None:
    one = exchange()
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.2)  # ten tokens after the first, in two seconds
    one.read(5, 1, one.started + 2.5)
    assert one.tpot_s == 0
    one.read(5, 11, one.first_token - 1)  # an answer in one piece: its last byte was its first
    assert one.tpot_s == 0


def test_a_registry_that_runs_wild_makes_no_endless_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "_MOST_COUNTS", 200)
    monkeypatch.setattr(families, "_MOST_TIMINGS", 50)
    metrics = Metrics()
    chance = random.Random(1)
    for _ in range(500):
        name = f"{chance.random()}"
        one = exchange(name)
        one.node = name
        metrics.request(name, 200)
        metrics.attempt(name, "ok")
        metrics.retry(name, "reset")
        metrics.first_token(name, 0.1)
        metrics.book_tokens(name, 1, 1)
        metrics.ended(one, "ok", 200, 1.0)
    before = series(metrics)
    for number in range(100):
        metrics.ended(exchange(f"late-{number}"), "ok", 200, 1.0)
        metrics.attempt(f"late-{number}", "ok")
    assert series(metrics) == before
    page = generate_latest(metrics.registry).decode()
    assert 'leaseway_requests_total{model="other",status="other"} 300.0\n' in page


def test_every_route_has_its_word() -> None:
    known = {"chat", "text_completion", "embeddings"}  # of OpenTelemetry's
    assert known <= {route.operation for route in ROUTES.values()}
    assert all(route.operation for route in ROUTES.values())
    chats = {path for path, route in ROUTES.items() if route.operation == "chat"}
    assert chats == {"/v1/chat/completions", "/v1/responses", "/v1/messages"}


async def test_degraded_time_is_that_of_being_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.telemetry.metrics._LOOK_S", 0.001)
    metrics = Metrics()
    looks = iter([True] * 3 + [False] * 5 + [True] * 3)
    done = asyncio.Event()

    def up() -> bool:
        state = next(looks, None)
        if state is None:
            done.set()
        return state is not False

    started = monotonic()
    task = asyncio.create_task(metrics.watch_degraded(up))
    await done.wait()
    task.cancel()
    counted = metrics.registry.get_sample_value("leaseway_degraded_seconds_total")
    assert counted is not None
    assert 0.005 <= counted <= monotonic() - started


class Blocked(io.RawIOBase):
    """A reader that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.taken = b""

    def write(self, data: object) -> int:
        self.go.wait(10)
        assert isinstance(data, bytes)
        self.taken += data
        return len(data)


def test_a_slow_reader_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_MOST_LINES", 10)
    monkeypatch.setattr(access, "_EVERY_S", 0.001)
    reader = Blocked()
    log = AccessLog("r", reader)  # type: ignore[arg-type]
    for number in range(200):  # more than the reader could ever have been handed
        one = exchange()
        one.request_id = b"%d" % number
        log.write(one, "ok", 200, 1.0, 1, 1)
    reader.go.set()
    wait_until(lambda: reader.taken.count(b"\n") >= 10, what="the reader has caught up")
    log.write(one, "ok", 200, 1.0, 1, 1)
    log.close()
    lines = [json.loads(line) for line in reader.taken.splitlines()]
    dropped = sum(line.get("dropped_before", 0) for line in lines)
    assert dropped > 100
    assert len(lines) == 201 - dropped
    assert [int(line["request_id"]) for line in lines] == sorted(
        int(line["request_id"]) for line in lines
    )


def test_the_bookkeeping_of_a_request_is_cheap() -> None:
    """Printed, and held to a bound that only a fault of another order breaks."""
    metrics = Metrics()

    def one_request() -> None:
        one = exchange()
        metrics.redis_call("acquire", 0.0004)
        metrics.request("m", 200)
        metrics.attempt("n", "ok")
        metrics.first_token("n", 0.1)
        metrics.book_tokens("m", 5, 11)
        metrics.ended(one, "ok", 200, 2.5)

    each_us = min(timeit.repeat(one_request, number=2000, repeat=7)) / 2000 * 1e6
    print(f"metrics of one request: {each_us:.1f} CPU-us")
    assert each_us < 200
