"""The settings: one YAML file, ``LEASEWAY_…`` and ``REDIS_URL`` over it, nothing else.

Every setting has its unit in its name and its reason in ``config/leaseway.yaml``. A bad
setting raises ``ConfigError`` that names file, key, value and what would be right.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
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
    "work", "ttft", "round_robin", "random", "least_conn", "weighted_least_conn", "p2c", "peak_ewma"
]
Engine = Literal["auto", "vllm", "sglang", "llamacpp", "ollama", "tgi", "generic"]
# Node and pool names become parts of Redis keys and metric labels.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
ModelName = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")]
# What a browser sends as Origin: scheme and authority, lower case, no path; or "*" for all.
Origin = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\sA-Z]+)$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PerMinute = Annotated[int, Field(ge=1, le=1_000_000_000)]
KeyHash = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_CREDENTIALS = re.compile(r"://[^/\s]*@")
UP_PORT = 6399  # of the Valkey of `leaseway up`: where the command line looks without a URL
_REDIS_URL = re.compile(r"(rediss?(\+(sentinel|cluster))?|unix)://.")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads `yes` and `on` as true, which would pass as the number 1.
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("true or false where something else is wanted; quote a word")
        return value


def _redis_url(value: str) -> str:
    """A form that ``cluster/address.py`` knows; the rest of it is read there."""
    if not _REDIS_URL.match(value):
        raise ValueError(
            "right is redis://host:6379/0, rediss://… for TLS, unix://path, "
            "redis+sentinel://host:26379/service or redis+cluster://host:6379"
        )
    return value


class Redis(_Section):
    """Where shared state lives. Without ``url`` the gateway starts an embedded Valkey."""

    url: Annotated[str, AfterValidator(_redis_url)] | None = None
    namespace: Name = "lw"
    call_timeout_ms: Annotated[int, Field(ge=10, le=60_000)] = 250


class Server(_Section):
    """The listening side of a replica."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    body_limit_mib: Annotated[float, Field(gt=0, le=4096)] = 64
    header_timeout_s: Positive = 10
    body_timeout_s: Positive = 30
    keep_alive_s: Annotated[int, Field(ge=1)] = 75
    notice_s: Annotated[float, Field(ge=0, le=300)] = 0.5
    drain_s: Annotated[int, Field(ge=0)] = 30
    open_without_keys: bool = False
    cors_origins: list[Origin] = []
    ask_usage: bool = True


class LeaseSettings(_Section):
    """How long a silent replica keeps its leases."""

    ttl_s: Annotated[float, Field(ge=0.3, le=3600)] = 10


class Scoring(_Section):
    """Policy and constants of the score (README, "The score")."""

    policy: Policy = "work"
    alpha: Annotated[float, Field(ge=0, le=1)] = 1.0
    ttft_baseline_ms: Positive = 50
    window: Annotated[int, Field(ge=1, le=1000)] = 50
    ttft_prior_ms: Positive = 100
    ttft_floor_ms: Positive = 10
    sample_max_age_s: Positive = 300
    idle_after_s: Positive = 10
    slow_start_s: Annotated[float, Field(ge=0)] = 0
    # Policy `work`
    top_k: Annotated[int, Field(ge=1, le=64)] = 4
    mean_prompt_tokens: Annotated[int, Field(ge=1)] = 512
    mean_output_tokens: Annotated[int, Field(ge=0)] = 100
    min_prompt_tokens: Annotated[int, Field(ge=1)] = 16
    overhead_tokens: Annotated[float, Field(ge=0)] = 128
    lease_tokens: Annotated[float, Field(ge=0)] = 20
    stall_share: Annotated[float, Field(ge=0)] = 0.1
    decode_share: Annotated[float, Field(ge=0)] = 0.05
    error_price_ms: Annotated[float, Field(ge=0)] = 1000
    tpot_prior_ms: Positive = 30
    untried_times: Annotated[float, Field(ge=1)] = 10
    memory_s: Positive = 5
    recover_s: Positive = 5
    best_memory_s: Positive = 300
    error_memory_s: Positive = 30
    hung_s: Positive = 1
    hung_times: Annotated[float, Field(ge=1)] = 3


class Prefix(_Section):
    """Pools whose requests go where their prompt's prefix is cached, when that is worth it."""

    pools: list[Name] = []
    node_tokens: Annotated[int, Field(ge=1024)] = 100_000
    salt: str = ""
    by_key: bool = False


class Circuit(_Section):
    """When a node stops getting requests, and for how long."""

    failure_threshold: Annotated[int, Field(ge=1)] = 3
    failure_rate: Annotated[float, Field(gt=0, le=1)] = 0.25
    min_samples: Annotated[int, Field(ge=1, le=15)] = 12
    open_s: Positive = 2
    open_max_s: Positive = 60

    @model_validator(mode="after")
    def _bounds(self) -> Circuit:
        if self.open_max_s < self.open_s:
            raise ValueError("open_max_s must be at least open_s")
        return self


