"""What the READMEs show of the server, run as it stands there; the address alone is another."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import toy
import yaml
from clients import http
from commands import run_python
from prometheus_client.parser import text_string_to_metric_families

from aftexport.bundle import Bundle
from aftserve.api.api_keys import Keys
from aftserve.ray.deployment import DeploymentSettings, deployment_options

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = {
    str(path.relative_to(REPOSITORY)): path.read_text("utf-8")
    for folder in (".", "docker", "export", "plugins", "serve", "tests/benchmarks")
    for path in [REPOSITORY / folder / "README.md"]
}
SERVE = DOCUMENTS["README.md"] + DOCUMENTS["serve/README.md"]
SHOWN = "localhost:8000"

CURL = re.findall(r"curl '?localhost:8000[^`\n]*", SERVE)
PYTHON = re.findall(r"```python\n(.*?)```", DOCUMENTS["serve/README.md"], re.DOTALL)


@pytest.fixture
def place(server: str) -> str:
    """Host and port."""
    return urlsplit(server).netloc


def test_there_are_examples() -> None:
    assert len(CURL) == 3
    assert len(PYTHON) == 2


@pytest.mark.parametrize("command", CURL)
def test_curl(command: str, place: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed here")
    (tmp_path / "document.txt").write_text("a long document ...")
    words = shlex.split(command.replace(SHOWN, place))
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (shown,) = re.findall(r"```json\n(.*?)```", SERVE, re.DOTALL)
    spans = answer.pop("evidence")["spans"] if "evidence" in command else []
    assert all(span["text"] in "a long document ..." for span in spans)
    assert bool(spans) == ("evidence" in command)
    assert answer.keys() == json.loads(shown).keys()
    assert answer["timings"].keys() == json.loads(shown)["timings"].keys()
    assert answer["tokens_total"] == len("a long document ...")


@pytest.mark.parametrize("program", PYTHON, ids=["tritonclient", "client"])
def test_python(program: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(program.replace(SHOWN, place))
    outcome = run_python("example.py", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert re.search("invoice|contract|letter", lines[0])
    assert len(lines) == (4 if "infer_each" in program else 1)


def test_prometheus(place: str) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", SERVE, re.DOTALL)
    (job,) = yaml.safe_load(shown.replace(SHOWN, place))["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    answer = http.get(f"http://{target}/metrics")  # what Prometheus asks where nothing is said
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {"aftserve_responses", "aftserve_bundle_info", "aftserve_ready"} <= families
    assert answer.headers["Content-Type"].startswith("text/plain; version=")


@pytest.mark.parametrize("command", re.findall(r"aftserve (key [^`]+)`", SERVE))
def test_a_key_is_made(command: str, tmp_path: Path) -> None:
    outcome = run_python("-m", "aftserve", *command.split(), cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    key, section = re.findall(r"\n\n(\S+)\n\n.*?\n\n(.*)", outcome.out, re.DOTALL)[0]
    (tmp_path / "keys.toml").write_text(section)
    assert Keys.read(tmp_path / "keys.toml").owner(key) == command.split()[1]


@pytest.mark.filterwarnings(  # while Ray Serve is imported
    "ignore:Using extra keyword arguments on `Field`:DeprecationWarning:ray"
)
def test_ray_serve_takes_the_options(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # nothing is asked of it
    (shown,) = re.findall(r"```toml\n(.*?)```", SERVE, re.DOTALL)
    (tmp_path / "ray.toml").write_text(shown)
    settings = DeploymentSettings.read([str(bundle_folder), "--config", str(tmp_path / "ray.toml")])
    options = deployment_options(settings)
    assert options["autoscaling_config"]["max_replicas"] == 8
    assert options["ray_actor_options"] == {"num_cpus": 2}


@pytest.mark.parametrize("command", re.findall(r"aftserve (batch .*)", SERVE))
def test_batch(command: str, ray: dict[str, str], bundle_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle_folder, tmp_path / "model.bundle")
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "a.txt").write_text("a long document ...")
    table = pa.table({"text": ["a long document ..."], "id": ["a.txt"]})
    pq.write_table(table, tmp_path / "documents.parquet")
    outcome = run_python("-m", "aftserve", *command.split(), cwd=tmp_path, **ray)
    assert outcome.code == 0, outcome.err
    (out,) = tmp_path.glob("labels.*")
    is_lines = out.suffix == ".jsonl"
    rows = [json.loads(out.read_text())] if is_lines else pq.read_table(out).to_pylist()
    assert [row["id"] for row in rows] == ["a.txt"]
    assert rows[0]["label"] in toy.LABELS


OURS, THEIRS = re.findall(r"```python\n(.*?)```", DOCUMENTS["export/README.md"], re.DOTALL)


def test_a_classifier_is_trained_and_exported(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(OURS)
    outcome = run_python("example.py", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert Bundle.open(tmp_path / "model.bundle").manifest.labels == ("letter", "invoice")


def test_a_module_around_one_layer_is_exported_and_runs_in_chunks(tmp_path: Path) -> None:
    (tmp_path / "classifier.py").write_text(THEIRS)
    write = "import torch, classifier; torch.save(classifier.Classifier().state_dict(), 'model.pt')"
    assert run_python("-c", write, cwd=tmp_path).code == 0
    command = ["-m", "aftexport", "model.pt", "--factory", "classifier:Classifier", "--to", "onnx"]
    outcome = run_python(*command, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "model.bundle" / "chunked.zip").exists()


def test_an_operator_is_called(tmp_path: Path) -> None:
    (called,) = re.findall(r"```python\n(.*?)```", DOCUMENTS["README.md"], re.DOTALL)
    inputs = "query = key = value = torch.ones(2, 5, 8)\nlengths = torch.tensor([5, 3])\n"
    (tmp_path / "example.py").write_text(
        called.replace("import torch\n", f"import torch\n{inputs}") + "print(*y.shape)\n"
    )
    outcome = run_python("example.py", cwd=tmp_path)
    assert (outcome.code, outcome.out) == (0, "2 5 8\n"), outcome.err


def test_every_extra_that_it_names_is_there() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    text = "".join(DOCUMENTS.values())
    named = re.findall(r"pip install '(?:aftexport|\.)\[([\w-]+)\]'", text)
    assert {"client", "otel", "serve", "torch"} <= set(named)
    assert set(named) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    here = (REPOSITORY / name).parent
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", DOCUMENTS[name]):
        target = (here / link).resolve() if link else REPOSITORY / name
        headings = re.findall(r"(?m)^#+ (.*)$", target.read_text("utf-8"))
        assert not anchor or anchor in [h.lower().replace(" ", "-") for h in headings]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_are_there(name: str) -> None:
    named = re.findall(r"`((?:export|plugins|serve|tests|docker)/[\w./]+)`", DOCUMENTS[name])
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
