"""The OpenAI SDK for Python, asynchronous."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
from pydantic import BaseModel

from tests.clients.scripts.report import HELLO, MODEL, failure, report, target

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

URL, KEY = target()
SDK = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": HELLO}]
CROWD = 40


class Weather(BaseModel):
    """What a parse helper is asked to fill in."""

    city: str
    days: int


async def text_of(question: str, *, stream: bool) -> str:
    """Ask one question, streamed or not; the text of the answer."""
    turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    if not stream:
        whole = await SDK.chat.completions.create(model=MODEL, messages=turns, max_tokens=12)
        return whole.choices[0].message.content or ""
    chunks = await SDK.chat.completions.create(
        model=MODEL, messages=turns, max_tokens=12, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def models() -> Any:
    return sorted([model.id async for model in SDK.models.list()])


async def chat() -> Any:
    return await text_of(HELLO, stream=False)


async def chat_streamed() -> Any:
    return await text_of(HELLO, stream=True)


async def crowd() -> Any:
    """Many questions at once, half of them streamed: each gets its own answer."""
    return await asyncio.gather(
        *(text_of(f"question {number}", stream=bool(number % 2)) for number in range(CROWD))
    )


async def stream_helper() -> Any:
    async with SDK.chat.completions.stream(model=MODEL, messages=ASK) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    return [kinds, final.choices[0].message.content]


async def parse() -> Any:
    answer = await SDK.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather)
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    return parsed.model_dump()


async def stream_cancelled() -> Any:
    """The task that reads a stream is cancelled in the middle; the client goes on working."""
    seen: list[str] = []

    async def read() -> None:
        chunks = await SDK.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=1_000_000, stream=True
        )
        async for chunk in chunks:
            seen.append(chunk.choices[0].delta.content or "")
            if len(seen) == 3:
                raise asyncio.CancelledError

    try:
        await asyncio.create_task(read())
    except asyncio.CancelledError:
        return [seen, await text_of(HELLO, stream=False)]
    raise AssertionError("the stream ended by itself")


async def embeddings() -> Any:
    answer = await SDK.embeddings.create(model=MODEL, input="a", dimensions=8)
    return [round(number, 6) for number in answer.data[0].embedding]


async def response_streamed() -> Any:
    events = await SDK.responses.create(model=MODEL, input=HELLO, max_output_tokens=16, stream=True)
    return [event.type async for event in events]


async def unknown_model() -> Any:
    try:
        await SDK.completions.create(model="nobody-has-it", prompt=HELLO)
    except openai.NotFoundError as exc:
        return failure(exc)
    raise AssertionError("an unknown model answered")


if __name__ == "__main__":
    report(
        "OpenAI SDK (Python, async)",
        "openai",
        {
            "models.list": models,
            "chat.completions": chat,
            "chat.completions, stream": chat_streamed,
            f"chat.completions, {CROWD} at once": crowd,
            "chat.completions, stream helper": stream_helper,
            "chat.completions, parse": parse,
            "chat.completions, stream cancelled": stream_cancelled,
            "embeddings": embeddings,
            "responses, stream": response_streamed,
            "error: unknown model": unknown_model,
        },
    )
