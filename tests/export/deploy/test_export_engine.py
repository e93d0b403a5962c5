import json
from pathlib import Path

import pytest
import tiny_models
import torch
from commands import assert_refused, listing, run_here, without
from sampling import any_case

import aftexport
import aftplugins
from aftexport.bundle.bundle import Bundle, engine_file
from aftexport.engines.tensorrt.runtimes import load
from aftexport.errors import EngineError
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.operators.torch_ops import OPERATORS
from aftexport.pipeline.export import export
from aftexport.system.installation import install_command

STEMS = sorted({operator.stem for operator in OPERATORS.values()})


@pytest.mark.table(keep=0.15, by=any_case)
@pytest.mark.parametrize("mechanism", STEMS)
def test_every_mechanism_has_a_portable_engine(mechanism: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ClassifierConfig(**tiny_models.CONFIG | {"mechanism": mechanism, "max_length": 100})
    aftexport.save(
        tmp_path / "model.pt", model=DocumentClassifier(config), labels=tiny_models.LABELS
    )
    bundle = export(tmp_path / "model.pt", to="trt-rtx", precision="fp16", max_length=100)
    record = engine_file(bundle.path, "tensorrt_rtx").read_record()
    assert list(record.operators) == list(bundle.manifest.operators)
    assert record.settings.max_length == 100
    assert record.version == load("tensorrt_rtx").version
    assert bundle.files["model.trt-rtx.engine"] > 10_000


def test_pending_gpu_work_is_reported_everywhere(
    no_gpu: None, rtx_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Bundle.open(rtx_bundle)
    assert bundle.manifest.engine is not None
    [deferred] = bundle.manifest.engine.deferred
    assert "parity" in deferred
    assert "no GPU" in deferred
    parity = json.loads((rtx_bundle / "parity.json").read_text("utf-8"))
    assert parity["checked"]  # by ONNX Runtime
    assert parity["engine"] == {"cases": [], "deferred": [deferred]}
    assert deferred.split(":")[1] in (rtx_bundle / "parity.html").read_text("utf-8")
    said = run_here(["inspect", rtx_bundle], capsys).out
    path = "portable body" if aftplugins.library("tensorrt") is None else "plugin"
    for words in (deferred, "compute capability 8.0, 8.6", "1 to 500 tokens", path):
        assert words in said


def test_bundle_without_tensorrt_lacks_only_engine(
    checkpoint_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--to", "trt", "--precision", "bf16", "--min-length", "2", "--opt-length", "64,256",
             "--max-length", "512", "--max-batch", "3", "--workspace", "100"]  # fmt: skip
    outcome = run_here([checkpoint_file, *words, "--out", tmp_path / "b"], capsys)
    assert outcome.code == 0, outcome.err
    try:
        load("tensorrt")
    except EngineError as error:
        reason = error.problem
    else:
        pytest.skip("TensorRT is installed")
    plan = Bundle.open(tmp_path / "b").manifest.engine
    assert plan is not None
    assert plan.file is None
    assert reason in plan.deferred[0]
    assert "bfloat16" in plan.deferred[1]
    settings = plan.settings.model_dump(exclude={"runtime", "compute_capabilities"})
    assert settings == {
        "min_length": 2, "opt_lengths": (64, 256), "max_length": 512, "max_batch": 3,
        "workspace_mib": 100,
    }  # fmt: skip
    for said in (reason, install_command("trt"), f"aftexport build {tmp_path / 'b'}", "bfloat16"):
        assert said in outcome.out
    parity = json.loads((tmp_path / "b" / "parity.json").read_text("utf-8"))
    assert parity["checked"]
    verified = run_here(["verify", tmp_path / "b"], capsys)
    assert verified.code == 0, verified.out
    assert_refused(run_here(["build", tmp_path / "b"], capsys), reason)


REFUSED = {
    "an engine option without an engine": (["onnx", "--max-batch", "2"], "--to trt"),
    "a timing cache without an engine": (["onnx", "--timing-cache", "c"], "--to trt"),
    "a timing cache without timings": (["trt-rtx", "--timing-cache", "c"], "--timing-cache"),
    "a GPU the builder lacks": (["trt-rtx", "--compute-capability", "90"], "--to trt"),
    "float32 on Turing": (["trt-rtx", "--compute-capability", "75"], "fp16"),
    "int8": (["trt", "--precision", "int8"], "fp16"),
    "lengths that fall": (["trt", "--min-length", "9", "--opt-length", "8"], "--opt-length"),
    "more than was learned": (["trt-rtx", "--max-length", "999"], "at most 100, the positions"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_failed_build_leaves_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = REFUSED[kind]
    config = ClassifierConfig(**tiny_models.CONFIG | {"mechanism": "aft_full", "max_length": 100})
    aftexport.save(
        tmp_path / "model.pt", model=DocumentClassifier(config), labels=tiny_models.LABELS
    )
    before = listing(tmp_path)
    assert_refused(run_here([tmp_path / "model.pt", "--to", *words], capsys), said)
    assert listing(tmp_path) == before


def test_missing_wheel_names_install_command(checkpoint_file: Path, tmp_path: Path) -> None:
    words = (checkpoint_file, "--to", "trt-rtx", "--out", tmp_path / "b")
    outcome = without(["tensorrt_rtx"], "aftexport", *words, cwd=tmp_path)
    assert_refused(outcome, install_command("trt-rtx"))
    assert not listing(tmp_path)
