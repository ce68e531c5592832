"""LiteLLM's SDK as a client: providers openai, anthropic and hosted_vllm."""

from __future__ import annotations

import io
from typing import Any

import litellm

from tests.clients.scripts.report import HELLO, MODEL, WEATHER, raised, report, target

URL, KEY = target()
OPENAI = {"api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "timeout": 60}
ANTHROPIC = {**OPENAI, "api_base": URL}
ASK = [{"role": "user", "content": HELLO}]
litellm.suppress_debug_info = True  # it would go to stdout, between the lines
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def chat() -> Any:
    answer: Any = litellm.completion(f"openai/{MODEL}", ASK, max_tokens=20, **OPENAI)
    choice = answer.choices[0]
    return [choice.message.content, choice.finish_reason, answer.usage.completion_tokens]


def chat_streamed() -> Any:
    chunks: Any = litellm.completion(f"openai/{MODEL}", ASK, max_tokens=20, stream=True, **OPENAI)
    return [chunk.choices[0].delta.content for chunk in chunks]


async def chat_async_streamed() -> Any:
    chunks: Any = await litellm.acompletion(
        f"openai/{MODEL}", ASK, max_tokens=20, stream=True, **OPENAI
    )
    return [chunk.choices[0].delta.content async for chunk in chunks]


def tools() -> Any:
    answer: Any = litellm.completion(f"openai/{MODEL}", ASK, tools=[TOOL], **OPENAI)
    (call,) = answer.choices[0].message.tool_calls
    return [call.id, call.function.name, call.function.arguments]


def text_completion() -> Any:
    answer: Any = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt=HELLO, max_tokens=12, **OPENAI
    )
    return answer.choices[0].text


def vllm_streamed() -> Any:
    chunks: Any = litellm.completion(
        f"hosted_vllm/{MODEL}", ASK, max_tokens=20, stream=True, **OPENAI
    )
    return [chunk.choices[0].delta.content for chunk in chunks]


def messages() -> Any:
    answer: Any = litellm.completion(f"anthropic/{MODEL}", ASK, max_tokens=20, **ANTHROPIC)
    choice = answer.choices[0]
    return [choice.message.content, choice.finish_reason, answer.usage.completion_tokens]


def messages_streamed() -> Any:
    chunks: Any = litellm.completion(
        f"anthropic/{MODEL}", ASK, max_tokens=20, stream=True, **ANTHROPIC
    )
    return [chunk.choices[0].delta.content for chunk in chunks]


def responses() -> Any:
    answer: Any = litellm.responses(
        input=HELLO, model=f"openai/{MODEL}", max_output_tokens=16, **OPENAI
    )
    return [answer.status, answer.output[0].content[0].text]


def embeddings() -> Any:
    answer: Any = litellm.embedding(f"openai/{MODEL}", input=["a"], **OPENAI)
    return [round(number, 6) for number in answer.data[0]["embedding"]]


def transcription() -> Any:
    file = io.BytesIO(bytes(range(256)) * 100)
    file.name = "speech.wav"
    answer: Any = litellm.transcription(f"openai/{MODEL}", file=file, **OPENAI)
    return answer.text


def rerank() -> Any:
    answer: Any = litellm.rerank(
        model=f"hosted_vllm/{MODEL}",
        query="a river",
        documents=["one", "two", "three"],
        api_base=f"{URL}/v1",
        api_key=KEY,
    )
    return [[row["index"], row["relevance_score"]] for row in answer.results]


def unknown_model() -> Any:
    return raised(
        lambda: litellm.completion("openai/nobody-has-it", ASK, **OPENAI), litellm.NotFoundError
    )


if __name__ == "__main__":
    report(
        "LiteLLM SDK",
        "litellm",
        {
            "completion": chat,
            "completion, stream": chat_streamed,
            "acompletion, stream": chat_async_streamed,
            "completion, tools": tools,
            "text_completion": text_completion,
            "completion, provider hosted_vllm, stream": vllm_streamed,
            "completion, provider anthropic": messages,
            "completion, provider anthropic, stream": messages_streamed,
            "responses": responses,
            "embedding": embeddings,
            "transcription": transcription,
            "rerank": rerank,
            "error: unknown model": unknown_model,
        },
    )
