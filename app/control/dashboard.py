"""``/dashboard``: the cluster in a browser. One page, its files, and the events that keep it live.

The page holds nothing that is secret, so it is open; what it shows comes from ``/dashboard/events``
and what it changes goes to ``/admin``, both behind an admin key when keys are configured.
"""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter, HTTPException, Request, Response

from app.control.feed import Feed
from app.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.resources.abc import Traversable

    from app.admission.keys import Keys
    from app.cluster.replica import Replica
    from app.gateway.asgi import Receive, Scope, Send

# Nothing but what this replica serves, no inline code, and no text that becomes markup.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def router(replica: Replica, keys: Keys) -> APIRouter:
    """``/dashboard``, ``/dashboard/static/…``, ``/dashboard/events``; for browsers, not for code:
    none of it is in the OpenAPI document."""
    routes = APIRouter(prefix="/dashboard", include_in_schema=False)
    feed = Feed(replica)

    @routes.get("")
    async def page() -> Response:
        return Response(_page(), media_type="text/html", headers=HEADERS)

    @routes.get("/static/{name:path}")
    async def static(name: str) -> Response:
        found = _static().get(name)
        if found is None:
            raise HTTPException(404)
        content, media_type = found
        return Response(content, media_type=media_type, headers=HEADERS)

    @routes.get("/events")
    async def events(request: Request) -> Response:
        headers = dict(request.headers.raw)
        keys.require_admin(headers)
        feed.require_place()
        return _Events(feed, lambda: keys.require_admin(headers))

    return routes


class _Events(Response):
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

    A slow viewer misses pictures, and nothing is kept for it. ``demand`` raises ``ApiError`` once
    the viewer's key is no longer good.
    """

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, demand: Callable[[], None]) -> None:
        # x-accel-buffering: nginx passes each event on as it comes.
        super().__init__(
            headers={**HEADERS, "cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._feed = feed
        self._demand = demand

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - as ASGI has it
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer until the viewer leaves, its key is taken back, or the replica leaves."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        with self._feed.viewed() as news:
            gone = asyncio.create_task(_gone(receive))
            gone.add_done_callback(lambda _: news.set())
            try:
                while True:
                    await news.wait()
                    news.clear()
                    if gone.done() or self._feed.ended or not self._still_let_in():
                        break
                    await send(
                        {"type": "http.response.body", "body": self._feed.event, "more_body": True}
                    )
            finally:
                gone.cancel()
        if not gone.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _still_let_in(self) -> bool:
        try:
            self._demand()
        except ApiError:
            return False
        return True


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@cache
def _page() -> bytes:
    return _folder().joinpath("dashboard.html").read_bytes()


@cache
def _static() -> dict[str, tuple[bytes, str]]:
    """Every file that the page may ask for, by its path: no request reaches the file system."""
    return {
        prefix + file.name: (file.read_bytes(), _TYPES[kind])
        for prefix, folder in (("", _folder()), ("vendor/", _folder().joinpath("vendor")))
        for file in folder.iterdir()
        if (kind := file.name[file.name.rfind(".") :]) in _TYPES
    }


def _folder() -> Traversable:
    return files("app.control").joinpath("static")
