"""One lazy timer for a connection: deadlines move with every byte, timers need not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_LATE_S = 0.1


class Alarm:
    """Rings at the earliest time it was set to since it last rang; whoever is rung looks at its
    own deadline and sets the alarm again.
    """

    __slots__ = ("_at", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at = 0.0  # kept here: uvloop's handle of a time that has come cannot tell it
        self._handle: asyncio.Handle | None = None

    def set(self, at: float, ring: Callable[[bool], None]) -> None:
        """Call ``ring`` at ``at`` (the loop's clock), unless it is to ring before that anyway.

        It is told whether it is called late: then the replica itself stood still (SIGSTOP, a
        frozen machine), and what came in meanwhile is to be read first.
        """
        if self._handle is not None and self._at > at + 0.001:
            self.stop()
        if self._handle is None:
            self._at = at
            self._handle = self._loop.call_at(at, self._due, ring)

    def stop(self) -> None:
        """Do not ring any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _due(self, ring: Callable[[bool], None]) -> None:
        self._handle = None
        ring(self._loop.time() - self._at > _LATE_S)
