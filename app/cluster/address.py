"""Where the writable primary of a pool is: asked again before every dial.

- ``redis://`` and ``rediss://`` (TLS) and ``unix://``: the server itself;
- ``redis+sentinel://[user:password@]host:port[,host:port…]/service[/db]``: the Sentinels know;
- ``redis+cluster://[user:password@]host:port[,host:port…]``: the owner of the pool's slot.

redis-py does the asking; only the answer is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError

from app.errors import ConfigError, RedisAway

_SHAPES = (
    "right is redis://host:6379/0, rediss://… for TLS, redis+sentinel://host:26379/service or "
    "redis+cluster://host:6379"
)


@dataclass(frozen=True, slots=True)
class Address:
    """What to dial and how to log in. ``path`` is a unix socket, else ``host`` and ``port``."""

    host: str = "127.0.0.1"
    port: int = 6379
    path: str | None = None
    tls: bool = False
    username: str | None = None
    password: str | None = None
    db: int = 0


class Resolver:
    """Finds the address for one pool. ``shown`` is the URL's authority, for logs."""

    def __init__(self, url: str, *, tag: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tag = tag
        parts = urlsplit(url)
        self.shown = parts.netloc.rpartition("@")[2] or parts.path
        self._kind = parts.scheme.partition("+")[2] or "single"
        if self._kind == "single":
            self._fixed = _single(url)
            return
        seeds = [_host_port(item) for item in self.shown.split(",") if item]
        if self._kind not in {"sentinel", "cluster"}:
            raise ConfigError(f"redis.url: unknown form {parts.scheme!r}; {_SHAPES}")
        if not seeds:
            raise ConfigError(f"redis.url: no host:port; {_SHAPES}")
        self._seeds = seeds
        names = [name for name in parts.path.split("/") if name]
        if self._kind == "sentinel" and not names:
            raise ConfigError(f"redis.url: the Sentinel service is missing; {_SHAPES}")
        self._service = names[0] if names else ""
        self._fixed = Address(
            tls=parts.scheme.startswith("rediss"),
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            db=int(names[1]) if self._kind == "sentinel" and len(names) > 1 else 0,
        )

    async def resolve(self) -> Address:
        """The primary, now. Raises ``RedisAway`` when nobody can tell."""
        if self._kind == "single":
            return self._fixed
        try:
            host, port = await (self._ask_sentinels() if self._service else self._ask_cluster())
        except (RedisError, OSError, TimeoutError) as exc:
            raise RedisAway(f"no primary known: {exc or type(exc).__name__}") from exc
        return replace(self._fixed, host=host, port=port)

    def _options(self) -> dict[str, Any]:
        return {
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "ssl": self._fixed.tls,
        }

    async def _ask_sentinels(self) -> tuple[str, int]:
        sentinels = Sentinel(  # type: ignore[no-untyped-call]
            self._seeds, sentinel_kwargs=self._options()
        )
        try:
            host, port = await sentinels.discover_master(self._service)
            return str(host), int(port)
        finally:
            for client in sentinels.sentinels:
                await client.aclose()

    async def _ask_cluster(self) -> tuple[str, int]:
        slot = key_slot(self._tag.encode())
        failure: Exception = RedisAway("no seed")
        for seed_host, seed_port in self._seeds:
            client = Redis(
                host=seed_host,
                port=seed_port,
                username=self._fixed.username,
                password=self._fixed.password,
                decode_responses=True,
                **self._options(),
            )
            try:
                slots = await client.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
                for first, last, primary, *_ in slots:
                    if first <= slot <= last:
                        self._learn(primary)
                        return str(primary[0] or seed_host), int(primary[1])
                failure = RedisAway(f"slot {slot} has no owner")
            except (RedisError, OSError) as exc:
                failure = exc
            finally:
                await client.aclose()
        raise failure

    def _learn(self, primary: Any) -> None:
        """The owner of our slot is a seed as well: the configured ones may all go away."""
        seed = (str(primary[0]), int(primary[1]))
        if primary[0] and seed not in self._seeds:
            self._seeds.append(seed)


def _single(url: str) -> Address:
    try:
        at: dict[str, Any] = dict(parse_url(url))
    except ValueError as exc:
        raise ConfigError(f"redis.url: {exc}; {_SHAPES}") from exc
    return Address(
        host=at.get("host", "127.0.0.1"),
        port=at.get("port", 6379),
        path=at.get("path"),
        tls=url.startswith("rediss://"),
        username=at.get("username"),
        password=at.get("password"),
        db=at.get("db", 0),
    )


def _host_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"redis.url: {text!r} is not host:port; {_SHAPES}")
    return host.strip("[]"), int(port)
