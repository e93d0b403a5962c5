"""Examples of the documentation that are data: answers, configurations, keys, the demo."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml
from commands import run_python
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from aftexport import demo
from aftexport.cli.demo import run
from aftexport.heads import HEADS, AnyHead
from aftserve.api.api_keys import Keys
from aftserve.ray.deployment import DeploymentSettings, deployment_options
from aftserve.settings import Settings
from docs.pages import BLOCKS, PAGES, Block

_SHOWN = re.findall(r"(?m)^aftserve (key [^[>\n]+)(?:>|$)", "".join(b.text for b in BLOCKS))
KEY_COMMANDS = sorted({command.strip() for command in _SHOWN})  # each once, without redirection


def shown(page: str, language: str) -> list[str]:
    """The blocks of a language on a page."""
    return [block.text for block in BLOCKS if (block.page, block.language) == (page, language)]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("json", "toml", "yaml")],
                         ids=lambda block: block.place)  # fmt: skip
def test_data_can_be_read(block: Block) -> None:
    parse = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}[block.language]
    assert parse(block.text)


def test_answer_has_shown_fields(client: httpx.Client) -> None:
    (answer,) = map(json.loads, shown("README.md", "json"))
    real = client.post("/infer", json={"text": "a long document ..."}).json()
    assert real.keys() == answer.keys()
    assert real["timings"].keys() == answer["timings"].keys()
    assert real["tokens_total"] == len("a long document ...")


def test_evidence_has_described_fields(client: httpx.Client) -> None:
    answer = client.post("/infer?evidence=3", json={"text": "a long document ..."}).json()
    evidence = answer["evidence"]
    assert evidence["spans"]
    for name in {*evidence, *evidence["spans"][0]}:
        assert f"`{name}`" in PAGES["docs/http.md"], name


def test_prometheus_reads_shown_address(client: httpx.Client) -> None:
    (configuration,) = map(yaml.safe_load, shown("docs/how-to/deploy.md", "yaml"))
    (job,) = configuration["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:8000"]}]
    answer = client.get("/metrics")  # Prometheus asks there, unless it is told otherwise
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {"aftserve_responses", "aftserve_bundle_info", "aftserve_ready"} <= families
    assert answer.headers["Content-Type"].startswith("text/plain; version=")


@pytest.mark.parametrize(
    ("page", "task"),
    [
        ("docs/bundle.md", "multi_label_classification"),
        ("docs/how-to/export-your-model.md", "regression"),
    ],
)
def test_shown_heads_are_valid(page: str, task: str) -> None:
    (content,) = [c for c in map(json.loads, shown(page, "json")) if "names" not in c]
    text = json.dumps(content.get("heads", content))
    (head,) = TypeAdapter(dict[str, AnyHead]).validate_json(text).values()
    assert head.task == task


def test_shown_answers_have_fields_of_tasks() -> None:
    shown_heads = [json.loads(text)["heads"] for text in shown("docs/http.md", "json")]
    answers = [answer for heads in shown_heads for answer in heads.values()]
    tasks = ("multi_label_classification", "regression", "token_classification")
    for answer, task in zip(answers, tasks, strict=True):
        read = HEADS[task].answer_type.model_validate(answer)
        assert read.model_dump(mode="json", exclude_none=True) == answer


@pytest.mark.parametrize(
    "page", ["docs/bundle.md", "docs/http.md", "docs/how-to/export-your-model.md"]
)
def test_every_task_is_described(page: str) -> None:
    rows = [line for line in PAGES[page].splitlines() if line.startswith("|")]
    assert [task for task in HEADS if not any(task in row for row in rows)] == []


@pytest.mark.parametrize("command", KEY_COMMANDS)
def test_key_is_made(command: str, tmp_path: Path) -> None:
    outcome = run_python("-m", "aftserve", *command.split(), cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    key, section = re.findall(r"\n\n(\S+)\n\n.*?\n\n(.*)", outcome.out, re.DOTALL)[0]
    (tmp_path / "keys.toml").write_text(section)
    assert Keys.read(tmp_path / "keys.toml").owner(key) == command.split()[1]


def test_key_commands_are_shown() -> None:
    assert KEY_COMMANDS == ["key alice 60/minute", "key ops --admin"]


@pytest.mark.parametrize("page", ["docs/settings.md", "docs/how-to/deploy.md"])
def test_settings_file_is_read(page: str, bundle_folder: Path, tmp_path: Path) -> None:
    text, *_ = shown(page, "toml")  # the next one is of several models
    (tmp_path / "aftserve.toml").write_text(text)
    settings = Settings.read([str(bundle_folder), "--config", str(tmp_path / "aftserve.toml")])
    assert settings.allowed_hosts == ["classify.example.org"]


@pytest.mark.filterwarnings(  # while Ray Serve is imported
    "ignore:Using extra keyword arguments on `Field`:DeprecationWarning:ray"
)
def test_ray_serve_takes_options(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # nothing is asked of it
    (text,) = shown("docs/how-to/many-machines.md", "toml")
    (tmp_path / "ray.toml").write_text(text)
    settings = DeploymentSettings.read([str(bundle_folder), "--config", str(tmp_path / "ray.toml")])
    options = deployment_options(settings)
    assert options["autoscaling_config"]["max_replicas"] == 8
    assert options["ray_actor_options"] == {"num_cpus": 2}


COMMANDS = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    if block.page == "docs/tutorial.md"
    for line in block.text.splitlines()
    if line.startswith("aftexport demo ")
]


def test_tutorial_commands_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[demo.DemoOptions]()
    monkeypatch.setattr(demo, "run", lambda options, _: shown.append(options))
    assert [run(words[2:]) for words in COMMANDS] == [0] * len(COMMANDS)
    assert {options.mechanism for options in shown} == {"aft_local", "gated_delta_net"}
    assert {options.data for options in shown} == {None, Path("documents.csv")}
