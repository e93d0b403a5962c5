"""The certificate of a server that speaks TLS, which takes effect when its files change."""

import logging
import ssl
from pathlib import Path
from typing import NamedTuple

from aftexport.errors import UsageError
from aftserve.observability.file_watch import FileWatch

logger = logging.getLogger("aftserve.tls")

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"


class _Files(NamedTuple):
    """The content of the files, read as one."""

    context: ssl.SSLContext
    pem: tuple[bytes, bytes]


class ServerCertificate:
    """A certificate chain with its private key, whose PEM files are watched."""

    # A new certificate is for new connections: the context of all hands each to the one in use.
    # gRPC takes ``pem``, the key and the chain.

    def __init__(self, certificate: Path, key: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self.watch = FileWatch(
            [certificate, *([key] if key else [])],
            self._read,
            self._use,
            name="certificates",
            logger=logger,
        )
        self._use(self._read())
        self.context = self._current
        # A certificate that is loaded into the context in use may come without its key.
        self.context.sni_callback = self._hand_over

    def _hand_over(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Give a connection the context in use; OpenSSL asks also without a server name."""
        connection.context = self._current

    def _use(self, files: _Files) -> str:
        self._current, self.pem = files
        return str(self._certificate)

    def _read(self) -> _Files:
        """Return a context of the files, and their bytes."""
        before = self._contents()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # it costs the server more than the client
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key, self._refuse_password)
        except (ssl.SSLError, OSError) as error:
            raise self._explain(error) from error
        if self._contents() != before:  # OpenSSL may have read others than these bytes
            raise UsageError(
                f"--ssl-certfile {self._certificate}: the certificate or its key changed while it "
                "was read.",
                "Write both files, then start the server or send SIGHUP.",
            )
        certificate, key = before
        return _Files(context, (key, certificate))

    def _refuse_password(self) -> str:
        raise UsageError(
            f"{self._key_place}: the private key must not be encrypted.",
            "Decrypt it by openssl pkey, into a file that only the server's user may read.",
        )

    def _explain(self, error: OSError) -> UsageError:
        """Return the error for files that OpenSSL refuses."""
        certificate, key = self._contents()
        if _CERTIFICATE not in certificate:
            return UsageError(
                f"--ssl-certfile {self._certificate}: expected a certificate in PEM, got none.",
                "Name the file of the certificate chain, with the server's certificate first.",
            )
        if _KEY not in key:
            return UsageError(
                f"{self._key_place}: expected a private key in PEM, got none.",
                "Name the file of the private key by --ssl-keyfile.",
            )
        reason = getattr(error, "reason", None)
        if reason == "KEY_VALUES_MISMATCH":
            return UsageError(
                f"{self._key_place}: the private key is not that of the certificate in "
                f"{self._certificate}.",
                "Name the files that were made together.",
            )
        return UsageError(
            f"--ssl-certfile {self._certificate}: OpenSSL refuses the certificate or its key "
            f"({reason or error}).",
            "Check both by openssl x509 and openssl pkey.",
        )

    def _contents(self) -> tuple[bytes, bytes]:
        """Return the bytes of the certificate's file and of the key's file, which may be one."""
        certificate = _bytes_of("--ssl-certfile", self._certificate)
        key = certificate if self._key is None else _bytes_of("--ssl-keyfile", self._key)
        return certificate, key

    @property
    def _key_place(self) -> str:
        if self._key is None:
            return f"--ssl-certfile {self._certificate}"
        return f"--ssl-keyfile {self._key}"


def server_certificate(certificate: Path | None, key: Path | None) -> ServerCertificate | None:
    """Return the certificate of a server; None without one."""
    if certificate is not None:
        return ServerCertificate(certificate, key)
    if key is not None:
        raise UsageError(
            f"--ssl-keyfile {key} needs a certificate, got none.", "Name it by --ssl-certfile."
        )
    return None


def _bytes_of(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{option} {path}: {error.strerror or error}.",
            "Name a PEM file that the server's user may read.",
        ) from error