class Health(_Section):
    """Active probes: one prober per node and interval in the whole cluster."""

    interval_s: Positive = 5
    timeout_s: Positive = 2
    signals: bool = False
    unhealthy_after: Annotated[int, Field(ge=1)] = 3


class Timeouts(_Section):
    """Three timers on silence, none on a whole stream; ``node_idle_s`` is the pool's."""

    connect_s: Positive = 1
    first_token_s: Positive = 120
    stall_s: Positive = 30
    node_idle_s: Positive = 4


class Retries(_Section):
    """How many nodes one request may try before its first byte has gone out."""

    max_attempts: Annotated[int, Field(ge=1, le=16)] = 3


def _collector_url(value: str) -> str:
    """The base of an OTLP collector, as OTEL_EXPORTER_OTLP_ENDPOINT has it."""
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("right is http://host:4318 or https://…: the base, without /v1/traces")
    if parts.username is not None:
        raise ValueError("no user or password in the URL; use OTEL_EXPORTER_OTLP_HEADERS")
    return value.rstrip("/")


class TelemetrySettings(_Section):
    """What a replica tells of its requests, beside its metrics."""

    access_log: Literal["json", "off"] = "off"
    tracing: bool = False
    otlp_endpoint: Annotated[str, AfterValidator(_collector_url)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _off_is_a_word(cls, given: Any) -> Any:
        # YAML reads a bare `off` as false.
        if isinstance(given, dict) and given.get("access_log") is False:
            return {**given, "access_log": "off"}
        return given


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


def _not_our_own(value: str) -> str:
    """What the variable holds is sent to the node: an admin must not send it our secrets."""
    if value == "REDIS_URL" or value.startswith(("LEASEWAY_", "OTEL_")):
        raise ValueError("this variable is the gateway's own; name one that holds the node's key")
    return value


NodeUrl = Annotated[str, AfterValidator(_base_url)]
# Bounds within which a score is neither infinite nor nothing.
Weight = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]
Capacity = Annotated[int, Field(ge=1, le=1_000_000_000)]
Models = Annotated[list[ModelName], Field(min_length=1)] | Literal["discovered"]
Variable = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"),
    AfterValidator(_not_our_own),
]


Slots = Annotated[int, Field(ge=1, le=1_000_000_000)]
KvTokens = Annotated[int, Field(ge=1024, le=10**12)]


class NodeSettings(_Section):
    """One inference server."""

    id: Name
    url: NodeUrl
    weight: Weight = 1.0
    capacity: Capacity = 64
    models: Models = "discovered"
    engine: Engine = "auto"
    api_key_env: Variable | None = None
    slots: Slots | None = None
    kv_tokens: KvTokens | None = None
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
            slots=self.slots,
            kv_tokens=self.kv_tokens,
        )


def _without_defaults(schema: dict[str, Any]) -> None:
    for said in schema["properties"].values():
        said.pop("default", None)


_LEFT_OUT: Any = None  # no value of these fields: null is refused


class NodeChange(_Section):
    """What is to be different of a node from now on; what is left out stays as it is."""

    model_config = ConfigDict(json_schema_extra=_without_defaults)

    url: NodeUrl = _LEFT_OUT
    weight: Weight = _LEFT_OUT
    capacity: Capacity = _LEFT_OUT
    models: Models = _LEFT_OUT
    engine: Engine = _LEFT_OUT
    api_key_env: Variable | None = Field(default=None, description="null: it wants no key")
    slots: Slots | None = Field(default=None, description="null: not known")
    kv_tokens: KvTokens | None = Field(default=None, description="null: not known")


def _key_hashes(value: Any) -> Any:
    given = value if isinstance(value, list) else [value]
    if not given or not all(isinstance(one, str) and _KEY_HASH.fullmatch(one) for one in given):
        raise ValueError(
            "right is sha256: and 64 hex digits in lower case, or a list of such; "
            "`leaseway hash-key` makes them"
        )
    return value


def _not_a_number(value: Any) -> Any:
    """Of dates only what reads as one: a bare 20271231 would be a day in 1970."""
    if not isinstance(value, str | date) or (isinstance(value, str) and value.isdigit()):
        raise ValueError("right is a date, 2027-12-31, or a time, 2027-12-31T18:00:00Z")
    return value


def _in_utc(value: datetime) -> datetime:
    return value.astimezone(UTC) if value.tzinfo is not None else value.replace(tzinfo=UTC)


Instant = Annotated[datetime, BeforeValidator(_not_a_number), AfterValidator(_in_utc)]


class KeySettings(_Section):
    """One caller: its API key, hashed (``sha256:`` and the hex digest of the key's bytes).

    ``hash`` may hold several, while a key is being rotated. ``expires`` is in UTC; a date is its
    first instant. ``rpm`` and ``tpm`` are requests and tokens per minute, over all replicas.
    """

    name: Name
    hash: Annotated[KeyHash | list[KeyHash], BeforeValidator(_key_hashes)]
    models: list[ModelName] | None = None
    rpm: PerMinute | None = None
    tpm: PerMinute | None = None
    expires: Instant | None = None
    admin: bool = False

    @property
    def hashes(self) -> list[str]:
        """All hashes, one or more."""
        return self.hash if isinstance(self.hash, list) else [self.hash]


