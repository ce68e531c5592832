"""L3: path and query are forwarded exactly once, under whatever prefix a node has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.cases.conftest import small_settings
from tests.support.rawclient import ask
from tests.support.rawnode import RawNode
from tests.support.servers import Gateway, ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What is put behind http://host:port in the settings → what the node sees before /v1.
BASES = {
    "": "", "/": "", "/v1": "", "/v1/": "",
    "/prefix": "/prefix", "/prefix/v1": "/prefix", "/prefix/v1/": "/prefix",
    "/a/b%20c/": "/a/b%20c", "/v1beta": "/v1beta", "/v1/engines/x": "/v1/engines/x",
}  # fmt: skip
QUERIES = [
    "",
    "?api-version=2&x=%2F%20y",
    "?a=1&a=2&b&=c&+%2B",
    "?q=%E6%97%A5&redirect=http://x/v1?y=/v1",
    "?x=a;b,c:d@e!$'()*",
]
MODELS = {base: f"m{i}" for i, base in enumerate(BASES)}


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Gateway, RawNode]]:
    """One replica that knows one node by all of its bases, each with a model of its own."""
    with ValkeyServer() as server, RawNode() as node:
        settings = small_settings([])
        settings["nodes"] = [
            {"id": f"n{i}", "url": node.url + base, "models": [MODELS[base]]}
            for i, base in enumerate(BASES)
        ]
        with Gateway(settings, server.url) as gw:
            yield gw, node
        assert "Traceback" not in gw.log


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_the_node_sees_its_prefix_one_v1_and_the_raw_query(
    started: tuple[Gateway, RawNode], base: str, path: str
) -> None:
    gw, node = started
    node.requests.clear()
    body = b'{"model":"%s","input":"x"}' % MODELS[base].encode()
    for query in QUERIES:
        head = f"POST {path}{query} HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
        raw = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
        assert ask(gw.port, raw).status == 200
    assert [request.target for request in node.requests] == [
        f"{BASES[base]}{path}{query}" for query in QUERIES
    ]
    host = node.url.removeprefix("http://").encode()
    assert {request.header(b"host") for request in node.requests} == {host}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1/v1?key=x", "cannot carry a query or a fragment"),
        ("http://me:pw@127.0.0.1:1", "no user or password"),
    ],
)
def test_a_base_that_cannot_be_honoured_is_refused_at_start(
    tmp_path: Path, url: str, why: str
) -> None:
    settings: dict[str, Any] = {**small_settings([]), "nodes": [{"id": "n", "url": url}]}
    gw = Gateway(settings, "redis://127.0.0.1:1/0")
    gw.start(wait=False)
    try:
        assert gw.process is not None
        assert gw.process.wait(10) == 2
        (line,) = gw.log.splitlines()
        assert line.startswith("leaseway: ")
        assert "nodes.0.url" in line
        assert why in line
    finally:
        gw.kill()
