"""Judges what clients saw. Every outcome is one of those below; all else is a violation.

| outcome | what the client saw |
| --- | --- |
| complete | the whole answer: text as the node makes it, one finish, `[DONE]`; or the whole JSON |
| error | a status >= 400 with an OpenAI error object, before any byte of an answer |
| stream_error | whole events of one answer, in order, then one error event; no finish, no `[DONE]` |
| aborted | the head and a true beginning of the answer; then the transfer broke off, visibly |
| reset | the connection was refused, closed or reset before any byte of an answer |
| left | the client itself went away |

An error is a violation too, unless one of these documented rules explains it. "In its life" is
from the request's first byte to its end; faults are those really in force, not as planned.

| rule | explains | when |
| --- | --- | --- |
| replica | any | the replica it spoke to was killed, stopped or ended in its life; one that got SIGTERM must still finish what was sent before it, within `server.drain_s` |
| node | stream_error, aborted | the node that served it had a fault in its life: no retry after the first byte |
| nodes | error | every node had a fault in its life, so all of `retries.max_attempts` may fail |
| circuit | error | as `nodes`, but some nodes had their fault shortly before (`RECOVERY_S`) and were seen unhealthy, open or cooling down (`Retry-After`) in its life (nobody sees the circuits of a replica without shared state: `ALONE_RECOVERY_S`) |
| capacity | error | as `circuit`, but some nodes were seen full in its life, or the replica, without shared state, carried as many requests as its shares of the remaining nodes' capacity |

A 404 for the model is never explained: what exists is no matter of what is up.
"""  # noqa: E501 - tables

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.lab.answers import answer_text
from app.lab.calls import parse_call
from tests.chaos.bench import ALONE_RECOVERY_S, CAPACITY, DRAIN_S, RECOVERY_S
from tests.chaos.schedule import NODES, REPLICAS
from tests.chaos.watch import WELL, CounterWatch, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.clients import Exchange
    from tests.chaos.truth import Truth

