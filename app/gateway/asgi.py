"""The control plane's side of a connection: one request as an ASGI application wants it.

ASGI HTTP: https://asgi.readthedocs.io/en/latest/specs/www.html
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.gateway.respond import Client

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


async def run(app: Application, client: Client) -> None:
    """Let ``app`` answer ``client``. Raises what ``Client.body`` does, before ``app`` is asked."""
    body = await client.body()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        while not (client.gone or client.finished):
            await client.changed()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await client.start(message["status"], list(message["headers"]))
        elif message.get("more_body", False):
            await client.write(message.get("body", b""))
        else:
            await client.finish(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1" if client.http_1_1 else "1.0",
        # HEAD is GET without the body (RFC 9110, 9.3.2), which the client's side leaves out.
        "method": "GET" if client.method == "HEAD" else client.method,
        "scheme": "http",
        "path": client.path,
        "raw_path": client.path.encode(),
        "query_string": client.query,
        "root_path": "",
        "headers": client.raw_headers,
        "client": client.peer,
        "server": None,
        "state": client.app_state.copy(),
    }
    await app(scope, receive, send)
