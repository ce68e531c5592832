"""The control plane under whatever its own OpenAPI document allows, and what it does not.

Every operation of the document is called on a real replica: with values that fit, with values
that do not, with and without an admin key. New operations are fuzzed as soon as they are there.
"""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample, Unsatisfiable
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

from app.admission.keys import hash_key
from tests.cases.bench import Bench, running_bench
from tests.fuzz import box
from tests.support import state
from tests.support.rawclient import RawClient, ask
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT, USER = "sk-root-0123456789", "sk-user-0123456789"
ADMIN = {"authorization": f"Bearer {ROOT}"}
# Header values that are no key of an admin.
OTHERS: list[dict[str, str]] = [
    {}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer "},
    {"authorization": f"Bearer {USER}"}, {"authorization": f"Bearer {ROOT}x"},
    {"authorization": f"Bearer {ROOT[:-1]}"}, {"authorization": f"Basic {ROOT}"},
    {"authorization": hash_key(ROOT)}, {"authorization": f"Bearer {hash_key(ROOT)}"},
    {"x-api-key": USER}, {"cookie": f"key={ROOT}"}, {"api-key": ROOT.upper()},
]  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    load_all_checks()
    keys: list[dict[str, Any]] = [
        {"name": "root", "hash": hash_key(ROOT), "admin": True},
        {"name": "user", "hash": hash_key(USER)},
    ]
    with running_bench(keys=keys) as bench:
        yield bench


@pytest.fixture(scope="module")
def operations(bench: Bench) -> list[Any]:
    """All operations of the document."""
    schema = schemathesis.openapi.from_url(f"{bench.gw.url}/openapi.json")
    found: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    assert {
        "/admin/nodes", "/admin/nodes/{node_id}", "/admin/nodes/{node_id}/drain",
        "/admin/nodes/{node_id}/circuit", "/admin/scores", "/admin/replicas", "/admin/leases",
        "/admin/config", "/healthz", "/v1/models",
    } <= {operation.path for operation in found}  # fmt: skip
    return found


def tamed(case: Any) -> Any:
    """``case`` with no address in it but of this machine: whatever it names would be dialled.

    The document cannot say what a URL is: every other one becomes one, so that nodes are added.
    """
    body = case.body
    if isinstance(body, dict) and isinstance(body.get("url"), str):
        url = body["url"]
        if urlsplit(url.replace("[", "").replace("]", "")).netloc or len(url) % 2:
            case.body = {**body, "url": "http://127.0.0.1:1"}
    given = case.path_parameters or {}
    if "node_id" in given and case.method != "DELETE" and len(given["node_id"]) % 2:
        case.path_parameters = {**given, "node_id": "b1"}  # which is there
    return case


def cases(operations: list[Any], mode: GenerationMode) -> st.SearchStrategy[Any]:
    """A call of any operation."""
    return st.one_of([operation.as_strategy(generation_mode=mode) for operation in operations])


def assert_in_our_shape(case: Any, response: Any) -> None:
    """An error has the OpenAI shape; anything else is what the document says."""
    assert response.status_code < 500, response.text
    assert ROOT not in response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == ["application/json"]
        error = json.loads(response.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return
    case.validate_response(response, checks=[content_type_conformance, response_schema_conformance])


def assert_well(bench: Bench) -> None:
    assert bench.gw.process is not None
    assert bench.gw.process.poll() is None
    assert ask(bench.gw.port, b"GET /healthz HTTP/1.1\r\nhost: g\r\n\r\n").status == 200
    wait_until(lambda: state.unloaded(bench.valkey), within_s=5, what="no lease is left")
    state.assert_counters_equal_leases(bench.valkey)
    assert ROOT not in bench.gw.log


def test_whatever_an_admin_says_is_answered_as_the_document_has_it(
    bench: Bench, operations: list[Any]
) -> None:
    fitting = cases(operations, GenerationMode.POSITIVE)
    wrong = [operation for operation in operations if _can_be_wrong(operation)]
    if wrong:
        fitting |= cases(wrong, GenerationMode.NEGATIVE)

    done: Counter[tuple[str, int]] = Counter()

    def check(case: Any) -> None:
        response = tamed(case).call(headers=ADMIN)
        done[case.method, response.status_code] += 1
        assert_in_our_shape(case, response)

    box.fuzz(check, fitting, share=1 / 3, batch=20)
    print(dict(done))
    assert_well(bench)


def _can_be_wrong(operation: Any) -> bool:
    """Whether there are values of the wrong kind: any text fits a name in a path."""
    quick = settings(
        max_examples=50, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    try:
        find(
            operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
            lambda _: True,
            settings=quick,
            random=Random(0),
        )
    except (Unsatisfiable, NoSuchExample):
        return False
    return True


METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY", "X"]
TYPES = ["application/json", "text/plain", "multipart/form-data; boundary=x", "", "\x7f"]


def test_what_the_document_does_not_have_is_refused_in_our_shape(
    bench: Bench, operations: list[Any]
) -> None:
    paths = [operation.path.partition("{")[0] for operation in operations]
    calls = st.tuples(
        st.sampled_from(METHODS),
        st.sampled_from(paths),
        st.binary(max_size=12).map(quote),
        st.text("a=&%2F;+é", max_size=12).map(quote),
        st.sampled_from(TYPES),
        st.binary(max_size=40) | st.sampled_from([b"{}", b"[]", b'{"url":1}', b'{"id":null}']),
    )

    def check(call: tuple[str, str, str, str, str, bytes]) -> None:
        method, path, more, query, kind, body = call
        lines = [
            f"{method} {path}{more}?{query} HTTP/1.1",
            "host: g",
            f"authorization: Bearer {ROOT}",
            f"content-type: {kind}",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        with RawClient(bench.gw.port) as client:
            client.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            client.read_head()
            if method != "HEAD":  # whose length is that of a body which does not come
                client.read_all()
        assert 0 < client.status < 500
        if client.status >= 400 and client.body:
            assert client.headers[b"content-type"] == b"application/json"
            assert set(client.json()["error"]) == {"message", "type", "param", "code"}

    box.fuzz(check, calls, share=1 / 3, batch=50)
    assert_well(bench)


def test_nobody_but_an_admin_gets_anything_from_admin(bench: Bench, operations: list[Any]) -> None:
    guarded = [op for op in operations if op.path.startswith("/admin")]
    before = sorted(bench.valkey.scan_iter("lw:*"))
    mode = GenerationMode.POSITIVE

    def check(drawn: tuple[Any, dict[str, str]]) -> None:
        case, headers = drawn
        response = tamed(case).call(headers=headers)
        assert response.status_code in {401, 403}, response.text
        assert_in_our_shape(case, response)

    box.fuzz(check, st.tuples(cases(guarded, mode), st.sampled_from(OTHERS)), share=1 / 3, batch=20)
    assert sorted(bench.valkey.scan_iter("lw:*")) == before, "and changes nothing"
    assert_well(bench)
