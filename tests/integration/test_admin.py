"""The admin API on real replicas: what a call does to Redis and to requests, and all refusals."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from app.admission.keys import hash_key
from app.config import Settings
from tests.support import state
from tests.support.admin import add, entry, error_of, operations, rows
from tests.support.fleet import Fleet, plain_http
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import RawNode, events, json_answer, sse_answer, stream_forever
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

ROOT, USER = "sk-root-0123456789", "sk-user-0123456789"
ADMIN = {"authorization": f"Bearer {ROOT}"}
KEYS = [
    {"name": "root", "hash": hash_key(ROOT), "admin": True},
    {"name": "user", "hash": hash_key(USER)},
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RawNode]]:
    """Two nodes of the settings file, b1 and b2, and two to add."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawNode()) for _ in range(4)]


@pytest.fixture(scope="module")
def fleet(nodes: list[RawNode]) -> Iterator[Fleet]:
    """Two replicas that know a node's key and want an admin's."""
    listed = [entry("b1", nodes[0]), entry("b2", nodes[1])]
    with Fleet(
        listed, replicas=2, keys=KEYS, environment={"SPARE_KEY": "nk-spare"},
        leases={"ttl_s": 1.5}, retries={"max_attempts": 1}, scoring={"policy": "ttft"},
    ) as started:  # fmt: skip
        yield started
        started.wait_settled()


@pytest.fixture
def spare(nodes: list[RawNode]) -> RawNode:
    """The node to add, as new."""
    for node in nodes:
        node.script = json_answer()
        node.requests.clear()
    return nodes[2]


@pytest.fixture
def http(fleet: Fleet) -> Iterator[httpx.Client]:
    """An admin at the first replica; what was added is taken out again."""
    with plain_http(fleet.urls[0]) as client:
        client.headers.update(ADMIN)
        yield client
        for row in client.get("/admin/nodes").json():
            if row["source"] == "admin":
                assert client.delete(f"/admin/nodes/{row['id']}").status_code == 200


def at(fleet: Fleet, number: int, model: str = "m", *, stream: bool = False) -> RawClient:
    """A user's request at a replica, answered."""
    body = chat(stream=stream, model=model)
    return ask(fleet.replicas[number].port, with_key(body))


def with_key(request: bytes, key: str = USER) -> bytes:
    return request.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer %s\r\n\r\n" % key.encode(), 1)


def record(fleet: Fleet, node_id: str) -> dict[str, str]:
    return dict(fleet.redis.hgetall(state.KEYS.node(node_id)))  # type: ignore[arg-type]


def served(fleet: Fleet, model: str = "x") -> None:
    """Wait until both replicas serve a model."""
    for number in range(2):
        wait_until(lambda n=number: at(fleet, n, model).status == 200, what=f"r{number} serves")


# Nodes


def test_a_node_that_is_added_is_known_probed_and_served_by_every_replica(
    http: httpx.Client, fleet: Fleet, spare: RawNode
) -> None:
    answer = http.post("/admin/nodes", json=entry("x", spare, models=["x", "x2"], weight=2.5))
    assert (answer.status_code, answer.headers["location"]) == (201, "/admin/nodes/x")
    row = answer.json()
    assert (row["id"], row["pool"], row["url"], row["models"]) == (
        "x", "default", spare.url, ["x", "x2"],
    )  # fmt: skip
    assert (row["weight"], row["capacity"], row["state"], row["source"]) == (
        2.5, 8, "active", "admin",
    )  # fmt: skip
    assert record(fleet, "x")["url"] == spare.url
    assert http.get("/admin/nodes/x").json()["epoch"] == row["epoch"]
    served(fleet)
    assert at(fleet, 1, "x2").headers[b"x-leaseway-node"] == b"x"
    assert {row["id"] for row in http.get("/admin/nodes").json()} == {"b1", "b2", "x"}


