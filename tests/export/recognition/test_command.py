"""``aftexport fuse``, and the export of other people's modules."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import third_party_models
import torch
from commands import assert_refused, listing, run_here

from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import operator_paths
from aftexport.parity.run_cases import verify
from aftexport.pipeline.export import export

from .graphs import scripted
from .implementations.aft import simple_softmax
from .layer import DIM, Layer
from .look_alikes import simple_clamped_denominator

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    example = torch.randn(2, 12, DIM)
    onnx.save(scripted(Layer(simple_softmax), example), folder / "simple.onnx")
    clamped = Layer(simple_clamped_denominator)
    onnx.save(scripted(clamped, example), folder / "clamped.onnx")
    return folder


def test_fuse_writes_model_and_report(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "fused.onnx", tmp_path / "report.json"
    done = run_here(["fuse", files / "simple.onnx", out, "--report", report], capsys)
    assert (done.code, "AftSimple" in done.out) == (0, True)
    (match,) = json.loads(report.read_text())["matches"]
    assert (match["mechanism"], match["operator"]) == ("aft_simple", "AftSimple")
    assert match["cases"] > 20
    assert match["difference"] < 1.0
    assert set(operator_paths(out)) == {"AftSimple"}
    assert onnx.load(out).ir_version in (8, 9)
    before, after = onnx.load(files / "simple.onnx").graph, onnx.load(out).graph
    assert [v.name for v in before.input] == [v.name for v in after.input]
    assert [v.name for v in before.output] == [v.name for v in after.output]


@pytest.mark.parametrize(
    ("op_type", "inputs", "is_random"),
    [
        ("Dropout", ("half", "yes"), True),
        ("Dropout", ("none", "yes"), False),
        ("Dropout", ("half", "no"), False),
        ("RandomNormalLike", (), True),
    ],
)
def test_fuse_refuses_random_outputs(
    op_type: str,
    inputs: tuple[str, ...],
    is_random: bool,
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = onnx.load(files / "simple.onnx")
    output = model.graph.output[0].name
    model.graph.node.append(onnx.helper.make_node(op_type, [output, *inputs], ["random"], "drop"))
    for name, value in {"half": 0.5, "none": 0.0, "yes": True, "no": False}.items():
        value = np.array(value, bool if isinstance(value, bool) else np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    model.graph.output[0].name = "random"
    onnx.save(model, tmp_path / "model.onnx")
    done = run_here(["fuse", tmp_path / "model.onnx", tmp_path / "fused.onnx"], capsys)
    if is_random:
        assert_refused(done, "random", f"node 'drop' is a {op_type}", "model.eval()")
    assert (done.code == 0) is not is_random


@pytest.mark.parametrize(("name", "operators"), [("simple", {"AftSimple"}), ("clamped", set())])
def test_weights_in_another_file_are_loaded(
    name: str, operators: set[str], files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    model = onnx.load(files / f"{name}.onnx")
    onnx.save(model, source, save_as_external_data=True, location="weights", size_threshold=0)
    assert run_here(["fuse", source, out], capsys).code == 0
    (tmp_path / "weights").unlink()
    assert set(operator_paths(out)) == operators
    assert_refused(run_here(["fuse", source, out], capsys), "weights")
    assert set(operator_paths(out)) == operators


def test_unrecognized_file_is_copied_with_reason(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "same.onnx"
    done = run_here(["fuse", files / "clamped.onnx", out], capsys)
    assert done.code == 0
    assert "No mechanism was recognized" in done.out
    assert "the denominator goes through Clip" in " ".join(done.out.split())
    assert out.read_bytes() == (files / "clamped.onnx").read_bytes()


@pytest.mark.parametrize("content", [None, b"", b"no model"])
def test_bad_files_are_refused_without_output(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "in.onnx").write_bytes(content)
    done = run_here(["fuse", tmp_path / "in.onnx", tmp_path / "out.onnx"], capsys)
    assert done.code == 2
    assert "in.onnx" in done.err
    assert not (tmp_path / "out.onnx").exists()


def test_nothing_is_written_into_a_bundle(
    files: Path, bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(bundle_copy)
    for name in ("model.onnx", "other.onnx"):
        done = run_here(["fuse", files / "simple.onnx", bundle_copy / name], capsys)
        assert_refused(done, "lies in the bundle copy.bundle")
    assert listing(bundle_copy) == before


def test_report_over_model_is_refused(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "simple.onnx", tmp_path / "fused.onnx"
    source.write_bytes((files / "simple.onnx").read_bytes())
    for report in (source, out):
        done = run_here(["fuse", source, out, "--report", report], capsys)
        assert (done.code, "--report" in done.err) == (2, True)
    assert source.read_bytes() == (files / "simple.onnx").read_bytes()
    assert not out.exists()


def test_fused_file_is_not_fused_again(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fused.onnx"
    assert run_here(["fuse", files / "simple.onnx", out], capsys).code == 0
    done = run_here(["fuse", out, tmp_path / "again.onnx"], capsys)
    assert (done.code, "already" in done.err) == (2, True)


def test_module_from_factory_without_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = export(factory="third_party_models:simple", out=tmp_path / "simple.bundle")
    assert bundle.manifest.operators["AftSimple"] == 1
    assert "AftSimple" in capsys.readouterr().out
    assert all(result.passed for result in verify(Bundle.open(bundle.path)))


def test_position_table_bounds_loaded_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of the model are loaded as well."""
    module = third_party_models.full()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    words = [tmp_path / "weights.pt", "--factory", "third_party_models:full", "--to", "onnx"]
    done = run_here([*words, "--out", tmp_path / "full.bundle"], capsys)
    assert done.code == 0, done.err
    manifest = Bundle.open(tmp_path / "full.bundle").manifest
    assert manifest.operators["AftFull"] == 1
    assert manifest.max_tokens == 35


def test_softmax_pooling_without_lengths_runs_chunked(tmp_path: Path) -> None:
    bundle = export(factory="third_party_models:pooled", out=tmp_path / "pooled.bundle")
    assert bundle.manifest.inputs == ("input_ids",)
    assert bundle.manifest.chunked is not None
    results = verify(Bundle.open(bundle.path))
    assert {"model in chunks", "evidence"} <= {result.subject for result in results}
    assert all(result.passed for result in results)


def test_export_reports_unrecognized_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--factory", "third_party_models:nothing", "--to", "onnx"]
    done = run_here([*words, "--out", tmp_path / "plain.bundle"], capsys)
    assert done.code == 0, done.err
    assert "No mechanism was recognized" in done.out
    assert "there is no weighted sum over tokens" in " ".join(done.out.split())
    bundle = Bundle.open(tmp_path / "plain.bundle")
    assert all(np.isfinite(r.error) and r.passed for r in verify(bundle))


def test_embedding_module_error_has_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--factory", "third_party_models:embeddings", "--to", "onnx"]
    done = run_here([*words, "--out", tmp_path / "no.bundle"], capsys)
    assert done.code == 2
    assert "nn.Embedding" in done.err
    assert "aftexport fuse" in done.err
