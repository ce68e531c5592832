"""The settings: one YAML file, ``LEASEWAY_…`` and ``REDIS_URL`` over it, nothing else.

Every setting has its unit in its name and its reason in ``config/leaseway.yaml``. A bad
setting raises ``ConfigError`` that names file, key, value and what would be right.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.errors import ConfigError
from app.model import Node

if TYPE_CHECKING:
    from pathlib import Path

Policy = Literal[
    "ttft", "round_robin", "random", "least_conn", "weighted_least_conn", "p2c", "peak_ewma"
]
Engine = Literal["auto", "vllm", "sglang", "llamacpp", "ollama", "tgi", "generic"]
# Node and pool names become parts of Redis keys and metric labels.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
ModelName = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")]
Positive = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Redis(_Section):
    """Where shared state lives. Without ``url`` the gateway starts an embedded Valkey."""

    url: str | None = None
    namespace: Name = "lw"
    call_timeout_ms: Annotated[int, Field(ge=10, le=60_000)] = 250


class Server(_Section):
    """The listening side of a replica."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    body_limit_mib: Annotated[float, Field(gt=0, le=4096)] = 64
    keep_alive_s: Annotated[int, Field(ge=1)] = 75
    drain_s: Annotated[int, Field(ge=0)] = 30
    open_without_keys: bool = False


class LeaseSettings(_Section):
    """How long a silent replica keeps its leases."""

    ttl_s: Annotated[float, Field(ge=0.3, le=3600)] = 10


class Scoring(_Section):
    """Policy and constants of the score (README, "The score")."""

    policy: Policy = "ttft"
    alpha: Annotated[float, Field(ge=0, le=1)] = 1.0
    ttft_baseline_ms: Positive = 50
    window: Annotated[int, Field(ge=1, le=1000)] = 50
    ttft_prior_ms: Positive = 100
    ttft_floor_ms: Positive = 10
    sample_max_age_s: Positive = 300


class Circuit(_Section):
    """When a node stops getting requests, and for how long."""

    failure_threshold: Annotated[int, Field(ge=1)] = 3
    open_s: Positive = 2
    open_max_s: Positive = 60

    @model_validator(mode="after")
    def _bounds(self) -> Circuit:
        if self.open_max_s < self.open_s:
            raise ValueError("open_max_s must be at least open_s")
        return self


class Timeouts(_Section):
    """Three timers on silence, none on a whole stream; ``node_idle_s`` is the pool's."""

    connect_s: Positive = 1
    first_token_s: Positive = 120
    stall_s: Positive = 30
    node_idle_s: Positive = 4


class Retries(_Section):
    """How many nodes one request may try before its first byte has gone out."""

    max_attempts: Annotated[int, Field(ge=1, le=16)] = 3


def _base_url(value: str) -> str:
    """A node's base: scheme, authority, optional path; ``/v1`` and slashes at its end go."""
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"{exc}; right is http://host:port") from exc
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ValueError("right is http://host:port or https://host:port, with an optional path")
    if parts.query or parts.fragment or "?" in value or "#" in value:
        raise ValueError("a base URL cannot carry a query or a fragment; give the path only")
    if parts.username is not None or parts.password is not None:
        raise ValueError("no user or password in the URL; use api_key_env for the node's key")
    if any(ord(c) <= 0x20 or ord(c) == 0x7F for c in value):
        raise ValueError("no spaces or control characters in a URL")
    return f"{parts.scheme}://{parts.netloc}" + parts.path.rstrip("/").removesuffix("/v1").rstrip(
        "/"
    )


