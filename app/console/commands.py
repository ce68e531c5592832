"""Commands that look at the cluster and change its nodes, straight through Redis.

Reads work while all replicas are down; changes go through the scripts that the admin API uses, and
the replicas follow. Imports of the cluster are inside: ``leaseway --help`` needs none of it.
"""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from app.config import NodeChange, NodeSettings
from app.console.options import Config, Json  # noqa: TC001 - typer reads them at run time
from app.console.show import show
from app.console.top import top
from app.errors import LeasewayError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from app.cluster.picture import NodeRow
    from app.console.access import Access

app = typer.Typer()
app.command()(top)
NodeId = Annotated[str, typer.Argument(metavar="NODE", help="The id of the node.")]
Weight = Annotated[float | None, typer.Option(help="Relative strength, K of the score.")]
Capacity = Annotated[int | None, typer.Option(help="Requests in flight at most.")]
ModelNames = Annotated[
    list[str] | None, typer.Option("--model", help="Again for more; or `discovered`.")
]
Engine = Annotated[str | None, typer.Option(help="vllm, sglang, llamacpp, ollama, tgi, generic.")]
KeyVariable = Annotated[str | None, typer.Option(help="Variable with the node's API key.")]
Slots = Annotated[int | None, typer.Option(help="Requests that its engine runs at once.")]
KvTokens = Annotated[int | None, typer.Option(help="Its KV cache, in tokens.")]
_LOOK_S = 0.1


@app.command()
def nodes(config: Config = None, as_json: Json = False) -> None:
    """All nodes with their live profile, straight from Redis."""
    from app.cluster import picture

    rows = _rows(config, lambda one: picture.nodes(one.link, one.keys, one.pool))
    columns = (
        "id", "models", "state", "health", "circuit", "active", "capacity", "weight", "ttft_ms",
        "samples", "tokens_per_s", "scores",
    )  # fmt: skip
    show(rows, columns, as_json=as_json)


@app.command()
def scores(config: Config = None, as_json: Json = False) -> None:
    """The ranking of every model, best first, straight from Redis."""
    from app.cluster import picture

    rows = _rows(config, lambda one: picture.scores(one.link, one.keys, one.pool))
    show(rows, ("model", "node", "score"), as_json=as_json)


@app.command()
def replicas(config: Config = None, as_json: Json = False) -> None:
    """The replicas that have a heartbeat, and how many requests each carries."""
    from app.cluster import owners

    rows = _rows(config, lambda one: owners.replicas(one.link, one.keys, one.pool))
    show(rows, ("replica", "pool", "leases", "expires_in_s"), as_json=as_json)


