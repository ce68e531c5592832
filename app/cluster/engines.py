"""What is particular to an engine: how it says that it is ready, and where it lists its models.

Sources: vLLM and SGLang serve ``/health`` (200 when the engine loop is alive); llama.cpp's server
answers ``/health`` with 503 while the model loads (tools/server/README.md); Ollama has no health
page but ``/api/tags``; TGI ``/health``. All answer ``GET /v1/models`` in the OpenAI shape. That
page alone proves nothing: llama.cpp lists a model that it is still loading.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import orjson

if TYPE_CHECKING:
    from app.model import Node

log = logging.getLogger("leaseway.engines")
_MODEL = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
# engine → pages that must all answer well. `auto` and `generic` take what is there.
_HEALTH_PAGE = {"vllm": "/health", "sglang": "/health", "llamacpp": "/health", "tgi": "/health",
                "ollama": "/api/tags", "auto": "/health"}  # fmt: skip
_ABSENT = {404, 405, 501}
_PAGE_BYTES = 4 * 1024 * 1024
# A page may take this many times the probe's timeout in all: connect, TLS, and the page itself.
PAGE_TIMEOUTS = 3
NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError)
"""What a page that does not come raises."""


def node_key(node: Node) -> str | None:
    """The node's own API key, from the environment variable that the settings name."""
    return (os.environ.get(node.api_key_env) or None) if node.api_key_env else None


def without_key(node: Node, text: str) -> str:
    """What a node says, for the log: engines and their proxies repeat the key that they refuse."""
    key = node_key(node)
    if not key:
        return text
    text = text.replace(key, "(hidden)")
    # The text is bounded: it may end in the middle of the key.
    cut = next((n for n in range(len(key) - 1, 3, -1) if text.endswith(key[:n])), 0)
    return text[: len(text) - cut] + "(hidden)" * bool(cut)


def _headers(node: Node) -> dict[str, str]:
    key = node_key(node)
    return {"authorization": f"Bearer {key}"} if key else {}


class Seen(NamedTuple):
    """What a probe saw: ``ready``, ``loading`` or ``miss``; why; whether it has no health page."""

    verdict: str
    why: str = ""
    pageless: bool = False


async def probe(client: httpx.AsyncClient, node: Node, *, briefly: bool = False) -> Seen:
    """Ask ``node`` whether it is ready. Never raises.

    Ready is an answer that only an inference server gives: a health page that says yes, and a
    list of models as JSON (any web server answers 200 to ``/health``). ``briefly`` asks for one
    page: of a node that has listed its models before, the health page says enough.
    """
    try:
        page, pageless = _HEALTH_PAGE.get(node.engine), False
        if page is not None:
            answer = await get_page(client, node, page)
            if answer.status == 503:
                return Seen("loading", f"{page} says 503")
            pageless = node.engine == "auto" and answer.status in _ABSENT
            if answer.status != 200 and not pageless:
                return Seen("miss", f"{page} says {answer.status}")
            if answer.status == 200 and answer.is_html:
                return Seen("miss", f"{page} is a web page")
            if briefly and not pageless:
                return Seen("ready")
        answer = await get_page(client, node, "/v1/models")
        if answer.status == 503:
            return Seen("loading", "/v1/models says 503")
        if _listed(answer) is None:
            return Seen("miss", f"/v1/models says {answer.status} and no model list")
        return Seen("ready", pageless=pageless)
    except NO_ANSWER as exc:
        return Seen("miss", f"{type(exc).__name__}: {exc}".rstrip(": "))


async def discover_models(client: httpx.AsyncClient, node: Node) -> tuple[str, ...]:
    """The models that ``node`` lists; empty when it does not answer properly."""
    try:
        return _listed(await get_page(client, node, "/v1/models")) or ()
    except NO_ANSWER as exc:
        log.info("node %s did not list its models: %s", node.id, exc or type(exc).__name__)
        return ()


class Page(NamedTuple):
    """What a node answers to a GET."""

    status: int
    content_type: str
    body: bytes

    @property
    def is_html(self) -> bool:
        return "html" in self.content_type or self.body.lstrip()[:1] == b"<"


async def get_page(client: httpx.AsyncClient, node: Node, path: str) -> Page:
    """One whole page. Raises one of ``NO_ANSWER``.

    The client's timeout is one on silence: a page that trickles, or never ends, needs its own.
    """
    whole_s = PAGE_TIMEOUTS * (client.timeout.read or 1.0)
    body = bytearray()
    async with (
        asyncio.timeout(whole_s),
        client.stream("GET", node.url + path, headers=_headers(node)) as answer,
    ):
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > _PAGE_BYTES:
                raise ValueError(f"{path} is larger than {_PAGE_BYTES} bytes")
    return Page(answer.status_code, answer.headers.get("content-type", "").lower(), bytes(body))


def _listed(answer: Page) -> tuple[str, ...] | None:
    """Names from an OpenAI model list; None when the answer is something else."""
    if answer.status != 200:
        return None
    body: Any = orjson.loads(answer.body)
    entries = body.get("data") if isinstance(body, dict) else None
    if not isinstance(entries, list):
        return None
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    models = tuple(dict.fromkeys(n for n in names if isinstance(n, str) and _MODEL.fullmatch(n)))
    return models if models or not entries else None  # somebody else's list
