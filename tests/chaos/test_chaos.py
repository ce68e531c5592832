"""A short run of chaos, and the proof that its judges catch what they are for."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import pytest

from app.lab.answers import answer_text
from app.lab.calls import parse_call
from tests.chaos.bench import CAPACITY
from tests.chaos.clients import Exchange, carry_out
from tests.chaos.run import Chaos, chaos
from tests.chaos.schedule import NODES, plan
from tests.chaos.truth import Truth, Window
from tests.chaos.verdict import Outcome, classify, explain
from tests.chaos.watch import WELL, CounterWatch, Sample
from tests.support.servers import ValkeyServer

BODY = json.dumps(
    {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
).encode()
TEXT = answer_text(parse_call("chat", BODY, seed=1, models=("demo",)).digest, 3)


def event(content: str = "", *, finish: str | None = None, answer_id: str = "a1") -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": answer_id, "choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"broke off","type":"upstream_error"}}\n\n'


def exchange(answer: bytes = b"", **fields: Any) -> Exchange:
    """A stream of 1 s on replica r0 that ended properly, unless said otherwise."""
    fields = {"status": 200, "complete": True, "stream": True, **fields}
    return Exchange(
        1, "r0", BODY, started=100.0, sent=100.0, ended=101.0, answer=answer, **fields
    )  # fmt: skip


def test_one_seed_is_one_plan() -> None:
    assert plan(7, 60) == plan(7, 60)
    assert plan(7, 60) != plan(8, 60)
    assert all(step.at_s + step.seconds <= 60 for step in plan(7, 60))


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (exchange(event(TEXT) + event(finish="length") + DONE), "complete"),
        (exchange(event(TEXT[:4]) + ERROR), "stream_error"),
        (exchange(event(TEXT[:4]), complete=False, broken="closed"), "aborted"),
        (exchange(status=0, complete=False, broken="connect: ConnectionRefusedError"), "reset"),
        (exchange(b'{"error":{"message":"no","code":"x"}}', status=503), "error"),
        # What may never be seen.
        (exchange(event(TEXT[:4])), "garbage"),  # truncated, but looks complete
        (exchange(event(TEXT[:4]) + event(finish="length") + DONE), "garbage"),  # invented finish
        (exchange(event(TEXT[:4]) + event(finish="stop") + DONE), "garbage"),
        (exchange(event(TEXT[:4]) + ERROR + DONE), "garbage"),  # an error dressed as an end
        (exchange(event(TEXT) + DONE), "garbage"),  # no finish
        (exchange(event(TEXT[:4]) + event(TEXT, answer_id="a2")), "garbage"),  # said twice
        (exchange(event(TEXT[:4]) + event(TEXT[4:], answer_id="a2")), "garbage"),  # spliced
        (exchange(event("nonsense"), left=True, complete=False), "garbage"),
        (exchange(event(TEXT) + event(finish="length") + DONE + b"data: {"), "garbage"),
        (exchange(b"", stream=False), "garbage"),  # an empty success
        (exchange(b"<html>", status=502), "garbage"),
        (exchange(hung=True, complete=False), "hang"),
    ],
)
def test_every_outcome_has_its_name(seen: Exchange, kind: str) -> None:
    assert classify(seen).kind == kind


def whole(content: str, finish: str = "length") -> bytes:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": finish}
    return json.dumps({"choices": [choice]}).encode()


def test_a_whole_answer_must_be_the_nodes_own() -> None:
    assert classify(exchange(whole(TEXT), stream=False)).kind == "complete"
    assert classify(exchange(whole(TEXT[:4]), stream=False)).kind == "garbage"
    assert classify(exchange(whole(TEXT, "stop"), stream=False)).kind == "garbage"
    assert classify(exchange(whole(TEXT)[:30], stream=False)).kind == "garbage"
    cut = exchange(whole(TEXT)[:30], stream=False, complete=False, broken="closed")
    assert classify(cut).kind == "aborted"


# Rules -------------------------------------------------------------------------------------------

REFUSED = Outcome("error", "no_node_available")


def truth(*windows: Window) -> Truth:
    made = Truth()
    made.windows += windows
    return made


def watch(
    nodes: dict[str, str] | None = None, active: dict[str, int] | None = None
) -> CounterWatch:
    """A watch that has seen one thing, in the middle of the exchange."""
    made = CounterWatch(port=1)
    said = dict.fromkeys(NODES, WELL) | (nodes or {})
    made.samples.append(Sample(100.5, active or {}, {}, {}, said, []))
    return made


def node_faults(*nodes: str, start: float = 100.5, end: float = 100.6) -> list[Window]:
    return [Window("node.status", node, start, end) for node in nodes]


def test_an_error_without_a_fault_is_unexplained() -> None:
    assert explain(exchange(status=503), REFUSED, truth(), watch()) == ""


def test_one_healthy_node_leaves_an_error_unexplained() -> None:
    three = truth(*node_faults(*NODES[:3]))
    assert explain(exchange(status=502), REFUSED, three, watch()) == ""
    four = truth(*node_faults(*NODES))
    assert explain(exchange(status=502), REFUSED, four, watch()) == "nodes"
    everywhere = truth(Window("node.blackout", "nodes", 99, 102))
    assert explain(exchange(status=502), REFUSED, everywhere, watch()) == "nodes"


def test_an_open_circuit_explains_only_after_a_fault() -> None:
    three, opened = node_faults(*NODES[:3]), watch({NODES[3]: "ok open"})
    assert explain(exchange(status=503), REFUSED, truth(*three), opened) == ""
    earlier = node_faults(NODES[3], start=95, end=97)
    assert explain(exchange(status=503), REFUSED, truth(*three, *earlier), opened) == "circuit"
    assert explain(exchange(status=503), REFUSED, truth(*three, *earlier), watch()) == ""


def test_a_full_node_explains_a_refusal() -> None:
    three = truth(*node_faults(*NODES[:3]))
    full = watch(active={NODES[3]: CAPACITY})
    assert explain(exchange(status=429), Outcome("error", "at_capacity"), three, full) == "capacity"
    room = watch(active={NODES[3]: CAPACITY - 1})
    assert explain(exchange(status=429), Outcome("error", "at_capacity"), three, room) == ""


def test_a_replica_alone_refuses_when_its_shares_are_full() -> None:
    three = [*node_faults(*NODES[:3]), Window("relay.pause", "r0", 100.2, 102)]
    for carried, rule in ((CAPACITY // 3 - 1, ""), (CAPACITY // 3, "capacity")):
        seen = exchange(status=429, neighbours=carried)
        assert explain(seen, Outcome("error", "at_capacity"), truth(*three), watch()) == rule
    one = truth(*three[2:])
    assert explain(seen, Outcome("error", "at_capacity"), one, watch()) == ""


def test_a_replica_that_says_that_it_is_alone_has_five_seconds_to_find_back() -> None:
    alone = exchange(status=429, neighbours=CAPACITY, headers={"x-leaseway-degraded": "1"})
    for ended, rule in ((97, "capacity"), (94, "")):
        faults = truth(*node_faults(*NODES[:3]), Window("relay.pause", "r0", 90, ended))
        assert explain(alone, Outcome("error", "at_capacity"), faults, watch()) == rule


def test_a_model_that_exists_is_never_unknown() -> None:
    unknown = Outcome("error", "model_not_found")
    assert explain(exchange(status=404), unknown, truth(*node_faults(*NODES)), watch()) == ""


def test_a_broken_stream_is_explained_by_the_node_that_served_it() -> None:
    seen = exchange(headers={"x-leaseway-node": "n1"})
    for kind in ("stream_error", "aborted"):
        assert explain(seen, Outcome(kind), truth(*node_faults("n1")), watch()) == "node"
        assert explain(seen, Outcome(kind), truth(*node_faults("n2")), watch()) == ""


def test_a_reset_is_explained_by_the_replica_that_was_asked() -> None:
    reset = Outcome("reset")
    assert explain(exchange(), reset, truth(Window("replica.kill", "r0", 100.5)), watch())
    assert not explain(exchange(), reset, truth(Window("replica.kill", "r1", 100.5)), watch())
    # SIGTERM: what was sent before it must be finished.
    assert not explain(exchange(), reset, truth(Window("replica.term", "r0", 100.5)), watch())
    assert explain(exchange(), reset, truth(Window("replica.term", "r0", 99.5)), watch())


# Watches -----------------------------------------------------------------------------------------


def test_damaged_books_are_seen() -> None:
    good = Sample(0, {"n1": 2, "n2": 0}, {"n1": 2}, {"r": 2}, {}, ["r"])
    assert [good.drifted, good.negative, good.ownerless, good.settled] == [False] * 4
    assert Sample(0, {"n1": 2}, {"n1": 1}, {"r": 1}, {}, ["r"]).drifted
    assert Sample(0, {"n1": -1}, {}, {}, {}, []).negative
    assert Sample(0, {"n1": 1}, {"n1": 1}, {"r": 1}, {}, []).ownerless


def test_a_drifted_counter_in_redis_is_a_violation() -> None:
    run = Chaos(1, 0)
    with ValkeyServer() as valkey, CounterWatch(valkey.port) as seen:
        seen._client.set("lw:{default}:active:n0", 1)
        run._watch = seen
        seen.samples[:] = [seen.look()]
        run._read_samples()
    assert [v.kind for v in run.report.violations] == ["drift"]


def test_a_healthy_node_taken_out_is_a_violation() -> None:
    run = Chaos(1, 0)
    run._watch = watch({"n2": "ok open"})
    run._read_samples()
    assert [v.kind for v in run.report.violations] == ["ejected"]


def test_violations_are_counted_and_say_amid_what() -> None:
    run = Chaos(1, 0)
    run._watch = watch()
    run._truth.windows += node_faults("n2")
    run._judge(exchange(event(TEXT[:4])))
    run._judge(exchange(hung=True, complete=False))
    run._judge(exchange(b'{"error":{"message":"no","code":"x"}}', status=503))
    run._judge_errors()
    assert [v.kind for v in run.report.violations] == ["garbage", "hang", "unexplained"]
    assert "node.status n2" in str(run.report.violations[0])
    assert run.report.to_json()["client_errors"] == {"error x [UNEXPLAINED]": 1}


async def test_a_silent_server_is_a_hang() -> None:
    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        asked = Exchange(1, "r0", BODY, stream=True, started=monotonic())
        await carry_out(asked, port, b"GET / HTTP/1.1\r\n\r\n", deadline_s=0.1)
        assert classify(asked).kind == "hang"
        await asyncio.sleep(0.5)


# The thing itself --------------------------------------------------------------------------------


def test_nothing_that_must_hold_breaks_under_faults() -> None:
    report = chaos(seed=11, seconds=25)
    assert not report.violations, report.table()
    assert report.outcomes["complete"] > 100, report.table()
    assert sum(report.figures["faults"].values()) >= 10, report.table()
