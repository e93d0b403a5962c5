"""What web pages may ask of a server that asks for no API key.

A page of anybody's may have its reader's browser send a request to loopback. It may not read the
answer; but where the name of its own host is made to lead to loopback, it may.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address

from fastapi import Request

from aftserve.errors import RefusedError

_PORT = re.compile(r":\d*$")
_OWN = (None, "same-origin", "none")
"""Values of Sec-Fetch-Site: of no browser, of a page of this server, of the reader's own."""


class OriginError(RefusedError):
    """A browser asks for a page that is not this server's."""

    status = 403


def same_origin(
    host: str, allowed_hosts: Sequence[str], origins: Sequence[str]
) -> Callable[..., Awaitable[None]]:
    """What refuses a request of a page that is not meant to ask, before its body is read.

    Args:
        host: that the server listens on. Where that is loopback, requests must name it, or
            another name of loopback, as their host.
        allowed_hosts: that they may name too; ``*`` for any.
        origins: whose pages may ask; ``*`` for all.
    """
    loopback = _is_loopback(host) and "*" not in allowed_hosts

    async def check(request: Request) -> None:
        # Not of Starlette's URL: where it finds a host odd, that has the server's own address.
        asked = _PORT.sub("", request.headers.get("host", "")).strip("[]").lower()
        if loopback and asked and not _is_loopback(asked) and asked not in allowed_hosts:
            raise OriginError(
                f"This server listens on loopback, and not as {asked[:100]}.",
                "Where that is a name of it, give it to --allowed-hosts.",
            )
        foreign = request.headers.get("sec-fetch-site") not in _OWN
        origin = request.headers.get("origin", "")
        if foreign and request.method == "POST" and not {"*", origin} & {*origins}:
            raise OriginError(
                f"A page of {origin[:100]} asks, another origin.",
                "Where it is to, give that to --cors-origins.",
            )

    return check


def _is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this machine alone, whoever is asked for it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
