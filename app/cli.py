"""``leaseway``: the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from app.config import Settings, load
from app.errors import LeasewayError, RedisAway

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pydantic import BaseModel

    from app.cluster.link import Link

app = typer.Typer(
    name="leaseway",
    help="A Redis-coordinated cluster of LLM inference gateways.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(
    help="Measurements, each beside a peer in the same run.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The settings file (config/leaseway.yaml).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def serve(
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option(help="Overrides server.port.")] = None,
    replica_id: Annotated[
        str | None, typer.Option(help="Unique among living replicas; minted when not given.")
    ] = None,
) -> None:
    """Run one gateway replica."""
    from app import main as wiring

    settings = load(config, port=port)
    _log_to_stderr()
    uvloop.run(wiring.serve(settings, replica_id))


@app.command()
def up(
    gateway_port: Annotated[int, typer.Option(help="First replica; the others follow.")] = 8080,
    node_port: Annotated[int, typer.Option(help="First fake node; the others follow.")] = 9101,
    redis_port: Annotated[int, typer.Option(help="The embedded Valkey.")] = 6399,
    config: ConfigOption = None,
) -> None:
    """Start embedded Valkey, three fake nodes and three replicas; Ctrl-C ends them all."""
    from app.lab.up import run

    _log_to_stderr()
    asyncio.run(
        run(gateway_port=gateway_port, node_port=node_port, redis_port=redis_port, config=config)
    )


@app.command("check-config")
def check_config(config: ConfigOption = None) -> None:
    """Check the settings and print them as the gateway would use them, secrets hidden."""
    settings = load(config).model_dump(mode="json")
    for key in settings["keys"]:
        key["hash"] = "(hidden)"
    if settings["redis"]["url"]:
        settings["redis"]["url"] = "(set)"
    print(json.dumps(settings, indent=2))


@app.command()
def schema() -> None:
    """Print the JSON schema of the settings file, for editors."""
    print(json.dumps(Settings.model_json_schema(), indent=2))


@app.command()
def nodes(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """All nodes with their live profile, straight from Redis."""
    from app.cluster import picture

    rows = _from_redis(config, picture.nodes)
    columns = (
        "id", "models", "state", "health", "circuit", "active", "capacity", "weight", "ttft_ms",
        "samples", "tokens_per_s", "scores",
    )  # fmt: skip
    _show(rows, columns, as_json=as_json)


@app.command()
def scores(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """The ranking of every model, best first, straight from Redis."""
    from app.cluster import picture

    _show(_from_redis(config, picture.scores), ("model", "node", "score"), as_json=as_json)


@bench_app.command("gateway")
def bench_gateway(
    workload: Annotated[list[str] | None, typer.Option(help="json, burst, paced.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of load, each round and peer.")] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Gateway CPU-µs per request beside nginx, interleaved in one run."""
    from app.lab.bench.run import main as run

    run(workload or ["json", "burst", "paced"], rounds, seconds, as_json)


def _from_redis(
    config: Path | None, read: Callable[[Link, Any, str], Awaitable[list[Any]]]
) -> list[BaseModel]:
    """Run ``read`` for every pool of the settings over a link of its own."""
    from app.cluster.link import Link
    from app.keys import pool_keys
    from app.lab.up import REDIS_PORT

    settings = load(config)
    url = settings.redis.url or f"redis://127.0.0.1:{REDIS_PORT}/0"

    async def rows() -> list[BaseModel]:
        link = Link(url, budget_s=2.0, name="leaseway-cli")
        try:
            await link.start()
            pools = sorted({"default"} | {node.pool for node in settings.nodes})
            return [
                row
                for pool in pools
                for row in await read(link, pool_keys(settings.redis.namespace, pool), pool)
            ]
        except RedisAway as exc:
            raise LeasewayError(f"cannot read from Redis: {exc}") from exc
        finally:
            await link.close()

    return asyncio.run(rows())


def _show(rows: list[BaseModel], columns: tuple[str, ...], *, as_json: bool) -> None:
    plain = [row.model_dump(mode="json") for row in rows]
    if as_json:
        print(json.dumps(plain, indent=2))
        return
    table = Table(*columns)
    for row in plain:
        table.add_row(*(_cell(row[column]) for column in columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {_cell(v)}" for k, v in value.items())
    return str(value)


def _log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # One line per probe and per connection is noise at 3 am.
    for quiet in ("httpx", "httpcore", "uvicorn.error"):
        logging.getLogger(quiet).setLevel(logging.WARNING)


def main() -> None:
    """Entry point: errors of ours are one line on stderr and exit code 1 or 2."""
    try:
        app()
    except LeasewayError as exc:
        print(f"leaseway: {exc}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
