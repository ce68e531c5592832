"""The policy bench: its arithmetic by hand, its clients against a real fake node."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, get_args

import orjson
import pytest

from app.config import Policy
from app.errors import ConfigError
from app.lab.bench.policies import entrants_of
from app.lab.bench.policies_client import Answer, Clients, Clock
from app.lab.bench.policies_cluster import Entrant
from app.lab.bench.policies_load import NODE_SEED, Load, Question, loads_of
from app.lab.bench.policies_measure import Counts, Run, closed_loop, open_loop
from app.lab.bench.policies_report import CANNOT_MATCH, as_json, as_markdown, verdicts
from app.lab.bench.policies_rows import Row, astray, backlog, mean_of, percentile, row_of, shares
from app.lab.bench.policies_trust import Cpu, Trust, worst_of
from app.lab.faults import Fault
from app.lab.node import NodeConfig, serve_node
from app.lab.profiles import IDEAL
from app.lab.simulate.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TTFT = Entrant("ttft", 3)
LOAD = Load("80%", SCENARIOS["trio"], 10.0)
FINE = Trust(lag_p99_ms=1.0, busiest="client", busiest_cpu=0.2, machine_cpu=0.3)
LIGHT = Question(b"{}", 100, 1, heavy=False, lot=0.0)
HEAVY = replace(LIGHT, heavy=True)


def answered(
    due_s: float, first_s: float | None, *, node: str = "xeon", question: Question = LIGHT
) -> Answer:
    """A whole answer, or one that was given up without a token."""
    tokens = [] if first_s is None else [first_s]
    whole = first_s is not None
    return Answer(question, due_s, tokens, node if whole else "", int(whole), whole=whole)


def run_of(*answers: Answer, entrant: Entrant = TTFT, seed: int = 1, trust: Trust = FINE) -> Run:
    """Counting from 5 s to 25 s; nodes that agree with the clients and had counted one before."""
    names = ("a100", "xeon")
    here = {name: sum(a.node == name for a in answers) for name in names}
    final = {name: Counts(here[name], here[name], 0) for name in names}
    before = {name: Counts(0, 0, 0) for name in names}
    return Run(
        entrant, "80%", seed, answers, 5.0, 25.0, 40.0, before, final, final, final, 0, trust
    )  # fmt: skip


# --- arithmetic


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        (range(1, 101), 0.99, 99),
        (range(1, 101), 0.50, 50),
        (range(1, 201), 0.99, 198),
        ([7.0], 0.99, 7.0),
        ([1.0, 9.0], 0.99, 9.0),
        ([], 0.5, 0.0),
    ],
)
def test_a_percentile_is_the_nearest_rank(
    values: list[float], share: float, expected: float
) -> None:
    assert percentile(list(values), share) == expected


def test_shares_add_up_to_one_or_are_none() -> None:
    assert shares({"a": 3, "b": 1, "c": 0}) == {"a": 0.75, "b": 0.25, "c": 0.0}
    assert shares({"a": 0}) == {}


def test_backlog_counts_those_who_found_one_waiting() -> None:
    # The second and the third come while the first waits; the fourth when all have their token.
    there = [answered(6, 9), answered(7, 10), answered(8, 11), answered(20, 21)]
    assert backlog(there, 5, 25) == 0.5
    # One that decodes is in nobody's way.
    assert backlog([answered(6, 6.5), answered(7, 8)], 5, 25) == 0.0


def test_backlog_sees_who_came_before_it_counted_but_does_not_count_them() -> None:
    assert backlog([answered(4, 9), answered(6, 10)], 5, 25) == 1.0
    assert backlog([answered(4, 9), answered(30, 31)], 5, 25) is None


def test_who_never_got_a_token_was_on_the_slowest_node_if_that_says_so() -> None:
    answers = (answered(6.0, 7.0), answered(6.5, None, question=HEAVY), answered(8.0, None))
    run = run_of(*answers)
    there = replace(run, given_up={"a100": Counts(0, 0, 0), "xeon": Counts(3, 1, 2)})
    assert row_of(there, "xeon").backlog == pytest.approx(2 / 3)
    assert row_of(there, "xeon").heavy_share == {"a100": 0.0, "xeon": 1.0}
    elsewhere = replace(run, given_up={"a100": Counts(1, 0, 1), "xeon": Counts(2, 1, 1)})
    assert row_of(elsewhere, "xeon").backlog == 0.0
    cut = answered(9.0, 9.5)
    cut.whole = False
    none_there = replace(run_of(*answers, cut), given_up=elsewhere.given_up)
    assert row_of(none_there, "xeon").backlog == pytest.approx(0.0)


def test_ttft_is_from_when_it_was_due_and_without_the_warm_up() -> None:
    row = row_of(run_of(answered(4.9, 30.0), answered(5.0, 5.1), answered(6.0, 6.3)), "xeon")
    assert row.mean_ttft_ms == pytest.approx(200)
    assert row.p99_ttft_ms == pytest.approx(300)
    assert (row.counted, row.sent, row.whole, row.at_least) == (2, 3, 3, False)


def test_who_never_got_a_token_counts_as_long_as_it_has_waited() -> None:
    row = row_of(run_of(answered(5.0, 5.1), answered(10.0, None)), "xeon")
    assert row.mean_ttft_ms == pytest.approx((100 + 30_000) / 2)
    assert row.p99_ttft_ms == pytest.approx(30_000)
    assert (row.at_least, row.unheard, row.cut) == (True, 1, 0)


def test_everything_sent_is_in_one_of_four_places() -> None:
    cut = answered(7.0, 7.1)
    cut.whole = False
    wrong = Answer(LIGHT, 8.0, fault="status 503")
    row = row_of(run_of(answered(5.0, 5.1), answered(6.0, None), cut, wrong), "xeon")
    assert (row.whole, row.cut, row.unheard, row.errors) == (1, 1, 1, 1)
    assert row.sent == 4
    assert row.reasons == {"status 503": 1}
    assert row.counted == 3, "an error has no time to first token"


def test_tokens_per_s_counts_tokens_by_their_own_time() -> None:
    begun_before = Answer(LIGHT, 1.0, [4.9, 5.0, 6.0], "a100", 1, whole=True)
    ends_after = Answer(LIGHT, 20.0, [24.9, 25.0, 26.0], "a100", 1, whole=True)
    assert row_of(run_of(begun_before, ends_after), "xeon").tokens_per_s == 3 / 20


def test_shares_are_the_nodes_own_and_heavy_ones_by_the_clients() -> None:
    answers = [
        answered(6, 7, node="a100", question=HEAVY),
        answered(7, 8, node="a100"),
        answered(8, 9, node="a100", question=HEAVY),
        answered(9, 10, question=HEAVY),
    ]
    run = replace(run_of(*answers), before={"a100": Counts(1, 1, 0), "xeon": Counts(0, 0, 0)})
    row = row_of(run, "xeon")
    assert row.share == {"a100": 2 / 3, "xeon": 1 / 3}
    assert row.heavy_share == {"a100": 2 / 3, "xeon": 1 / 3}


def test_nodes_and_clients_must_agree() -> None:
    answers = [answered(6, 7), answered(7, 8), answered(8, None)]
    agreed = {"xeon": Counts(3, 2, 0)}
    assert astray(answers, agreed) == 0
    assert astray(answers, {"xeon": Counts(3, 1, 0)}) == 1, "a whole answer that no node has given"
    assert astray(answers, {"xeon": Counts(3, 3, 0)}) == 1, "a whole answer that reached nobody"
    assert astray(answers, {"xeon": Counts(4, 2, 0)}) == 1, "a request that nobody has sent"
    cut = answered(9, 10)
    cut.whole = False
    assert astray([*answers, cut], {"xeon": Counts(4, 3, 0)}) == 0, "it may have ended just then"


def test_a_second_attempt_is_one_more_request_for_the_nodes() -> None:
    moved = answered(6, 7)
    moved.attempts = 2
    assert astray([moved], {"xeon": Counts(1, 1, 0), "a100": Counts(1, 0, 0)}) == 0
    assert row_of(run_of(moved), "xeon").moved == 1


def test_seeds_are_averaged_and_their_counts_added() -> None:
    lagging = replace(FINE, lag_p99_ms=9.0)
    rows = [
        row_of(run_of(answered(5.0, 5.1), seed=1), "xeon"),
        row_of(run_of(answered(5.0, 5.3), answered(6.0, 6.3), seed=2, trust=lagging), "xeon"),
    ]
    mean = mean_of(rows)
    assert mean.mean_ttft_ms == pytest.approx(200)
    assert (mean.seeds, mean.sent, mean.whole) == ((1, 2), 3, 3)
    assert mean.trust.lag_p99_ms == 9.0


def test_trust_ends_where_the_machine_may_set_the_pace() -> None:
    assert FINE.enough
    assert not replace(FINE, lag_p99_ms=6.0).enough
    assert not replace(FINE, busiest_cpu=0.9).enough
    assert not replace(FINE, machine_cpu=0.95).enough
    busier = replace(FINE, busiest="replica-1", busiest_cpu=0.5, machine_cpu=0.1)
    assert worst_of([FINE, busier]) == Trust(1.0, "replica-1", 0.5, 0.3)


def test_cpu_is_what_was_used_between_two_moments() -> None:
    before = Cpu(10.0, 100.0, {"client": 1.0, "replica-1": 5.0})
    trust = before.until(Cpu(20.0, 100.0, {"client": 2.0, "replica-1": 9.0}), [0.001] * 10)
    assert (trust.busiest, trust.busiest_cpu) == ("replica-1", 0.4)
    assert trust.machine_cpu == 0.0
    assert trust.lag_p99_ms == pytest.approx(1.0)


# --- what is asked


def test_a_seed_asks_everyone_the_same_and_another_seed_something_else() -> None:
    assert LOAD.arrivals(1, 20) == LOAD.arrivals(1, 20)
    assert LOAD.arrivals(1, 20) != LOAD.arrivals(2, 20)
    assert [q.due_s for q in LOAD.arrivals(1, 20)] == sorted(q.due_s for q in LOAD.arrivals(1, 20))
    assert 1700 < len(LOAD.arrivals(1, 200)) < 2300
    closed = loads_of("closed")[0]
    first, again = (list(islice(closed.of_client(1, 3), 5)) for _ in range(2))
    assert first == again
    assert list(islice(closed.of_client(1, 4), 5)) != first


def test_the_closed_loop_asks_for_512_tokens_and_68_on_average() -> None:
    questions = list(islice(loads_of("closed")[0].of_client(1, 0), 500))
    assert {question.prompt_tokens for question in questions} == {512}
    assert sum(question.answer_tokens for question in questions) / 500 == pytest.approx(68, abs=3)


def test_no_generation_says_how_long_its_answer_will_be() -> None:
    questions = LOAD.arrivals(1, 20)
    bodies = [(question, orjson.loads(question.body)) for question in questions]
    assert {question.heavy for question in questions} == {True, False}
    for question, body in bodies:
        assert body.get("max_tokens") == (None if question.heavy else question.answer_tokens)
    contents = [body["messages"][0]["content"][:8] for _, body in bodies]
    assert len(set(contents)) > len(contents) * 0.9, "prompts share a prefix"


@pytest.mark.parametrize("text", ["", "open", "closed,", "0", "-1", "nan", "3", "50%"])
def test_a_load_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"closed,0\.8"):
        loads_of(text)


def test_policies_are_those_of_the_settings() -> None:
    known = get_args(Policy)
    usual = entrants_of("", 3, "")
    assert [e.policy for e in usual][:3] == ["round_robin", "least_conn", "ttft"]
    assert {e.policy for e in usual} <= set(known)
    assert ("work" in known) == (Entrant("work", 3) in usual)
    assert entrants_of("p2c,ttft", 2, "ttft") == [
        Entrant("p2c", 2), Entrant("ttft", 2), Entrant("ttft", 1),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'fastest': "):
        entrants_of("ttft,fastest", 3, "")
    with pytest.raises(ConfigError, match="one-replica = 'p2c'"):
        entrants_of("ttft", 3, "p2c")
    with pytest.raises(ConfigError, match="one-replica = 'ttft'"):
        entrants_of("ttft", 1, "ttft")


# --- the clients


@asynccontextmanager
async def node_with(fault: Fault | None = None) -> AsyncIterator[str]:
    """An ideal node: its URL."""
    config = NodeConfig(profile=IDEAL, seed=NODE_SEED, fault=fault or Fault())
    node = await serve_node(config)
    try:
        yield node.url
    finally:
        await node.close()


@asynccontextmanager
async def clients_of(url: str, clock: Clock | None = None) -> AsyncIterator[Clients]:
    clients = Clients([url], clock or Clock(1.0))
    try:
        yield clients
    finally:
        clients.close()


async def test_both_kinds_of_answers_come_back_whole() -> None:
    questions = LOAD.arrivals(1, 2)
    async with node_with() as url, clients_of(url) as clients:
        answers = [await clients.ask(question, 0.0, 0) for question in questions]
    assert {answer.question.heavy for answer in answers} == {True, False}
    assert [answer.fault for answer in answers] == [""] * len(answers)
    assert all(answer.whole for answer in answers)
    assert [len(a.token_s) for a in answers] == [q.answer_tokens for q in questions]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(mode="status", status=503), "status 503"),
        (Fault(mode="drop_before_headers"), "closed before the answer ended"),
        (Fault(mode="error_event", after_tokens=1), "error event"),
        (Fault(mode="drop_mid_stream", after_tokens=1), "closed before the answer ended"),
    ],
)
async def test_what_is_not_a_whole_answer_is_an_error(fault: Fault, reason: str) -> None:
    question = next(q for q in LOAD.arrivals(1, 5) if q.heavy)
    async with node_with(fault) as url, clients_of(url) as clients:
        answer = await clients.ask(question, 0.0, 0)
    assert (answer.whole, answer.fault) == (False, reason)


async def test_an_answer_of_another_length_is_an_error() -> None:
    question = replace(LOAD.arrivals(1, 5)[0], answer_tokens=9999)
    async with node_with() as url, clients_of(url) as clients:
        answer = await clients.ask(question, 0.0, 0)
    assert answer.fault.endswith("tokens, not 9999")


async def test_a_prompt_that_was_counted_differently_is_an_error() -> None:
    question = replace(LOAD.arrivals(1, 5)[0], prompt_tokens=1)
    async with node_with() as url, clients_of(url) as clients:
        answer = await clients.ask(question, 0.0, 0)
    assert answer.fault.startswith("usage (")


async def test_a_stream_without_its_last_event_is_an_error() -> None:
    choice = {"delta": {"content": "word"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": LIGHT.prompt_tokens, "completion_tokens": LIGHT.answer_tokens}
    event = b"data: %b\n\n" % orjson.dumps({"choices": [choice], "usage": usage})

    async def ask(body: bytes) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(LIGHT.body)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with clients_of(url) as clients:
                return (await clients.ask(LIGHT, 0.0, 0)).fault

    assert await ask(event + b"data: [DONE]\n\n") == ""
    assert await ask(event) == "no end of the stream"
    assert await ask(event.replace(b'"stop"', b"null") + b"data: [DONE]\n\n") == (
        "no end of the stream"
    )


async def test_nobody_listening_is_an_error() -> None:
    async with node_with() as url:
        pass
    async with clients_of(url) as clients:
        answer = await clients.ask(LIGHT, 0.0, 0)
    assert answer.fault == "connect"


async def test_a_late_client_does_not_flatter_the_time_to_first_token() -> None:
    question = LOAD.arrivals(1, 5)[0]
    async with node_with() as url, clients_of(url) as clients:
        answer = await clients.ask(question, -100.0, 0)
    assert answer.first_s is not None
    assert answer.first_s - answer.due_s > 100


async def test_arrivals_wait_for_no_answer_and_none_is_forgotten() -> None:
    questions = [replace(question, due_s=0.0) for question in LOAD.arrivals(1, 2)]
    async with node_with(Fault(mode="hang")) as url, clients_of(url) as clients:
        sending = asyncio.create_task(open_loop(clients, Clock(1.0), questions))
        while len(clients.answers) < len(questions):  # noqa: ASYNC110 - a list, no event
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
    assert len(clients.answers) == len(questions) > 10
    assert [answer.due_s for answer in clients.answers] == [0.0] * len(questions)
    assert not any(answer.whole or answer.fault for answer in clients.answers)


async def test_clients_of_the_closed_loop_ask_one_after_the_other() -> None:
    load, clock = loads_of("closed")[0], Clock(1.0)
    async with node_with() as url, clients_of(url, clock) as clients:
        await closed_loop(clients, clock, load, 1, 0.1)
    assert len(clients.answers) >= load.clients
    assert all(answer.whole for answer in clients.answers)
    mine = {question.body for question in islice(load.of_client(1, 0), 100)}
    own = [answer for answer in clients.answers if answer.question.body in mine]
    for answer, following in pairwise(own):
        assert answer.token_s[-1] < following.due_s


# --- what is printed


def rows() -> list[Row]:
    """Two policies and one of them on one replica, two seeds."""
    slow = Entrant("round_robin", 3)
    return [
        row_of(run_of(answered(5.0, 5.0 + ttft_s), entrant=entrant, seed=seed), "xeon")
        for seed in (1, 2)
        for entrant, ttft_s in ((slow, 0.4), (TTFT, 0.1), (Entrant("ttft", 1), 0.08))
    ]


def test_verdicts_say_who_is_before_whom_and_what_more_replicas_cost() -> None:
    assert verdicts(rows()) == [
        "mean: ttft < round_robin, in 2 of 2 seeds",
        "P99: ttft < round_robin, in 2 of 2 seeds",
        "ttft, 3 replicas instead of 1: mean TTFT +25.0%, P99 TTFT +25.0%",
    ]


def test_a_rank_that_is_a_lower_bound_says_so() -> None:
    unheard = [row_of(run_of(answered(5.0, None), entrant=Entrant("p2c", 3)), "xeon")]
    assert verdicts([*rows()[:2], *unheard])[0].startswith(
        "mean: ttft < round_robin < p2c (at least), "
    )


def test_json_has_a_row_for_each_entrant_and_each_seed() -> None:
    report = json.loads(as_json(rows(), [LOAD], seeds=[1, 2], seconds=20, scale=1.0))
    assert [(row["policy"], row["replicas"]) for row in report["rows"]] == [
        ("round_robin", 3), ("ttft", 3), ("ttft", 1),
    ]  # fmt: skip
    assert len(report["by_seed"]) == 6
    assert report["rows"][1]["mean_ttft_ms"] == pytest.approx(100)
    assert set(report["published"]) == {"round_robin", "least_conn", "ttft"}


def test_a_document_shows_the_published_figures_beside_the_closed_loop_only() -> None:
    closed = loads_of("closed")[0]
    here = [replace(row, load="closed") for row in rows()]
    shown = as_markdown([*here, *rows()], [closed, LOAD], "seeds 1, 2")
    first, second = shown.split("**Open loop", 1)
    assert "400.0 (184.2)" in first
    assert "100.0 (41.5)" in first
    assert "(184.2)" not in second
    assert CANNOT_MATCH in second


def test_lower_bounds_and_doubts_are_shown() -> None:
    doubtful = row_of(run_of(answered(5.0, None), trust=replace(FINE, lag_p99_ms=50)), "xeon")
    shown = as_markdown([doubtful], [LOAD], "seeds 1")
    assert ">= 35000.0" in shown
    assert shown.count("| NO |") == 1
