"""Estimates through a replica: what nodes say that requests used is what the next is taken for."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from app.admission.keys import hash_key
from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, post
from tests.support.rawnode import DONE_EVENT, RawNode, event, events, hang, json_answer, sse_answer
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER = (Path(__file__).parents[2] / "lua" / "acquire.lua").read_text(encoding="utf-8")
KEYS = {"sk-a": "team-a", "sk-b": "team-b"}
PROMPT = "words " * 1000  # 6000 bytes


class Bench:
    """One replica over one node that serves one model for each test."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        server = stack.enter_context(ValkeyServer())
        self.valkey: Any = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        self.node = stack.enter_context(RawNode(models=("one", "two", "three")))
        settings = small_settings([self.node], circuit={"failure_threshold": 1000})
        named = [{"name": name, "hash": hash_key(secret)} for secret, name in KEYS.items()]
        self.gw = stack.enter_context(Gateway({**settings, "keys": named}, server.url))

    def ask(
        self, key: str, fields: dict[str, Any], path: str = "/v1/chat/completions"
    ) -> RawClient:
        answer = ask(self.gw.port, as_sent(key, fields, path))
        assert answer.status == 200
        return answer

    def taken_for(
        self, key: str, fields: dict[str, Any], path: str = "/v1/chat/completions"
    ) -> tuple[int, int]:
        """(prompt tokens, output tokens) that a request is leased with."""
        self.node.script = hang()
        score = state.KEYS.score(fields["model"])
        with self.valkey.monitor() as monitor, RawClient(self.gw.port) as client:
            client.send(as_sent(key, fields, path))
            for command in monitor.listen():
                words = command["command"].split(" ")
                if words[0] == "EVALSHA" and words[3] == score:
                    break
            wait_until(lambda: self.node.open == 1, what="at the node")
            client.reset()
        wait_until(lambda: state.unloaded(self.valkey), within_s=5, what="load = 0")
        arguments = words[3 + int(words[2]) :]
        return arguments_of(arguments, "size"), arguments_of(arguments, "output")


def arguments_of(arguments: list[str], name: str) -> int:
    found = re.search(rf"^-- ARGV\[(\d+)\] {name} ", HEADER, re.MULTILINE)
    assert found
    return int(arguments[int(found[1]) - 1])


def as_sent(key: str, fields: dict[str, Any], path: str) -> bytes:
    body = json.dumps(fields).encode()
    return post(path, body).replace(
        b"\r\n\r\n", b"\r\nauthorization: Bearer %b\r\n\r\n" % key.encode(), 1
    )


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": PROMPT}], **more}


def whole(prompt: int, output: int) -> Any:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    used = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return json_answer(body={"object": "chat.completion", "choices": [choice], "usage": used})


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        yield Bench(stack)


def test_before_the_first_answer_it_is_the_prior(bench: Bench) -> None:
    prompt, output = bench.taken_for("sk-a", chat("one"))
    assert 1500 <= prompt <= 1520  # 4 bytes a token
    assert output == 100
    assert bench.taken_for("sk-a", chat("one", max_tokens=7))[1] == 7


def test_then_it_is_what_nodes_have_said(bench: Bench) -> None:
    bench.node.script = whole(3000, 900)
    for _ in range(120):
        bench.ask("sk-a", chat("two"))
    prompt, output = bench.taken_for("sk-a", chat("two"))
    assert 2900 <= prompt <= 3020
    assert 890 <= output <= 900
    # What the others ask has the same tokens, and answers of its own.
    other, expected = bench.taken_for("sk-b", chat("two"))
    assert (other, expected) == (prompt, 100)
    assert bench.taken_for("sk-a", chat("two", max_completion_tokens=50))[1] == 50
    # Nothing is generated: no output, whatever answers are like.
    assert bench.taken_for("sk-a", {"model": "two", "input": PROMPT}, "/v1/embeddings")[1] == 0


def test_streams_teach_with_or_without_usage_and_only_to_their_end(bench: Bench) -> None:
    used = {"choices": [], "usage": {"prompt_tokens": 2000, "completion_tokens": 400}}
    told = sse_answer([*events(5)[:-1], event(used), DONE_EVENT])
    for script in (told, sse_answer(events(400))):
        bench.node.script = script
        for _ in range(60):
            bench.ask("sk-a", chat("three", stream=True))
    prompt, output = bench.taken_for("sk-a", chat("three"))
    assert 1800 <= prompt <= 2010
    assert 370 <= output <= 401
    bench.node.script = sse_answer(events(5)[:3], chunked=False)  # breaks off
    for _ in range(4):
        ask(bench.gw.port, as_sent("sk-a", chat("three", stream=True), "/v1/chat/completions"))
    assert bench.taken_for("sk-a", chat("three"))[1] == output
