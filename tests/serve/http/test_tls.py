"""HTTPS: answers, a change of the certificate while connections are open, and unusable files."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from clients import ANSWER, GET, POST, eventually
from commands import run_python
from servers import encrypt_key, make_certificate, needs_openssl, serving

from aftexport.errors import UsageError
from aftserve.client import Client
from aftserve.http.tls import server_certificate

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The files of two certificates and their keys."""
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(folder, name) for name in ("first", "second")}


@dataclass
class Secure:
    """A server that speaks TLS, with its files."""

    address: str
    process: "subprocess.Popen[bytes]"
    certificate: Path
    key: Path
    log: Path

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def connect(self) -> ssl.SSLSocket:
        """Return a connection that checks the certificate in use."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def owner(self) -> str:
        """Return the organization in the certificate of a new connection."""
        with self.connect() as connection:
            found = connection.getpeercert()
        assert found
        return next(v for part in found["subject"] for k, v in part if k == "organizationName")

    def use(self, pair: tuple[Path, Path]) -> None:
        shutil.copyfile(pair[0], self.certificate)
        shutil.copyfile(pair[1], self.key)

    def wait_for_line(self, text: str, change: Callable[[], object]) -> None:
        """Make a change, and wait for one more line with a text in the log."""
        before = self.log.read_text("utf-8").count(text)
        change()
        eventually(lambda: self.log.read_text("utf-8").count(text) > before, text)


_PATIENT = """
import asyncio.constants, sys

sys.modules["uvloop"] = None
asyncio.constants.SSL_SHUTDOWN_TIMEOUT = 3600

from aftserve.__main__ import run

run()
"""
"""A server that would wait for an hour for a client that does not end TLS.

