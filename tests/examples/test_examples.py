"""The examples, run by the commands that they document."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from commands import environment
from prometheus_client.parser import text_string_to_metric_families
from servers import serving

import aftexport
from aftexport.heads import HEADS
from aftexport.nn import LAYERS
from aftserve.client import Result, Timings

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
COMPOSE = EXAMPLES / "compose"


def commands(name: str) -> list[str]:
    """The indented commands of a script's docstring, but for the set-up and the server."""
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text("utf-8")))
    assert text is not None
    found = re.findall(r"(?m)^    (?!pip |aftserve )(.+)$", text)
    assert found
    return found


def run(command: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a documented command in a folder that has the examples."""
    shutil.copytree(EXAMPLES, cwd / "examples", dirs_exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-ec", f"set -o pipefail; {command}"],
        cwd=cwd,
        env=environment(PATH=path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def read_manifest(bundle: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((bundle / "manifest.json").read_text("utf-8"))
    return content


def test_layers_are_trained_and_exported(tmp_path: Path) -> None:
    train, export = commands("train_each_layer.py")
    done = run(train, tmp_path)
    assert done.returncode == 0, done.stderr
    accuracies = dict(re.findall(r"(?m)^(\w+) +([\d.]+)%", done.stdout))
    assert tuple(accuracies) == LAYERS
    assert all(float(percent) > 90 for percent in accuracies.values()), done.stdout

    folder = tmp_path / "build" / "examples" / "layers"
    for layer in LAYERS:
        assert aftexport.load(folder / f"{layer}.pt").labels == ("invoice", "letter")

    done = run(export, tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_manifest(folder / "aft_local.bundle")["operators"]["AftLocal"] == 1
    assert (folder / "aft_local.bundle" / "tokenizer.json").is_file()


def test_tasks_are_served_as_pytorch_computes(tmp_path: Path) -> None:
    (command,) = commands("train_each_task.py")
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"(?m)^(\w+): loss ([\d.]+) to ([\d.]+)$", done.stdout)
    assert all(float(last) < float(first) / 2 for _, first, last in losses), done.stdout
    shown = re.findall(r"(?m)^  (\w+) +(\S+)  PyTorch +(\S+)$", done.stdout)
    numbers = {"single_label_classification": 3, "multi_label_classification": 3,
               "binary_classification": 2, "regression": 1, "token_classification": 4,
               "feature_extraction": 4}  # fmt: skip
    assert [task for task, *_ in losses] == list(HEADS) == list(numbers)
    assert len(shown) == 2 * sum(numbers.values())
    for _, served, expected in shown:
        assert float(served) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
    folder = tmp_path / "build" / "examples" / "tasks"
    for task in numbers:
        assert read_manifest(folder / f"{task}.bundle")["heads"]["logits"]["task"] == task


def test_whole_documents_answer_what_their_beginnings_cannot(tmp_path: Path) -> None:
    (command,) = commands("train_whole_documents.py")
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"(?m)^ *([\d,]+) tokens: (\d+)% right, and (\d+)% by", done.stdout)
    assert [tokens for tokens, _, _ in shown] == ["512", "4,096", "65,536"], done.stdout
    assert all(int(whole) >= 90 for _, whole, _ in shown), done.stdout
    assert all(int(first) < 75 for _, _, first in shown[1:]), done.stdout
    assert (tmp_path / "build" / "examples" / "whole" / "model.bundle").is_dir()


@pytest.mark.parametrize("command", commands("label_source_files.py"))
def test_source_files_have_bundle_of_task(command: str, tmp_path: Path) -> None:
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    shares = [float(found) for found in re.findall(r"(?m)^\w+ +([\d.]+)%? ", done.stdout)]
    baseline, bundle = shares
    task = command.split("--task ")[1].split()[0]
    is_better = bundle < baseline if task == "regression" else bundle > baseline
    assert is_better, done.stdout
    (path,) = (tmp_path / "build" / "examples" / "source_files").glob("*.bundle")
    head = read_manifest(path)["heads"]["logits"]["task"]
    assert head.removesuffix("_classification").replace("_", "-") in task


def test_series_of_sensors_are_labelled(tmp_path: Path) -> None:
    (command,) = commands("sensor_series.py")
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("%")[0]) > 80, done.stdout
    manifest = read_manifest(tmp_path / "build" / "examples" / "series" / "model.bundle")
    assert len(manifest["features"]["names"]) == 16


def test_transformers_model_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="this example needs `pip install transformers`")
    (command,) = commands("transformers_model.py")
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(tmp_path / "build" / "examples" / "bert" / "bert.bundle")
    assert manifest["operators"]["NormalizedLinearAttention"] == 2
    assert manifest["max_tokens"] == 512


def test_files_are_labelled_in_process(bundle_folder: Path, tmp_path: Path) -> None:
    (command,) = commands("predict.py")
    (tmp_path / "model.bundle").symlink_to(bundle_folder)
    (tmp_path / "first.txt").write_text("an invoice")
    (tmp_path / "second.txt").write_text("")
    done = run(command, tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"first.txt\t(invoice|contract|letter)\t[\d.]+\t10 tokens\n", done.stdout)
    assert done.stderr == "second.txt: The document has no tokens. Send some text.\n"


def prometheus_target() -> str:
    """The ``host:port`` that Prometheus asks."""
    (job,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    return str(target)


def client_commands(address: str) -> list[str]:
    return [line.replace("http://localhost:8000", address) for line in commands("client.py")[:2]]


def test_client_asks_for_files(server: str, tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("the first document")
    (tmp_path / "second.txt").write_text("the second, ü")
    done = run(client_commands(server)[0], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [(row[0], row[3]) for row in rows] == [
        ("first.txt", "18 tokens"),
        ("second.txt", "14 tokens"),
    ]
    assert all(0 < float(row[2]) <= 1 for row in rows)


def test_client_shows_evidence(server: str, tmp_path: Path) -> None:
    (tmp_path / "document.txt").write_text("a document from standard input")
    done = run(client_commands(server)[1], tmp_path)
    assert done.returncode == 0, done.stderr
    first, *passages = done.stdout.splitlines()
    assert first.startswith("-\t")
    assert 1 <= len(passages) <= 3
    assert all(
        ast.literal_eval(line.split(None, 1)[1]) in "a document from standard input"
        for line in passages
    )


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ({"labels": ["b"], "scores": {"a": 0.25, "b": 0.75}}, "b\t0.75\t9 tokens"),
        ({"labels": [], "scores": {"a": 0.25, "b": 0.5}}, "no label\t9 tokens"),
        ({"values": {"age": 41.5, "mass": -3.0}}, "age\t41.5\tmass\t-3\t9 tokens"),
    ],
)
def test_client_describes_other_heads(head: dict[str, Any], line: str) -> None:
    timings = dict.fromkeys(Timings.__dataclass_fields__, 0.0)
    answer = {"tokens_total": 9, "tokens_used": 9, "truncated": False, "policy": "exact",
              "bundle": "0", "timings": timings, "heads": {"logits": head}}  # fmt: skip
    program = runpy.run_path(str(EXAMPLES / "client.py"))
    assert program["describe"](Result.read(answer)) == line


def test_client_reports_document_without_answer(server: str, tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("x" * 6001)  # the server takes 6,000 tokens
    (tmp_path / "second.txt").write_text("x")
    done = run(client_commands(server)[0], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("first.txt: 413: ")
    assert done.stdout.startswith("second.txt\t")


def test_client_reports_missing_server(tmp_path: Path) -> None:
    (tmp_path / "document.txt").write_text("x")
    command = client_commands("http://127.0.0.1:1")[1]
    done = run(f"{command} --deadline 0.2", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    assert "127.0.0.1:1" in done.stderr


def test_server_answers_prometheus(bundle_folder: Path, tmp_path: Path) -> None:
    """On all addresses, as in the image, it answers to the name that Prometheus uses."""
    with serving(bundle_folder, tmp_path / "log", "--host", "0.0.0.0") as (address, _):
        headers = {"Host": prometheus_target()}
        with httpx.Client(base_url=address.replace("0.0.0.0", "127.0.0.1"), timeout=60) as client:
            client.post("/infer", json={"text": "x"}).raise_for_status()
            answer = client.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    families = text_string_to_metric_families(answer.text)
    names = {sample.name for family in families for sample in family.samples}
    text = (COMPOSE / "compose.yaml").read_text("utf-8")
    assert set(re.findall(r"rate\((\w+)\[", text)) == {"aftserve_responses_total"} <= names


def test_readme_lists_every_example() -> None:
    listed = re.findall(r"(?m)^\| \[([\w./]+)\]", (EXAMPLES / "README.md").read_text("utf-8"))
    present = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert {name.rstrip("/") for name in listed} == present
