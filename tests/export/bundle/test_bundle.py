import json
from pathlib import Path

import numpy as np
import pytest
from memory import NEEDS_PROC

from aftexport.bundle.bundle import PARITY, Bundle
from aftexport.errors import UsageError
from aftexport.system.files import write_json


def test_bundle_holds_documented_files(bundle_folder: Path) -> None:
    assert {path.name for path in bundle_folder.iterdir()} == {
        "manifest.json", "model.onnx", "chunked.zip", "tokenizer.json", "golden.safetensors",
        "parity.json", "parity.html",
    }  # fmt: skip
    bundle = Bundle.open(bundle_folder)
    assert bundle.manifest.hardware == "any"
    assert bundle.manifest.config is not None
    assert bundle.manifest.config["mechanism"] == "aft_simple"
    assert bundle.tokenizer() is not None
    assert set(bundle.files) == {p.name for p in bundle_folder.iterdir()} - {"manifest.json"}


def test_parity_json_describes_comparison(bundle_folder: Path) -> None:
    record = json.loads((bundle_folder / PARITY).read_text("utf-8"))
    assert record["checked"] is True
    assert all(case["passed"] and case["error"] <= case["bound"] for case in record["cases"])
    shapes = [case["shape"] for case in record["cases"] if case["subject"] == "model"]
    assert [1, 1] in shapes
    assert max(tokens for _, tokens in shapes) >= 4096
    assert max(batch for batch, _ in shapes) >= 3


def test_source_file_is_known_by_content(
    bundle_folder: Path, checkpoint_file: Path, tmp_path: Path
) -> None:
    bundle = Bundle.open(bundle_folder)
    same = tmp_path / "same.pt"
    same.write_bytes(checkpoint_file.read_bytes())
    bundle.check_source(same)
    other = tmp_path / "other.pt"
    other.write_bytes(checkpoint_file.read_bytes() + b"\0")
    with pytest.raises(UsageError, match=r"got .*other\.pt"):
        bundle.check_source(other)


@NEEDS_PROC
def test_unreadable_source_is_refused(bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="/proc/self/mem cannot be read"):
        Bundle.open(bundle_folder).check_source(Path("/proc/self/mem"))


def test_json_ignores_order_of_entries(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"b": np.float64(1.5), "a": "é"})
    write_json(tmp_path / "b", {"a": "é", "b": 1.5})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
