"""Bundles with their weights in a file of their own, and bundles of links."""

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from bundles import LINKS, flip, of_links, resealed, unlisted
from commands import Capture, assert_refused, listing, run_here

from aftexport.bundle.bundle import PARITY, Bundle, write_manifest
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, operator_paths
from aftexport.errors import AftexportError, BundleError, EngineError
from aftexport.parity.run_cases import verify
from aftexport.system.onnx_files import MODEL, MODEL_DATA, read_model, write_model
from aftexport.verify.search import token_norms


@pytest.fixture(scope="module")
def outside_bundle(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a bundle with external weights, as weights over the protobuf limit need."""
    folder = tmp_path_factory.mktemp("outside") / "bundle"
    shutil.copytree(bundle_folder, folder)
    (folder / MODEL).unlink()
    (folder / "manifest.json").unlink()
    write_model(folder, onnx.load(bundle_folder / MODEL), max_bytes=10_000)
    write_manifest(folder, Bundle.open(bundle_folder).manifest)
    return folder


@pytest.fixture
def copy(outside_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(outside_bundle, tmp_path / "copy"))


def test_large_weights_go_to_own_file(outside_bundle: Path) -> None:
    bundle = Bundle.open(outside_bundle)
    assert bundle.files[MODEL_DATA] > bundle.files[MODEL]
    assert all(result.passed for result in verify(bundle))
    assert operator_paths(bundle.model_path).keys() == bundle.manifest.operators.keys()


def test_external_weights_are_checked(copy: Path) -> None:
    flip(MODEL_DATA)(copy)
    with pytest.raises(BundleError, match=r"model\.onnx\.data was changed"):
        Bundle.open(copy)
    (copy / MODEL_DATA).unlink()
    with pytest.raises(BundleError, match=r"model\.onnx\.data is missing"):
        Bundle.open(copy)


@pytest.mark.parametrize("kind", LINKS)
def test_links_are_read_as_files(
    kind: str, outside_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Weights in a file of their own too, which the onnx package reads through no link."""
    folder = of_links(outside_bundle, kind, tmp_path)
    before = listing(tmp_path)
    bundle = Bundle.open(folder)
    assert bundle.digest == Bundle.open(outside_bundle).digest
    cases = [case for case in bundle.golden() if case.name == "seven tokens"]
    assert all(result.passed for result in verify(bundle, cases=cases))
    expected, found = (read_model(path / MODEL) for path in (outside_bundle, folder))
    assert found.SerializeToString() == expected.SerializeToString()
    assert token_norms(bundle.model_path) is not None
    assert run_here(["inspect", folder], capsys).code == 0
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", [MODEL, MODEL_DATA])
def test_link_beside_a_file_is_read(name: str, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = Path(shutil.move(copy / name, tmp_path / "elsewhere" / "blob"))
    (copy / name).symlink_to(target)
    bundle = Bundle.open(copy)
    engine = OnnxRuntimeEngine(bundle.model_path, threads=1)
    (case,) = [case for case in bundle.golden() if case.name == "seven tokens"]
    np.testing.assert_allclose(engine.run(case.inputs)["logits"], case.outputs["logits"], atol=1e-4)


def test_model_in_memory_reads_no_file(
    outside_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of chunked.zip brings its weights, so it reads no file of the current folder."""
    monkeypatch.chdir(outside_bundle)
    with pytest.raises(EngineError, match=r"model\.onnx\.data"):
        OnnxRuntimeEngine((outside_bundle / MODEL).read_bytes())


def test_weights_of_no_digest_are_refused(copy: Path) -> None:
    unlisted(MODEL_DATA)(copy)
    with pytest.raises(BundleError, match=r"model\.onnx reads 'model\.onnx\.data', which"):
        Bundle.open(copy)


def test_weights_outside_bundle_are_refused(copy: Path, tmp_path: Path) -> None:
    shutil.move(copy / MODEL_DATA, tmp_path / "outside.data")
    model = onnx.load(copy / MODEL, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = os.path.join("..", "outside.data")  # noqa: PTH118
    (copy / MODEL).write_bytes(model.SerializeToString())
    with pytest.raises(AftexportError):
        OnnxRuntimeEngine(Bundle.open(resealed(copy)).model_path)


@pytest.mark.parametrize("name", [MODEL, PARITY])
def test_report_through_link_is_refused(
    name: str, bundle_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A report is not written over the file that a link leads to."""
    folder = of_links(bundle_folder, "cache", tmp_path)
    before = listing(tmp_path)
    for place in (folder / name, (folder / name).resolve()):
        for option in ("--output", "--report"):
            assert_refused(run_here(["verify", folder, option, place], capsys), option)
    assert listing(tmp_path) == before
