"""A server of several bundles: their addresses, their answers, and folders that change."""

import shutil
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import altered_bundles
import httpx
import pytest
from bundle_swaps import damage, deploy, digest
from clients import eventually, http, metric
from servers import Serve, serving

from aftserve.api.api_keys import make_key
from aftserve.client import Client, Result
from aftserve.predictor import Predictor

TEXT = "An invoice."


@pytest.fixture(scope="module")
def alone(bundle_folder: Path, other_bundle: Path) -> dict[str, Result]:
    """The answer of each bundle without a server, by the name that it gets below."""
    found = {}
    for name, bundle in (("a", bundle_folder), ("b", other_bundle)):
        with Predictor(bundle, threads=1) as predictor:
            found[name] = predictor(TEXT)
    return found


@pytest.fixture(scope="module")
def both(bundle_folder: Path, other_bundle: Path, serve: Serve, tmp_path_factory: Any) -> str:
    """The address of a server of both bundles."""
    folder = tmp_path_factory.mktemp("both")
    second = deploy(other_bundle, folder / "b")
    return serve(deploy(bundle_folder, folder / "a.bundle"), str(second), "--threads", "1")


def check_answers(address: str, name: str, alone: dict[str, Result], start: str = "") -> None:
    """Check the answers of a model in several formats; ``start`` begins their paths."""

    def post(path: str, **body: Any) -> Any:
        return http.post(f"{address}{start}{path}", json=body).json()

    expected = alone[name]
    assert expected.scores is not None
    scores = pytest.approx(expected.scores, abs=1e-6)
    infer = post("/infer", text=TEXT)
    assert (infer["bundle"], infer["scores"]) == (expected.bundle, scores)
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    protocol = post(f"/v2/models/{name}/infer", inputs=[text])
    assert protocol["model_name"] == name
    assert protocol["parameters"]["bundle"] == expected.bundle
    vllm = post("/classify", model=name, input=TEXT)
    assert (vllm["model"], vllm["data"][0]["label"]) == (name, expected.label)
    question = {"type": "predicate", "name": "invoice", "instructions": "Is it?"}
    decision = post("/v1/decisions", model=name, input=TEXT, questions=[question])
    probability = pytest.approx(expected.scores["invoice"], abs=1e-6)
    assert (decision["model"], decision["answers"][0]["probability"]) == (name, probability)
    predicted = post("/predict", inputs=[[TEXT]])
    assert {one["label"]: one["score"] for one in predicted[0]} == scores


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "b"])
def test_models_answer_as_alone(name: str, both: str, alone: dict[str, Result]) -> None:
    check_answers(both, name, alone, f"/models/{name}")


def test_first_bundle_answers_plain_paths(both: str, alone: dict[str, Result]) -> None:
    check_answers(both, "a", alone)


def test_bodies_and_protocol_name_other_model(both: str, alone: dict[str, Result]) -> None:
    vllm = http.post(f"{both}/classify", json={"model": "b", "input": TEXT}).json()
    assert (vllm["model"], vllm["data"][0]["label"]) == ("b", alone["b"].label)
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    protocol = http.post(f"{both}/v2/models/b/infer", json={"inputs": [text]}).json()
    assert (protocol["model_name"], protocol["parameters"]["bundle"]) == ("b", alone["b"].bundle)


def test_lists_have_all_models(both: str) -> None:
    assert [one["id"] for one in http.get(f"{both}/v1/models").json()["data"]] == ["a", "b"]
    stats = http.get(f"{both}/v2/models/stats").json()["model_stats"]
    assert [one["name"] for one in stats] == ["a", "b"]
    below = http.get(f"{both}/models/b/v1/models").json()["data"]
    assert [one["id"] for one in below] == ["b"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/models/c/infer", {"text": "a"}),
        ("GET", "/models/c/info", None),
        ("GET", "/models/c/readyz", None),
        ("GET", "/models/c/healthz", None),
        ("GET", "/models/c/", None),
        ("GET", "/models/c/v2", None),
        ("GET", "/models/c/openapi.json", None),
        ("GET", "/v2/models/c", None),
        ("GET", "/v1/models/c", None),
        ("POST", "/classify", {"model": "c", "input": "a"}),
    ],
)
def test_unknown_name_lists_models(method: str, path: str, body: Any, both: str) -> None:
    refused = http.request(method, f"{both}{path}", json=body)
    assert refused.status_code == 404
    assert "one of the models 'a', 'b', got 'c'" in refused.text


