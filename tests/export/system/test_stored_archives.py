"""No archive makes its reader allocate more than the file has bytes."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import overstated_archives as archives
import pytest
import tiny_models
import torch
from bundles import resealed
from commands import assert_refused, run_here

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.checkpoint import load
from aftexport.chunked.runner import ChunkedModel
from aftexport.errors import CheckpointError, EngineError
from aftexport.system.stored_archives import unstored_member

Change = Callable[[Path], object]
BAD: dict[str, tuple[Change, str]] = {
    "compressed": (lambda path: archives.rewritten(path, "compressed"), "in it is compressed"),
    "twice": (lambda path: archives.rewritten(path, "twice"), "is in it twice"),
    "nested": (lambda path: archives.nested(path, 40, 4000), "and its members up to"),
}


def overstating(name: str) -> Change:
    return lambda path: archives.overstated(path, name, 3_000_000_000)


def test_stored_members_are_accepted(bundle_folder: Path, checkpoint_file: Path) -> None:
    for path in (bundle_folder / CHUNKED, checkpoint_file):
        with zipfile.ZipFile(path) as archive:
            assert unstored_member(archive, path.stat().st_size) is None


@pytest.mark.parametrize("kind", [*BAD, "overstated"])
def test_chunked_archive_is_refused(kind: str, bundle_copy: Path) -> None:
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    change, reason = BAD.get(kind) or (overstating("pool.onnx"), "pool.onnx have 30")
    change(bundle_copy / CHUNKED)
    with pytest.raises(EngineError, match=f"chunked.zip: .*{reason}"):
        ChunkedModel(bundle_copy / CHUNKED, plan)


def test_graph_over_message_limit_is_unread(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    model = ChunkedModel(bundle_copy / CHUNKED, plan)
    monkeypatch.setattr("aftexport.chunked.opened_archive._MAX_GRAPH_BYTES", 1000)
    with pytest.raises(EngineError, match=r"0\.reduce must have at most 1000 bytes, got \d+"):
        model.run(np.arange(3))


def test_verify_refuses_chunked_archive(
    bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archives.rewritten(bundle_copy / CHUNKED, "compressed")
    refused = run_here(["verify", resealed(bundle_copy)], capsys)
    assert_refused(refused, "chunked.zip", "is compressed")


@pytest.mark.parametrize("kind", ["compressed", "twice", "overstated"])
def test_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(tiny_models.Bag().state_dict(), path)
    change, reason = BAD.get(kind) or (overstating("model/data/0"), "data/0 have 30")
    change(path)
    with pytest.raises(CheckpointError, match=reason):
        load(path, factory="tiny_models:Bag")


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_cut_archive_is_refused(size: int, bundle_copy: Path) -> None:
    plan = Bundle.open(bundle_copy).manifest.chunked
    assert plan is not None
    os.truncate(bundle_copy / CHUNKED, size)
    with pytest.raises(EngineError, match=r"chunked\.zip"):
        ChunkedModel(bundle_copy / CHUNKED, plan)
