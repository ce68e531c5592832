"""Metrics of running replicas: what is documented, drawn and alerted on is there, and bounded."""

from __future__ import annotations

import json
import random
import re
import signal
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.admission.keys import hash_key
from app.control.scrape import CIRCUITS, STATES
from app.gateway.routes import ROUTES
from app.lab.faults import Fault
from app.lab.node import NodeConfig
from app.lab.profiles import IDEAL
from app.model import Outcome
from tests.support.fleet import CHAT, MODEL, Fleet, Nodes, chat, pace, plain_http
from tests.support.promql import asked
from tests.support.rawclient import ask
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = Path(__file__).parents[2]
DOCS = (TOP / "docs" / "telemetry.md").read_text()
RULES = yaml.safe_load((TOP / "deploy" / "prometheus" / "alerts.yaml").read_text())
DASHBOARD = json.loads((TOP / "deploy" / "grafana" / "leaseway.json").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], one["expr"]) for panel in PANELS for one in panel["targets"]]
EXPRESSIONS = [(rule["alert"], rule["expr"]) for rule in ALERTS] + TARGETS
OF_THE_SCRAPER = {"instance", "job"}
REASONS = {"unknown", "down", "full", "spent"}
KEY = {"authorization": "Bearer sk-telemetry"}
KEYS = [{"name": "team-a", "hash": hash_key("sk-telemetry")}]
FROM_REDIS = re.compile(r"leaseway_(node_|replicas$|redis_script)")


@dataclass(frozen=True)
class Family:
    """One metric of a page: its type, and its series, labels → value, by sample name."""

    kind: str
    series: dict[str, list[tuple[dict[str, str], float]]]

    @property
    def labels(self) -> set[str]:
        """The labels of its series, without the buckets'."""
        return {name for of in self.series.values() for have, _ in of for name in have} - {"le"}


def scrape(url: str) -> dict[str, Family]:
    """The metrics page: name as one asks for it (counters with ``_total``) → family."""
    with plain_http(url) as http:
        page = http.get("/metrics")
    assert page.status_code == 200
    found: dict[str, Family] = {}
    for family in text_string_to_metric_families(page.text):
        assert family.documentation, family.name
        series: dict[str, list[tuple[dict[str, str], float]]] = {}
        for sample in family.samples:
            series.setdefault(sample.name, []).append((sample.labels, sample.value))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in found, f"{name} is on the page twice"
        found[name] = Family(family.type, series)
    return found


def samples(page: dict[str, Family]) -> dict[str, list[tuple[dict[str, str], float]]]:
    """All samples of a page by name."""
    return {name: of for family in page.values() for name, of in family.series.items()}


