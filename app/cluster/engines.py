"""What is particular to an engine: how it says that it is ready, and where it lists its models.

Sources: vLLM and SGLang serve ``/health`` (200 when the engine loop is alive); llama.cpp's server
answers ``/health`` with 503 while the model loads (tools/server/README.md); Ollama has no health
page but ``/api/tags``; TGI ``/health``. All answer ``GET /v1/models`` in the OpenAI shape. That
page alone proves nothing: llama.cpp lists a model that it is still loading.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from app.model import Node

log = logging.getLogger("leaseway.engines")
_MODEL = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
# engine → pages that must all answer well. `auto` and `generic` take what is there.
_HEALTH_PAGE = {"vllm": "/health", "sglang": "/health", "llamacpp": "/health", "tgi": "/health",
                "ollama": "/api/tags", "auto": "/health"}  # fmt: skip
_ABSENT = {404, 405, 501}


def node_key(node: Node) -> str | None:
    """The node's own API key, from the environment variable that the settings name."""
    return (os.environ.get(node.api_key_env) or None) if node.api_key_env else None


def _headers(node: Node) -> dict[str, str]:
    key = node_key(node)
    return {"authorization": f"Bearer {key}"} if key else {}


async def probe(client: httpx.AsyncClient, node: Node) -> tuple[str, str]:
    """Ask ``node`` whether it is ready: (``ready``, ``loading`` or ``miss``; why). Never raises.

    Ready is an answer that only an inference server gives: a health page that says yes, and a
    list of models as JSON (any web server answers 200 to ``/health``).
    """
    try:
        page = _HEALTH_PAGE.get(node.engine)
        if page is not None:
            status = (await client.get(node.url + page, headers=_headers(node))).status_code
            if status == 503:
                return "loading", f"{page} says 503"
            if status != 200 and not (node.engine == "auto" and status in _ABSENT):
                return "miss", f"{page} says {status}"
        answer = await client.get(f"{node.url}/v1/models", headers=_headers(node))
        if answer.status_code == 503:
            return "loading", "/v1/models says 503"
        if _listed(answer) is None:
            return "miss", f"/v1/models says {answer.status_code} and no model list"
        return "ready", ""
    except (httpx.HTTPError, ValueError) as exc:
        return "miss", f"{type(exc).__name__}: {exc}".rstrip(": ")


async def discover_models(client: httpx.AsyncClient, node: Node) -> tuple[str, ...]:
    """The models that ``node`` lists; empty when it does not answer properly."""
    try:
        answer = await client.get(f"{node.url}/v1/models", headers=_headers(node))
        return _listed(answer) or ()
    except (httpx.HTTPError, ValueError) as exc:
        log.info("node %s did not list its models: %s", node.id, exc or type(exc).__name__)
        return ()


def _listed(answer: httpx.Response) -> tuple[str, ...] | None:
    """Names from an OpenAI model list; None when the answer is something else."""
    if answer.status_code != 200:
        return None
    body: Any = answer.json()
    entries = body.get("data") if isinstance(body, dict) else None
    if not isinstance(entries, list):
        return None
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    return tuple(dict.fromkeys(n for n in names if isinstance(n, str) and _MODEL.fullmatch(n)))
