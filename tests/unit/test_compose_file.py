"""The container files promise what the documents say. Static: nothing is built or started."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from app.config import Settings, load
from app.lab.profiles import PROFILES

ROOT = Path(__file__).parents[2]
NODES = {"a100": 9101, "rtx4090": 9102, "xeon": 9103}


@pytest.fixture(scope="module")
def compose() -> Any:
    """The file as YAML reads it, anchors resolved."""
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings that the gateways are given, without this machine's overrides."""
    for name in list(os.environ):
        if name == "REDIS_URL" or name.upper().startswith("LEASEWAY_"):
            monkeypatch.delenv(name)
    return load(ROOT / "config" / "compose.yaml")


def _seconds(duration: str) -> float:
    number = re.fullmatch(r"(\d+)s", duration)
    assert number, f"{duration!r} is not in seconds"
    return float(number[1])


def _stages() -> list[str]:
    """The Dockerfile's stages, comments taken out; each begins with what follows its FROM."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return re.split(r"(?m)^FROM ", text)[1:]


def test_services_are_the_promised_ones(compose: Any) -> None:
    assert compose["name"] == "leaseway"
    assert set(compose["services"]) == {"redis", "gateway", *NODES}
    assert compose["services"]["redis"]["image"] == "redis:7-alpine"


def test_gateway_is_one_name_for_three_replicas_on_loopback_ports(compose: Any) -> None:
    gateway = compose["services"]["gateway"]

    assert "container_name" not in gateway  # replicas need names of their own
    assert gateway["deploy"]["replicas"] == "${REPLICAS:-3}"
    assert gateway["ports"] == ["127.0.0.1:8080-8082:8080"]


def test_only_the_gateway_is_published(compose: Any) -> None:
    published = {name for name, service in compose["services"].items() if "ports" in service}
    assert published == {"gateway"}


def test_every_service_has_a_health_check(compose: Any) -> None:
    for name, service in compose["services"].items():
        check = service["healthcheck"]
        assert check["test"][0] == "CMD", name
        assert {"interval", "timeout", "retries", "start_period"} <= set(check), name
    assert "/readyz" in compose["services"]["gateway"]["healthcheck"]["test"][-1]


def test_gateway_waits_for_all_others(compose: Any) -> None:
    assert compose["services"]["gateway"]["depends_on"] == {
        name: {"condition": "service_healthy"} for name in ("redis", *NODES)
    }


def test_every_service_is_hardened_and_restarted(compose: Any) -> None:
    for name, service in compose["services"].items():
        assert service["restart"] == "unless-stopped", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name


def test_one_service_builds_and_the_others_use_its_image(compose: Any) -> None:
    services = compose["services"]
    assert [name for name, service in services.items() if "build" in service] == ["gateway"]
    assert {services[name]["image"] for name in NODES} == {services["gateway"]["image"]}


@pytest.mark.parametrize(("name", "port"), NODES.items())
def test_node_services_are_the_configured_nodes(
    compose: Any, settings: Settings, name: str, port: int
) -> None:
    command = compose["services"][name]["entrypoint"]
    assert command[1:3] == ["-m", "app.lab.node"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options == {"--profile": name, "--host": "0.0.0.0", "--port": str(port)}
    assert f":{port}/health" in compose["services"][name]["healthcheck"]["test"][-1]

    node = next(node for node in settings.nodes if node.id == name)
    assert node.url == f"http://{name}:{port}"
    assert node.weight == PROFILES[name].weight_k
    assert node.models == ["demo"]


def test_settings_fit_the_containers(compose: Any, settings: Settings) -> None:
    assert {node.id for node in settings.nodes} == set(NODES)
    redis = urlsplit(settings.redis.url or "")
    assert (redis.scheme, redis.hostname, redis.port) == ("redis", "redis", 6379)
    assert redis.password is None

    gateway = compose["services"]["gateway"]
    assert settings.server.host == "0.0.0.0"
    assert gateway["ports"][0].endswith(f":{settings.server.port}")
    assert _seconds(gateway["stop_grace_period"]) > settings.server.drain_s
    # Without keys the ports must stay on loopback.
    assert settings.server.open_without_keys
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])


def test_settings_are_mounted_where_the_image_reads_them(compose: Any) -> None:
    source, target, mode = compose["services"]["gateway"]["volumes"][0].split(":")
    assert (ROOT / source).is_file()
    assert mode == "ro"
    assert f'CMD ["serve", "--config", "{target}"]' in _stages()[-1]


def test_image_is_python_3_11_and_not_root() -> None:
    stages = _stages()
    assert len(stages) == 2
    assert all(stage.startswith("python:3.11-slim") for stage in stages)
    assert re.search(r"(?m)^USER [1-9]\d*:[1-9]\d*$", stages[-1])
    assert 'ENTRYPOINT ["leaseway"]' in stages[-1]


def test_build_context_holds_what_is_copied_and_no_more() -> None:
    ignore = (ROOT / ".dockerignore").read_text().split("\n")
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = {
        source
        for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", _stages()[0])
        for source in line.split()[:-1]
    }
    assert "*" in ignore
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
