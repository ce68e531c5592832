"""Every error of the project, small and without logic.

``ApiError`` is what a client sees, in the OpenAI error shape
(https://platform.openai.com/docs/guides/error-codes). ``AttemptFailed`` is what one attempt
on one node ends with before anything was sent to the client. ``RedisAway`` covers every way in
which shared state can be out of reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.model import Outcome, Refusal


class LeasewayError(Exception):
    """Base of all errors raised by this project."""


class ConfigError(LeasewayError):
    """A setting stops the start. The message names file, key, value and what would be right."""


class RedisAway(LeasewayError):  # noqa: N818 - a state of the world, named as in the docs
    """Redis did not answer within its budget, refused, or is not a writable primary now."""


class ScriptError(LeasewayError):
    """A Lua script refused its arguments: a broken contract between Python and Lua."""


class Refused(LeasewayError):  # noqa: N818 - what the scripts answer
    """No node was leased: ``refusal`` says why and when to come back."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class ApiError(LeasewayError):
    """An answer to the client other than the node's own.

    ``retry_after_s`` becomes the ``Retry-After`` header (whole seconds, at least 1); ``headers``
    go out as they are.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow
        self.headers = headers or []


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is at fault."""
    return ApiError(400, message, kind="invalid_request_error", param=param, code=code)


class AttemptFailed(LeasewayError):  # noqa: N818 - named as in the docs
    """One attempt on one node ended before a byte went to the client: another may be tried.

    ``outcome`` is what the lease is ended with, ``kind`` the reason in one word (``connect``,
    ``reset``, ``status_500`` …), ``cool_ms`` how long a saturated node asked to be left alone.
    ``status`` is what the client is told when no other node can be tried.
    """

    def __init__(self, outcome: Outcome, kind: str, message: str, *, cool_ms: int = 0) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.kind = kind
        self.cool_ms = cool_ms

    @property
    def status(self) -> int:
        """504 when time ran out, 502 for every other broken attempt (RFC 9110, 15.6)."""
        return 504 if self.kind.endswith("timeout") or self.kind == "stall" else 502
