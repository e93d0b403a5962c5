"""Checks of a request's headers that the parser does not make."""

from collections.abc import Sequence

import httptools


class UnknownCodingError(Exception):
    """A body has an unknown transfer coding; RFC 9112 requires status 501."""


def check_headers(version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Check the head of a request.

    Args:
        version: version of HTTP.
        url: target of the request.
        headers: names in lower case, and values.

    Raises:
        HttpParserError: if the request has several hosts, or none in HTTP/1.1, or no path.
        UnknownCodingError: if the body has another transfer coding than chunked.
    """
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts != 1 and version == "1.1":
        raise httptools.HttpParserError(f"{hosts} Host headers")
    codings = b", ".join(value for name, value in headers if name == b"transfer-encoding")
    codings = codings.strip().lower()
    # The parser would ignore the other codings.
    if codings.endswith(b"chunked") and codings != b"chunked":
        raise UnknownCodingError(
            "The transfer coding must be chunked only: send the body without other codings"
        )
    if not url.startswith((b"/", b"*")) and not httptools.parse_url(url).path:
        raise httptools.HttpParserError("a URL without a path")