def value(page: dict[str, Family], sample: str, **labels: str) -> float:
    """The sum over the series that have these labels."""
    return sum(v for have, v in samples(page).get(sample, []) if labels.items() <= have.items())


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A good node, and one that is preferred, serves a model of its own, and fails."""
    with Nodes(
        n1=NodeConfig(profile=pace(1.0)),
        n2=NodeConfig(profile=IDEAL, models=(MODEL, "lonely"), fault=Fault(mode="status")),
    ) as started:
        yield started


@pytest.fixture(scope="module")
def fleet(nodes: Nodes) -> Iterator[Fleet]:
    """Two replicas; the first has seen one of everything that makes a series."""
    listed = nodes.settings(n2={"weight": 1000})
    with Fleet(listed, replicas=2, keys=KEYS, leases={"ttl_s": 1}) as started:
        with plain_http(started.urls[0]) as http:

            def post(model: str, **more: Any) -> int:
                body = {**chat(**more), "model": model}
                return http.post(CHAT, json=body, headers=KEY).status_code

            assert post(MODEL, stream=True, max_tokens=20) == 200  # n2 fails, n1 answers
            assert post("lonely") == 500
            assert post("nobody-has-it") == 404
            assert http.post(CHAT, json=chat()).status_code == 401
            for path in ("/v1/nothing", "/healthz"):
                http.get(path)
        ask(started.replicas[0].port, b"nonsense\r\n\r\n")
        started.wait_settled()
        yield started


def test_what_the_docs_list_is_what_a_scrape_shows(fleet: Fleet) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", DOCS, re.MULTILINE)
    listed = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    shown = {name: (family.kind, family.labels) for name, family in scrape(fleet.urls[0]).items()}
    assert listed == shown


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_dashboard_and_alerts_ask_for_what_there_is(
    fleet: Fleet, where: str, expression: str
) -> None:
    there = samples(_page(fleet.urls[0]))
    found = asked(expression)
    assert found.labels, "asks for nothing"
    for metric, labels in found.labels.items():
        assert metric in there, metric
        for have, _ in there[metric]:
            assert labels <= have.keys() | OF_THE_SCRAPER, (metric, labels)
    for (metric, label), wanted in found.values.items():
        values = {have[label] for have, _ in there[metric]}
        assert wanted <= (REASONS if label == "reason" else values), (metric, label)


@cache
def _page(url: str) -> dict[str, Family]:
    return scrape(url)


def test_alert_rules_are_what_prometheus_takes() -> None:
    """https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/"""
    assert set(RULES) == {"groups"}
    names = [group["name"] for group in RULES["groups"]]
    assert len(names) == len(set(names))
    assert len(ALERTS) == len({rule["alert"] for rule in ALERTS})
    for group in RULES["groups"]:
        assert set(group) <= {"name", "interval", "limit", "rules"}
    for rule in ALERTS:
        assert set(rule) <= {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
        assert re.fullmatch(r"Leaseway[A-Za-z]+", rule["alert"])
        if "for" in rule:
            assert promql_parser.parse_duration(rule["for"]).total_seconds() > 0
        assert rule["labels"]["severity"] in {"warning", "critical"}
        told = rule["annotations"]
        assert set(told) == {"summary", "description", "runbook"}
        kept = asked(rule["expr"]).kept
        for text in told.values():
            used = set(re.findall(r"\$labels\.(\w+)", text))
            assert kept is None or used <= kept, f"{rule['alert']}: {used} not in {kept}"
        file, _, heading = told["runbook"].partition("#")
        headings = re.findall(r"^### (\w+)$", (TOP / file).read_text(), re.MULTILINE)
        assert heading in {one.lower() for one in headings}


def test_every_runbook_belongs_to_an_alert() -> None:
    used = {rule["annotations"]["runbook"].partition("#")[2] for rule in ALERTS}
    section = DOCS.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert {one.lower() for one in re.findall(r"^### (\w+)$", section, re.MULTILINE)} == used


def test_the_dashboard_is_well_formed(fleet: Fleet) -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", " ".join(e for _, e in TARGETS))) - {"__rate_interval"} <= (
        names
    )
    there = samples(_page(fleet.urls[0]))
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            asks = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert asks
            assert all(asks[2] in have for have, _ in there[asks[1]])


def test_counters_are_a_replicas_own_and_the_picture_is_everybodys(fleet: Fleet) -> None:
    with plain_http(fleet.urls[1]) as http:
        body = chat(stream=True, max_tokens=3)
        assert http.post(CHAT, json=body, headers=KEY).status_code == 200
    fleet.wait_settled()

    def same() -> tuple[dict[str, Family], dict[str, Family]] | None:
        # Scores move by themselves (a window ages, an idle node recovers): read until both agree.
        first, second = scrape(fleet.urls[0]), scrape(fleet.urls[1])
        shared = [name for name in first if FROM_REDIS.match(name) and "script" not in name]
        assert len(shared) == 8
        assert set(first) >= set(shared) <= set(second)
        return (first, second) if all(first[n] == second[n] for n in shared) else None

    first, second = wait_until(same, what="both replicas show the same picture")
    assert value(first, "leaseway_replica_info", replica="r0") == 1
    assert value(second, "leaseway_replica_info", replica="r1") == 1
    name = "leaseway_route_requests_total"
    ours = [value(page, name, route=CHAT, outcome="ok") for page in (first, second)]
    assert ours == [1, 1]  # neither shows the other's
    assert value(first, "leaseway_replicas") == value(second, "leaseway_replicas") == 2
    assert value(second, name, outcome="rejected", route=CHAT) == 0
    for page in (first, second):
        assert value(page, "leaseway_redis_scripts_total") > 0
        assert value(page, "leaseway_redis_script_seconds_total") > 0


def test_the_picture_agrees_with_redis(fleet: Fleet, nodes: Nodes) -> None:
    fleet.wait_settled()
    page = scrape(fleet.urls[1])
    for node in nodes.ids:
        record = fleet.redis.hgetall(f"lw:{{default}}:node:{node}")
        assert value(page, "leaseway_node_capacity", node=node) == float(record["capacity"])
        assert value(page, "leaseway_node_in_flight", node=node) == 0
        for state in STATES:
            told = value(page, "leaseway_node_state", node=node, state=state)
            assert told == (record.get("state", "active") == state)
        assert sum(value(page, "leaseway_node_circuit", node=node, state=s) for s in CIRCUITS) == 1


def test_a_request_is_counted_and_timed_once(fleet: Fleet) -> None:
    """The first request of the fixture, as it is on the page of the replica that served it."""
    page = scrape(fleet.urls[0])
    gen_ai = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "openai"}
    here = {**gen_ai, "gen_ai_request_model": MODEL}
    assert value(page, "gen_ai_server_time_to_first_token_seconds_count", **here) == 1
    assert value(page, "gen_ai_server_time_per_output_token_seconds_count", **here) == 1
    took = "gen_ai_server_request_duration_seconds"
    assert value(page, f"{took}_count", **here, error_type="") == 1
    assert value(page, f"{took}_count", gen_ai_request_model="lonely", error_type="failed") == 1
    assert value(page, f"{took}_count", gen_ai_request_model="unknown") >= 2
    # The caller waits for the failed attempt too, and for the lease.
    waited = value(page, "gen_ai_server_time_to_first_token_seconds_sum", **here)
    assert waited >= value(page, "leaseway_ttft_seconds_sum", node="n1") > 0
    assert value(page, f"{took}_sum", **here) >= waited
    assert value(page, "leaseway_retries_total", node="n2", kind="status_500") == 1
    assert value(page, "leaseway_failovers_total", model=MODEL) == 1
    assert value(page, "leaseway_lease_refusals_total", reason="unknown") >= 1
    assert value(page, "leaseway_lease_wait_seconds_count") == 2
    assert value(page, "leaseway_redis_call_seconds_count", script="acquire") >= 2
    routes = "leaseway_route_requests_total"
    assert value(page, routes, route="other", status_class="4xx", outcome="rejected") == 1
    assert value(page, routes, route="control", status_class="4xx") >= 1


def test_thousands_of_random_requests_leave_no_word_of_theirs(fleet: Fleet) -> None:
    """Every label value is one of a closed set, and so the series are bounded."""
    chance = random.Random(20261201)
    port, mark = fleet.replicas[0].port, "zq"
    statuses = Counter[int]()
    for _ in range(3000):
        word = mark + "".join(chance.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=12))
        method = chance.choice(["POST"] * 6 + ["GET", "PUT", "PATCH", "BREW", word.upper()])
        path = chance.choice([*ROUTES, f"/{word}", f"/v1/{word}", f"/admin/{word}", f"{CHAT}/"])
        model = chance.choice([word, MODEL.upper(), "", f"{MODEL}-{word}", 7])
        body = json.dumps({**chat(word), "model": model}).encode()
        lines = [
            f"{method} {path}?{word}={word} HTTP/1.1",
            f"host: {word}",
            f"x-request-id: {word}",
            f"{word}: {word}",
            f"user-agent: {word}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            chance.choice(["authorization: Bearer sk-telemetry", f"x-api-key: {word}", f"{word}:"]),
        ]
        statuses[ask(port, "\r\n".join(lines).encode() + b"\r\n\r\n" + body).status] += 1
    assert {400, 401, 404, 405} <= statuses.keys(), statuses
    with plain_http(fleet.urls[0]) as http:
        text = http.get("/metrics").text
    assert mark not in text.lower()
    closed = {
        "model": {MODEL, "lonely", "unknown", ""},
        "gen_ai_request_model": {MODEL, "lonely", "unknown"},
        "route": {*ROUTES, "other", "control"},
        "status_class": {"2xx", "4xx", "5xx", "none"},
        "outcome": {str(one.value) for one in Outcome},
        "error_type": {"", *(str(one.value) for one in Outcome)},
        "gen_ai_operation_name": {route.operation for route in ROUTES.values()},
        "gen_ai_provider_name": {"openai", "anthropic"},
        "reason": REASONS,
        "key": {"team-a"},
        "node": {"n1", "n2"},
    }
    series = 0
    for of in samples(scrape(fleet.urls[0])).values():
        for have, _ in of:
            series += 1
            for label, given in have.items():
                assert given in closed.get(label, {given}), (label, given)
    assert series < 2500


def test_a_frozen_redis_does_not_hold_the_page_up(nodes: Nodes) -> None:
    """It is read when Redis is ill; a scraper's patience is ten seconds."""
    with Fleet(nodes.settings(), replicas=1, redis={"call_timeout_ms": 60_000}) as fleet:
        assert fleet.valkey.process is not None
        fleet.valkey.process.send_signal(signal.SIGSTOP)
        page = scrape(fleet.urls[0])
        fleet.valkey.process.send_signal(signal.SIGCONT)
        assert "leaseway_redis_up" in page
        assert not any(of.series for name, of in page.items() if FROM_REDIS.match(name))


def test_time_without_redis_is_counted_and_the_picture_left_out(nodes: Nodes) -> None:
    with Fleet(nodes.settings(), replicas=1, leases={"ttl_s": 1}) as fleet:
        url = fleet.urls[0]
        before = value(scrape(url), "leaseway_degraded_seconds_total")
        fleet.valkey.kill()
        wait_until(
            lambda: value(scrape(url), "leaseway_degraded_seconds_total") >= before + 0.5,
            what="degraded time is counted",
        )
        page = scrape(url)
        assert value(page, "leaseway_redis_up") == 0
        assert not any(of.series for name, of in page.items() if FROM_REDIS.match(name))
        fleet.valkey.start()
        wait_until(lambda: value(scrape(url), "leaseway_redis_up") == 1, what="in touch again")
        assert value(scrape(url), "leaseway_node_up", node="n1") == 1