def test_models_of_a_node_that_names_none_are_discovered(
    http: httpx.Client, fleet: Fleet, nodes: list[RawNode], spare: RawNode
) -> None:
    spare.models = ("told-1", "told-2")
    answer = http.post("/admin/nodes", json={"id": "x", "url": spare.url})
    assert (answer.status_code, answer.json()["models"]) == (201, [])
    served(fleet, "told-2")
    changed = http.patch("/admin/nodes/x", json={"models": ["given"]}).json()
    assert changed["models"] == ["given"]
    served(fleet, "given")
    assert at(fleet, 0, "told-2").status == 404
    spare.models = ("told-3",)
    again = http.patch("/admin/nodes/x", json={"models": "discovered"}).json()
    assert again["models"] == ["given"]  # until it has told them
    served(fleet, "told-3")
    spare.models = ("m",)


def test_a_weight_counts_at_once_in_the_score_that_all_replicas_pick_by(
    http: httpx.Client, fleet: Fleet, spare: RawNode
) -> None:
    add(http, spare)
    served(fleet)
    before = http.get("/admin/nodes/x").json()["scores"]["x"]
    row = http.patch("/admin/nodes/x", json={"weight": 4}).json()
    assert (row["weight"], row["edited"]) == (4, sorted(row["edited"]))
    assert row["scores"]["x"] == fleet.redis.zscore(state.KEYS.score("x"), "x")
    assert row["scores"]["x"] > before


def test_a_capacity_is_the_cap_of_the_whole_cluster_at_once(
    http: httpx.Client, fleet: Fleet, spare: RawNode
) -> None:
    add(http, spare)
    served(fleet)
    spare.script = stream_forever(0.05)
    with RawClient(fleet.replicas[0].port) as held:
        held.send(with_key(chat(model="x"))).read_events(2)
        assert http.patch("/admin/nodes/x", json={"capacity": 1}).status_code == 200
        refused = at(fleet, 1, "x")
        assert (refused.status, refused.json()["error"]["code"]) == (429, "at_capacity")
        spare.script = json_answer()
        assert http.patch("/admin/nodes/x", json={"capacity": 2}).status_code == 200
        assert at(fleet, 1, "x").status == 200


def test_a_url_and_a_key_of_the_node_are_followed_by_every_replica(
    http: httpx.Client, fleet: Fleet, nodes: list[RawNode], spare: RawNode
) -> None:
    add(http, spare)
    served(fleet)
    other = nodes[3]
    change = {"url": other.url + "/v1/", "api_key_env": "SPARE_KEY", "engine": "vllm"}
    row = http.patch("/admin/nodes/x", json=change).json()
    assert (row["url"], row["engine"]) == (other.url, "vllm")
    assert record(fleet, "x")["api_key_env"] == "SPARE_KEY"

    def followed(number: int) -> bool:
        before = len(other.requests)
        assert at(fleet, number, "x").status == 200
        keys = [one.header(b"authorization") for one in other.requests[before:]]
        return keys == [b"Bearer nk-spare"]

    for number in range(2):
        wait_until(partial(followed, number), what=f"r{number} follows")
    assert http.patch("/admin/nodes/x", json={"kv_tokens": 50_000}).is_success
    assert record(fleet, "x")["kv_tokens"] == "50000"
    assert http.patch("/admin/nodes/x", json={"kv_tokens": None, "api_key_env": None}).is_success
    assert (record(fleet, "x")["api_key_env"], record(fleet, "x")["kv_tokens"]) == ("", "")


def test_nothing_given_changes_nothing(http: httpx.Client, fleet: Fleet) -> None:
    before = fleet.redis.get(state.KEYS.changes)
    assert http.patch("/admin/nodes/b1", json={}).json()["id"] == "b1"
    assert fleet.redis.get(state.KEYS.changes) == before


