"""What is particular to an engine: where it lists its models.

All of vLLM, SGLang, llama.cpp, Ollama and TGI answer ``GET /v1/models`` in the OpenAI shape
(https://platform.openai.com/docs/api-reference/models/list).
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from app.model import Node

log = logging.getLogger("leaseway.engines")
_MODEL = re.compile(r"[^\x00-\x1f\x7f]{1,256}")


def node_key(node: Node) -> str | None:
    """The node's own API key, from the environment variable that the settings name."""
    return (os.environ.get(node.api_key_env) or None) if node.api_key_env else None


async def discover_models(node: Node, *, timeout_s: float = 2.0) -> tuple[str, ...]:
    """The models that ``node`` lists; empty when it does not answer properly."""
    key = node_key(node)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
            answer = await client.get(f"{node.url}/v1/models", headers=headers)
            answer.raise_for_status()
            names = [entry["id"] for entry in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
        log.info("node %s did not list its models: %s", node.id, exc or type(exc).__name__)
        return ()
    return tuple(dict.fromkeys(n for n in names if isinstance(n, str) and _MODEL.fullmatch(n)))
