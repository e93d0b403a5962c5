"""The adapters that ``--api`` names, one in a file of a user, and models without their fields."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from clients import http
from commands import run_python
from docs.pages import BLOCKS, PAGES
from fastapi import FastAPI
from servers import serving
from tiny_models import LABELS

from aftexport.errors import UsageError
from aftserve import adapter_names
from aftserve.adapter_names import ADAPTERS
from aftserve.api.adapters.adapter import create_adapters, include_adapters
from aftserve.api.api_keys import make_key
from aftserve.settings import Settings

PAGE = "docs/how-to/other-apis.md"
PATH = "/v1/systemone"
"""The path of the adapter that the page shows."""
(SHOWN,) = [block for block in BLOCKS if (block.page, block.mark) == (PAGE, "file")]
REFUSALS = {
    "/classify": ["error"],
    "/v1/classify": ["error"],
    "/predict": ["error", "error_type"],
    "/embed": ["error", "error_type"],
    "/rerank": ["error", "error_type"],
    "/v1/rerank": ["message"],
    "/v2/rerank": ["message"],
    "/v1/models": ["error"],
    "/v1/models/model": ["error"],
    "/v1/decisions": ["error"],
    "/v1/models/model:predict": ["error"],
    "/invocations": ["detail"],
    "/v1/systemone": ["detail"],
}
"""The fields of an error at each path."""
CLASHING = SHOWN.text.replace("/v1/systemone", "/infer")
SHADOWED = SHOWN.text.replace("/v1/systemone", "/models/plain/infer")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a server, with the adapter that the page shows."""
    (tmp_path / SHOWN.marked).write_text(SHOWN.text)
    (tmp_path / "clashing.py").write_text(CLASHING)
    (tmp_path / "shadowed.py").write_text(SHADOWED)
    (tmp_path / "wrong.py").write_text("def create(models, guards):\n    return guards\n")
    (tmp_path / "broken.py").write_text("def create(models, guards):\n    return guards[5]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], list(ADAPTERS)),
        (["--api", "vllm"], ["vllm"]),
        (["--api", "vllm", "--api", "mine:create", "--api", "vllm"], ["vllm", "mine:create"]),
        (["--api", "mine:create,vllm"], ["mine:create", "vllm"]),
        (["--api", "none"], []),
    ],
)
def test_names_are_read(words: list[str], names: list[str]) -> None:
    assert Settings.read(["bundle", *words]).api == names


@pytest.mark.parametrize("name", ["vlm", "none,vllm", "mine"])
def test_unknown_name_lists_known_ones(name: str) -> None:
    expected = rf"^--api: expected {', '.join(ADAPTERS)}, none by itself, or package.module:"
    with pytest.raises(UsageError, match=expected):
        Settings.read(["bundle", "--api", name])


def test_help_and_page_list_names(tmp_path: Path) -> None:
    outcome = run_python("-m", "aftserve", "--help", cwd=tmp_path)
    shown = " ".join(outcome.out.split())
    assert f"/infer and /v2: {', '.join(ADAPTERS)}, or package.module:callable" in shown
    assert re.findall(r"(?m)^\| `(\w+)` \| `/", PAGES[PAGE]) == list(ADAPTERS)


