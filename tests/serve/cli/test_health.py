"""``aftserve health``, which the images' health checks run."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from commands import Outcome, assert_refused, run_python
from servers import free_port, make_certificate, needs_openssl, serving


def health(folder: Path, *words: str, **variables: str) -> Outcome:
    return run_python("-m", "aftserve", "health", *words, cwd=folder, **variables)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_server_is_healthy(host: str, server: str, tmp_path: Path) -> None:
    port = server.rpartition(":")[2]
    assert health(tmp_path, "--host", host, "--port", port).code == 0
    assert health(tmp_path, AFTSERVE_HOST=host, AFTSERVE_PORT=port).code == 0
    (tmp_path / "server.toml").write_text(f'host = ["{host}"]\nport = {port}\n', "utf-8")
    assert health(tmp_path, "--config", "server.toml").code == 0


def test_absent_server_is_unhealthy(tmp_path: Path) -> None:
    outcome = health(tmp_path, "--port", str(free_port()))
    assert outcome.code == 1
    assert "The server does not answer" in outcome.err


@needs_openssl
def test_flags_of_process_are_read(bundle_folder: Path, tmp_path: Path) -> None:
    """A server with TLS at a Unix socket."""
    certificate, key = make_certificate(tmp_path, "health")
    with TemporaryDirectory() as folder:  # a path of pytest may be too long for a socket
        options = ("--uds", f"{folder}/socket", "--ssl-certfile", str(certificate))
        options += ("--ssl-keyfile", str(key))
        with serving(bundle_folder, tmp_path / "log", *options) as (_, process):
            assert health(tmp_path, "--pid", str(process.pid)).code == 0
            assert health(tmp_path, *options).code == 0
            assert health(tmp_path, *options[:2]).code == 1  # not by TLS


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--pid", str(os.getpid())), "is not aftserve"),
        (("--pid", "999999999"), "Expected the command line of process 999999999"),
        (("--port", "0"), "--port 0 is a free port"),
        (("--prot", "3"), "Write --port"),
    ],
)
def test_unusable_setting_is_refused(words: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    assert_refused(health(tmp_path, *words), problem)
