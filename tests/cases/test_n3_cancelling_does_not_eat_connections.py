"""N3: cancelling must not eat pool slots.

The gateway's pools have no limit to run into, so what a lost slot would be here is a connection
that is neither used nor pooled nor closed: the node and the kernel are asked for such.
"""

from __future__ import annotations

import json
import random
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.fleet import MODEL_LIST
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import COMPLETION, sized
from tests.support.servers import Gateway, wait_until

if TYPE_CHECKING:
    import redis

    from tests.support.servers import ValkeyServer

CHURNING, CHURN_S = 40, 5.0
PAUSE_S = 0.1  # so that the replica gets as far as connecting before its clients leave
ACCEPT_EVERY_S = 0.05
# A queue shorter than the churn is wide: connections really are being set up when clients leave.
BACKLOG = 4
ANSWER = sized(200, json.dumps(COMPLETION).encode(), [(b"content-type", b"application/json")])


class AcceptsSlowly:
    """B1 of the case: takes what waits at its door every 50 ms, answers at once.

    ``connected`` is how many connections it holds, ``accepted`` how many there ever were,
    ``answered`` the requests that it answered.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._held: dict[socket.socket, bytearray] = {}
        self.accepted = 0
        self.answered = 0

    @property
    def connected(self) -> int:
        return len(self._held)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(5)
        for sock in [self._listener, *self._held]:
            sock.close()

    def widen(self) -> None:
        """Let many wait at the door, as usual: a SYN that finds no place is lost for a second."""
        self._listener.listen(128)

    def _run(self) -> None:
        accept_at = time.monotonic() + ACCEPT_EVERY_S
        while not self._stop.is_set():
            wait_s = max(0.0, accept_at - time.monotonic())
            for sock in select.select(list(self._held), [], [], wait_s)[0]:
                self._serve(sock)
            if time.monotonic() >= accept_at:
                accept_at = time.monotonic() + ACCEPT_EVERY_S
                self._accept()

    def _accept(self) -> None:
        try:
            while True:
                sock, _ = self._listener.accept()
                self.accepted += 1
                self._held[sock] = bytearray()
        except BlockingIOError:
            pass

    def _serve(self, sock: socket.socket) -> None:
        """Answer a request that is whole; forget a connection that is closed."""
        try:
            data = sock.recv(65_536)
            self._held[sock] += data
            if self._held[sock].startswith(b"GET ") and self._held[sock].endswith(b"\r\n\r\n"):
                self._held[sock] = bytearray()
                sock.sendall(MODEL_LIST)
            if self._held[sock].endswith(b"false}"):  # the end of ``chat(stream=False)``
                self._held[sock] = bytearray()
                sock.sendall(ANSWER)
                self.answered += 1
        except OSError:
            data = b""
        if not data:
            self._held.pop(sock).clear()
            sock.close()


def sockets_of(pid: int) -> int:
    """How many sockets a process has open."""
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += str(file.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return found


def test_after_five_seconds_of_churn_every_request_succeeds_and_no_connection_is_left_over(
    valkey: redis.Redis, valkey_server: ValkeyServer
) -> None:
    request = chat(stream=False)

    def churn(seed: int) -> int:
        """Ask and leave 0 to 20 ms later, again and again; how often."""
        draw, times, until = random.Random(seed), 0, time.monotonic() + CHURN_S
        while time.monotonic() < until:
            client = RawClient(gw.port)
            client.send(request)
            time.sleep(draw.uniform(0, 0.02))
            client.reset() if draw.random() < 0.5 else client.close()
            times += 1
            time.sleep(draw.uniform(0, PAUSE_S))
        return times

    def timed(_: int) -> tuple[int, float]:
        began = time.monotonic()
        return ask(gw.port, request).status, time.monotonic() - began

    with AcceptsSlowly() as node:
        settings = small_settings(
            [],
            timeouts={"node_idle_s": 1.5, "connect_s": 3},
            health={"interval_s": 3600, "timeout_s": 2},
        )
        settings["nodes"] = [{"id": "b1", "url": node.url, "models": ["m"], "capacity": 64}]
        with Gateway(settings, valkey_server.url) as gw:
            assert ask(gw.port, request).status == 200
            wait_until(lambda: node.connected == 0, within_s=4, what="the pool is empty")
            before = sockets_of(gw.pid)

            with ThreadPoolExecutor(CHURNING) as pool:
                asked = sum(pool.map(churn, range(CHURNING)))
            wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
            served, accepted = node.answered, node.accepted
            node.widen()

            one_by_one = [timed(i) for i in range(20)]
            with ThreadPoolExecutor(10) as pool:
                at_once = list(pool.map(timed, range(10)))

            print(
                f"{asked} requests left, {accepted} connections, {served} answers; then "
                f"worst of 20: {max(t for _, t in one_by_one):.3f} s, "
                f"of 10 at once: {max(t for _, t in at_once):.3f} s"
            )
            assert [status for status, _ in one_by_one + at_once] == [200] * 30
            # Normal time: a wait at the door of 50 ms, and this machine's noise.
            assert max(seconds for _, seconds in one_by_one + at_once) < 0.5
            # Most clients left while their connection was being set up.
            assert asked > 1000
            assert 100 < accepted < asked / 2
            # No connection without an owner: those of the pool go when idle, no others are left.
            wait_until(lambda: node.connected == 0, within_s=4, what="all connections are closed")
            wait_until(lambda: sockets_of(gw.pid) <= before, within_s=2, what="no socket is left")
            assert state.unloaded(valkey)
            record = state.record(valkey, "b1")
            assert (record["streak"], record["circuit"]) == ("0", "closed")
            assert "Traceback" not in gw.log
