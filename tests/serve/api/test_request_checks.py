"""Checks of the Host and Origin headers that protect a server from foreign web pages."""

import asyncio
from pathlib import Path

import httpx
import pytest
from clients import http
from fastapi import Request
from sampling import any_case
from servers import Serve, serving

from aftserve.api.api_keys import make_key
from aftserve.api.request_checks import OriginError, named_host, same_origin

CLOSED = ["/info", "/metrics", "/parity", "/v2/models/model"]
OPEN = ["/", "/healthz", "/readyz", "/v2/health/ready", "/openapi.json"]
NAMES = ["localhost", "LOCALHOST:81", "model.localhost", "127.0.0.1", "127.9.9.9:80", "[::1]:8000"]
FOREIGN = [
    "attacker.example",
    "0.0.0.0:8000",
    "10.0.0.1",
    "localhost.attacker.example",
    "a localhost",
]
EFFECTS = ["POST", "PUT", "PATCH", "DELETE", "OTHER"]


def request(method: str, **headers: list[str]) -> Request:
    fields = [
        (name.replace("_", "-").encode(), value.encode("latin-1"))
        for name, values in headers.items()
        for value in values
    ]
    return Request({"type": "http", "method": method, "path": "/infer", "headers": fields})


def post(address: str, **headers: str) -> httpx.Response:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.post(f"{address}/infer", content=b"a", headers=fields)


@pytest.fixture(scope="module")
def proxied(bundle_folder: Path, serve: Serve) -> str:
    options = ("--allowed-hosts", "a.example", "--cors-origins", "https://good.example")
    return serve(bundle_folder, *options)


@pytest.mark.table(keep=0.34, by=any_case)
@pytest.mark.parametrize("host", NAMES)
def test_loopback_names_are_accepted(host: str, server: str) -> None:
    for path in OPEN + CLOSED:
        assert http.get(server + path, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_dns_rebinding_reads_nothing(host: str, server: str) -> None:
    """A foreign name that resolves to loopback reaches only probes and the page."""
    for path in CLOSED:
        refused = http.get(server + path, headers={"Host": host})
        assert refused.status_code == 403
        assert "--allowed-hosts" in refused.text
    assert post(server, Host=host, Content_Type="text/plain").status_code == 403
    for path in OPEN:  # probes may use any name
        assert http.get(server + path, headers={"Host": host}).status_code == 200


def test_proxy_may_forward_allowed_host(proxied: str) -> None:
    for host, status in (("a.example", 200), ("A.example:443", 200), ("b.example", 403)):
        assert http.get(f"{proxied}/info", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "model.example"])
def test_allowed_hosts_hold_at_every_address(host: str) -> None:
    check = named_host([host], ["a.example", "[2001:db8::1]"])
    for name in (*NAMES, "a.example", "A.EXAMPLE.:443", "[2001:DB8:0::1]:80"):
        asyncio.run(check(request("GET", host=[name])))
    for name in (
        *FOREIGN,
        "b.example",
        "a.example.b.example",
        "[::]",
        "a.example:80:80",
        "x@a.example",
        "",
    ):
        with pytest.raises(OriginError, match="--allowed-hosts"):
            asyncio.run(check(request("GET", host=[name])))
    with pytest.raises(OriginError):
        asyncio.run(check(request("GET", host=["a.example", "b.example"])))


def test_public_server_enforces_allowed_hosts(bundle_folder: Path, tmp_path: Path) -> None:
    """The check also holds on a server with API keys, and for ``POST /reload``."""
    key, section = make_key("alice", None, admin=True)
    (tmp_path / "keys.toml").write_text(section)
    options = ("--host", "0.0.0.0", "--allowed-hosts", "a.example")
    keyed = (*options, "--api-keys", str(tmp_path / "keys.toml"))
    with serving(bundle_folder, tmp_path / "log", *keyed) as (address, _):
        here = address.replace("0.0.0.0", "127.0.0.1")
        for host, status in (("a.example:8000", 200), ("attacker.example", 403)):
            headers = {"Host": host, "X-API-Key": key, "Content-Type": "text/plain"}
            for path in CLOSED:
                assert http.get(here + path, headers=headers).status_code == status
            assert post(here, **headers).status_code == status
            assert http.get(f"{here}/healthz", headers=headers).status_code == 200
        assert http.post(f"{here}/reload", headers=headers).status_code == 403


@pytest.mark.parametrize(("host", "allowed"), [("0.0.0.0", []), ("::", []), ("127.0.0.1", ["*"])])
def test_unrestricted_server_accepts_any_host(host: str, allowed: list[str]) -> None:
    for name in ("attacker.example", "10.0.0.1:80"):
        asyncio.run(named_host([host], allowed)(request("GET", host=[name])))


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ["/infer", "/parity", "/v2/models/model/infer"])
def test_cross_origin_page_is_refused(site: str, path: str, server: str) -> None:
    headers = {
        "Sec-Fetch-Site": site,
        "Origin": "https://other.example",
        "Content-Type": "text/plain",
    }
    refused = http.post(server + path, content=b"a", headers=headers)
    assert refused.status_code == 403
    assert "https://other.example" in refused.text


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_own_page_and_user_are_accepted(site: str, server: str) -> None:
    assert post(server, Sec_Fetch_Site=site, Content_Type="text/plain").status_code == 200


