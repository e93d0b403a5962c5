"""The compose files against the images, and against docker compose where it is installed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from aftserve.settings import Settings

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = DOCKER / "compose.yaml"
EXAMPLE = DOCKER.parent / "examples" / "compose" / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]


def compose_command() -> list[str]:
    """Return the command of the installed docker compose, or skip the test."""
    if shutil.which("docker-compose") is not None:
        return ["docker-compose"]
    plugin = ["docker", "compose"]
    if shutil.which("docker") is None or subprocess.run([*plugin, "version"]).returncode != 0:
        pytest.skip("neither docker-compose nor docker's plugin for it is installed")
    return plugin


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_service_matches_its_image(service: dict[str, Any]) -> None:
    build = service["build"]
    context = (DOCKER / build["context"]).resolve()
    image = (context / build["dockerfile"]).read_text("utf-8")
    (exposed,) = re.findall(r"^EXPOSE (\d+)$", image, re.MULTILINE)
    (bundle,) = re.findall(r'^CMD \["(.*)"\]$', image, re.MULTILINE)
    (published,) = service["ports"]
    assert published == f"${{PORT:-8000}}:{exposed}"
    assert service["volumes"][0].endswith(f"}}:{bundle}:ro")
    assert service["read_only"]
    assert "/tmp" in service["tmpfs"]


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_grace_period_exceeds_shutdown_time(service: dict[str, Any]) -> None:
    fields = Settings.model_fields
    needed = fields["drain_seconds"].default + fields["shutdown_seconds"].default
    assert float(service["stop_grace_period"].removesuffix("s")) > needed


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_healthcheck_asks_server_without_proxy(service: dict[str, Any], server: str) -> None:
    image = (DOCKER.parent / service["build"]["dockerfile"]).read_text("utf-8")
    (words,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", image, re.MULTILINE)
    (address,) = re.findall(r"\b(AFTSERVE_HOST=\S+)", image)
    assert json.loads(words) == ["aftserve", "health", "--pid", "1"]
    assert (
        'ENTRYPOINT ["aftserve"]\n' in image
    )  # so process 1 has the flags, and commands are reached

    def status(port: str) -> int:
        """Docker passes its user's proxy variables to every container."""
        variables = dict([address.split("="), ("AFTSERVE_PORT", port)])
        proxy = {"http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
        command = [sys.executable, "-m", "aftserve", "health"]
        environment = os.environ | variables | proxy
        return subprocess.run(command, env=environment, capture_output=True).returncode

    assert status(server.rpartition(":")[2]) == 0
    assert status("1") == 1


def test_prometheus_reads_exposed_port() -> None:
    """Without docker: the example extends a service that exists, and Prometheus finds its port."""
    services = yaml.safe_load(EXAMPLE.read_text("utf-8"))["services"]
    extended = services["aftserve"]["extends"]
    assert (EXAMPLE.parent / extended["file"]).resolve() == COMPOSE
    assert extended["service"] in SERVICES
    place, _, path = services["prometheus"]["volumes"][0].removesuffix(":ro").partition(":")
    assert f"--config.file={path}" in services["prometheus"]["command"]
    (job,) = yaml.safe_load((EXAMPLE.parent / place).read_text("utf-8"))["scrape_configs"]
    published = SERVICES[extended["service"]]["ports"][0].rpartition(":")[2]
    assert job["static_configs"] == [{"targets": [f"aftserve:{published}"]}]


@pytest.mark.parametrize("file", [COMPOSE, EXAMPLE], ids=["docker", "example"])
def test_compose_file_requires_bundle_variable(file: Path, tmp_path: Path) -> None:
    words = [*compose_command(), "-f", str(file), "config"]
    environment = os.environ | {"BUNDLE": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}" in done.stdout
    environment.pop("BUNDLE")
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "the bundle's folder" in done.stderr