def test_draining_lets_run_what_runs_and_tells_how_far_it_is(
    http: httpx.Client, fleet: Fleet, spare: RawNode
) -> None:
    add(http, spare)
    served(fleet)
    spare.script = sse_answer(events(3), gap_s=0.05)
    assert http.get("/admin/nodes/x/drain").json() == {
        "id": "x", "state": "active", "leases": 0, "done": False,
    }  # fmt: skip
    spare.script = stream_forever(0.05)
    with RawClient(fleet.replicas[1].port) as held:
        held.send(with_key(chat(model="x"))).read_events(2)
        draining = http.post("/admin/nodes/x/drain").json()
        assert draining == {"id": "x", "state": "draining", "leases": 1, "done": False}
        for number in range(2):
            assert at(fleet, number, "x").status == 503
        held.read_events(len(held.body.split(b"\n\n")) + 3)  # it goes on
    wait_until(lambda: http.get("/admin/nodes/x/drain").json()["done"], what="drained")
    assert http.post("/admin/nodes/x/drain").json()["state"] == "draining"  # again: the same
    spare.script = json_answer()
    assert http.post("/admin/nodes/x/enable").json()["state"] == "active"
    for number in range(2):
        assert at(fleet, number, "x").status == 200
    assert http.post("/admin/nodes/x/disable").json()["state"] == "disabled"
    assert at(fleet, 1, "x").status == 503


def test_a_node_that_is_taken_out_ends_its_requests_in_peace(
    http: httpx.Client, fleet: Fleet, spare: RawNode
) -> None:
    add(http, spare)
    served(fleet)
    spare.script = sse_answer(events(20), gap_s=0.05)
    with RawClient(fleet.replicas[1].port) as held:
        held.send(with_key(chat(model="x"))).read_events(2)
        assert http.delete("/admin/nodes/x").json() == {"id": "x", "leases": 1}
        assert http.get("/admin/nodes/x").status_code == 404
        assert "x" not in {row["id"] for row in http.get("/admin/nodes").json()}
        wait_until(lambda: at(fleet, 1, "x").status == 404, what="the model is gone")
        assert held.read_all() == b"".join(events(20))
    wait_until(lambda: not fleet.redis.exists(state.KEYS.node("x")), what="nothing is left")
    add(http, spare)  # and may come back
    served(fleet)


def test_a_circuit_is_opened_and_closed_by_hand(
    http: httpx.Client, fleet: Fleet, spare: RawNode
) -> None:
    add(http, spare)
    served(fleet)
    order = {"state": "open", "seconds": 600}
    row = http.post("/admin/nodes/x/circuit", json=order).json()
    assert (row["circuit"], row["scores"]["x"]) == ("open", 0)
    now_ms = int(fleet.redis.time()[0]) * 1000
    due = fleet.redis.zscore(state.KEYS.due("x"), "x")
    assert due is not None
    assert 500_000 < due - now_ms <= 601_000
    for number in range(2):
        refused = at(fleet, number, "x")
        assert (refused.status, int(refused.headers[b"retry-after"]) > 500) == (503, True)
    row = http.post("/admin/nodes/x/circuit", json={"state": "closed"}).json()
    assert row["circuit"] == "closed"
    for number in range(2):
        assert at(fleet, number, "x").status == 200


def test_an_opened_circuit_lets_a_trial_in_when_its_time_is_over(
    http: httpx.Client, fleet: Fleet, spare: RawNode
) -> None:
    add(http, spare)
    served(fleet)
    assert http.post("/admin/nodes/x/circuit", json={"state": "open", "seconds": 0.2}).is_success
    wait_until(lambda: at(fleet, 1, "x").status == 200, what="a trial")
    assert http.get("/admin/nodes/x").json()["circuit"] == "closed"


# Pages


