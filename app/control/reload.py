"""Changes of the settings file while the replica runs: keys, aliases and nodes, without a restart.

The content of the file is looked at again and again, so every way to change it is noticed: written
in place, renamed over, or a symlink that leads elsewhere (Kubernetes swaps ConfigMaps like that). A
content counts when two looks in a row have found it, for a writer may be half way; SIGHUP takes it
as it stands. What is bad is refused whole, and the settings in force stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from app.config import Settings, load
from app.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from app.admission.keys import Keys
    from app.cluster.replica import Replica

log = logging.getLogger("leaseway.reload")
_LOOK_S = 0.5
_AT_ONCE = {"keys", "aliases", "nodes"}  # the sections that a running replica takes over


class Reload:
    """Keeps a running replica in step with the file at ``path``, which ``settings`` came from.

    ``port`` is what the command line put over ``server.port``. ``settings.aliases`` is changed in
    place: whoever was given it reads it for every request.
    """

    def __init__(
        self, path: Path, settings: Settings, *, port: int | None, keys: Keys, replica: Replica
    ) -> None:
        self._path = path
        self._in_force = settings
        self._port = port
        self._keys = keys
        self._replica = replica
        self._judged: bytes | None = b""  # the content that was taken over or refused last
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Look now, and say again what there is to say (SIGHUP)."""
        log.info("reading %s again", self._path)
        self._asked.set()

    async def watch(self) -> None:
        """Look until cancelled."""
        seen: bytes | None = b""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            # In threads: a slow disk, or a file of ten thousand nodes, must not hold up requests.
            content = await asyncio.to_thread(self._read)
            if asked or (content == seen and content != self._judged):
                await self._judge(content)
                self._judged = content
            seen = content

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None  # `load` says why

    async def _judge(self, content: bytes | None) -> None:
        """Take over what is good; say, once, why a content is refused."""
        try:
            if content is not None and not content.strip():
                raise ConfigError(f"{self._path}: is empty; write the settings, or restart without")
            new = await asyncio.to_thread(load, self._path, port=self._port, content=content)
            if not new.keys and not self._keys.open:
                raise ConfigError(
                    f"{self._path}: keys = []: this would open the gateway to everyone; "
                    "keep a key, or restart to open it"
                )
            self._take_over(new)
        except ConfigError as exc:
            reasons = "; ".join(str(exc).splitlines())
            log.error("settings refused, those in force stay: %s", reasons)  # noqa: TRY400
        except Exception:
            log.exception("%s could not be taken over", self._path)

    def _take_over(self, new: Settings) -> None:
        old = self._in_force
        if new.keys != old.keys:
            self._keys.replace(new.keys)
            log.info("keys: %s", _difference({k.name: k for k in old.keys},
                                             {k.name: k for k in new.keys}))  # fmt: skip
        if new.aliases != old.aliases:
            log.info("aliases: %s", _difference(old.aliases, new.aliases))
            old.aliases.clear()
            old.aliases.update(new.aliases)
        if new.nodes != old.nodes:
            log.info("nodes: %s", _difference({n.id: n for n in old.nodes},
                                              {n.id: n for n in new.nodes}))  # fmt: skip
            if pools := self._replica.configure([node.node() for node in new.nodes]):
                log.warning("restart to use the new pools %s", ", ".join(sorted(pools)))
        if waiting := _waiting(old, new):
            log.warning("restart for the changes of %s", ", ".join(waiting))
        self._in_force = old.model_copy(update={"keys": new.keys, "nodes": new.nodes})
        self._replica.settings = self._in_force


def _difference(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """The names that came, went and changed; no values, which may be secret."""
    found = {
        "added": new.keys() - old.keys(),
        "removed": old.keys() - new.keys(),
        "changed": {name for name in new.keys() & old.keys() if new[name] != old[name]},
    }
    said = [f"{what} {', '.join(sorted(names))}" for what, names in found.items() if names]
    return "; ".join(said) or "another order"


def _waiting(old: Settings, new: Settings) -> list[str]:
    """``section.setting`` of what differs and is read at the start only."""
    return [
        f"{section}.{name}"
        for section in Settings.model_fields
        if section not in _AT_ONCE
        for name in type(getattr(old, section)).model_fields
        if getattr(getattr(old, section), name) != getattr(getattr(new, section), name)
    ]