OWN = [
    ("http://a.example", "a.example"),
    ("http://a.example", "a.example:80"),
    ("http://a.example:80", "A.Example"),
    ("https://a.example", "a.example"),  # a proxy terminates TLS
    ("https://a.example:443", "a.example:443"),
    ("HTTP://A.EXAMPLE:8000", "a.example:8000"),
    ("http://a.example.", "a.example"),
    ("http://[2001:db8::1]:8000", "[2001:DB8:0:0::1]:8000"),
    ("http://[::ffff:192.0.2.7]", "192.0.2.7"),
]
OTHERS = [
    ("null", "a.example"),
    ("", "a.example"),
    ("a.example", "a.example"),
    ("http://b.example", "a.example"),
    ("http://a.example:8001", "a.example:8000"),
    ("http://a.example", "a.example:8000"),
    ("http://a.example:443", "a.example"),
    ("https://a.example", "a.example:80"),
    ("http://a.example/", "a.example"),
    ("http://a.example@b.example", "a.example"),
    ("http://a.example b.example", "a.example"),
    ("http://a.example, http://a.example", "a.example"),
    ("http://xa.example", "a.example"),
    ("http://a.example.b.example", "a.example"),
    ("http://[::1]", "[::2]"),
    ("http://[a.example", "a.example"),
    ("ftp://a.example", "a.example"),
    ("chrome-extension://abc", "a.example"),
    ("http://a.example", ""),
]


@pytest.mark.parametrize(("origin", "host"), OWN)
@pytest.mark.parametrize("method", EFFECTS)
def test_own_origin_over_http_is_accepted(method: str, origin: str, host: str) -> None:
    asyncio.run(same_origin([])(request(method, origin=[origin], host=[host])))


@pytest.mark.parametrize(("origin", "host"), OTHERS)
@pytest.mark.parametrize("method", EFFECTS)
def test_other_origin_over_http_is_refused(method: str, origin: str, host: str) -> None:
    with pytest.raises(OriginError, match="--cors-origins"):
        asyncio.run(same_origin([])(request(method, origin=[origin], host=[host])))
    asyncio.run(same_origin([])(request("GET", origin=[origin], host=[host])))


@pytest.mark.parametrize(
    ("named", "origin"),
    [
        ("https://a.example", "https://a.example:443"),
        ("http://[2001:db8::1]:80", "http://[2001:DB8::1]"),
        ("chrome-extension://abc", "chrome-extension://abc"),
        ("*", "null"),
    ],
)
def test_named_origin_matches_other_spellings(named: str, origin: str) -> None:
    asyncio.run(same_origin([named])(request("POST", origin=[origin], host=["b.example"])))
    if named != "*":
        with pytest.raises(OriginError):
            asyncio.run(same_origin([named])(request("POST", origin=["null"], host=["b.example"])))


def test_repeated_origin_or_host_is_refused() -> None:
    check, own = same_origin(["http://a.example"]), "http://a.example"
    for origins, hosts in (([own, "http://b.example"], ["a.example"]), ([own, own], ["a.example"])):
        with pytest.raises(OriginError):
            asyncio.run(check(request("POST", origin=origins, host=hosts)))
    hosts = ["a.example", "b.example"]
    with pytest.raises(OriginError):
        asyncio.run(same_origin([])(request("POST", origin=[own], host=hosts)))


def test_sec_fetch_site_overrides_origin() -> None:
    check, own = same_origin([]), {"origin": ["http://a.example"], "host": ["b.example"]}
    asyncio.run(check(request("POST", sec_fetch_site=["same-origin"], **own)))
    for sites in (["cross-site"], [""], ["same-origin", "cross-site"]):
        with pytest.raises(OriginError):
            asyncio.run(check(request("POST", sec_fetch_site=sites, **own)))


@pytest.mark.parametrize("path", ["/infer", "/parity", "/v2/models/model/infer"])
@pytest.mark.parametrize("origin", ["null", "http://other.example"])
def test_server_refuses_other_origin_over_http(path: str, origin: str, server: str) -> None:
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    refused = http.post(server + path, content=b"a", headers=headers)
    assert refused.status_code == 403
    assert origin in refused.text
    assert post(server, Origin=server, Content_Type="text/plain").status_code == 200
    assert post(server, Content_Type="text/plain").status_code == 200  # not a browser


def test_page_of_named_origin_is_accepted(proxied: str) -> None:
    for origin, status in (("https://good.example", 200), ("https://other.example", 403)):
        headers = {"Origin": origin, "Content_Type": "text/plain"}
        assert post(proxied, Sec_Fetch_Site="cross-site", **headers).status_code == status
        assert post(proxied, **headers).status_code == status


def test_cors_allows_only_named_origins(proxied: str) -> None:
    foreign = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    named = {**foreign, "Origin": "https://good.example"}
    header = "access-control-allow-origin"
    assert header not in http.options(f"{proxied}/infer", headers=foreign).headers
    allowed = http.options(f"{proxied}/infer", headers=named).headers
    assert allowed[header] == "https://good.example"
    listed = set(allowed["access-control-allow-headers"].lower().split(", "))
    assert {
        "authorization", "x-api-key", "content-type", "content-encoding", "deadline-seconds",
        "inference-header-content-length", "x-request-id", "traceparent", "tracestate",
        "baggage",
    } <= listed  # fmt: skip
    answer = http.get(f"{proxied}/readyz", headers=named)
    readable = answer.headers["access-control-expose-headers"].lower()
    assert {
        "retry-after", "x-request-id", "server-timing", "inference-header-content-length",
        "accept-encoding", "www-authenticate", "allow",
    } <= set(readable.split(", "))  # fmt: skip


def test_cors_is_off_by_default(server: str) -> None:
    foreign = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    answer = http.options(f"{server}/infer", headers=foreign)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]
