"""Where the names in the nodes' URLs lead now, looked up again every probe interval.

A kept-alive connection goes on to the address that its name had when it was dialled, for as long
as requests keep it busy: a node that has moved would get none of them. So every replica looks the
names up by itself (only one of them makes the probes), and a connection to an address that its
name has left is not used again.

One table for the process, as the system has one resolver.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger("leaseway.names")
# The loop's resolver has few threads, and new connections need them too.
_LOOKUPS_AT_ONCE = 2
_leads: dict[str, frozenset[str]] = {}  # URL of a node → addresses of its name


def left(url: str, address: str) -> bool:
    """Whether the name in ``url`` is known to lead elsewhere than to ``address``."""
    leads = _leads.get(url)
    return leads is not None and address not in leads


class Lookups:
    """Looks names up in the background. A name that cannot be looked up keeps its meaning."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(_LOOKUPS_AT_ONCE)

    def start(self, urls: Iterable[str]) -> None:
        """Look these up, but for plain addresses and what is still being looked up."""
        for url in urls:
            host = urlsplit(url).hostname
            if host and url not in self._running and not _is_address(host):
                task = asyncio.create_task(self._look_up(url, host), name=f"look up {host}")
                self._running[url] = task
                task.add_done_callback(partial(self._ended, url))

    async def close(self) -> None:
        """Stop looking."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, url: str, _: asyncio.Task[None]) -> None:
        del self._running[url]

    async def _look_up(self, url: str, host: str) -> None:
        try:
            async with self._places:
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as exc:
            log.debug("cannot look up %s: %s", host, exc)
            return
        leads = frozenset(str(address[0]) for *_, address in found)
        if leads and leads != _leads.get(url):
            if url in _leads:
                log.info("%s now leads to %s", host, ", ".join(sorted(leads)))
            _leads[url] = leads


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