class Settings(BaseSettings):
    """The whole file. Unknown keys are refused."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="LEASEWAY_", env_nested_delimiter="__"
    )

    redis: Redis = Redis()
    server: Server = Server()
    leases: LeaseSettings = LeaseSettings()
    scoring: Scoring = Scoring()
    prefix: Prefix = Prefix()
    circuit: Circuit = Circuit()
    health: Health = Health()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    telemetry: TelemetrySettings = TelemetrySettings()
    nodes: list[NodeSettings] = []
    aliases: dict[ModelName, ModelName] = {}
    keys: list[KeySettings] = []

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        _unique("nodes", "id", [node.id for node in self.nodes])
        _unique("keys", "name", [key.name for key in self.keys])
        owners: dict[str, str] = {}
        for key in self.keys:
            for one in key.hashes:
                if one in owners:
                    raise ValueError(
                        f"keys: {owners[one]!r} and {key.name!r} have a hash in common; "
                        "each key needs its own"
                    )
                owners[one] = key.name
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
    own: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(f"line {line}: {key!r} is no name; quote it if it is meant as one")
        if key in own:
            raise ConfigError(f"line {line}: {key!r} is given twice; keep one")
        own.add(key)
    loader.flatten_mapping(node)  # what `<<` brings stands first: own values go over it
    return {
        loader.construct_object(key_node, deep=True): loader.construct_object(value, deep=True)
        for key_node, value in node.value
    }


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(path: Path | None, *, port: int | None = None, content: bytes | None = None) -> Settings:
    """Read the settings from ``path`` (None: defaults and environment only).

    ``port`` overrides ``server.port``; ``content`` is what the file holds, if it was read already.
    Raises ``ConfigError``.
    """
    raw: Any = {}
    where = str(path) if path else "defaults and environment"
    if path is not None:
        try:
            content = path.read_bytes() if content is None else content
            raw = yaml.load(content.decode(), Loader=_StrictLoader)  # noqa: S506
        except OSError as exc:
            raise ConfigError(f"{where}: cannot be read: {exc.strerror or exc}") from exc
        except (yaml.YAMLError, UnicodeDecodeError, ConfigError) as exc:
            raise ConfigError(f"{where}: not valid YAML: {_syntax(exc)}") from exc
        raw = {} if raw is None else raw
        if not isinstance(raw, dict):
            raise ConfigError(
                f"{where}: the top level must be a mapping of sections, not a {type(raw).__name__}"
            )
    for section, key, value in (
        ("redis", "url", os.environ.get("REDIS_URL") or None), ("server", "port", port)
    ):  # fmt: skip
        present = raw.get(section) or {}
        if value is not None and isinstance(present, dict):  # else: refused below
            raw[section] = {**present, key: value}
    try:
        return Settings(**raw)
    except ValidationError as exc:
        # An error of a list that could also be 'discovered' comes with one that says so.
        errors = [error for error in exc.errors() if "literal['discovered']" not in error["loc"]]
        raise ConfigError("\n".join(f"{where}: {_explain(error)}" for error in errors)) from exc
    except ValueError as exc:  # pydantic-settings: an environment value that is not JSON
        raise ConfigError(f"environment: {exc}") from exc


def masked(settings: Settings) -> dict[str, Any]:
    """The settings as they may be shown: hashes of keys and the URL of Redis are hidden."""
    shown = settings.model_dump(mode="json")
    for key in shown["keys"]:
        key["hash"] = "(hidden)"  # one or several
    if shown["redis"]["url"]:
        shown["redis"]["url"] = "(set)"
    return shown


def _explain(error: Any) -> str:
    loc = [part for part in error["loc"] if "[" not in str(part)]  # "list[…]" names no key
    key = ".".join(map(str, loc)) or "settings"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key; remove it or correct its name"
    if error["type"] == "missing":
        return f"{key}: missing; it must be given"
    if error["type"] == "value_error" and not loc:
        return str(message)
    return f"{key} = {_shown(loc, error['input'])}: {message}"


def _shown(loc: list[Any], value: Any) -> str:
    """``value`` as it may be printed: ``redis`` and ``keys`` hold secrets, and URLs may."""
    harmless = loc[0] not in {"redis", "keys"} or (
        isinstance(value, str | int | float) and not {"url", "hash"} & set(loc) and len(loc) > 1
        and (loc[0] == "redis" or len(loc) > 2)
    )  # fmt: skip
    shown = repr(value)
    return shown if harmless and not _CREDENTIALS.search(shown) else "(hidden)"


def _syntax(error: Exception) -> str:
    """A YAML error as one line, without the text around it, which may hold a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
