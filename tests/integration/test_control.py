"""The control plane of a running replica: health, readiness, metrics, admin, errors."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.admission.keys import hash_key
from app.lab.node import NodeConfig
from app.lab.profiles import IDEAL
from tests.support.fleet import CHAT, MODEL, POOL, Fleet, Nodes, chat, pace, plain_http
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

METRICS = {
    "leaseway_requests_total": {"model", "status"},
    "leaseway_requests_abandoned_total": set(),
    "leaseway_requests_in_flight": set(),
    "leaseway_attempts_total": {"node", "outcome"},
    "leaseway_ttft_seconds_count": {"node"},
    "leaseway_tokens_total": {"model", "kind"},
    "leaseway_leases_held": set(),
    "leaseway_leases_reaped": set(),
    "leaseway_redis_up": set(),
}
USER, ADMIN = {"authorization": "Bearer sk-user"}, {"authorization": "Bearer sk-admin"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes; the second also serves a model of its own."""
    with Nodes(
        n1=NodeConfig(profile=IDEAL),
        n2=NodeConfig(profile=pace(2.0), models=(MODEL, "other")),
    ) as started:
        yield started


@pytest.fixture(scope="module")
def fleet(nodes: Nodes) -> Iterator[Fleet]:
    """Two open replicas."""
    with Fleet(nodes.settings(n1={"weight": 3}), replicas=2, leases={"ttl_s": 1}) as started:
        yield started
        started.wait_settled()


@pytest.fixture(scope="module")
def guarded(nodes: Nodes) -> Iterator[Fleet]:
    """One replica with a user's and an administrator's key."""
    keys = [
        {"name": "user", "hash": hash_key("sk-user")},
        {"name": "boss", "hash": hash_key("sk-admin"), "admin": True},
    ]
    with Fleet(nodes.settings(), replicas=1, keys=keys) as started:
        yield started


@pytest.fixture
def http(fleet: Fleet) -> Iterator[httpx.Client]:
    """A client of the first replica."""
    with plain_http(fleet.urls[0]) as client:
        yield client