@pytest.mark.parametrize("path", ["/models/a/v2/models/b", "/models/a/v1/models/b"])
def test_path_of_one_model_refuses_other(path: str, both: str) -> None:
    refused = http.get(f"{both}{path}")
    assert refused.status_code == 404
    assert "Expected the model 'a', got 'b'" in refused.text


def test_metrics_name_models(both: str) -> None:
    http.post(f"{both}/models/b/infer", json={"text": "a"})
    http.post(f"{both}/models/c/infer", json={"text": "a"})
    path = {"path": "/infer"}
    eventually(
        lambda: metric(both, "aftserve_responses_total", model="b", status="200", **path) > 0,
        "the answer is counted",
    )
    eventually(
        lambda: metric(both, "aftserve_responses_total", model="", status="404", **path) > 0,
        "the refusal is counted",
    )
    assert metric(both, "aftserve_responses_total", model="c") == 0
    assert metric(both, "aftserve_document_tokens_count", model="b") > 0
    assert [metric(both, "aftserve_ready", model=name) for name in ("a", "b", "c")] == [1, 1, 0]
    assert metric(both, "aftserve_server_ready") == 1


def test_client_takes_address_of_model(both: str, alone: dict[str, Result]) -> None:
    with Client(f"{both}/models/b") as client:
        assert client.infer(TEXT).bundle == alone["b"].bundle