def test_own_adapter_answers_beside_named_ones(here: Path, bundle_folder: Path) -> None:
    key, section = make_key("alice", None)
    (here / "keys.toml").write_text(section)
    options = ("--api", f"{','.join(ADAPTERS)},systemone:create", "--api-keys", "keys.toml")
    with (
        serving(bundle_folder, here / "log", *options) as (address, _),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        choice = {"type": "choice", "criteria": dict.fromkeys(LABELS)}
        own = {"model": "model", "state": "A contract", "questions": {"kind": choice}}
        for path, fields in REFUSALS.items():
            is_listed = re.fullmatch("/v1/models(/model)?", path)
            refused = client.request("GET" if is_listed else "POST", path)
            assert (refused.status_code, [*refused.json()]) == (401, fields)
            assert refused.headers["WWW-Authenticate"] == "Bearer"
        client.headers["X-API-Key"] = key
        named = client.post("/infer", json={"text": own["state"]}).json()
        answer = client.post(PATH, json=own).json()
        assert answer["answers"]["kind"]["choice"] == named["label"]
        assert answer["answers"]["kind"]["probabilities"] == named["scores"]
        assert answer["usage"]["input_tokens"] == named["tokens_used"]
        for changes, problem in (
            ({"state": ""}, "has no tokens"),
            ({"model": "other"}, "Expected the model 'model', got 'other'"),
            ({"questions": {"kind": choice | {"criteria": {"a": None}}}}, "labels of one output"),
        ):
            assert problem in client.post(PATH, json=own | changes).json()["detail"]
        assert PATH in client.get("/openapi.json").json()["paths"]
        refused = f'aftserve_responses_total{{model="",path="{PATH}",status="401"}}'
        assert refused in client.get("/metrics").text
    assert "Traceback" not in (here / "log").read_text("utf-8")


def included(name: str) -> FastAPI:
    """Return an application with POST /infer and an adapter."""
    app = FastAPI()
    app.post("/infer")(lambda: None)
    models: Any = SimpleNamespace(settings=SimpleNamespace(api=[name]))
    include_adapters(app, create_adapters(models, []))
    return app


def test_only_registry_names_adapters() -> None:
    """An adapter is removed with its file and its line in the registry."""
    modules = {path.partition(":")[0] for path in ADAPTERS.values()}
    folder = Path(adapter_names.__file__).parent
    files = [file for file in folder.rglob("*.py") if file.name != "adapter_names.py"]
    named = [f"{file}: {one}" for file in files for one in modules if one in file.read_text()]
    assert not named
    own = {
        ".".join(("aftserve", *file.relative_to(folder).with_suffix("").parts)) for file in files
    }
    assert modules <= own


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clashing:create", "expected a free path, got POST /infer, which another endpoint has"),
        ("shadowed:create", "does not begin with /models/, got /models/plain/infer"),
        ("wrong:create", "must return an Adapter, got a list"),
        ("broken:create", "the call raised IndexError"),
        ("absent_module:create", "the import raised ModuleNotFoundError"),
        ("systemone:other", "the import raised AttributeError"),
    ],
)
def test_bad_adapter_is_refused(name: str, message: str, here: Path) -> None:
    with pytest.raises(UsageError, match=f"--api {name}.* {message}"):
        included(name)


def test_named_adapters_keep_import_path(here: Path) -> None:
    """The working folder of a default server cannot shadow modules."""
    code = (
        "import sys; from aftserve.api.adapters.adapter import import_adapters; "
        "from aftserve.adapter_names import ADAPTERS; before = [*sys.path]; "
        "import_adapters(ADAPTERS); assert sys.path == before; "
        "import_adapters(['systemone:create']); print(sys.path[0] == '' != before[0])"
    )
    outcome = run_python("-P", "-c", code, cwd=here)
    assert outcome.out.split() == ["True"], outcome


def test_wrong_adapter_is_refused_before_load(here: Path) -> None:
    """The missing bundle would be the problem otherwise."""
    outcome = run_python(
        "-m", "aftserve", "absent.bundle", "--api", "absent_module:create", cwd=here
    )
    assert outcome.code == 2
    assert "--api absent_module:create: the import raised ModuleNotFoundError" in outcome.err


KIND = {"type": "choice", "instructions": "Which?", "choices": [{"value": one} for one in LABELS]}
MOOD = {
    "type": "choice",
    "instructions": "Which?",
    "choices": [{"value": "calm"}, {"value": "sad"}],
}


def bodies(document: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return a request of every format for a document."""
    decision = {"model": "model", "input": document}
    return [
        ("/classify", {"input": document}),
        ("/v1/classify", {"input": [document]}),
        ("/predict", {"inputs": document}),
        ("/v1/decisions", decision | {"questions": [KIND]}),
        ("/v1/decisions", decision | {"questions": [MOOD]}),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [("feature_server", "features"), ("extra_server", "extra_inputs of GET /info")],
)
def test_every_format_refuses_documents(
    name: str, message: str, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(name)
    for path, body in [*bodies("a text"), *bodies([5, 6, 7])]:
        answer = http.post(f"{address}{path}", json=body)
        assert (answer.status_code, message in answer.text) == (422, True), (path, answer.text)
    schemas = http.get(f"{address}/openapi.json").json()["components"]["schemas"]
    for model, field in (
        ("ClassificationRequest", "input"),
        ("PredictRequest", "inputs"),
        ("EmbedRequest", "inputs"),
        ("DecisionRequest", "input"),
    ):
        assert schemas[model]["properties"][field] == {"not": {}}
