import csv
import io
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.demo import DemoOptions, Size, answer_rows, run
from aftexport.demo.corpus import Document
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
    out, own = tmp_path / "demo", tmp_path / "own.csv"
    own_documents(own)
    options = DemoOptions("aft_simple", own, out, seed=0, size=Size(steps=2))
    printed = shown(options)
    assert "The longest one is posted, with" in printed
    assert "posting" in printed
    assert Bundle.open(out / "bundle").manifest.heads["logits"].names == ("sea", "wood")
    text = (out / "document.txt").read_text("utf-8")
    assert text in own.read_text("utf-8")
    assert {p.name for p in out.iterdir()} == {"model.pt", "bundle", "document.txt", "server.log"}


def test_answer_is_compared_with_truth() -> None:
    answer = {"label": "long", "scores": {"long": 0.75, "short": 0.25}}
    answer |= {"tokens_used": 2, "tokens_total": 2, "truncated": False, "timings": {}}
    rows = {label: dict(answer_rows(answer, Document("ab", label, []))) for label in ("long", "a")}
    assert "right" in rows["long"]["label"]
    assert "wrong[/], it is a" in rows["a"]["label"]
    assert rows["a"]["scores"] == "long 0.750, short 0.250"


def refused(tmp_path: Path, **changed: Any) -> AftexportError:
    arguments: dict[str, Any] = {"mechanism": "aft_local", "data": None, "seed": 0}
    arguments["out"] = tmp_path / "out"
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