_SEED = 1  # of the fake nodes
# A replica that says that it is alone has this long to find back (a frozen one cannot look).
_BACK_S = 5.0
_PICTURE_S = 6.0  # age of what a replica without shared state remembers of it, at most


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request came to. ``reason`` says what is wrong with a violation."""

    kind: str
    reason: str = ""

    @property
    def is_error(self) -> bool:
        """Whether it is an honest error that needs a rule."""
        return self.kind in {"error", "stream_error", "aborted", "reset"}


class _Wrong(Exception):  # noqa: N818 - what an answer is
    """The answer is none that may be given."""


def classify(exchange: Exchange) -> Outcome:
    """The outcome of a request, by what its client has seen."""
    if exchange.hung:
        return Outcome("hang", "no end before the deadline")
    try:
        if exchange.left:
            if exchange.status == 200 and exchange.stream:
                _read_events(exchange, cut=True)
            return Outcome("left")
        if exchange.broken.startswith(("malformed", "bytes after")):
            raise _Wrong(exchange.broken)
        if not exchange.status:
            return Outcome("reset")
        if exchange.status >= 400:
            return _read_error(exchange)
        return _read_events(exchange, cut=False) if exchange.stream else _read_whole(exchange)
    except _Wrong as exc:
        return Outcome("garbage", str(exc))


def _expected(exchange: Exchange) -> str:
    call = parse_call("chat", exchange.body, seed=_SEED, models=("demo",))
    return answer_text(call.digest, call.max_tokens or 0)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as exc:
        raise _Wrong(f"no JSON: {data[:80]!r}") from exc
    if not isinstance(fields, dict):
        raise _Wrong(f"no JSON object: {data[:80]!r}")
    return fields


def _read_error(exchange: Exchange) -> Outcome:
    if not exchange.complete:
        return Outcome("aborted")
    error = _parsed(exchange.answer).get("error")
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise _Wrong(f"status {exchange.status} without an error object")
    return Outcome("error", str(error.get("code")))


def _read_whole(exchange: Exchange) -> Outcome:
    if not exchange.complete:
        return Outcome("aborted")
    fields = _parsed(exchange.answer)
    if "error" in fields:
        raise _Wrong("status 200 with an error object")
    choice = fields["choices"][0]
    if choice["message"]["content"] != _expected(exchange):
        raise _Wrong("another text than the node makes")
    if choice["finish_reason"] != "length":
        raise _Wrong(f"finish_reason {choice['finish_reason']!r}")
    return Outcome("complete")


def _read_events(exchange: Exchange, *, cut: bool) -> Outcome:
    """``cut``: the end is not looked at, since the client did not wait for it."""
    *events, rest = exchange.answer.split(b"\n\n")
    text, ids = "", set()
    endings: list[str] = []
    for event in events:
        if endings and endings[-1] in {"[DONE]", "error"}:
            raise _Wrong(f"an event after {endings[-1]}: {event[:80]!r}")
        if not event.startswith(b"data: "):
            raise _Wrong(f"no event: {event[:80]!r}")
        if event == b"data: [DONE]":
            endings.append("[DONE]")
            continue
        fields = _parsed(event.removeprefix(b"data: "))
        if "error" in fields:
            endings.append("error")
            continue
        if endings:
            raise _Wrong(f"content after {endings[-1]}: {event[:80]!r}")
        ids.add(fields["id"])
        choice = fields["choices"][0]
        text += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            endings.append(choice["finish_reason"])
    return _judge_events(exchange, text, ids, endings, rest, cut=cut)


def _judge_events(
    exchange: Exchange, text: str, ids: set[str], endings: list[str], rest: bytes, *, cut: bool
) -> Outcome:
    expected = _expected(exchange)
    whole = endings == ["length", "[DONE]"]
    if len(ids) > 1:
        raise _Wrong(f"spliced from {sorted(ids)}")
    if not expected.startswith(text) or ("length" in endings and text != expected):
        raise _Wrong("another text than the node makes")
    if "error" in endings and len(endings) > 1:
        raise _Wrong(f"ends with {endings}")
    if cut or not exchange.complete:
        return Outcome("aborted")
    if rest:
        raise _Wrong(f"ends inside an event: {rest[:80]!r}")
    if whole:
        return Outcome("complete")
    if endings == ["error"]:
        return Outcome("stream_error")
    raise _Wrong(f"looks complete, but ends with {endings or 'nothing'}")


def explain(exchange: Exchange, outcome: Outcome, truth: Truth, watch: CounterWatch) -> str:
    """The rule that explains an error; "" when none does."""
    start, end = exchange.started, exchange.ended
    # After the first byte the node decides; a replica that ends kindly has to wait for it.
    served_by = exchange.headers.get("x-leaseway-node", "")
    if outcome.kind in {"stream_error", "aborted"} and served_by in truth.faulty_nodes(start, end):
        return "node"
    if _replica_explains(exchange, outcome, truth):
        return "replica"
    if outcome.kind != "error" or outcome.reason == "model_not_found":
        return ""
    left = set(NODES) - truth.faulty_nodes(start, end)
    if not left:
        return "nodes"
    samples = watch.between(start - 0.1, end + 0.1)  # a refusal takes less than a look's period
    away = truth.redis_away(start - 1.0, end, exchange.replica) or (
        "x-leaseway-degraded" in exchange.headers
        and truth.redis_away(start - _BACK_S, end, exchange.replica)
    )
    recovering = truth.faulty_nodes(start - RECOVERY_S, end)
    unseen = truth.faulty_nodes(start - ALONE_RECOVERY_S, end) if away else set()
    left -= {n for n in left & recovering if n in unseen or _seen_not_well(samples, n)}
    if not left:
        return "circuit"
    left -= {n for n in left if any(s.active.get(n, 0) >= CAPACITY for s in samples)}
    # Alone it may use its share of each node; what it carries must fill them all.
    if away and exchange.neighbours >= len(left) * _share(watch, start, end):
        return "capacity"
    return "" if left else "capacity"


def _share(watch: CounterWatch, start: float, end: float) -> int:
    """A replica's share of a node's capacity; dead replicas count until they are reaped."""
    listed = [len(sample.replicas) for sample in watch.between(start - _PICTURE_S, end)]
    return CAPACITY // max([len(REPLICAS), *listed])


def _replica_explains(exchange: Exchange, outcome: Outcome, truth: Truth) -> bool:
    windows = truth.during("replica", exchange.started, exchange.ended, exchange.replica)
    if outcome.kind in {"reset", "aborted"} and {w.kind for w in windows} == {"replica.term"}:
        told = windows[0].start
        finished_late = exchange.ended - told > DRAIN_S
        return exchange.sent == 0 or exchange.sent > told or finished_late
    return bool(windows)


def _seen_not_well(samples: Sequence[Sample], node: str) -> bool:
    return any(sample.nodes.get(node) != WELL for sample in samples)
