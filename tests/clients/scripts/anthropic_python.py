"""The Anthropic SDK for Python, against /v1/messages. Its key goes out as x-api-key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
from pydantic import BaseModel

from tests.clients.scripts.report import HELLO, MODEL, WEATHER, raised, report, target

if TYPE_CHECKING:
    from anthropic.types import MessageParam, ToolParam

URL, KEY = target()
SDK = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
ASYNC = anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
ASK: list[MessageParam] = [{"role": "user", "content": HELLO}]
TOOL: ToolParam = {"name": "weather", "description": "the weather", "input_schema": WEATHER}


class Weather(BaseModel):
    """What a parse helper is asked to fill in."""

    city: str
    days: int


def text_of(message: Any) -> str:
    """The text of a message that has nothing else."""
    (block,) = message.content
    assert block.type == "text"
    return str(block.text)


def message() -> Any:
    answer = SDK.messages.create(model=MODEL, messages=ASK, max_tokens=20)
    used = [answer.usage.input_tokens, answer.usage.output_tokens]
    return [text_of(answer), answer.stop_reason, used]


def message_with_system() -> Any:
    answer = SDK.messages.create(model=MODEL, system="Be brief.", messages=ASK, max_tokens=5)
    return text_of(answer)


def message_streamed() -> Any:
    stream = SDK.messages.create(model=MODEL, messages=ASK, max_tokens=8, stream=True)
    kept: list[Any] = []
    for event in stream:
        if event.type == "message_start":
            kept.append([event.type, event.message.role, event.message.usage.input_tokens])
        else:
            kept.append(event.to_dict())
    return kept


def stream_helper() -> Any:
    with SDK.messages.stream(model=MODEL, messages=ASK, max_tokens=20) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    return [texts, text_of(final), final.stop_reason, final.usage.output_tokens]


def stream_left() -> Any:
    with SDK.messages.stream(model=MODEL, messages=ASK, max_tokens=1_000_000) as stream:
        texts = stream.text_stream
        return [next(texts) for _ in range(3)]


def tools() -> Any:
    answer = SDK.messages.create(model=MODEL, messages=ASK, max_tokens=500, tools=[TOOL])
    (block,) = answer.content
    assert block.type == "tool_use"
    return [answer.stop_reason, block.id, block.name, block.input]


def tools_streamed() -> Any:
    with SDK.messages.stream(model=MODEL, messages=ASK, max_tokens=500, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    (block,) = final.content
    assert block.type == "tool_use"
    return [kinds, final.stop_reason, block.id, block.name, block.input]


def tool_result() -> Any:
    first = SDK.messages.create(model=MODEL, messages=ASK, max_tokens=500, tools=[TOOL])
    (block,) = first.content
    assert block.type == "tool_use"
    turns: list[MessageParam] = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"}],
        },
    ]
    answer = SDK.messages.create(model=MODEL, messages=turns, max_tokens=9, tools=[TOOL])
    return [text_of(answer), answer.stop_reason]


def parse() -> Any:
    answer = SDK.messages.parse(model=MODEL, messages=ASK, max_tokens=500, output_format=Weather)
    assert answer.parsed_output is not None
    return answer.parsed_output.model_dump()


async def asynchronous() -> Any:
    async with ASYNC.messages.stream(model=MODEL, messages=ASK, max_tokens=20) as stream:
        return [
            [text async for text in stream.text_stream],
            text_of(await stream.get_final_message()),
        ]


def unknown_model() -> Any:
    def ask() -> Any:
        return SDK.messages.create(model="nobody-has-it", messages=ASK, max_tokens=5)

    return kind_of_error(raised(ask, anthropic.NotFoundError), ask)


def bad_request() -> Any:
    def ask() -> Any:
        return SDK.messages.create(model=MODEL, messages=ASK, max_tokens=-1)

    return kind_of_error(raised(ask, anthropic.BadRequestError), ask)


def wrong_key() -> Any:
    stranger = SDK.with_options(api_key="sk-wrong")

    def ask() -> Any:
        return stranger.messages.create(model=MODEL, messages=ASK, max_tokens=5)

    return kind_of_error(raised(ask, anthropic.AuthenticationError), ask)


def kind_of_error(found: dict[str, Any], ask: Any) -> Any:
    """What was raised, with the body's shape: Anthropic's own, as its other tools expect."""
    try:
        ask()
    except anthropic.APIStatusError as exc:
        body: Any = exc.body
        return {**found, "body": [body["type"], body["error"]["type"], sorted(body["error"])]}
    return found


if __name__ == "__main__":
    report(
        "Anthropic SDK (Python)",
        "anthropic",
        {
            "messages": message,
            "messages, system prompt": message_with_system,
            "messages, stream": message_streamed,
            "messages, stream helper": stream_helper,
            "messages, stream left after three texts": stream_left,
            "messages, tools": tools,
            "messages, tools, stream": tools_streamed,
            "messages, tools, second turn": tool_result,
            "messages, parse": parse,
            "messages, async stream": asynchronous,
            "error: unknown model": unknown_model,
            "error: bad parameter": bad_request,
            "error: wrong key": wrong_key,
        },
    )