class NodeSettings(_Section):
    """One inference server."""

    id: Name
    url: Annotated[str, AfterValidator(_base_url)]
    weight: Positive = 1.0
    capacity: Annotated[int, Field(ge=1)] = 64
    models: Annotated[list[ModelName], Field(min_length=1)] | Literal["discovered"] = "discovered"
    engine: Engine = "auto"
    api_key_env: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = (
        None
    )
    pool: Name = "default"

    def node(self) -> Node:
        """The registry's view; ``discovered`` models are filled in later."""
        return Node(
            id=self.id,
            url=self.url,
            pool=self.pool,
            weight=self.weight,
            capacity=self.capacity,
            models=() if self.models == "discovered" else tuple(dict.fromkeys(self.models)),
            engine=self.engine,
            api_key_env=self.api_key_env,
        )


class KeySettings(_Section):
    """One API key, hashed: ``sha256:`` and the hex digest of the key's bytes."""

    name: Name
    hash: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    models: list[ModelName] | None = None
    admin: bool = False


class Settings(BaseSettings):
    """The whole file. Unknown keys are refused."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="LEASEWAY_", env_nested_delimiter="__"
    )

    redis: Redis = Redis()
    server: Server = Server()
    leases: LeaseSettings = LeaseSettings()
    scoring: Scoring = Scoring()
    circuit: Circuit = Circuit()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    nodes: list[NodeSettings] = []
    aliases: dict[ModelName, ModelName] = {}
    keys: list[KeySettings] = []

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        _unique("nodes", "id", [node.id for node in self.nodes])
        _unique("keys", "name", [key.name for key in self.keys])
        homes: dict[str, str] = {}
        for node in self.nodes:
            for model in [] if node.models == "discovered" else node.models:
                if homes.setdefault(model, node.pool) != node.pool:
                    raise ValueError(
                        f"nodes: model {model!r} is in the pools {homes[model]!r} and "
                        f"{node.pool!r}; a model lives in one pool"
                    )
        for public, served in self.aliases.items():
            if served in self.aliases:
                raise ValueError(
                    f"aliases.{public}: {served!r} is an alias itself; name a served model"
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the library's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment over file: the file is what ``load`` passes in."""
        assert isinstance(env_settings, EnvSettingsSource)  # noqa: S101
        return env_settings, init_settings


def _unique(section: str, field: str, values: list[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{section}: {field} {value!r} is given twice; each needs its own")


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error, not a silent overwrite."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            mark = key_node.start_mark
            raise ConfigError(f"line {mark.line + 1}: {key!r} is given twice; keep one")
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(path: Path | None, *, port: int | None = None) -> Settings:
    """Read the settings from ``path`` (None: defaults and environment only).

    ``port`` overrides ``server.port``. Raises ``ConfigError``.
    """
    raw: Any = {}
    where = str(path) if path else "defaults and environment"
    if path is not None:
        try:
            raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506
        except OSError as exc:
            raise ConfigError(f"{where}: cannot be read: {exc.strerror or exc}") from exc
        except (yaml.YAMLError, UnicodeDecodeError, ConfigError) as exc:
            raise ConfigError(f"{where}: not valid YAML: {exc}") from exc
        raw = {} if raw is None else raw
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: the top level must be a mapping of sections, not {raw!r}")
    if os.environ.get("REDIS_URL"):
        raw["redis"] = {**(raw.get("redis") or {}), "url": os.environ["REDIS_URL"]}
    if port is not None:
        raw["server"] = {**(raw.get("server") or {}), "port": port}
    try:
        return Settings(**raw)
    except ValidationError as exc:
        raise ConfigError(
            "\n".join(f"{where}: {_explain(error)}" for error in exc.errors())
        ) from exc
    except TypeError as exc:
        raise ConfigError(f"{where}: {exc}; section names must be plain words") from exc
    except ValueError as exc:  # pydantic-settings: an environment value that is not JSON
        raise ConfigError(f"environment: {exc}") from exc


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "settings"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key; remove it or correct its name"
    if error["type"] == "value_error" and not error["loc"]:
        return str(message)
    secret = any(
        part in {"hash", "url"} and error["loc"][0] in {"keys", "redis"} for part in error["loc"]
    )
    value = "(hidden)" if secret else repr(error["input"])
    return f"{key} = {value}: {message}"
