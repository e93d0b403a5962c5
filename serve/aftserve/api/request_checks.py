"""Checks of a request before its body is read: its Origin and Host headers, and its query.

A page of any site can make a browser send a request to this server. The page cannot
read the answer, unless its own host name resolves to this server (DNS rebinding).
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Literal, NamedTuple
from urllib.parse import urlencode

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from aftexport.errors import InputError
from aftexport.system.arguments import nearest
from aftserve.errors import RefusedError

_HOST = re.compile(r"(\[[^\[\]]+\]|[^\s\[\]:/@?#]+)(?::(\d{0,5}))?", re.ASCII)
_ORIGIN = re.compile(rf"(?P<scheme>https?)://(?P<host>{_HOST.pattern})", re.ASCII | re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}
_ALL_ADDRESSES = {"0.0.0.0", "::"}
_MAX_SHOWN_CHARACTERS = 100
"""Maximum length of a value of a body that an error repeats."""
_MAX_KNOWN_HOSTS = 64
"""Host headers whose parts are remembered."""
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site for a page of this server, and for a request by the user."""


class OriginError(RefusedError):
    """A browser sent the request for a page of another origin."""

    status = 403


class _Place(NamedTuple):
    """A host in its canonical spelling, and a port."""

    host: str
    port: int


Check = Callable[[Request], Awaitable[None]]
"""A dependency that raises an error, or returns nothing."""


def in_turn(*checks: Check) -> Check:
    """Return one dependency that does several checks, as FastAPI takes longer for each of them."""

    async def check(request: Request) -> None:
        for one in checks:
            await one(request)

    return check


def named_host(hosts: Sequence[str], allowed_hosts: Sequence[str]) -> Check:
    """Return a dependency that refuses a Host header that names another server."""
    # ``*`` allows every name. If none is allowed, only a server on loopback or a Unix socket checks
    # it.
    is_local = all(_is_loopback(_canonical(host)) for host in hosts)
    any_host = "*" in allowed_hosts or not (allowed_hosts or is_local)
    own = {_canonical(name) for name in (*hosts, *allowed_hosts)} - _ALL_ADDRESSES

    async def check(request: Request) -> None:
        # Do not use Starlette's URL: for a malformed host it has the server's own address.
        named = [*filter(None, request.headers.getlist("host"))]
        # Refuse a client of HTTP/1.0 without a Host header only if names are listed.
        for asked in named or ([""] if allowed_hosts else []):
            place = _place(asked, 0)
            if any_host or (place and (place.host in own or _is_loopback(place.host))):
                continue
            raise OriginError(
                f"The Host header must name this server, got {asked[:100] or 'none'}.",
                "If this server has that name, add it to --allowed-hosts.",
            )

    return check


def same_origin(origins: Sequence[str]) -> Check:
    """Return a dependency that refuses effects by a page of another origin; ``*`` allows all."""
    # Browsers send Sec-Fetch-Site to loopback and over TLS. Over plain HTTP to any other host, the
    # Origin header tells whose page it is.
    allowed = {_canonical_origin(origin) for origin in origins}

    async def check(request: Request) -> None:
        if request.method in _SAFE_METHODS or "*" in allowed or not _is_foreign(request):
            return
        given = request.headers.getlist("origin")
        if len(given) == 1 and _canonical_origin(given[0]) in allowed:
            return
        raise OriginError(
            f"A page of this server must send the request, got one of {', '.join(given)[:100]}.",
            "Add that origin to --cors-origins to accept its pages. If it is this server's own "
            "origin behind a proxy, make the proxy forward the Host header.",
        )

    return check


def _is_foreign(request: Request) -> bool:
    """Return whether a page of another origin sent a request; programs send neither header."""
    if sites := request.headers.getlist("sec-fetch-site"):
        return any(site not in _OWN_SITES for site in sites)
    origins, hosts = (request.headers.getlist(name) for name in ("origin", "host"))
    if not origins:
        return False
    found = _ORIGIN.fullmatch(origins[0])
    if found is None or len(origins) > 1 or len(hosts) != 1:
        return True
    # Use the page's scheme: a proxy may have ended TLS, and both headers omit the default port.
    default = _PORTS[found["scheme"].lower()]
    page, here = _place(found["host"], default), _place(hosts[0], default)
    return page is None or page != here


@lru_cache(_MAX_KNOWN_HOSTS)
def _place(text: str, default_port: int) -> _Place | None:
    """Return the host and port of a header, or None if it is malformed."""
    found = _HOST.fullmatch(text)
    return found and _Place(_canonical(found[1]), int(found[2] or default_port))


def _canonical(host: str) -> str:
    """Return the canonical spelling of a host: names in lower case, without a final dot."""
    host = host.strip("[]").lower()
    try:
        address = ip_address(host)
    except ValueError:
        return host.removesuffix(".")
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


def _canonical_origin(origin: str) -> str:
    found = _ORIGIN.fullmatch(origin)
    if found is None:
        return origin  # a browser extension's origin has no port
    scheme = found["scheme"].lower()
    place = _place(found["host"], _PORTS[scheme])
    assert place is not None  # the pattern of an origin contains the pattern of a host
    return f"{scheme}://{place.host}:{place.port}"


@lru_cache(_MAX_KNOWN_HOSTS)
def _is_loopback(host: str) -> bool:
    """Return whether a canonical name or address is of loopback."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


async def check_query(request: Request) -> None:
    """Check that the endpoint of a request has its query parameters."""
    if not request.query_params:
        return
    known = _names(request, "query_params")
    for name in request.query_params:
        if name not in known:
            likely = nearest(name, known)
            remedy = f"Write {likely}." if likely else "Leave it out."
            raise InputError(f"Expected {_listed(known)}, got {name[:100]!r}.", remedy)


def place_of_option(request: Request, name: str, value: object) -> str | None:
    """Return how to send a field of a body that is a query parameter or a header; else None."""
    if name in _names(request, "query_params"):
        is_short = isinstance(value, int | str) and len(str(value)) <= _MAX_SHOWN_CHARACTERS
        query = urlencode({name: value}) if is_short else f"{name}=VALUE"
        return f"Put it into the address: ?{query}."
    for header in _names(request, "header_params"):
        if header.lower() == name.lower().replace("_", "-"):
            return f"Send it as the header {header}."
    return None


def _names(request: Request, kind: Literal["query_params", "header_params"]) -> list[str]:
    """Return the names of the parameters of an endpoint and of its checks."""

    def collected(dependant: Dependant) -> list[str]:
        own = [one.alias for one in getattr(dependant, kind)]
        return own + [name for one in dependant.dependencies for name in collected(one)]

    route: APIRoute = request.scope["route"]
    return collected(route.dependant)


def _listed(known: Sequence[str]) -> str:
    if not known:
        return "no query parameter"
    return f"the query parameter{'s' * (len(known) > 1)} {', '.join(known)}"
