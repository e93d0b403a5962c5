"""The description of the bundle in ``GET /info``."""

from pathlib import Path

import pytest
from clients import http
from commands import run_here
from servers import serving

from aftexport.bundle.bundle import Bundle


def test_info_counts_node_precisions(
    server: str, checkpoint_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "auto.bundle"
    words = ["--to", "onnx", "--precision", "auto", "--tolerance", "3e-4", "--out", out]
    assert run_here([checkpoint_file, *words], capsys).code == 0
    with serving(out, tmp_path / "log") as (address, _):
        info = http.get(f"{address}/info").json()
    manifest = Bundle.open(out).manifest
    assert info["precision"] == manifest.precision
    shown = {choice["precision"] for choice in info["methods"]}
    assert shown == {n.precision for n in manifest.node_precisions} & {"bf16", "int8"}
    counts = info["node_precisions"]
    counted = ", ".join(f"{count} in {name}" for name, count in counts.items())
    assert manifest.precision_title == f"auto: {counted}"
    assert sum(counts.values()) == len(manifest.node_precisions) > 0
    other = http.get(f"{server}/info").json()
    assert other["node_precisions"] is None
    assert other["methods"] == []
    assert other["scores"] == info["scores"] == "softmax over exclusive labels"
