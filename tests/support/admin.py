"""Words that tests of the admin API share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

    from tests.support.rawnode import RawNode


def entry(node_id: str, node: RawNode, **fields: Any) -> dict[str, Any]:
    """A node as the settings file has it, or a POST."""
    return {"id": node_id, "url": node.url, "models": ["m"], "capacity": 8, **fields}


def add(http: httpx.Client, node: RawNode, node_id: str = "x", **fields: Any) -> dict[str, Any]:
    """Add ``node`` with a model of its own, named like it; the row."""
    answer = http.post("/admin/nodes", json=entry(node_id, node, models=[node_id], **fields))
    assert answer.status_code == 201, answer.text
    row: dict[str, Any] = answer.json()
    return row


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, after a look at its shape."""
    body = answer.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def operations(http: httpx.Client) -> list[tuple[str, str]]:
    """Every method and path below /admin that the document has; of nodes, b1."""
    paths = http.get("/openapi.json").json()["paths"]
    return [
        (method.upper(), path.replace("{node_id}", "b1"))
        for path, methods in paths.items()
        for method in methods
        if path.startswith("/admin")
    ]


def rows(http: httpx.Client) -> dict[str, Any]:
    """All nodes by id."""
    return {row["id"]: row for row in http.get("/admin/nodes").json()}


def models(http: httpx.Client) -> set[str]:
    """The names that ``/v1/models`` lists."""
    return {card["id"] for card in http.get("/v1/models").json()["data"]}
