"""The OpenAI SDK for Python, synchronous."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import openai
from pydantic import BaseModel

from tests.clients.scripts.report import HELLO, MODEL, WEATHER, digest, raised, report, target

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
    from openai.types.responses import ToolParam

URL, KEY = target()
SDK = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": HELLO}]
TOOL: ChatCompletionToolUnionParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": WEATHER, "strict": True},
}
RESPONSE_TOOL: ToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": WEATHER,
    "strict": True,
}
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAAC"
SOUND = bytes(range(256)) * 200


class Weather(BaseModel):
    """What a parse helper is asked to fill in."""

    city: str
    days: int


def models() -> Any:
    return sorted(model.id for model in SDK.models.list())


def model() -> Any:
    return SDK.models.retrieve(MODEL).id


def chat() -> Any:
    answer = SDK.chat.completions.create(model=MODEL, messages=ASK, max_tokens=20, seed=7)
    assert answer.usage is not None
    return {
        "text": answer.choices[0].message.content,
        "finish": answer.choices[0].finish_reason,
        "usage": answer.usage.to_dict(),
    }


def chat_streamed() -> Any:
    chunks = list(
        SDK.chat.completions.create(model=MODEL, messages=ASK, max_tokens=20, stream=True)
    )
    return {
        "events": len(chunks),
        "texts": [chunk.choices[0].delta.content for chunk in chunks],
        "finish": chunks[-1].choices[0].finish_reason,
        "usage": [chunk.usage for chunk in chunks if chunk.usage],
    }


def chat_streamed_with_usage() -> Any:
    *chunks, last = SDK.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert last.usage is not None
    return {"events": len(chunks), "choices": last.choices, "usage": last.usage.to_dict()}


def chat_stream_helper() -> Any:
    with SDK.chat.completions.stream(model=MODEL, messages=ASK) as stream:
        kinds = [event.type for event in stream]
        return {"kinds": kinds, "text": stream.get_final_completion().choices[0].message.content}


def chat_stream_left() -> Any:
    stream = SDK.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=1_000_000, stream=True
    )
    texts = [next(stream).choices[0].delta.content for _ in range(3)]
    stream.close()
    return texts


def chat_image() -> Any:
    parts: list[Any] = [
        {"type": "text", "text": HELLO},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]
    answer = SDK.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=5
    )
    return answer.choices[0].message.content


def chat_tools() -> Any:
    answer = SDK.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    return [answer.choices[0].finish_reason, call.id, call.function.name, call.function.arguments]


def chat_tools_streamed() -> Any:
    with SDK.chat.completions.stream(model=MODEL, messages=ASK, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    return [kinds, call.id, call.function.name, call.function.parsed_arguments]


def chat_tool_result() -> Any:
    first = SDK.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL])
    (call,) = first.choices[0].message.tool_calls or []
    turns: list[Any] = [
        *ASK,
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    answer = SDK.chat.completions.create(
        model=MODEL, messages=turns, tools=[TOOL], max_completion_tokens=9
    )
    return [answer.choices[0].finish_reason, answer.choices[0].message.content]


def chat_parse() -> Any:
    answer = SDK.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather)
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    return parsed.model_dump()


def chat_parse_streamed() -> Any:
    with SDK.chat.completions.stream(model=MODEL, messages=ASK, response_format=Weather) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert parsed is not None
    return parsed.model_dump()


def completion() -> Any:
    answer = SDK.completions.create(model=MODEL, prompt=HELLO, max_tokens=12)
    return [answer.choices[0].text, answer.choices[0].finish_reason]


def completion_streamed() -> Any:
    stream = SDK.completions.create(model=MODEL, prompt=HELLO, max_tokens=12, stream=True)
    return [chunk.choices[0].text for chunk in stream]


def embeddings() -> Any:
    """The SDK asks for base64 by itself and decodes it."""
    answer = SDK.embeddings.create(model=MODEL, input=["a", "b"], dimensions=8)
    return [[round(number, 6) for number in row.embedding] for row in answer.data]


def embeddings_float() -> Any:
    answer = SDK.embeddings.create(model=MODEL, input="a", dimensions=8, encoding_format="float")
    return [answer.data[0].embedding, answer.usage.to_dict()]


def response() -> Any:
    answer = SDK.responses.create(model=MODEL, input=HELLO, max_output_tokens=16)
    assert answer.usage is not None
    return [answer.status, answer.output_text, answer.usage.output_tokens]


def response_streamed() -> Any:
    stream = SDK.responses.create(model=MODEL, input=HELLO, max_output_tokens=16, stream=True)
    events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return [[event.type for event in events], text]


def response_stream_helper() -> Any:
    with SDK.responses.stream(model=MODEL, input=HELLO) as stream:
        stream.until_done()
        final = stream.get_final_response()
    return [final.status, final.output_text]


def response_tools() -> Any:
    answer = SDK.responses.create(model=MODEL, input=HELLO, tools=[RESPONSE_TOOL])
    (call,) = answer.output
    assert call.type == "function_call"
    return [call.call_id, call.name, call.arguments]


def response_tools_streamed() -> Any:
    with SDK.responses.stream(model=MODEL, input=HELLO, tools=[RESPONSE_TOOL]) as stream:
        stream.until_done()
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    return [call.call_id, call.name, call.arguments]


def response_parse() -> Any:
    parsed = SDK.responses.parse(model=MODEL, input=HELLO, text_format=Weather).output_parsed
    assert parsed is not None
    return parsed.model_dump()


def upload() -> io.BytesIO:
    file = io.BytesIO(SOUND)
    file.name = "speech.wav"
    return file


def transcription() -> Any:
    return SDK.audio.transcriptions.create(model=MODEL, file=upload()).text


def transcription_srt() -> Any:
    return SDK.audio.transcriptions.create(model=MODEL, file=upload(), response_format="srt")


def transcription_verbose() -> Any:
    answer = SDK.audio.transcriptions.create(
        model=MODEL, file=upload(), response_format="verbose_json"
    )
    return [answer.text, answer.duration]


def transcription_streamed() -> Any:
    stream = SDK.audio.transcriptions.create(model=MODEL, file=upload(), stream=True)
    return [event.to_dict() for event in stream]


def translation() -> Any:
    return SDK.audio.translations.create(model=MODEL, file=upload()).text


def speech() -> Any:
    with SDK.audio.speech.with_streaming_response.create(
        model=MODEL, input=HELLO, voice="alloy", response_format="wav"
    ) as answer:
        return [answer.headers["content-type"], digest(b"".join(answer.iter_bytes()))]


def image() -> Any:
    answer = SDK.images.generate(model=MODEL, prompt=HELLO)
    return (answer.data or [])[0].b64_json


def unknown_model() -> Any:
    def ask() -> Any:
        return SDK.chat.completions.create(model="nobody-has-it", messages=ASK)

    return raised(ask, openai.NotFoundError)


def unknown_model_streamed() -> Any:
    def ask() -> Any:
        return SDK.chat.completions.create(model="nobody-has-it", messages=ASK, stream=True)

    return raised(ask, openai.NotFoundError)


def bad_request() -> Any:
    def ask() -> Any:
        return SDK.chat.completions.create(model=MODEL, messages=ASK, max_tokens=-1)

    return raised(ask, openai.BadRequestError)


def wrong_key() -> Any:
    def ask() -> Any:
        return SDK.with_options(api_key="sk-wrong").chat.completions.create(
            model=MODEL, messages=ASK
        )

    return raised(ask, openai.AuthenticationError)


if __name__ == "__main__":
    report(
        "OpenAI SDK (Python)",
        "openai",
        {
            "models.list": models,
            "models.retrieve": model,
            "chat.completions": chat,
            "chat.completions, stream": chat_streamed,
            "chat.completions, stream with usage": chat_streamed_with_usage,
            "chat.completions, stream helper": chat_stream_helper,
            "chat.completions, stream left after three events": chat_stream_left,
            "chat.completions, image in the prompt": chat_image,
            "chat.completions, tools": chat_tools,
            "chat.completions, tools, stream": chat_tools_streamed,
            "chat.completions, tools, second turn": chat_tool_result,
            "chat.completions, parse": chat_parse,
            "chat.completions, parse, stream": chat_parse_streamed,
            "completions": completion,
            "completions, stream": completion_streamed,
            "embeddings, base64": embeddings,
            "embeddings, float": embeddings_float,
            "responses": response,
            "responses, stream": response_streamed,
            "responses, stream helper": response_stream_helper,
            "responses, tools": response_tools,
            "responses, tools, stream": response_tools_streamed,
            "responses, parse": response_parse,
            "audio.transcriptions": transcription,
            "audio.transcriptions, srt": transcription_srt,
            "audio.transcriptions, verbose_json": transcription_verbose,
            "audio.transcriptions, stream": transcription_streamed,
            "audio.translations": translation,
            "audio.speech, wav": speech,
            "images.generate": image,
            "error: unknown model": unknown_model,
            "error: unknown model, stream": unknown_model_streamed,
            "error: bad parameter": bad_request,
            "error: wrong key": wrong_key,
        },
    )
