import csv
import io
import random
from pathlib import Path

import pytest
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.demo import run
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


def test_own_documents_reach_an_answer(tmp_path: Path) -> None:
    own_documents(tmp_path / "own.csv")
    console = Console(file=io.StringIO(), width=100)
    out = tmp_path / "demo"
    run(mechanism="aft_simple", data=tmp_path / "own.csv", out=out, seed=0, console=console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "The longest one is posted, with" in " ".join(printed.split())
    assert "posting" in printed
    assert Bundle.open(out / "bundle").manifest.heads["logits"].names == ("sea", "wood")
    text = (out / "document.txt").read_text("utf-8")
    assert text in (tmp_path / "own.csv").read_text("utf-8")
    assert {p.name for p in out.iterdir()} == {"model.pt", "bundle", "document.txt", "server.log"}


def refused(tmp_path: Path, **changed: object) -> AftexportError:
    arguments = {"mechanism": "aft_local", "data": None, "out": tmp_path / "out", "seed": 0}
    with pytest.raises(UsageError) as caught:
        run(**(arguments | changed), console=Console(file=io.StringIO()))  # type: ignore[arg-type]
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
