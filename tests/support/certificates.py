"""Certificates of a server on loopback, made by the command ``openssl``."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the files of a self-signed certificate for loopback, and of its private key.

    Args:
        folder: folder for the files.
        name: name of the organization in the certificate, and of the files.
    """
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/O={name}/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


def encrypt_key(key: Path) -> Path:
    """Return the file of the same private key under a password."""
    encrypted = key.with_suffix(".encrypted")
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", encrypted],
        check=True,
        capture_output=True,
    )
    return encrypted
