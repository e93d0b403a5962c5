import csv
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from sampling import any_case

from aftexport.bundle.bundle import Bundle
from aftexport.cli import demo as cli_demo
from aftexport.demo import DemoOptions, Size, run
from aftexport.demo.series import NAMES, make_series
from aftexport.demo.tasks import TASKS
from aftexport.errors import AftexportError, UsageError

WORDS = {"sea": "wave salt ship tide gull", "wood": "leaf moss bark root deer"}


def own_documents(path: Path) -> None:
    draw = random.Random(0)
    common = [f"w{i}" for i in range(40)]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "label"))
        for label, words in WORDS.items():
            pool = words.split() + common
            for _ in range(30):
                rows.writerow((" ".join(draw.choices(pool, k=draw.randrange(20, 40))), label))


def shown(options: DemoOptions) -> str:
    """Run a demo; return its output as one line."""
    console = Console(file=io.StringIO(), width=100)
    run(options, console)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_own_documents_reach_an_answer(tmp_path: Path) -> None:
    own_documents(tmp_path / "own.csv")
    out = tmp_path / "demo"
    options = DemoOptions(
        "single-label", "aft_simple", tmp_path / "own.csv", out, seed=0, size=Size(steps=2)
    )
    printed = shown(options)
    assert "The longest one is posted, with" in printed
    assert "posting" in printed
    assert Bundle.open(out / "bundle").manifest.heads["logits"].names == ("sea", "wood")
    text = (out / "document.txt").read_text("utf-8")
    assert text in (tmp_path / "own.csv").read_text("utf-8")
    assert {p.name for p in out.iterdir()} == {"model.pt", "bundle", "document.txt", "server.log"}


SMALL = Size(classes=2, per_class=12, steps=2)


@pytest.mark.table(keep=0.01, by=any_case)
@pytest.mark.parametrize("task", [task for task in TASKS if task != "single-label"])
def test_each_task_reaches_an_answer(task: str, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    printed = shown(DemoOptions(task, "aft_simple", None, out, seed=0, size=SMALL))
    assert "The server's answer" in printed
    assert "parity with PyTorch" in printed
    (head,) = Bundle.open(out / "bundle").manifest.heads.values()
    assert head.task == TASKS[task].problem_type
    assert all(f" {name} " in printed for name in head.names)


def test_series_reach_an_answer(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    size = Size(per_class=6, steps=2)
    printed = shown(DemoOptions("series", "aft_local", None, out, seed=0, size=size))
    assert "matched filter" in printed
    assert "posting" in printed
    assert "evidence" in printed
    assert "parity with PyTorch" in printed
    names = {"model.pt", "bundle", "features.json", "series.npy", "server.log"}
    assert {path.name for path in out.iterdir()} == names
    features = Bundle.open(out / "bundle").manifest.features
    assert features is not None
    assert features.names == NAMES
    assert features.mean is not None
    sent = np.load(out / "series.npy")
    assert len(sent) == max(len(one) for one in make_series(12, seed=1))


def refused(tmp_path: Path, **changed: Any) -> AftexportError:
    arguments: dict[str, Any] = {
        "task": "single-label",
        "mechanism": "aft_local",
        "data": None,
        "out": tmp_path / "out",
        "seed": 0,
    }
    with pytest.raises(UsageError) as caught:
        run(DemoOptions(**(arguments | changed)), Console(file=io.StringIO()))
    return caught.value


def test_unknown_mechanism_error_lists_known_ones(tmp_path: Path) -> None:
    assert "aft_full, aft_local" in refused(tmp_path, mechanism="softmax").remedy
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed: int, tmp_path: Path) -> None:
    assert str(seed) in refused(tmp_path, seed=seed).problem


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    """The demo refuses it before any work."""
    (tmp_path / "file").write_text("mine")
    assert "must be a folder" in refused(tmp_path, out=tmp_path / "file").problem
    (tmp_path / "out" / "bundle").mkdir(parents=True)
    (tmp_path / "out" / "bundle" / "mine").write_text("mine")
    assert "is not a bundle" in refused(tmp_path).problem


@pytest.mark.parametrize("task", [task for task in cli_demo.TASKS if task != "single-label"])
def test_data_of_other_tasks_is_refused(task: str, tmp_path: Path) -> None:
    own_documents(tmp_path / "own.csv")
    error = refused(tmp_path, task=task, data=tmp_path / "own.csv")
    assert f"--task {task}" in error.problem


def test_command_line_lists_every_task() -> None:
    assert (*TASKS, "series") == cli_demo.TASKS
