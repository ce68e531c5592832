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
    is served. ``operation``: what metrics and traces call it, the word of OpenTelemetry where it
    has one (https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/).
    """

    path: str
    ttft: Literal["first", "whole", "none"] = "first"
    shape: Shape = Shape.OPENAI
    form: bool = False
    usage: bool = False
    any_model: bool = False
    operation: str = "chat"


ROUTES = {
    route.path: route
    for route in (
        Route("/v1/chat/completions", usage=True),
        Route("/v1/completions", usage=True, operation="text_completion"),
        Route("/v1/responses", shape=Shape.RESPONSES),
        Route("/v1/messages", shape=Shape.ANTHROPIC),
        Route("/v1/messages/count_tokens", "none", Shape.ANTHROPIC, operation="count_tokens"),
        Route("/v1/embeddings", "whole", operation="embeddings"),
        Route("/v1/moderations", "whole", operation="moderation"),
        Route("/v1/rerank", "whole", operation="rerank"),
        Route("/v2/rerank", "whole", operation="rerank"),
        Route("/rerank", "whole", operation="rerank"),
        Route("/v1/score", "whole", operation="score"),
        Route("/score", "whole", operation="score"),
        Route("/pooling", "whole", operation="pooling"),
        Route("/v1/audio/transcriptions", "none", form=True, operation="transcription"),
        Route("/v1/audio/translations", "none", form=True, operation="translation"),
        Route("/v1/audio/speech", "none", operation="speech"),
        Route("/v1/images/generations", "none", operation="image_generation"),
        Route("/tokenize", "none", any_model=True, operation="tokenize"),
        Route("/detokenize", "none", any_model=True, operation="detokenize"),
    )
}
