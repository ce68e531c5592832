"""Wiring and lifespan of one replica; no logic."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn

from app.admission.keys import Keys
from app.admission.limits import Limits
from app.cluster.embedded import EmbeddedValkey
from app.cluster.replica import Replica
from app.control.plane import control_plane
from app.control.reload import Reload
from app.errors import ConfigError
from app.gateway.forward import Forward
from app.gateway.listen import ClientProtocol
from app.gateway.path import DataPlane
from app.telemetry.exchange import Telemetry
from app.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from app.config import Settings

log = logging.getLogger("leaseway")


class Wired(NamedTuple):
    """One replica, put together."""

    app: DataPlane
    replica: Replica
    keys: Keys


def create_app(settings: Settings, redis_url: str, replica_id: str | None = None) -> Wired:
    """One replica as an ASGI app: the data plane in front of the control plane.

    Must be called inside the event loop that will serve it. Raises ``ConfigError``.
    """
    replica = Replica(settings, redis_url, replica_id)
    forward = Forward(settings.timeouts)
    keys = Keys(settings.keys)
    home = replica.pools["default"]
    limits = Limits(home.scripts, lambda: home.registry.replicas)
    metrics = Metrics()
    metrics.replica(replica.id)
    for pool in replica.pools.values():
        pool.scripts.timed = metrics.redis_call
    telemetry = Telemetry(settings.telemetry, metrics, replica.id)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await replica.start()
        degraded = asyncio.create_task(metrics.watch_degraded(lambda: replica.up), name="degraded")
        try:
            yield
        finally:
            degraded.cancel()
            await replica.stop()
            forward.close()
            await asyncio.to_thread(telemetry.close)

    control = control_plane(settings, replica, keys, metrics, lifespan=lifespan)
    path = DataPlane(settings, replica, forward, keys, limits, telemetry, control)
    return Wired(path, replica, keys)


async def serve(
    settings: Settings,
    replica_id: str | None = None,
    *,
    file: Path | None = None,
    port: int | None = None,
) -> None:
    """Run one replica until SIGTERM or SIGINT, in step with the settings file.

    ``settings`` were loaded from ``file`` with ``port``. Raises ``ConfigError``.
    """
    _refuse_open_door(settings)
    async with contextlib.AsyncExitStack() as stack:
        redis_url = settings.redis.url
        if redis_url is None:
            valkey = await stack.enter_async_context(EmbeddedValkey())
            redis_url = valkey.url
            log.warning(
                "no redis.url: started an embedded Valkey at %s, this replica's own", redis_url
            )
        app, replica, keys = create_app(settings, redis_url, replica_id)
        reload = _without_file
        if file is not None:
            watched = Reload(file, settings, port=port, keys=keys, replica=replica)
            watching = asyncio.create_task(watched.watch(), name="reload")
            stack.callback(watching.cancel)
            reload = watched.ask
        config = uvicorn.Config(
            app,
            host=settings.server.host,
            port=settings.server.port,
            http=ClientProtocol,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.server.keep_alive_s,
            timeout_graceful_shutdown=settings.server.drain_s,
        )
        log.info("listening on http://%s:%d", settings.server.host, settings.server.port)
        await _Server(config, replica, settings.server.notice_s, reload).serve()


def _without_file() -> None:
    log.warning("SIGHUP: this replica was started without a settings file to read again")


class _Server(uvicorn.Server):
    """uvicorn, which says that it leaves before it stops listening, and ends with exit code 0."""

    def __init__(
        self,
        config: uvicorn.Config,
        replica: Replica,
        notice_s: float,
        reload: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._replica = replica
        self._notice_s = notice_s
        self._reload = reload

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal turns readiness off and, after the notice, stops; a second one now.

        SIGHUP reads the settings file again.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        yield

    def _leave(self) -> None:
        if self._replica.leaving:
            self.should_exit = True
        else:
            self._replica.leaving = True
            asyncio.get_running_loop().call_later(self._notice_s, self._stop)

    def _stop(self) -> None:
        self.should_exit = True


def _refuse_open_door(settings: Settings) -> None:
    if settings.keys:
        return
    host = settings.server.host
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not settings.server.open_without_keys:
        raise ConfigError(
            f"server.host = {host!r}: without keys the gateway is open on loopback only; "
            "configure keys, bind 127.0.0.1, or set server.open_without_keys: true"
        )
    log.warning("no keys are configured: everyone who can reach %s may use the gateway", host)