@pytest.fixture
def folder(bundle_folder: Path, other_bundle: Path, tmp_path: Path) -> Path:
    """A folder of bundles, a and b."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    for name, bundle in (("a", bundle_folder), ("b", other_bundle)):
        shutil.copytree(bundle, folder / f"{name}.bundle")
    return folder


def served(address: str) -> dict[str, str]:
    """Return the digest of each loaded model."""
    names = [one["id"] for one in http.get(f"{address}/v1/models").json()["data"]]
    infos = {name: http.get(f"{address}/models/{name}/info") for name in names}
    # A model may be unloaded between the requests.
    return {n: info.json()["bundle"] for n, info in infos.items() if info.status_code == 200}


def test_folder_has_no_default(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log") as (address, _):
        refused = http.post(f"{address}/infer", json={"text": "a"})
        assert refused.status_code == 404
        assert "the server has a, b. Send the request to /models/a/infer." in refused.text
        schemas = http.get(f"{address}/openapi.json").json()["components"]["schemas"]
        assert schemas["DecisionRequest"]["properties"]["model"] == {"enum": ["a", "b"]}
        assert "text" in schemas["InferRequest"]["properties"]
        named = http.post(f"{address}/classify", json={"model": "b", "input": "a"})
        assert named.json()["model"] == "b"


@pytest.mark.slow
def test_rescan_follows_folder(
    folder: Path, bundle_folder: Path, other_bundle: Path, tmp_path: Path
) -> None:
    """Bundles are added, replaced and removed; a broken one leaves the others."""
    first, second = digest(bundle_folder), digest(other_bundle)
    with serving(folder, tmp_path / "log", "--threads", "1") as (address, process):
        assert served(address) == {"a": first, "b": second}
        shutil.copytree(bundle_folder, folder / "c")
        process.send_signal(signal.SIGHUP)
        eventually(lambda: served(address).get("c") == first, "c is added")
        swap(other_bundle, folder / "a.bundle")
        shutil.rmtree(folder / "b.bundle")
        broken = Path(shutil.copytree(bundle_folder, folder / "broken.bundle"))
        damage(broken)
        process.send_signal(signal.SIGHUP)
        eventually(lambda: served(address) == {"a": second, "c": first}, "a and b changed")
        log = tmp_path / "log"
        eventually(lambda: "model.onnx was changed" in log.read_text("utf-8"), "broken is refused")
        assert http.get(f"{address}/models/broken/readyz").status_code == 404
        answer = http.post(f"{address}/models/a/infer", json={"text": "a"})
        assert answer.json()["bundle"] == second
        assert http.get(f"{address}/readyz").status_code == 200
        swap(bundle_folder, broken)
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "broken" in served(address), "the corrected bundle is loaded")
        for bundle in folder.iterdir():
            shutil.rmtree(bundle)
        process.send_signal(signal.SIGHUP)
        eventually(lambda: served(address) == {}, "all are unloaded")
        assert "no model is loaded" in http.get(f"{address}/readyz").text
        assert http.get(f"{address}/readyz").status_code == 503
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


def swap(bundle: Path, place: Path) -> None:
    """Replace a bundle of a folder; the copy has a hidden name before."""
    copy = Path(shutil.copytree(bundle, place.with_name(".new")))
    shutil.rmtree(place)
    copy.rename(place)


def test_breach_leaves_other_model_ready(folder: Path, tmp_path: Path) -> None:
    altered_bundles.always(folder / "a.bundle")
    with serving(folder, tmp_path / "log") as (address, _):
        assert http.get(f"{address}/readyz").status_code == 200
        assert "ready, except a: " in http.get(f"{address}/readyz").json()["status"]
        assert http.get(f"{address}/models/a/readyz").status_code == 503
        assert http.get(f"{address}/models/b/readyz").json() == {"status": "ready"}
        assert http.get(f"{address}/v2/models/a/ready").status_code == 503
        refused = http.post(f"{address}/models/a/infer", json={"text": "a"})
        assert (refused.status_code, "golden cases" in refused.text) == (503, True)
        assert http.post(f"{address}/models/b/infer", json={"text": "a"}).status_code == 200


@pytest.mark.slow
def test_sections_belong_to_models(folder: Path, checkpoint_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "aftserve.toml"
    config.write_text(f'[models.a]\nreference = "{checkpoint_file}"\nshadow = 0.5\n')
    with serving(folder, tmp_path / "log", "--config", str(config)) as (address, _):
        compared = http.post(f"{address}/models/a/parity", json={"text": "a"}, timeout=120)
        assert compared.json()["within"], compared.text
        assert http.get(f"{address}/models/a/parity").json()["shadow"] == 0.5
        assert http.post(f"{address}/models/b/parity", json={"text": "a"}).status_code == 404
        assert http.get(f"{address}/models/b/parity").json()["shadow"] == 0


def test_api_key_comes_before_names(folder: Path, tmp_path: Path) -> None:
    key, section = make_key("admin", None, admin=True)
    (tmp_path / "keys.toml").write_text(section)
    options = ("--api-keys", str(tmp_path / "keys.toml"))
    with (
        serving(folder, tmp_path / "log", *options) as (address, _),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        for path in ("/models/a/infer", "/models/c/infer", "/models/c/reload", "/infer"):
            refused = client.post(path, json={"text": "a"})
            assert refused.status_code == 401
            assert "'a'" not in refused.text
        probes = ("healthz", "readyz", "v2/health/ready")
        for path in (*probes, "openapi.json", "v2", "", "page/page.js"):
            unknown = client.get(f"/models/c/{path}")
            assert (unknown.status_code, "'c'" in unknown.text) == (404, True), path
            assert "'a'" not in unknown.text
            assert client.get(f"/models/a/{path}").status_code == 200
        for start, model in (("", {"type": ["string"]}), ("/models/a", {"enum": ["a"]})):
            schemas = client.get(f"{start}/openapi.json").json()["components"]["schemas"]
            assert schemas["DecisionRequest"]["properties"]["model"] == model
        client.headers["X-API-Key"] = key
        assert client.post("/models/c/infer", json={"text": "a"}).status_code == 404
        assert client.post("/models/b/reload").json()["bundle"] == served_by(client, "b")
        assert (
            'aftserve_reloads_total{model="b",outcome="served"} 1.0' in client.get("/metrics").text
        )


def served_by(client: httpx.Client, name: str) -> str:
    return str(client.get(f"/models/{name}/info").json()["bundle"])


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
def quoted(bundle_folder: Path, serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a server of a folder with these names."""
    folder = tmp_path_factory.mktemp("quoted")
    for name in QUOTED:
        shutil.copytree(bundle_folder, folder / name)
    return serve(folder, "--threads", "1")


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