@app.command()
def leases(
    node: Annotated[str | None, typer.Option(help="Only those on this node.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The oldest so many.")] = 100,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Requests in flight over all replicas, oldest first; nothing of their content."""
    from app.cluster import owners
    from app.console.access import run

    async def read(opened: list[Access]) -> owners.LeasePage:
        pages = [
            await owners.leases(one.link, one.keys, one.pool, limit=limit, node=node)
            for one in opened
        ]
        return owners.oldest(pages, limit)

    page = run(config, read)
    if as_json:
        print(page.model_dump_json(indent=2))
        return
    columns = ("lease", "node", "replica", "age_s", "prompt_tokens", "answering")
    show(page.leases, columns, as_json=False)
    if page.total > len(page.leases):
        print(f"{page.total - len(page.leases)} more")


@app.command()
def add(
    node: NodeId,
    url: Annotated[str, typer.Argument(metavar="URL", help="http://host:port")],
    weight: Weight = None,
    capacity: Capacity = None,
    model: ModelNames = None,
    engine: Engine = None,
    api_key_env: KeyVariable = None,
    slots: Slots = None,
    kv_tokens: KvTokens = None,
    pool: Annotated[str, typer.Option(help="One that the replicas know.")] = "default",
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Add a node; its first good probe lets requests in."""
    given = _given(weight, capacity, model, engine, api_key_env, slots, kv_tokens)
    wanted = _checked(NodeSettings, id=node, url=url, pool=pool, **given).node()

    async def put_in(opened: list[Access]) -> NodeRow:
        from app.cluster import picture
        from app.cluster.operator import NodeExists

        one = next((one for one in opened if one.pool == pool), None)
        if one is None:
            raise LeasewayError(f"pool = {pool!r}: there are {', '.join(o.pool for o in opened)}")
        for other in opened:
            if other is not one and await other.operator.knows(node):
                raise NodeExists(node)
            if other is not one:
                served = await picture.nodes(other.link, other.keys, other.pool)
                if taken := {m for row in served for m in row.models} & set(wanted.models):
                    raise LeasewayError(
                        f"models: {min(taken)!r} is served in the pool {other.pool!r}; "
                        "a model lives in one pool"
                    )
        await one.operator.add(wanted)
        return await one.node(node)

    _changed(config, put_in, f"{node} added", as_json=as_json)


@app.command()
def change(
    node: NodeId,
    url: Annotated[str | None, typer.Option(help="http://host:port")] = None,
    weight: Weight = None,
    capacity: Capacity = None,
    model: ModelNames = None,
    engine: Engine = None,
    api_key_env: KeyVariable = None,
    slots: Slots = None,
    kv_tokens: KvTokens = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Change what is set of a node; what is not given stays."""
    from app.cluster.edits import fields_of

    given = _given(weight, capacity, model, engine, api_key_env, slots, kv_tokens)
    if url is not None:
        given["url"] = url
    if not given:
        raise LeasewayError("change wants at least one of the options")
    checked = _checked(NodeChange, **given).model_dump(exclude_unset=True)
    fields = fields_of(NodeSettings(**{"id": "any", "url": "http://any", **checked}).node())
    _set(node, {name: fields[name] for name in given}, "changed", config, as_json=as_json)


@app.command()
def enable(node: NodeId, config: Config = None, as_json: Json = False) -> None:
    """Let requests go to a node again."""
    _set(node, {"state": "active"}, "enabled", config, as_json=as_json)


@app.command()
def disable(node: NodeId, config: Config = None, as_json: Json = False) -> None:
    """Let no new request go to a node, for long."""
    _set(node, {"state": "disabled"}, "disabled", config, as_json=as_json)


@app.command()
def drain(
    node: NodeId,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for its last request; else code 1.")
    ] = 0,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Let no new request go to a node; those that run end in peace."""
    from app.console.access import home, run

    async def drained(opened: list[Access]) -> NodeRow:
        one = await home(opened, node)
        await one.operator.change(node, {"state": "draining"})
        until = monotonic() + wait
        while True:
            row = await one.node(node)
            if not row.active or monotonic() >= until:
                return row
            await asyncio.sleep(_LOOK_S)

    row = run(config, drained)
    _tell(row, f"{node} draining, {row.active} requests still run on it", as_json=as_json)
    if wait and row.active:
        raise typer.Exit(1)


@app.command()
def remove(node: NodeId, config: Config = None, as_json: Json = False) -> None:
    """Take a node out; its requests end in peace."""
    from app.console.access import home, run

    async def taken_out(opened: list[Access]) -> int:
        return await (await home(opened, node)).operator.remove(node)

    running = run(config, taken_out)
    if as_json:
        print(json.dumps({"id": node, "leases": running}))
    else:
        print(f"{node} removed, {running} requests still run on it")


def _rows(config: Path | None, read: Callable[[Access], Awaitable[list[Any]]]) -> list[Any]:
    from app.console.access import run

    async def all_rows(opened: list[Access]) -> list[Any]:
        return [row for one in opened for row in await read(one)]

    return run(config, all_rows)


def _set(
    node: str, fields: dict[str, str], what: str, config: Path | None, *, as_json: bool
) -> None:
    from app.console.access import home

    async def changed(opened: list[Access]) -> NodeRow:
        one = await home(opened, node)
        await one.operator.change(node, fields)
        return await one.node(node)

    _changed(config, changed, f"{node} {what}", as_json=as_json)


def _changed(
    config: Path | None,
    work: Callable[[list[Access]], Awaitable[NodeRow]],
    what: str,
    *,
    as_json: bool,
) -> None:
    from app.console.access import run

    _tell(run(config, work), what, as_json=as_json)


def _tell(row: NodeRow, what: str, *, as_json: bool) -> None:
    print(row.model_dump_json(indent=2) if as_json else what)


def _given(
    weight: float | None,
    capacity: int | None,
    models: list[str] | None,
    engine: str | None,
    api_key_env: str | None,
    slots: int | None,
    kv_tokens: int | None,
) -> dict[str, Any]:
    given = {
        "weight": weight,
        "capacity": capacity,
        "models": "discovered" if models == ["discovered"] else models or None,
        "engine": engine,
        "api_key_env": api_key_env,
        "slots": slots,
        "kv_tokens": kv_tokens,
    }
    return {name: value for name, value in given.items() if value is not None}


def _checked(model: type[Any], **given: Any) -> Any:
    """``model`` of what was given. Raises ``LeasewayError`` that names the first fault."""
    try:
        return model(**given)
    except ValidationError as exc:
        first = exc.errors()[0]
        field, what = first["loc"][0], first["msg"].removeprefix("Value error, ")
        raise LeasewayError(f"{field} = {given[str(field)]!r}: {what}") from exc
