"""The files of the page and their response headers."""

from importlib.resources import files

import httpx
import pytest

NAMES = (
    "page.css",
    "page.js",
    "files.js",
    "heads.js",
    "inputs.js",
    "models.js",
    "program.js",
    "tokens.js",
    "series.js",
    "series_field.js",
    "elements.js",
)
FILES = {"/": "index.html"} | {f"/page/{name}": name for name in NAMES}


@pytest.fixture(params=FILES)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_page_files_come_from_package(path: str, client: httpx.Client) -> None:
    served = client.get(path)
    assert served.status_code == 200
    assert served.content == (files("aftserve.api.page") / FILES[path]).read_bytes()
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    kind = kinds[FILES[path].partition(".")[2]]
    assert served.headers["Content-Type"] == f"{kind}; charset=utf-8"


def test_security_policy_allows_own_origin_only(path: str, client: httpx.Client) -> None:
    headers = client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    refused = ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types")
    assert {policy[name] for name in refused} == {"'none'"}
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_unchanged_file_is_not_resent(path: str, client: httpx.Client) -> None:
    first = client.get(path)
    tag = first.headers["ETag"]
    assert first.headers["Cache-Control"] == "no-cache"
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = client.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["ETag"] == tag
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_head_request_matches_get(path: str, client: httpx.Client) -> None:
    answer = client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["Content-Length"] == str(len(client.get(path).content))


def test_openapi_omits_page_files(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert "/infer" in paths
    assert not FILES.keys() & paths.keys()


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_third_party_docs_pages_are_absent(path: str, client: httpx.Client) -> None:
    assert client.get(path).status_code == 404
