"""The data plane as a table: what is forwarded, and what the gateway has to know of each route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.gateway.shape import Shape


@dataclass(frozen=True, slots=True)
class Route:
    """One forwarded endpoint; it has the same path at the node.

    ``ttft``: what its answers say about the time to first token: ``first`` (they are generated
    token by token), ``whole`` (one pass over the prompt: the whole answer is its first token) or
    ``none`` (other work, which must not be taken for one of these). ``form``: the request is
    multipart/form-data instead of JSON. ``usage``: streams take
    ``stream_options.include_usage``. ``any_model``: ``model`` may be left out where only one
    is served.
    """

    path: str
    ttft: Literal["first", "whole", "none"] = "first"
    shape: Shape = Shape.OPENAI
    form: bool = False
    usage: bool = False
    any_model: bool = False


ROUTES = {
    route.path: route
    for route in (
        Route("/v1/chat/completions", usage=True),
        Route("/v1/completions", usage=True),
        Route("/v1/responses", shape=Shape.RESPONSES),
        Route("/v1/messages", shape=Shape.ANTHROPIC),
        Route("/v1/messages/count_tokens", "none", Shape.ANTHROPIC),
        Route("/v1/embeddings", "whole"),
        Route("/v1/moderations", "whole"),
        Route("/v1/rerank", "whole"),
        Route("/v2/rerank", "whole"),
        Route("/rerank", "whole"),
        Route("/v1/score", "whole"),
        Route("/score", "whole"),
        Route("/pooling", "whole"),
        Route("/v1/audio/transcriptions", "none", form=True),
        Route("/v1/audio/translations", "none", form=True),
        Route("/v1/audio/speech", "none"),
        Route("/v1/images/generations", "none"),
        Route("/tokenize", "none", any_model=True),
        Route("/detokenize", "none", any_model=True),
    )
}