def test_scores_replicas_and_leases_agree_with_redis(
    http: httpx.Client, fleet: Fleet, nodes: list[RawNode], spare: RawNode
) -> None:
    for node in nodes:
        node.script = stream_forever(0.05)
    with contextlib.ExitStack() as stack:
        for number in (0, 1, 1):
            held = stack.enter_context(RawClient(fleet.replicas[number].port))
            held.send(with_key(chat())).read_events(3)
        page = http.get("/admin/leases").json()
        known = {lease.id: lease for lease in state.leases(fleet.redis)}
        assert (page["total"], len(page["leases"])) == (3, 3)
        assert {row["lease"] for row in page["leases"]} == set(known)
        for row in page["leases"]:
            lease = known[row["lease"]]
            assert (row["node"], row["replica"], row["prompt_tokens"]) == (
                lease.node, lease.replica, lease.prompt_tokens,
            )  # fmt: skip
            assert row["age_s"] >= 0
            assert row["answering"] is True
            assert set(row) == {
                "pool", "lease", "node", "replica", "age_s", "prompt_tokens", "answering",
            }  # fmt: skip
        ages = [row["age_s"] for row in page["leases"]]
        assert ages == sorted(ages, reverse=True)
        short = http.get("/admin/leases", params={"limit": 2}).json()
        assert (short["total"], short["leases"][0]["lease"]) == (3, page["leases"][0]["lease"])
        assert len(short["leases"]) == 2
        of_b1 = http.get("/admin/leases", params={"node": "b1"}).json()
        assert of_b1["total"] == state.load(fleet.redis, "b1")
        rows = http.get("/admin/replicas").json()
        assert [(row["replica"], row["leases"]) for row in rows] == [("r0", 1), ("r1", 2)]
        assert all(0 < row["expires_in_s"] <= 1.5 for row in rows)
        ranked = [(row["node"], row["score"]) for row in http.get("/admin/scores").json()]
        assert ranked == fleet.redis.zrevrange(state.KEYS.score("m"), 0, -1, withscores=True)


def test_the_settings_in_force_are_shown_without_their_secrets(
    http: httpx.Client, fleet: Fleet
) -> None:
    answer = http.get("/admin/config")
    shown = answer.json()
    assert set(shown) == set(Settings.model_fields)
    assert shown["leases"]["ttl_s"] == 1.5
    assert shown["redis"]["url"] == "(set)"
    assert [key["hash"] for key in shown["keys"]] == ["(hidden)", "(hidden)"]
    for secret in (ROOT, hash_key(ROOT), str(fleet.valkey.port)):
        assert secret not in answer.text


# Refusals

