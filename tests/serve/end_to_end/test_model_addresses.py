"""The addresses of models with names that an address quotes, and the document of each model."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest
from bundle_swaps import deploy
from clients import http
from servers import serving


def test_openapi_has_limits_of_model(
    bundle_folder: Path, feature_bundle: Path, tmp_path: Path
) -> None:
    text, features = (
        deploy(bundle_folder, tmp_path / "text.bundle"),
        deploy(feature_bundle, tmp_path / "features.bundle"),
    )
    with serving(text, tmp_path / "log", str(features)) as (address, _):

        def fields(start: str) -> set[str]:
            document = http.get(f"{address}{start}/openapi.json").json()
            forms = document["components"]["schemas"]["InferRequest"]["oneOf"]
            return {name for form in forms for name in form["required"]}

        assert fields("/models/features") == {"input_features"}
        assert fields("/models/text") == fields("") == {"text", "texts", "input_ids"}
        below = http.get(f"{address}/models/text/openapi.json").json()
        assert below["servers"] == [{"url": "../text"}]
        body = below["components"]["schemas"]["ClassificationRequest"]
        assert body["properties"]["model"] == {"enum": ["text", None]}


COUNTING = """
from itertools import count

from fastapi import APIRouter

from aftserve.api.adapters.adapter import Adapter


def create(models, guards):
    made = count()
    return Adapter(
        APIRouter(), describe=lambda document, *_: document.update({"x-made": next(made)})
    )
"""
"""An adapter that numbers the OpenAPI documents in the order in which they are made."""


def test_openapi_documents_are_kept(
    bundle_folder: Path,
    other_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests for one document do not replace another one."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.chdir(tmp_path)
    first = deploy(bundle_folder, tmp_path / "a.bundle")
    second = deploy(other_bundle, tmp_path / "b.bundle")
    starts = ("", "/models/a", "/models/b")
    options = (str(second), "--api", "counting:create")
    with serving(first, tmp_path / "log", *options) as (address, _):
        made = [http.get(f"{address}{s}/openapi.json").json()["x-made"] for s in starts * 2]
    assert made == [0, 1, 2, 0, 1, 2]


QUOTED = {"a": "a", "sp ce": "sp%20ce", "100%41": "100%2541", "{x}": "%7Bx%7D", "ü": "%C3%BC"}
"""Names of models, and the form of each in an address."""


@pytest.fixture(scope="module")
def quoted(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a folder with these names."""
    folder = tmp_path_factory.mktemp("quoted")
    (folder / "bundles").mkdir()
    for name in QUOTED:
        shutil.copytree(bundle_folder, folder / "bundles" / name)
    with serving(folder / "bundles", folder / "log", "--threads", "1") as (address, _):
        yield address


def only_model(address: str) -> str:
    """Return the name of the only model below an address."""
    (model,) = http.get(f"{address}/v1/models").json()["data"]
    return str(model["id"])


@pytest.mark.parametrize("name", QUOTED)
def test_openapi_leads_to_model(name: str, quoted: str) -> None:
    """The address of the document's server is right below the prefix of a proxy, too."""
    place = f"/models/{QUOTED[name]}/openapi.json"
    ((url,),) = [one.values() for one in http.get(f"{quoted}{place}").json()["servers"]]
    assert only_model(urljoin(quoted + place, url)) == name
    proxied = urljoin(f"https://example.org/prefix{place}", url)
    assert proxied == f"https://example.org/prefix/models/{QUOTED[name]}"


def test_remedy_quotes_name(quoted: str) -> None:
    refused = http.get(f"{quoted}/info").json()["detail"]
    assert refused.endswith("Send the request to /models/100%2541/info.")
    assert only_model(f"{quoted}/models/100%2541") == "100%41"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_path_without_slash_names_page(method: str, quoted: str) -> None:
    refused = http.request(method, f"{quoted}/models/sp%20ce")
    assert refused.status_code == 404
    assert refused.json()["detail"].endswith("The page of the model is /models/sp%20ce/.")
    assert http.get(f"{quoted}/models/sp%20ce/").status_code == 200