def samples(http: httpx.Client) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The metrics page, parsed: sample name → (labels, value)."""
    page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page.text):
        assert family.documentation, family.name
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(http: httpx.Client, name: str, **labels: str) -> float:
    return sum(v for have, v in samples(http).get(name, []) if labels.items() <= have.items())


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, after a look at its shape."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


def test_health_says_that_the_process_is_alive_and_which_one(http: httpx.Client) -> None:
    answer = http.get("/healthz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "replica": "r0"}


def test_readiness_says_how_many_nodes_are_known(http: httpx.Client) -> None:
    answer = http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "replica": "r0", "nodes": 2}


def test_readiness_does_not_flicker_while_the_heart_beats(http: httpx.Client) -> None:
    seen = Counter[int]()
    until = monotonic() + 1.2  # at least three beats of ttl/3
    while monotonic() < until:
        seen[http.get("/readyz").status_code] += 1
    assert set(seen) == {200}, seen


def test_readiness_follows_redis_down_and_up_again(nodes: Nodes) -> None:
    with (
        Fleet(nodes.settings(), replicas=1, leases={"ttl_s": 1}) as fleet,
        plain_http(fleet.urls[0]) as http,
    ):

        def status() -> str:
            page = http.get("/readyz")
            assert page.status_code == 200  # it serves alone: all leaving at once helps nobody
            return str(page.json()["status"])

        fleet.valkey.kill()
        wait_until(lambda: status() == "degraded", within_s=2, what="degraded without Redis")
        alone = http.post(CHAT, json=chat(max_tokens=1))
        assert (alone.status_code, alone.headers["x-leaseway-degraded"]) == (200, "1")
        assert http.get("/healthz").status_code == 200  # alive: a restart would mend nothing
        assert value(http, "leaseway_redis_up") == 0
        refused = http.get("/admin/nodes")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "state_unavailable")
        fleet.valkey.start()
        wait_until(lambda: status() == "ok", within_s=5, what="in touch again")
        assert value(http, "leaseway_redis_up") == 1
        assert http.post(CHAT, json=chat(max_tokens=1)).status_code == 200


def test_metrics_have_the_names_and_labels_of_old(http: httpx.Client) -> None:
    assert http.post(CHAT, json=chat(max_tokens=3, stream=True)).status_code == 200
    found = samples(http)
    for name, labels in METRICS.items():
        assert name in found, name
        assert all(set(have) == labels for have, _ in found[name]), name


def test_metrics_count_what_was_served(http: httpx.Client) -> None:
    served = {"model": "other", "status": "200"}
    before = value(http, "leaseway_requests_total", **served)
    tokens = value(http, "leaseway_tokens_total", model="other", kind="output")
    firsts = value(http, "leaseway_ttft_seconds_count", node="n2")
    for _ in range(3):
        body = {**chat(max_tokens=4, stream=True), "model": "other"}
        assert http.post(CHAT, json=body).text.endswith("data: [DONE]\n\n")
    assert value(http, "leaseway_requests_total", **served) == before + 3
    assert value(http, "leaseway_ttft_seconds_count", node="n2") == firsts + 3
    # Without a usage event the tokens are the events with content and the one that finishes.
    assert 12 <= value(http, "leaseway_tokens_total", model="other", kind="output") - tokens <= 15
    assert value(http, "leaseway_leases_held") == 0
    assert value(http, "leaseway_requests_in_flight") == 0


def test_names_that_clients_invent_never_become_labels(http: httpx.Client) -> None:
    before = samples(http)["leaseway_requests_total"]
    for number in range(200):
        answer = http.post(CHAT, json={**chat(), "model": f"invented-{number}"})
        assert answer.status_code == 404
    after = samples(http)["leaseway_requests_total"]
    assert {labels["model"] for labels, _ in after} <= {MODEL, "other", "unknown"}
    assert len(after) <= len(before) + 1
    assert value(http, "leaseway_requests_total", model="unknown", status="404") >= 200


def test_admin_nodes_agree_with_redis(http: httpx.Client, fleet: Fleet) -> None:
    for _ in range(4):
        assert http.post(CHAT, json=chat(max_tokens=2, stream=True)).status_code == 200
    fleet.wait_settled()
    rows = {row["id"]: row for row in http.get("/admin/nodes").json()}
    assert set(rows) == set(fleet.redis.smembers(f"{POOL}nodes"))
    for node_id, row in rows.items():
        record = fleet.redis.hgetall(f"{POOL}node:{node_id}")
        assert row["url"] == record["url"]
        assert row["weight"] == float(record["weight"])
        assert row["capacity"] == int(record["capacity"])
        assert row["models"] == str(record["models"]).split("\n")
        assert (row["state"], row["health"], row["circuit"]) == ("active", "ok", "closed")
        assert row["active"] == int(fleet.redis.get(f"{POOL}active:{node_id}") or 0)
        window = fleet.redis.lrange(f"{POOL}ttft:{node_id}", 0, -1)
        assert row["samples"] == len(window)
        if window:
            mean_ms = sum(int(str(each).split(":")[0]) for each in window) / len(window) / 1000
            assert row["ttft_ms"] == pytest.approx(mean_ms, abs=0.001)
        for model, score in row["scores"].items():
            assert score == fleet.redis.zscore(f"{POOL}score:{model}", node_id)
    assert sum(row["samples"] for row in rows.values()) > 0


def test_admin_nodes_show_a_running_stream(http: httpx.Client, fleet: Fleet) -> None:
    body = {**chat(max_tokens=100_000, stream=True), "model": "other"}
    with http.stream("POST", CHAT, json=body) as answer:
        chunks = answer.iter_bytes()  # dropping it would close the stream
        next(chunks)
        url = f"{fleet.urls[1]}/admin/nodes"  # any replica tells of all
        rows = {row["id"]: row for row in http.get(url).json()}
        assert (rows["n1"]["active"], rows["n2"]["active"]) == (0, 1)
        assert value(http, "leaseway_leases_held") == 1
    fleet.wait_settled()


def test_admin_scores_agree_with_redis_best_first(http: httpx.Client, fleet: Fleet) -> None:
    rows = http.get("/admin/scores").json()
    for model in (MODEL, "other"):
        listed = [(row["node"], row["score"]) for row in rows if row["model"] == model]
        assert listed == fleet.redis.zrevrange(f"{POOL}score:{model}", 0, -1, withscores=True)
    assert {row["model"] for row in rows} == {MODEL, "other"}


def test_the_openapi_document_describes_the_control_plane(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert {"/healthz", "/readyz", "/metrics", "/admin/nodes", "/admin/scores"} <= set(
        document["paths"]
    )
    assert http.get("/docs").status_code == 200


@pytest.mark.parametrize("path", ["/admin/nodes", "/admin/scores"])
def test_admin_wants_an_admin_key_when_keys_are_configured(guarded: Fleet, path: str) -> None:
    with plain_http(guarded.urls[0]) as http:
        nobody, wrong = http.get(path), http.get(path, headers={"x-api-key": "sk-guess"})
        assert (nobody.status_code, wrong.status_code) == (401, 401)
        assert error_of(nobody)["code"] == error_of(wrong)["code"] == "invalid_api_key"
        user = http.get(path, headers=USER)
        assert (user.status_code, error_of(user)["code"]) == (403, "not_admin")
        assert http.get(path, headers=ADMIN).status_code == 200
        assert http.get(path, headers={"x-api-key": "sk-admin"}).status_code == 200


def test_health_pages_need_no_key(guarded: Fleet) -> None:
    with plain_http(guarded.urls[0]) as http:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/admin/nothing", 404, "not_found"),
        ("DELETE", "/healthz", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/embeddings", 405, "method_not_allowed"),
        ("GET", "/v1/models/nobody/has-it", 404, "model_not_found"),
    ],
)
def test_unknown_paths_and_methods_get_an_error_in_the_openai_shape(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)["code"] == code
    if status == 405:
        assert answer.headers["allow"]
