"""The OpenAI SDK against a replica: what clients really send, and what they make of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from app.admission.keys import hash_key
from app.lab.node import NodeConfig
from app.lab.profiles import IDEAL
from tests.support.fleet import CHAT, MODEL, NO_TLS, Fleet, Nodes, chat, plain_http

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai.types.chat import ChatCompletionMessageParam

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
KEY, NARROW = "sk-one", "sk-two"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """One open replica over two nodes that answer at once."""
    models = (MODEL, "embed")
    with (
        Nodes(
            n1=NodeConfig(profile=IDEAL, models=models), n2=NodeConfig(profile=IDEAL, models=models)
        ) as nodes,
        Fleet(nodes.settings(), replicas=1, aliases={"gpt-4o-mini": MODEL}) as started,
    ):
        yield started
        started.wait_settled()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Fleet]:
    """One replica that wants a key; the node wants its own."""
    node = NodeConfig(profile=IDEAL, models=(MODEL, "embed"), api_key="node-secret")
    keys = [
        {"name": "one", "hash": hash_key(KEY)},
        {"name": "two", "hash": hash_key(NARROW), "models": ["embed"]},
    ]
    with (
        Nodes(n1=node) as nodes,
        Fleet(
            nodes.settings(n1={"api_key_env": "NODE_KEY"}),
            replicas=1,
            keys=keys,
            environment={"NODE_KEY": "node-secret"},
        ) as started,
    ):
        yield started
        started.wait_settled()


@pytest.fixture
def sdk(fleet: Fleet) -> Iterator[openai.OpenAI]:
    """A client of the open replica that never retries behind the test's back."""
    with client(fleet) as opened:
        yield opened


def client(fleet: Fleet, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{fleet.urls[0]}/v1",
        api_key=key,
        max_retries=0,
        timeout=20,
        http_client=openai.DefaultHttpxClient(trust_env=False, verify=NO_TLS),
    )


def test_a_whole_chat_answer_has_text_and_usage(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_a_streamed_chat_has_the_text_of_the_whole_answer(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=40)
    with sdk.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=40, stream=True
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_in_a_stream_comes_when_it_is_asked_for(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *_, last = stream
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 7


def test_the_stream_helper_of_the_sdk_accumulates_the_answer(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        done = [event for event in stream if event.type == "content.done"]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == done[0].content


def test_completions_whole_and_streamed_agree(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(model=MODEL, prompt="once upon", max_tokens=9)
    with sdk.completions.create(
        model=MODEL, prompt="once upon", max_tokens=9, stream=True
    ) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == whole.choices[0].text


def test_embeddings_of_two_texts_come_in_order_with_the_length_asked_for(
    sdk: openai.OpenAI,
) -> None:
    both = sdk.embeddings.create(model="embed", input=["a", "b"], dimensions=12)
    alone = sdk.embeddings.create(model="embed", input="b", dimensions=12)
    assert [row.index for row in both.data] == [0, 1]
    assert len(both.data[0].embedding) == 12
    assert both.data[1].embedding == pytest.approx(alone.data[0].embedding)
    assert both.data[0].embedding != both.data[1].embedding


def test_models_are_the_union_of_the_nodes_and_the_aliases(sdk: openai.OpenAI) -> None:
    assert sorted(model.id for model in sdk.models.list()) == [MODEL, "embed", "gpt-4o-mini"]
    assert sdk.models.retrieve(MODEL).object == "model"
    assert sdk.models.retrieve("gpt-4o-mini").id == "gpt-4o-mini"
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.models.retrieve("nobody/has-it")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found_and_says_so(sdk: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="nope", messages=HELLO, stream=stream)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "nope" in caught.value.message


def test_an_alias_is_served_by_its_model(sdk: openai.OpenAI) -> None:
    named = sdk.chat.completions.create(model="gpt-4o-mini", messages=HELLO, max_tokens=5)
    direct = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
    assert named.choices[0].message.content == direct.choices[0].message.content


def test_headers_name_the_request_the_node_and_the_attempts(sdk: openai.OpenAI) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-leaseway-node"] in {"n1", "n2"}
    assert raw.headers["x-leaseway-attempts"] == "1"
    assert raw.parse().choices[0].message.content


def test_a_request_without_an_id_is_given_one_of_its_own(sdk: openai.OpenAI) -> None:
    ids = set()
    for _ in range(3):
        answer = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        ids.add(answer._request_id)
    assert len(ids) == 3
    assert None not in ids


def test_an_error_carries_the_request_id_too(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(
            model="nope", messages=HELLO, extra_headers={"x-request-id": "mine-2"}
        )
    assert caught.value.request_id == "mine-2"


def test_the_nodes_own_refusal_reaches_the_client_unchanged(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=-1)
    assert caught.value.param == "max_tokens"


async def test_the_async_client_streams_and_asks_at_once(fleet: Fleet) -> None:
    direct = openai.DefaultAsyncHttpxClient(trust_env=False, verify=NO_TLS)
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.urls[0]}/v1", api_key="unused", max_retries=0, http_client=direct
    ) as sdk:
        whole = await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=11)
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=11, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content
        vectors = await sdk.embeddings.create(model="embed", input="x", dimensions=4)
        assert len(vectors.data[0].embedding) == 4
        assert [model.id async for model in sdk.models.list()]
        with pytest.raises(openai.NotFoundError):
            await sdk.completions.create(model="nope", prompt="x")


def test_leaving_a_stream_in_the_middle_gives_the_lease_back(fleet: Fleet) -> None:
    with client(fleet) as sdk:
        stream = sdk.completions.create(
            model=MODEL, prompt="long", max_tokens=1_000_000, stream=True
        )
        next(stream)
        assert fleet.books().held == 1
        stream.close()
    fleet.wait_settled()


def test_the_right_key_is_served_and_the_node_gets_its_own(guarded: Fleet) -> None:
    with client(guarded, KEY) as sdk:  # the node would refuse the client's key
        assert sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2).choices
        assert [model.id for model in sdk.models.list()] == [MODEL, "embed"]


@pytest.mark.parametrize("key", ["sk-wrong", "node-secret", hash_key(KEY)])
def test_a_wrong_key_is_an_authentication_error(guarded: Fleet, key: str) -> None:
    with client(guarded, key) as sdk:
        with pytest.raises(openai.AuthenticationError) as caught:
            sdk.chat.completions.create(model=MODEL, messages=HELLO)
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            sdk.models.list()


def test_a_key_may_use_and_see_its_own_models_only(guarded: Fleet) -> None:
    with client(guarded, NARROW) as sdk:
        assert sdk.embeddings.create(model="embed", input="x").data
        assert [model.id for model in sdk.models.list()] == ["embed"]
        with pytest.raises(openai.PermissionDeniedError) as caught:
            sdk.chat.completions.create(model=MODEL, messages=HELLO)
        assert caught.value.code == "model_not_allowed"


def test_no_key_at_all_is_refused_before_the_body_is_looked_at(guarded: Fleet) -> None:
    with plain_http(guarded.urls[0]) as http:
        answer = http.post(CHAT, json=chat())
    assert answer.status_code == 401
    assert answer.json()["error"]["message"] == "No API key provided."
