"""A hosts file of the test's own: what names mean to a replica, changed at any time.

A replica that is started with ``Hosts.environment`` looks into the file first, at each lookup, as
the C library does with /etc/hosts: its event loop's ``getaddrinfo`` and ``create_connection``.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

_FILE = "LEASEWAY_TEST_HOSTS_FILE"


class Hosts:
    """``set`` says what names mean; a name without addresses does not exist."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "hosts"
        # Loaded by every Python process before anything else (the module `site`).
        (folder / "sitecustomize.py").write_text(
            "from tests.support import hosts\nhosts.install()\n"
        )
        self.environment = {"PYTHONPATH": f"{folder}:.", _FILE: str(self._file)}
        self._names: dict[str, tuple[str, ...]] = {}

    def set(self, name: str, *addresses: str) -> None:
        """From now on ``name`` has these addresses."""
        self._names[name] = addresses
        lines = [" ".join([one, *meaning]) + "\n" for one, meaning in self._names.items()]
        new = self._file.with_suffix(".new")
        new.write_text("".join(lines))
        new.replace(self._file)


def install() -> None:
    """Let the event loops of a replica look into the file."""
    if "serve" not in sys.orig_argv:
        return
    import uvloop

    file = Path(os.environ[_FILE])
    look_up, connect = uvloop.Loop.getaddrinfo, uvloop.Loop.create_connection

    def meaning(host: Any) -> list[Any]:
        name = host.decode() if isinstance(host, bytes) else host
        for line in file.read_text().splitlines():
            one, *addresses = line.split()
            if one == name:
                if not addresses:
                    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
                return addresses
        return [host]

    async def getaddrinfo(self: uvloop.Loop, host: Any, port: Any, **how: Any) -> list[Any]:
        return [
            found
            for one in meaning(host)
            for found in await look_up(self, one, port, **how)
        ]  # fmt: skip

    async def create_connection(
        self: uvloop.Loop, factory: Any, host: Any = None, port: Any = None, **how: Any
    ) -> Any:
        if host is not None:
            if how.get("ssl"):
                how.setdefault("server_hostname", host)
            host = meaning(host)[0]
        return await connect(self, factory, host, port, **how)

    uvloop.Loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign, assignment]
    uvloop.Loop.create_connection = create_connection  # type: ignore[method-assign, assignment]
