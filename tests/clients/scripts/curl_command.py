"""curl, as in everybody's examples: what it prints, with ids and times taken out."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any

from tests.clients.scripts.report import HELLO, MODEL, digest, report, target

URL, KEY = target()
AUTH = ("-H", f"Authorization: Bearer {KEY}")
JSON = ("-H", "Content-Type: application/json")
ASK = {"model": MODEL, "messages": [{"role": "user", "content": HELLO}], "max_tokens": 9}
# What differs between two answers to the same request.
PASSING = re.compile(r'"(id|created|created_at)":("[^"]*"|\d+)')
SOUND = bytes(range(256)) * 8192  # 2 MiB


def raw(*arguments: str, data: bytes | None = None) -> bytes:
    """Run curl; what it wrote to stdout. Raises on any exit code but 0."""
    ran = subprocess.run(
        ["curl", "--silent", "--show-error", "--max-time", "60", *arguments],
        input=data,
        capture_output=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"curl ended with {ran.returncode}: {ran.stderr.decode()}")
    return ran.stdout


def curl(*arguments: str, data: bytes | None = None) -> str:
    """Run curl; its output without what differs from answer to answer."""
    return PASSING.sub(r'"\1":0', raw(*arguments, data=data).decode())


def post(path: str, body: Any, *more: str) -> str:
    """POST JSON as the examples do."""
    return curl(*AUTH, *JSON, "-d", json.dumps(body), *more, URL + path)


def models() -> Any:
    return sorted(re.findall(r'"id":"([^"]*)"', raw(*AUTH, f"{URL}/v1/models").decode()))


def chat() -> Any:
    return post("/v1/chat/completions", ASK)


def stream() -> Any:
    return post("/v1/chat/completions", {**ASK, "stream": True}, "-N")


def stream_over_http_1_0() -> Any:
    return post("/v1/chat/completions", {**ASK, "stream": True}, "-N", "--http1.0")


def chat_over_http_1_0() -> Any:
    return post("/v1/chat/completions", ASK, "--http1.0")


def compressed() -> Any:
    return post("/v1/chat/completions", ASK, "--compressed")


def chunked_upload() -> Any:
    return post("/v1/chat/completions", ASK, "-H", "Transfer-Encoding: chunked")


def big_upload() -> Any:
    """Over a megabyte curl sends Expect: 100-continue and waits for the answer to it."""
    long = {**ASK, "messages": [{"role": "user", "content": "word " * 500_000}]}
    return curl(
        *(*AUTH, *JSON, "--expect100-timeout", "30", "--data-binary", "@-"),
        f"{URL}/v1/chat/completions",
        data=json.dumps(long).encode(),
    )


def query_string() -> Any:
    return post("/v1/chat/completions?api-version=2&x=%2F%20y", ASK, *STATUS)


def two_requests_on_one_connection() -> Any:
    """The second request reuses the connection: curl counts the new ones."""
    one = (*AUTH, *JSON, "-d", json.dumps(ASK), "-o", os.devnull)
    said = ("-w", "%{http_code} %{num_connects}\n")
    return curl(*one, *said, f"{URL}/v1/chat/completions", "--next", "--silent", *one, *said,
                f"{URL}/v1/chat/completions")  # fmt: skip


def transcription() -> Any:
    return curl(
        *AUTH,
        *("-F", f"model={MODEL}", "-F", "response_format=srt", "-F", "file=@-;filename=x.wav"),
        f"{URL}/v1/audio/transcriptions",
        data=SOUND,
    )


def speech() -> Any:
    body = {"model": MODEL, "input": HELLO, "voice": "a", "response_format": "wav"}
    return digest(raw(*AUTH, *JSON, "-d", json.dumps(body), f"{URL}/v1/audio/speech"))


def other_routes() -> Any:
    """Routes of inference servers that no SDK here calls."""
    return [
        post("/v1/score", {"model": MODEL, "text_1": "a river", "text_2": ["one", "two"]}),
        post("/v1/rerank", {"model": MODEL, "query": "a river", "documents": ["one", "two"]}),
        post("/tokenize", {"model": MODEL, "prompt": HELLO}),
        post("/detokenize", {"model": MODEL, "tokens": [1400136037, 544436837]}),
    ]


STATUS = ("-o", os.devnull, "-w", "%{http_code} %{content_type}")


def bad_json() -> Any:
    return curl(*AUTH, *JSON, "-d", "{bad", *STATUS, f"{URL}/v1/chat/completions")


def no_key() -> Any:
    return curl(*JSON, "-d", json.dumps(ASK), *STATUS, f"{URL}/v1/chat/completions")


def wrong_method() -> Any:
    return curl(*AUTH, *STATUS, f"{URL}/v1/chat/completions")


def curl_version() -> str:
    """The version that ``curl --version`` names."""
    return raw("--version").decode().split()[1]


if __name__ == "__main__":
    report(
        "curl",
        "",
        {
            "GET /v1/models": models,
            "chat/completions": chat,
            "chat/completions, stream": stream,
            "chat/completions, HTTP/1.0": chat_over_http_1_0,
            "chat/completions, stream, HTTP/1.0": stream_over_http_1_0,
            "chat/completions, --compressed": compressed,
            "chat/completions, chunked upload": chunked_upload,
            "chat/completions, 2.5 MB with Expect: 100-continue": big_upload,
            "chat/completions, query string": query_string,
            "chat/completions, twice on one connection": two_requests_on_one_connection,
            "audio/transcriptions, 2 MiB form, srt": transcription,
            "audio/speech": speech,
            "score, rerank, tokenize, detokenize": other_routes,
            "error: broken JSON": bad_json,
            "error: no key": no_key,
            "error: wrong method": wrong_method,
        },
        told=curl_version(),
    )
