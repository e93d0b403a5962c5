"""The Kubernetes manifest: valid in Kubernetes' schemas, and fitting the image and the server."""

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from clients import http

from aftserve.settings import Settings

ROOT = Path(__file__).parents[2]
OBJECTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((ROOT / "docker/kubernetes/aftserve.yaml").read_text("utf-8"))
)
VERSION = kubernetes_validate.latest_version()


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [one for one in OBJECTS if one["kind"] == kind]
    return copy.deepcopy(found)


@pytest.fixture
def pod() -> dict[str, Any]:
    return dict(of_kind("Deployment")["spec"]["template"]["spec"])


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return dict(found)


@pytest.fixture(scope="module")
def image() -> str:
    return (ROOT / "docker/cpu.Dockerfile").read_text("utf-8")


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_object_is_valid(kind: str) -> None:
    kubernetes_validate.validate(of_kind(kind), VERSION, strict=True)


def test_mistake_in_manifest_is_found() -> None:
    wrong = of_kind("Deployment")
    probe = wrong["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    probe["failureTreshold"] = probe.pop("failureThreshold")
    with pytest.raises(kubernetes_validate.ValidationError, match="failureTreshold"):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_service_selects_pods_by_label(container: dict[str, Any]) -> None:
    deployment, service = of_kind("Deployment")["spec"], of_kind("Service")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == labels == deployment["selector"]["matchLabels"]
    (port,) = container["ports"]
    assert [one["targetPort"] for one in service["ports"]] == [port["name"]]


def test_container_fits_image(pod: dict[str, Any], container: dict[str, Any], image: str) -> None:
    (exposed,) = re.findall(r"^EXPOSE (\d+)$", image, re.MULTILINE)
    (user,) = re.findall(r"^USER (\d+)$", image, re.MULTILINE)
    (bundle,) = re.findall(r'^CMD \["(.*)"\]$', image, re.MULTILINE)
    assert container["ports"][0]["containerPort"] == int(exposed)
    assert pod["securityContext"]["runAsUser"] == int(user)
    assert container["args"] == [bundle]
    mounted = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
    assert mounted == {bundle: True, "/tmp": False}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }


def test_variables_are_settings(
    container: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    settings = Settings.read([str(tmp_path)])
    assert settings.log_format == "json"
    assert settings.drain_seconds == 5


def test_grace_period_exceeds_shutdown_time(pod: dict[str, Any], container: dict[str, Any]) -> None:
    variables = {one["name"]: one["value"] for one in container["env"]}
    drain = float(variables["AFTSERVE_DRAIN_SECONDS"])
    needed = drain + Settings.model_fields["shutdown_seconds"].default
    assert pod["terminationGracePeriodSeconds"] >= needed + 5


@pytest.mark.parametrize("name", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probe_is_answered(name: str, container: dict[str, Any], server: str) -> None:
    """The kubelet asks by the address of the pod, without an API key."""
    probe = container[name]["httpGet"]
    assert probe["port"] == container["ports"][0]["name"]
    answer = http.get(f"{server}{probe['path']}", headers={"Host": "10.0.0.5:8080"})
    assert answer.status_code == 200


def test_memory_limit_exceeds_budgets(container: dict[str, Any]) -> None:
    fields = Settings.model_fields
    needed = fields["memory_budget_mib"].default + fields["max_buffered_mib"].default
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024
    assert limit >= 2 * needed
