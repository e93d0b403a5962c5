"""The weights of bundles, which are in a file of their own, and bundles of links."""

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from bundles import LINKS, flip, of_links, resealed, unlisted
from commands import Capture, assert_refused, listing, run_here

from aftexport.bundle.bundle import PARITY, Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import AftexportError, BundleError, EngineError
from aftexport.parity.run_cases import verify
from aftexport.system.onnx_files import MODEL, MODEL_DATA, model_digest, read_model
from aftexport.verify.search import token_norms


def test_external_weights_are_checked(bundle_copy: Path) -> None:
    flip(MODEL_DATA)(bundle_copy)
    with pytest.raises(BundleError, match=r"model\.onnx\.data was changed"):
        Bundle.open(bundle_copy)
    (bundle_copy / MODEL_DATA).unlink()
    with pytest.raises(BundleError, match=r"model\.onnx\.data is missing"):
        Bundle.open(bundle_copy)


@pytest.mark.parametrize("kind", LINKS)
def test_links_are_read_as_files(
    kind: str, bundle_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Weights in a file of their own too, which the onnx package reads through no link."""
    folder = of_links(bundle_folder, kind, tmp_path)
    before = listing(tmp_path)
    bundle = Bundle.open(folder)
    assert bundle.digest == Bundle.open(bundle_folder).digest
    cases = [case for case in bundle.golden() if case.name == "seven tokens"]
    assert all(result.passed for result in verify(bundle, cases=cases))
    expected, found = (read_model(path / MODEL) for path in (bundle_folder, folder))
    assert found.SerializeToString() == expected.SerializeToString()
    assert token_norms(bundle.model_path) is not None
    assert run_here(["inspect", folder], capsys).code == 0
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", [MODEL, MODEL_DATA])
def test_link_beside_a_file_is_read(name: str, bundle_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = Path(shutil.move(bundle_copy / name, tmp_path / "elsewhere" / "blob"))
    (bundle_copy / name).symlink_to(target)
    bundle = Bundle.open(bundle_copy)
    engine = OnnxRuntimeEngine(bundle.model_path, threads=1)
    (case,) = [case for case in bundle.golden() if case.name == "seven tokens"]
    np.testing.assert_allclose(engine.run(case.inputs)["logits"], case.outputs["logits"], atol=1e-4)


def test_model_in_memory_reads_no_file(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle_folder)
    with pytest.raises(EngineError, match=r"model\.onnx\.data"):
        OnnxRuntimeEngine((bundle_folder / MODEL).read_bytes())


def test_weights_of_no_digest_are_refused(bundle_copy: Path) -> None:
    unlisted(MODEL_DATA)(bundle_copy)
    with pytest.raises(BundleError, match=r"does not list model\.onnx\.data"):
        Bundle.open(bundle_copy)


PLACES = {
    "location": os.path.join("..", "outside.data"),  # noqa: PTH118
    "offset": str(1 << 40),
    "length": str(1 << 40),
}


@pytest.mark.parametrize("key", PLACES)
def test_weights_outside_file_are_refused(key: str, bundle_copy: Path, tmp_path: Path) -> None:
    shutil.copy(bundle_copy / MODEL_DATA, tmp_path / "outside.data")
    model = onnx.load(bundle_copy / MODEL, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = PLACES[key]
    (bundle_copy / MODEL).write_bytes(model.SerializeToString())
    with pytest.raises(AftexportError):
        OnnxRuntimeEngine(Bundle.open(resealed(bundle_copy)).model_path)


def test_engine_digest_covers_weights(bundle_copy: Path) -> None:
    before = model_digest(bundle_copy / MODEL)
    flip(MODEL_DATA)(bundle_copy)
    assert model_digest(bundle_copy / MODEL) != before


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
