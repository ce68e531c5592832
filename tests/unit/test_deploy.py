"""What is deployed fits the program: manifests, chart and unit, as their own tools see it."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from app.config import Settings, load

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = Path(__file__).parents[2]
PLAIN = TOP / "deploy/kubernetes"
CHART = TOP / "deploy/helm/leaseway"
UNIT = TOP / "deploy/systemd/leaseway.service"
VERSIONS = ("1.25", "1.31", kubernetes_validate.latest_version())
helm_python = pytest.importorskip("helm_python", reason="no wheel for this platform")
KEY = {"name": "team-a", "hash": "sha256:" + 64 * "0"}
Manifests = dict[tuple[str, str], dict[str, Any]]


def by_name(texts: Iterator[str]) -> Manifests:
    """All objects, by kind and name; no two may have the same."""
    found: Manifests = {}
    for text in texts:
        for content in yaml.safe_load_all(text):
            if content is not None:
                name = content["kind"], content["metadata"]["name"]
                assert name not in found, name
                found[name] = content
    return found


def rendered(values: dict[str, Any], release: str = "leaseway") -> Manifests:
    """What Helm's own engine makes of the chart."""
    with helm_python.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name=release, namespace="inference")
    return by_name(text for path, text in texts.items() if path.endswith(".yaml"))


@pytest.fixture(scope="module")
def plain() -> Manifests:
    """The plain manifests, the optional ones too."""
    return by_name(path.read_text() for path in sorted(PLAIN.rglob("*.yaml")))


