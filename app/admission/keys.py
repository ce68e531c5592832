"""API keys: who may ask, and for which models.

Keys are stored as SHA-256 of their bytes (random keys need no salt or stretching) and compared
in constant time. Without configured keys the gateway is open; ``main`` allows that on loopback
only, unless the operator says otherwise.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from hmac import compare_digest
from typing import TYPE_CHECKING

from app.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from app.config import KeySettings


def hash_key(key: str | bytes) -> str:
    """The form in which a key is configured: ``sha256:`` and 64 hex digits."""
    raw = key.encode() if isinstance(key, str) else key
    return "sha256:" + hashlib.sha256(raw).hexdigest()


class Keys:
    """The configured keys. ``now`` is an argument so that tests own the calendar."""

    def __init__(
        self,
        keys: list[KeySettings],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._now = now
        self.replace(keys)

    def replace(self, keys: list[KeySettings]) -> None:
        """From now on these are the keys; requests that were let in go on."""
        self._hashes = [(one.encode(), key) for key in keys for one in key.hashes]
        self.open = not keys

    def identify(self, headers: Mapping[bytes, bytes]) -> KeySettings | None:
        """The caller's key; None when the gateway is open. Raises ``ApiError`` 401."""
        if self.open:
            return None
        given = _presented(headers)
        if not given:
            raise _not_let_in("No API key provided.")
        digest = hash_key(given).encode()
        # Every key is compared, so that time says nothing about which one is near.
        match = [key for one, key in self._hashes if compare_digest(one, digest)]
        if not match:
            raise _not_let_in("Incorrect API key provided.")
        key = match[0]
        if key.expires is not None and key.expires <= self._now():
            raise _not_let_in("This API key has expired.", code="api_key_expired")
        return key

    def require_admin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises ``ApiError`` 401 or 403 unless the caller may administer."""
        key = self.identify(headers)
        if key is not None and not key.admin:
            raise ApiError(
                403, "This key may not administer.", kind="permission_error", code="not_admin"
            )

    @staticmethod
    def require_model(key: KeySettings | None, model: str) -> None:
        """Raises ``ApiError`` 403 when ``key`` may not use ``model``."""
        if key is not None and key.models is not None and model not in key.models:
            raise ApiError(
                403,
                f"This key may not use the model {model!r}.",
                kind="permission_error",
                param="model",
                code="model_not_allowed",
            )


def _not_let_in(message: str, *, code: str = "invalid_api_key") -> ApiError:
    return ApiError(
        401,
        message,
        kind="invalid_request_error",
        code=code,
        headers=[(b"www-authenticate", b"Bearer")],  # RFC 9110, 15.5.2
    )


def _presented(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key", b"").strip()
