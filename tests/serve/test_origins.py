"""What web pages may ask of a server without API keys."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from clients import http
from servers import serving

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


def post(address: str, **headers: str) -> httpx.Response:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.post(f"{address}/infer", content=b"a", headers=fields)


@pytest.fixture(scope="module")
def proxied(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("proxied") / "log"
    options = ("--allowed-hosts", "a.example", "--cors-origins", "https://good.example")
    with serving(bundle_folder, log, *options) as (address, _):
        yield address


@pytest.mark.parametrize("host", NAMES)
def test_loopback_may_be_asked_by_its_names(host: str, server: str) -> None:
    for path in OPEN + CLOSED:
        assert http.get(server + path, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_was_made_to_lead_to_loopback_reads_nothing(host: str, server: str) -> None:
    for path in CLOSED:
        refused = http.get(server + path, headers={"Host": host})
        assert refused.status_code == 403
        assert "--allowed-hosts" in refused.text
    assert post(server, Host=host, Content_Type="text/plain").status_code == 403
    for path in OPEN:  # a probe asks by any name
        assert http.get(server + path, headers={"Host": host}).status_code == 200


def test_a_proxy_may_pass_on_a_name_that_is_allowed(proxied: str) -> None:
    for host, status in (("a.example", 200), ("A.example:443", 200), ("b.example", 403)):
        assert http.get(f"{proxied}/info", headers={"Host": host}).status_code == status


def test_where_more_than_loopback_may_ask_every_name_will_do(
    bundle_folder: Path, tmp_path: Path
) -> None:
    for number, options in enumerate((("--host", "0.0.0.0"), ("--allowed-hosts", "*"))):
        with serving(bundle_folder, tmp_path / f"log{number}", *options) as (address, _):
            here = address.replace("0.0.0.0", "127.0.0.1")
            for host in ("attacker.example", "10.0.0.1:80"):
                assert http.get(f"{here}/info", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ["/infer", "/parity", "/v2/models/model/infer"])
def test_a_page_of_another_origin_may_not_ask(site: str, path: str, server: str) -> None:
    said = {"Sec-Fetch-Site": site, "Origin": "https://other.example", "Content-Type": "text/plain"}
    refused = http.post(server + path, content=b"a", headers=said)
    assert refused.status_code == 403
    assert "https://other.example" in refused.text


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_page_of_the_server_and_its_reader_may(site: str, server: str) -> None:
    assert post(server, Sec_Fetch_Site=site, Content_Type="text/plain").status_code == 200


def test_a_page_that_is_named_may(proxied: str) -> None:
    for origin, status in (("https://good.example", 200), ("https://other.example", 403)):
        headers = {"Sec_Fetch_Site": "cross-site", "Origin": origin, "Content_Type": "text/plain"}
        assert post(proxied, **headers).status_code == status