VARIANTS: dict[str, dict[str, Any]] = {
    "least": {"secret": {"keys": [KEY]}},
    "all": {
        "secret": {"keys": [KEY], "env": {"GPU1_KEY": "a: b #c"}},
        "autoscaling": {"enabled": True},
        "image": {"repository": "registry.example/leaseway", "tag": "1", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
        "podAnnotations": {"a/b": "c"},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "settings": {"server": {"port": 9000, "notice_s": 0.5, "drain_s": 600}},
    },
    "bare": {
        "secret": {"existing": "mine"},
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "settings": {"nodes": []},
    },
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid(plain: Manifests, version: str) -> None:
    for content in plain.values():
        kubernetes_validate.validate(content, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_chart_renders_is_valid(variant: str, version: str) -> None:
    for content in rendered(VARIANTS[variant], "gate").values():
        kubernetes_validate.validate(content, version, strict=True)


def test_a_fault_in_a_manifest_would_be_found(plain: Manifests) -> None:
    wrong = json.loads(json.dumps(plain["Deployment", "leaseway"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_has_nothing_to_say_against_the_chart(variant: str) -> None:
    with helm_python.Chart.load(str(CHART)) as chart:
        values = chart.merge_values(VARIANTS[variant])
    said = helm_python.lint(str(CHART), values=values)
    assert said["errors"] == []
    assert [m for m in said["messages"] if "icon" not in m["error"]] == []


def test_the_chart_makes_the_plain_manifests(plain: Manifests) -> None:
    def bare(content: dict[str, Any]) -> dict[str, Any]:
        copy = json.loads(json.dumps(content))
        for label in ("app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"):
            copy["metadata"]["labels"].pop(label, None)
        for holder in (copy.get("data", {}), copy.get("stringData", {})):  # texts in which comments
            for name, text in holder.items():  # and the order of keys say nothing
                holder[name] = yaml.safe_load(text)
        return dict(copy)

    values = {"secret": {"keys": [KEY]}}
    chart = rendered(values) | {
        name: content
        for name, content in rendered({**values, "autoscaling": {"enabled": True}}).items()
        if name[0] == "HorizontalPodAutoscaler"
    }
    assert {n: bare(c) for n, c in chart.items()} == {n: bare(c) for n, c in plain.items()}


def test_a_chart_without_keys_says_what_is_missing() -> None:
    with pytest.raises(helm_python.HelmError, match=r"secret\.keys is empty"):
        rendered({})


def test_two_releases_share_no_object_and_no_pod() -> None:
    one, two = (rendered(VARIANTS["all"], name) for name in ("red", "blue"))
    assert not set(one) & set(two)
    select = [r["Deployment", f"{n}-leaseway"]["spec"]["selector"]["matchLabels"]
              for r, n in ((one, "red"), (two, "blue"))]  # fmt: skip
    assert select[0] != select[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_objects_fit_each_other_and_the_settings(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rendered(VARIANTS[variant])
    environment = found.get(("Secret", "leaseway"), {}).get("stringData", {})
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    text = found["ConfigMap", "leaseway"]["data"]["leaseway.yaml"]
    settings = load(Path("leaseway.yaml"), content=text.encode())
    if environment:
        assert [key.name for key in settings.keys] == ["team-a"]
        assert settings.redis.url == "redis://redis:6379/0"
        assert set(VARIANTS[variant]["secret"].get("env", {})) <= set(environment)

    deployment = found["Deployment", "leaseway"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert settings.server.host == "0.0.0.0"
    assert container["ports"] == [{"name": "http", "containerPort": settings.server.port}]
    leaving_s = settings.server.notice_s + settings.server.drain_s
    assert leaving_s + 10 <= pod["terminationGracePeriodSeconds"] < leaving_s + 15
    assert pod["enableServiceLinks"] is False
    assert ("replicas" in deployment) != (("HorizontalPodAutoscaler", "leaseway") in found)
    secret = "mine" if variant == "bare" else "leaseway"
    assert container["envFrom"] == [{"secretRef": {"name": secret}}]

    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    for (kind, _), content in found.items():
        spec = content.get("spec", {})
        if kind == "Service":
            assert spec["selector"] == labels
            assert [port["targetPort"] for port in spec["ports"]] == ["http"]
        elif kind == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"] == labels
        elif kind == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"] == labels


def test_a_pod_is_confined_and_runs_what_the_image_runs(plain: Manifests) -> None:
    pod = plain["Deployment", "leaseway"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    dockerfile = (TOP / "Dockerfile").read_text()
    user, group = (pod["securityContext"][name] for name in ("runAsUser", "runAsGroup"))
    assert f"USER {user}:{group}" in dockerfile
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    command = re.search(r"CMD (\[.*\])", dockerfile)
    assert command
    assert container["args"] == [*json.loads(command[1]), "--replica-id", "$(POD_NAME)"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(container["args"][2]).parent) in mounts
    assert not any("subPath" in mount for mount in container["volumeMounts"])


def test_probes_and_metrics_are_pages_and_series_of_the_program(plain: Manifests) -> None:
    (container,) = plain["Deployment", "leaseway"]["spec"]["template"]["spec"]["containers"]
    pages = (TOP / "app/control/health.py").read_text()
    probes = [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
    asked = {probe["httpGet"]["path"] for probe in probes}
    assert asked == {"/healthz", "/readyz"}
    assert all(f'"{page}"' in pages for page in asked)
    hpa = plain["HorizontalPodAutoscaler", "leaseway"]["spec"]
    metric = hpa["metrics"][0]["pods"]["metric"]["name"]
    assert f"| `{metric}` | gauge |" in (TOP / "docs/telemetry.md").read_text()
    assert metric in (PLAIN / "README.md").read_text()


def test_the_version_is_the_programs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (TOP / "pyproject.toml").read_text()


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(UNIT)
    return parsed


def test_the_unit_gives_answers_the_time_to_end() -> None:
    service, server = unit()["Service"], Settings().server
    assert service["Type"] == "exec"
    assert service["KillSignal"] == "SIGTERM"
    assert float(service["TimeoutStopSec"]) > server.notice_s + server.drain_s + 10
    assert service["ExecStart"].split()[1:4] == ["serve", "--config", "/etc/leaseway/leaseway.yaml"]
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_bad_settings_end_with_the_code_that_the_unit_does_not_restart(tmp_path: Path) -> None:
    file = tmp_path / "leaseway.yaml"
    file.write_text("server: {port: http}\n")
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve", "--config", str(file)],
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert str(done.returncode) == unit()["Service"]["RestartPreventExitStatus"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit_and_finds_it_confined(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    program = Path(sys.executable).parent / "leaseway"
    copy.write_text(UNIT.read_text().replace("/opt/leaseway/bin/leaseway", str(program)))

    def analyze(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["systemd-analyze", *args, str(copy)], capture_output=True, text=True, check=False
        )

    verified = analyze("verify", "--man=no", "--recursive-errors=no")
    assert (verified.returncode, verified.stderr) == (0, "")
    exposed = analyze("security", "--offline=true", "--threshold=20", "--no-pager")
    assert exposed.returncode == 0, exposed.stdout
    copy.write_text(copy.read_text().replace("Type=exec", "Type=exek"))
    assert "exek" in analyze("verify", "--man=no", "--recursive-errors=no").stderr