REFUSED: list[tuple[str, str, Any, int, str | None, str]] = [
    ("GET", "/nodes/none", None, 404, "id", "node_not_found"),
    ("PATCH", "/nodes/none", {"weight": 2}, 404, "id", "node_not_found"),
    ("DELETE", "/nodes/none", None, 404, "id", "node_not_found"),
    ("POST", "/nodes/none/drain", None, 404, "id", "node_not_found"),
    ("GET", "/nodes/none/drain", None, 404, "id", "node_not_found"),
    ("POST", "/nodes/none/enable", None, 404, "id", "node_not_found"),
    ("POST", "/nodes/none/disable", None, 404, "id", "node_not_found"),
    ("POST", "/nodes/none/circuit", {"state": "open"}, 404, "id", "node_not_found"),
    ("GET", "/nodes/%7Bno%20id%7D", None, 404, "id", "node_not_found"),
    ("POST", "/nodes", {"id": "b1", "url": "http://h:1"}, 409, "id", "node_exists"),
    ("POST", "/nodes", {"url": "http://h:1"}, 422, "id", "invalid_value"),
    ("POST", "/nodes", {"id": "y"}, 422, "url", "invalid_value"),
    ("POST", "/nodes", {"id": "a b", "url": "http://h:1"}, 422, "id", "invalid_value"),
    ("POST", "/nodes", {"id": "y", "url": "ftp://h"}, 422, "url", "invalid_value"),
    ("POST", "/nodes", {"id": "y", "url": "http://u:p@h"}, 422, "url", "invalid_value"),
    ("POST", "/nodes", {"id": "y", "url": "http://h", "wieght": 1}, 422, "wieght", "invalid_value"),
    ("POST", "/nodes", {"id": "y", "url": "http://h", "models": []}, 422, "models",
     "invalid_value"),
    ("POST", "/nodes", {"id": "y", "url": "http://h", "models": ["a\nb"]}, 422, "models.0",
     "invalid_value"),
    ("POST", "/nodes", {"id": "y", "url": "http://h", "models": "all"}, 422, "models",
     "invalid_value"),
    ("POST", "/nodes", {"id": "y", "url": "http://h", "pool": "east"}, 422, "pool",
     "invalid_value"),
    ("POST", "/nodes", ["id"], 422, None, "invalid_value"),
    ("POST", "/nodes", None, 422, None, "invalid_value"),
    ("PATCH", "/nodes/b1", {"weight": 0}, 422, "weight", "invalid_value"),
    ("PATCH", "/nodes/b1", {"weight": 1e300}, 422, "weight", "invalid_value"),
    ("PATCH", "/nodes/b1", {"weight": None}, 422, "weight", "invalid_value"),
    ("PATCH", "/nodes/b1", {"weight": True}, 422, "weight", "invalid_value"),
    ("PATCH", "/nodes/b1", {"capacity": 0.5}, 422, "capacity", "invalid_value"),
    ("PATCH", "/nodes/b1", {"capacity": 10**30}, 422, "capacity", "invalid_value"),
    ("PATCH", "/nodes/b1", {"url": "http://h?x=1"}, 422, "url", "invalid_value"),
    ("PATCH", "/nodes/b1", {"engine": "magic"}, 422, "engine", "invalid_value"),
    ("PATCH", "/nodes/b1", {"api_key_env": "A=B"}, 422, "api_key_env", "invalid_value"),
    ("PATCH", "/nodes/b1", {"api_key_env": "REDIS_URL"}, 422, "api_key_env", "invalid_value"),
    ("PATCH", "/nodes/b1", {"id": "b9"}, 422, "id", "invalid_value"),
    ("PATCH", "/nodes/b1", {"pool": "b9"}, 422, "pool", "invalid_value"),
    ("PATCH", "/nodes/b1", {"state": "draining"}, 422, "state", "invalid_value"),
    ("POST", "/nodes/b1/circuit", {"state": "half_open"}, 422, "state", "invalid_value"),
    ("POST", "/nodes/b1/circuit", {"state": "open", "seconds": 0}, 422, "seconds",
     "invalid_value"),
    ("POST", "/nodes/b1/circuit", {"state": "open", "seconds": 1e9}, 422, "seconds",
     "invalid_value"),
    ("POST", "/nodes/b1/circuit", {"state": "closed", "seconds": 5}, 422, None, "invalid_value"),
    ("GET", "/leases?limit=0", None, 422, "limit", "invalid_value"),
    ("GET", "/leases?limit=1001", None, 422, "limit", "invalid_value"),
    ("GET", "/leases?limit=x", None, 422, "limit", "invalid_value"),
    ("GET", "/leases?node=a%20b", None, 422, "node", "invalid_value"),
    ("PUT", "/nodes/b1", {}, 405, None, "method_not_allowed"),
    ("DELETE", "/nodes", None, 405, None, "method_not_allowed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param", "code"),
    REFUSED,
    ids=[f"{method} {path} {body}"[:60] for method, path, body, *_ in REFUSED],
)
def test_what_cannot_be_is_refused_names_its_field_and_changes_nothing(
    http: httpx.Client, fleet: Fleet, method: str, path: str, body: Any, status: int,
    param: str | None, code: str,
) -> None:  # fmt: skip
    def looked_at() -> list[Any]:
        return [fleet.redis.hgetall(state.KEYS.edits), *map(partial(what_is_set, fleet), "12")]

    before = looked_at()
    answer = http.request(method, f"/admin{path}", json=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error"
    if param is not None and status == 422:
        assert error["message"].startswith(f"{param}: ")
    assert looked_at() == before


def what_is_set(fleet: Fleet, number: str) -> dict[str, str]:
    fields = ("url", "weight", "capacity", "models", "engine", "api_key_env", "state", "circuit")
    there = record(fleet, f"b{number}")
    return {name: there.get(name, "") for name in fields}


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"id": "y", ' + b"[" * 100_000, b"[]]"])
def test_a_body_that_is_no_json_is_said_to_be_none(http: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = http.post("/admin/nodes", content=body, headers=headers)
    assert answer.status_code in {400, 422}
    assert error_of(answer)["type"] == "invalid_request_error"


def test_every_call_wants_an_admins_key_before_it_looks_at_anything(
    http: httpx.Client, fleet: Fleet
) -> None:
    before = [what_is_set(fleet, n) for n in "12"]
    calls = operations(http)
    assert len(calls) == 14
    with plain_http(fleet.urls[1]) as other:
        for method, path in calls:
            for body in (b"{", b'{"weight": 9, "state": "open"}'):
                for key, status in ((None, 401), ("sk-guess", 401), (USER, 403)):
                    headers = {"content-type": "application/json"}
                    headers |= {"authorization": f"Bearer {key}"} if key else {}
                    answer = other.request(method, path, content=body, headers=headers)
                    assert answer.status_code == status, (method, path, body, key)
                    assert error_of(answer)["code"] in {"invalid_api_key", "not_admin"}
    assert [what_is_set(fleet, n) for n in "12"] == before


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_changes_nothing_through_the_browser_of_an_admin(
    http: httpx.Client, site: str
) -> None:
    refused = http.post("/admin/nodes/b1/drain", headers={"sec-fetch-site": site})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "cross_site")
    assert http.get("/admin/nodes/b1").json()["state"] == "active"
    own = http.post("/admin/nodes/b1/enable", headers={"sec-fetch-site": "same-origin"})
    assert own.status_code == 200


def test_the_document_has_every_call_with_its_refusals(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values() if path.startswith("/admin") else ():
            assert operation["summary"]
            refusals = {status for status in operation["responses"] if status >= "400"}
            assert refusals == {"401", "403", "404", "409", "422", "503"}
            for status in refusals:
                (content,) = operation["responses"][status]["content"].values()
                assert content["schema"]["$ref"].endswith("/FaultBody")


def test_a_node_and_a_model_live_in_one_pool(nodes: list[RawNode], spare: RawNode) -> None:
    b1, b2, _, _ = nodes
    listed = [entry("b1", b1), entry("e1", b2, models=["far"], pool="east")]
    with Fleet(listed, replicas=1) as two, plain_http(two.urls[0]) as http:
        taken = http.post("/admin/nodes", json=entry("e1", spare, models=["new"]))
        assert (taken.status_code, error_of(taken)["code"]) == (409, "node_exists")
        for answer in (
            http.post("/admin/nodes", json=entry("x", spare, models=["far"])),
            http.post("/admin/nodes", json=entry("x", spare, models=["m"], pool="east")),
            http.patch("/admin/nodes/b1", json={"models": ["m", "far"]}),
        ):
            assert (answer.status_code, error_of(answer)["param"]) == (422, "models")
        far = entry("x", spare, models=["far", "farther"], pool="east")
        assert http.post("/admin/nodes", json=far).json()["pool"] == "east"
        assert http.post("/admin/nodes/x/drain").json()["state"] == "draining"
        assert http.delete("/admin/nodes/e1").json() == {"id": "e1", "leases": 0}
        assert set(rows(http)) == {"b1", "x"}
        assert http.get("/admin/leases").json() == {"total": 0, "leases": []}
        living = [(row["pool"], row["replica"]) for row in http.get("/admin/replicas").json()]
        assert living == [("default", "r0"), ("east", "r0")]
