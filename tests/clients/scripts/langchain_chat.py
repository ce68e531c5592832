"""LangChain's ChatOpenAI and OpenAIEmbeddings."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from tests.clients.scripts.report import HELLO, MODEL, WEATHER, raised, report, target

URL, KEY = target()
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


class Weather(BaseModel):
    """What a structured answer is asked to fill in."""

    city: str
    days: int


def model(**more: Any) -> ChatOpenAI:
    """A chat model as an application makes it."""
    return ChatOpenAI(
        model=more.pop("model", MODEL),
        base_url=f"{URL}/v1",
        api_key=SecretStr(KEY),
        max_retries=0,
        timeout=60,
        **more,
    )


def invoke() -> Any:
    answer = model(max_tokens=15).invoke(HELLO)
    return [answer.content, answer.response_metadata["finish_reason"], answer.usage_metadata]


def stream() -> Any:
    return [chunk.content for chunk in model(max_tokens=15).stream(HELLO)]


def stream_with_usage() -> Any:
    whole: Any = None
    for chunk in model(max_tokens=15, stream_usage=True).stream(HELLO):
        whole = chunk if whole is None else whole + chunk
    return [whole.content, whole.usage_metadata]


async def astream() -> Any:
    return [chunk.content async for chunk in model(max_tokens=15).astream(HELLO)]


def batch() -> Any:
    questions: list[Any] = [f"question {number}" for number in range(6)]
    return [answer.content for answer in model(max_tokens=5).batch(questions)]


def tools() -> Any:
    answer = model().bind_tools([TOOL]).invoke(HELLO)
    assert isinstance(answer, AIMessage)
    return answer.tool_calls


def tools_streamed() -> Any:
    whole: Any = None
    for chunk in model().bind_tools([TOOL]).stream(HELLO):
        whole = chunk if whole is None else whole + chunk
    return whole.tool_calls


def tool_result() -> Any:
    able = model(max_tokens=500).bind_tools([TOOL])
    first = able.invoke(HELLO)
    assert isinstance(first, AIMessage)
    result = ToolMessage("rain", tool_call_id=first.tool_calls[0]["id"])
    return able.invoke([HumanMessage(HELLO), first, result]).content


def structured() -> Any:
    answer = model().with_structured_output(Weather).invoke(HELLO)
    assert isinstance(answer, Weather)
    return answer.model_dump()


def responses() -> Any:
    return model(use_responses_api=True, max_tokens=15).invoke(HELLO).text


def responses_streamed() -> Any:
    return [chunk.text for chunk in model(use_responses_api=True, max_tokens=15).stream(HELLO)]


def embeddings() -> Any:
    maker = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key=SecretStr(KEY),
        dimensions=8,
        max_retries=0,
        check_embedding_ctx_length=False,  # or it cuts texts with a tokenizer from the internet
    )
    return [[round(number, 6) for number in row] for row in maker.embed_documents(["a", "b"])]


def unknown_model() -> Any:
    return raised(lambda: model(model="nobody-has-it").invoke(HELLO), openai.NotFoundError)


if __name__ == "__main__":
    report(
        "LangChain ChatOpenAI",
        "langchain-openai",
        {
            "invoke": invoke,
            "stream": stream,
            "stream with usage": stream_with_usage,
            "astream": astream,
            "batch": batch,
            "bind_tools, invoke": tools,
            "bind_tools, stream": tools_streamed,
            "bind_tools, second turn": tool_result,
            "with_structured_output": structured,
            "use_responses_api, invoke": responses,
            "use_responses_api, stream": responses_streamed,
            "OpenAIEmbeddings.embed_documents": embeddings,
            "error: unknown model": unknown_model,
        },
    )