It runs without uvloop, whose time for the end of TLS is fixed.
"""


@pytest.fixture(scope="module")
def secure(
    bundle_folder: Path,
    pairs: dict[str, tuple[Path, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key, log = folder / "chain.pem", folder / "key.pem", folder / "log"
    shutil.copyfile(pairs["first"][0], certificate)
    shutil.copyfile(pairs["first"][1], key)
    options = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    options += ("--shutdown-seconds", "3600", "--receive-seconds", "3600")
    with serving(bundle_folder, log, *options, program=("-c", _PATIENT)) as (address, process):
        server = Secure(address, process, certificate, key, log)
        yield server
        with server.connect() as idle:  # does not answer the end of TLS
            answered(idle)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert "Traceback" not in log.read_text("utf-8")


def answered(connection: ssl.SSLSocket) -> None:
    connection.sendall(GET)
    received = b""
    while ANSWER not in received:
        part = connection.recv(65536)
        assert part, received
        received += part


def test_client_is_answered_over_tls(secure: Secure) -> None:
    assert secure.address.startswith("https://")
    context = ssl.create_default_context(cafile=str(secure.certificate))
    with httpx.Client(verify=context, base_url=secure.address, timeout=60) as client:
        answers = [client.post("/infer", json={"text": "a" * n}) for n in (1, 4000)]
    assert [one.json()["tokens_total"] for one in answers] == [1, 4000]
    assert [one.http_version for one in answers] == ["HTTP/1.1"] * 2


def test_python_client_trusts_named_authority(
    secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.certificate))
    with Client(secure.address) as client:
        assert client.infer("abc").tokens_total == 3


def test_plain_request_is_dropped(secure: Secure) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), timeout=60) as connection:
        connection.sendall(GET)
        assert ANSWER not in connection.recv(65536)


def test_old_versions_are_refused(secure: Secure) -> None:
    context = ssl.create_default_context(cafile=str(secure.certificate))
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", secure.port), timeout=60) as plain,
        pytest.raises(OSError),  # noqa: PT011  # OpenSSL or the server ends the handshake
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_closed_connection_logs_no_warning(secure: Secure) -> None:
    """asyncio warns if a protocol keeps a TLS connection that the client has ended."""
    for _ in range(3):
        with secure.connect() as connection:
            connection.sendall(POST)
    assert secure.owner()
    assert "eof_received" not in secure.log.read_text("utf-8")


@pytest.mark.parametrize("by_signal", [True, False])
def test_new_certificate_keeps_connections(
    by_signal: bool, secure: Secure, pairs: dict[str, tuple[Path, Path]]
) -> None:
    name = "second" if secure.owner() == "first" else "first"
    with secure.connect() as connection:
        answered(connection)

        def change() -> None:
            secure.use(pairs[name])
            if by_signal:
                os.kill(secure.process.pid, signal.SIGHUP)

        secure.wait_for_line("using the certificates of", change)
        assert secure.owner() == name
        answered(connection)


def test_broken_certificate_is_not_used(
    secure: Secure, pairs: dict[str, tuple[Path, Path]]
) -> None:
    name = secure.owner()
    other = "second" if name == "first" else "first"

    def mix() -> None:
        secure.key.write_bytes(pairs[other][1].read_bytes())

    secure.wait_for_line("the previous certificates stay in use", mix)
    assert "the private key is not that of the certificate" in secure.log.read_text("utf-8")
    assert secure.owner() == name
    secure.wait_for_line("using the certificates of", lambda: secure.use(pairs[name]))
    assert secure.owner() == name


def files(pairs: dict[str, tuple[Path, Path]], folder: Path, case: str) -> list[Path | None]:
    """Return a certificate and a key that cannot be used, by the case."""
    certificate, key = pairs["first"]
    empty = folder / "empty.pem"
    empty.write_text("")
    damaged = folder / "damaged.pem"
    damaged.write_text(certificate.read_text().replace("M", "!", 3))
    return {
        "absent certificate": [folder / "absent.pem", key],
        "absent key": [certificate, folder / "absent.key"],
        "a folder": [folder, key],
        "no certificate": [empty, key],
        "damaged certificate": [damaged, key],
        "no key": [certificate, empty],
        "no key in the certificate": [certificate, None],
        "other key": [certificate, pairs["second"][1]],
        "encrypted key": [certificate, encrypt_key(key)],
        "only a key": [None, key],
    }[case]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("absent certificate", r"--ssl-certfile \S+absent.pem: No such file"),
        ("absent key", r"--ssl-keyfile \S+absent.key: No such file"),
        ("a folder", r"--ssl-certfile \S+: Is a directory"),
        ("no certificate", r"--ssl-certfile \S+empty.pem: expected a certificate in PEM"),
        ("damaged certificate", r"--ssl-certfile \S+damaged.pem: OpenSSL refuses"),
        ("no key", r"--ssl-keyfile \S+empty.pem: expected a private key in PEM"),
        ("no key in the certificate", r"--ssl-certfile \S+first.pem: expected a private key"),
        ("other key", r"--ssl-keyfile \S+second.key: .* not that of the certificate in \S+first"),
        ("encrypted key", r"--ssl-keyfile \S+first.encrypted: .* must not be encrypted"),
        ("only a key", r"--ssl-keyfile \S+first.key needs a certificate"),
    ],
)
def test_unusable_files_are_named(
    case: str, message: str, pairs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    certificate, key = files(pairs, tmp_path, case)
    with pytest.raises(UsageError, match=message) as refusal:
        server_certificate(certificate, key)
    assert refusal.value.remedy.endswith(".")


def test_file_that_vanishes_is_named(
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL refuses a file, and another process removes it before the reason is looked up."""
    certificate, key = (Path(shutil.copy(one, tmp_path)) for one in pairs["first"])

    def refuse(*_: object) -> None:
        certificate.unlink()
        raise ssl.SSLError

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", refuse)
    with pytest.raises(UsageError, match=r"--ssl-certfile \S+first.pem: No such file"):
        server_certificate(certificate, key)


def test_change_during_read_is_refused(
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL reads one pair, and another process writes the next before the bytes are kept."""
    certificate, key = (Path(shutil.copy(one, tmp_path)) for one in pairs["first"])
    load = ssl.SSLContext.load_cert_chain
    used = server_certificate(certificate, key)
    assert used is not None
    assert used.pem == (pairs["first"][1].read_bytes(), pairs["first"][0].read_bytes())

    def load_and_replace(context: ssl.SSLContext, *files: Any) -> None:
        load(context, *files)
        key.write_bytes(pairs["second"][1].read_bytes())

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_and_replace)
    with pytest.raises(UsageError, match=r"--ssl-certfile \S+first.pem: .* changed while"):
        server_certificate(certificate, key)


def test_one_file_may_have_both(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join(part.read_bytes() for part in pairs["first"]))
    assert server_certificate(both, None) is not None
    assert server_certificate(None, None) is None


def test_unusable_file_ends_start(bundle_folder: Path, tmp_path: Path) -> None:
    words = (bundle_folder, "--ssl-certfile", "absent.pem")
    outcome = run_python("-m", "aftserve", *words, cwd=tmp_path)
    assert outcome.code == 2
    assert "--ssl-certfile absent.pem: No such file" in outcome.err
    assert "Checking" not in outcome.out
