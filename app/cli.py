"""``leaseway``: the command line."""

from __future__ import annotations

import asyncio
import getpass
import json
import logging
import secrets
import sys
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer
import uvloop
import yaml
from pydantic import ValidationError

from app.config import KeySettings, Settings, load, masked
from app.console.commands import app as console
from app.console.options import Config, Json  # noqa: TC001 - typer reads them at run time
from app.errors import LeasewayError

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
app.add_typer(console)

_SHORT_KEY = 16


@app.command()
def serve(
    config: Config = None,
    port: Annotated[int | None, typer.Option(help="Overrides server.port.")] = None,
    replica_id: Annotated[
        str | None, typer.Option(help="Unique among living replicas; minted when not given.")
    ] = None,
) -> None:
    """Run one gateway replica."""
    from app import main as wiring

    settings = load(config, port=port)
    _log_to_stderr()
    uvloop.run(wiring.serve(settings, replica_id, file=config, port=port))


@app.command()
def up(
    gateway_port: Annotated[int, typer.Option(help="First replica; the others follow.")] = 8080,
    node_port: Annotated[int, typer.Option(help="First fake node; the others follow.")] = 9101,
    redis_port: Annotated[int, typer.Option(help="The embedded Valkey.")] = 6399,
    config: Config = None,
) -> None:
    """Start embedded Valkey, three fake nodes and three replicas; Ctrl-C ends them all."""
    from app.lab.up import run

    _log_to_stderr()
    asyncio.run(
        run(gateway_port=gateway_port, node_port=node_port, redis_port=redis_port, config=config)
    )


@app.command("check-config")
def check_config(config: Config = None) -> None:
    """Check the settings and print them as the gateway would use them, secrets hidden."""
    print(json.dumps(masked(load(config)), indent=2))


@app.command("hash-key")
def hash_key(
    name: Annotated[str, typer.Option(help="Shows in metrics and messages.")] = "team-a",
    new: Annotated[bool, typer.Option("--new", help="Make a key, shown once on stderr.")] = False,
) -> None:
    """Print the settings entry of an API key that is read from stdin, or asked for, or made."""
    from app.admission import keys

    if new:
        key = f"lw-{secrets.token_urlsafe(32)}".encode()
    elif sys.stdin.isatty():
        key = getpass.getpass("API key: ").encode()
    else:
        key = sys.stdin.buffer.read()
    key = key.strip()  # as it comes out of a header, and without the newline of `echo`
    if not key or len(key.splitlines()) > 1:
        raise LeasewayError("hash-key wants one key: a line on stdin, or --new to make one")
    try:
        entry = KeySettings(name=name, hash=keys.hash_key(key))
    except ValidationError as exc:
        raise LeasewayError(f"name = {name!r}: {exc.errors()[0]['msg']}") from exc
    if new:  # on stderr: `>> leaseway.yaml` must keep the entry alone
        print(f"The key, which is stored nowhere: {key.decode()}", file=sys.stderr)
    elif len(key) < _SHORT_KEY:
        print(f"leaseway: a key under {_SHORT_KEY} characters can be guessed from its hash; "
              "--new makes a good one", file=sys.stderr)  # fmt: skip
    print(yaml.safe_dump([{"name": name, "hash": entry.hash}], sort_keys=False), end="")


@app.command()
def schema() -> None:
    """Print the JSON schema of the settings file, for editors."""
    print(json.dumps(Settings.model_json_schema(), indent=2))


@bench_app.command("gateway")
def bench_gateway(
    workload: Annotated[list[str] | None, typer.Option(help="json, burst, paced.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of load, each round and peer.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Gateway CPU-µs per request beside nginx, interleaved in one run."""
    from app.lab.bench.run import main as run

    run(workload or ["json", "burst", "paced"], rounds, seconds, as_json)


@bench_app.command("policies")
def bench_policies(
    policies: Annotated[
        str, typer.Option(help="As ttft,least_conn; none: round_robin, least_conn, ttft, work.")
    ] = "",
    load: Annotated[
        str, typer.Option(help="closed, and shares of the fleet's throughput: closed,0.5,0.8.")
    ] = "closed,0.8",
    seeds: Annotated[str, typer.Option(help="Whole numbers; a round of all policies each.")] = (
        "1,2,3"
    ),
    seconds: Annotated[float, typer.Option(min=1, help="Of each run, without warm-up.")] = 20.0,
    replicas: Annotated[int, typer.Option(min=1, max=16)] = 3,
    one_replica: Annotated[
        str, typer.Option(help="A policy to run on one replica too: what does sharing cost?")
    ] = "",
    scale: Annotated[
        float, typer.Option(min=0.1, max=10, help="2: nodes half as fast, for slow machines.")
    ] = 1.0,
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Routing policies on three unequal fake nodes, live, beside the published figures."""
    from app.lab.bench.policies import main as run

    run(
        policies, load, seeds, seconds=seconds, replicas=replicas, one_replica=one_replica,
        scale=scale, json_out=as_json, markdown_out=as_markdown,
    )  # fmt: skip


@bench_app.command("redis")
def bench_redis(
    policy: Annotated[list[str] | None, typer.Option(help="Again for more.")] = None,
    nodes: Annotated[list[int] | None, typer.Option(min=1, help="Again for more.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    as_json: Json = False,
) -> None:
    """What Redis pays for a request: CPU-µs per script, beside one that does nothing; memory."""
    from app.lab.bench.redis import run

    asyncio.run(run(policy or ["work", "ttft"], nodes or [10, 100, 1000, 10_000], rounds, as_json))


@app.command()
def simulate(
    scenario: Annotated[
        str, typer.Option(help="trio, fleet, equal, closed, prefix, or one in which things break.")
    ] = "trio",
    load: Annotated[
        float | None,
        typer.Option(min=0.01, max=2, help="Share of the summed saturated throughput."),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Again for more; all if none.")] = None,
    seeds: Annotated[str, typer.Option(help="Whole numbers; rows are means over them.")] = "1",
    requests: Annotated[int | None, typer.Option(min=100)] = None,
    replicas: Annotated[int | None, typer.Option(min=1)] = None,
    sharing: Annotated[
        str | None, typer.Option(help="State of replicas: global, local, or its age in ms.")
    ] = None,
    alpha: Annotated[float, typer.Option(min=0, max=1, help="Of policy `ttft`.")] = 1.0,
    fleet: Annotated[Path | None, typer.Option(help="YAML that describes your nodes.")] = None,
    as_json: Json = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG (extra `plots`).")] = None,
) -> None:
    """Routing policies on a simulated fleet, beside peers' and one that knows everything."""
    from app.lab.simulate.experiment import main as run

    run(
        scenario, policy or [], seeds, load=load, requests=requests, replicas=replicas,
        sharing=sharing, alpha=alpha, fleet=fleet, as_json=as_json, as_markdown=as_markdown,
        plot=plot,
    )  # fmt: skip


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
