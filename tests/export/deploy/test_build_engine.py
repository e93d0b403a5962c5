"""``aftexport build``, by TensorRT-RTX, which needs no GPU."""

import json
import threading
from io import StringIO
from pathlib import Path

import pytest
import tiny_models
import torch
from commands import Capture, Outcome, assert_refused, listing, run_here, without
from rich.console import Console
from sampling import any_case

import aftexport
import aftplugins
from aftexport.bundle.bundle import Bundle, engine_file
from aftexport.deploy.build_engine import build, wanted_here
from aftexport.engines.tensorrt.engine_file import VARIABLE, EngineFile, EngineRecord, engine_cache
from aftexport.engines.tensorrt.runtimes import load
from aftexport.errors import EngineError
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.operators.torch_ops import OPERATORS
from aftexport.pipeline.export import export
from aftexport.system.installation import install_command


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def changed_record(bundle: Path, **changes: object) -> None:
    file = engine_file(bundle, "tensorrt_rtx").record
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


def building(bundle: Path, capsys: Capture, *words: str) -> Outcome:
    return run_here(["build", bundle, *words], capsys)


def test_fitting_engine_is_not_rebuilt(rtx_copy: Path, cache: Path, capsys: Capture) -> None:
    outcome = building(rtx_copy, capsys)
    assert outcome.code == 0, outcome.err
    assert f"{rtx_copy}/model.trt-rtx.engine" in outcome.out
    assert not cache.exists()


def stale(bundle: Path) -> str:
    changed_record(bundle, version="1.0")
    return "by TensorRT-RTX 1.0, this machine has"


def foreign(bundle: Path) -> str:
    changed_record(bundle, model="0" * 64)
    return "another model.onnx"


def damaged(bundle: Path) -> str:
    engine = engine_file(bundle, "tensorrt_rtx").engine
    engine.write_bytes(engine.read_bytes()[:-1] + b"?")
    return "changed or damaged"


def absent(bundle: Path) -> str:
    engine_file(bundle, "tensorrt_rtx").engine.unlink()
    return "No such file"


@pytest.mark.parametrize("spoil", [stale, foreign, damaged, absent])
def test_unfit_engine_is_rebuilt_in_cache(
    spoil: object, rtx_copy: Path, cache: Path, capsys: Capture
) -> None:
    reason = spoil(rtx_copy)  # type: ignore[operator]
    before = listing(rtx_copy)
    first = building(rtx_copy, capsys)
    assert first.code == 0, first.err
    assert reason in first.out
    assert "done Building" in first.out
    assert listing(rtx_copy) == before, "the bundle is not written to"
    again = building(rtx_copy, capsys)
    assert "Building" not in again.out
    assert str(cache) in again.out


def test_rebuild_replaces_cached_engine(rtx_copy: Path, cache: Path, capsys: Capture) -> None:
    assert building(rtx_copy, capsys, "--rebuild").code == 0
    [engine] = cache.rglob("engine")
    engine.write_bytes(b"half")
    outcome = building(rtx_copy, capsys, "--rebuild")
    assert outcome.code == 0, outcome.err
    record = EngineRecord.model_validate_json(engine.with_name("record.json").read_text("utf-8"))
    bundle = Bundle.open(rtx_copy)
    assert bundle.manifest.engine is not None
    wanted = wanted_here(bundle, bundle.manifest.engine.settings)
    assert engine_cache(wanted.model).entry(wanted).read(wanted)[1] == record


def test_concurrent_builds_make_one_engine(rtx_copy: Path, cache: Path) -> None:
    stale(rtx_copy)
    bundle = Bundle.open(rtx_copy)
    consoles = [Console(record=True, file=StringIO()) for _ in range(3)]
    files: list[EngineFile] = []
    threads = [
        threading.Thread(target=lambda c=console: files.append(build(bundle, console=c)))
        for console in consoles
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(files) == 3
    assert len(set(files)) == 1
    assert sum("done Building" in c.export_text() for c in consoles) == 1


def test_unwritable_cache_is_reported(rtx_copy: Path, cache: Path, capsys: Capture) -> None:
    stale(rtx_copy)
    cache.write_text("a file")
    assert_refused(building(rtx_copy, capsys), VARIABLE)


def test_bundle_for_onnx_is_refused(bundle_folder: Path, capsys: Capture) -> None:
    assert_refused(building(bundle_folder, capsys), "--to trt")


STEMS = sorted({operator.stem for operator in OPERATORS.values()})


def saved(folder: Path, mechanism: str) -> Path:
    torch.manual_seed(0)
    config = ClassifierConfig(**tiny_models.CONFIG | {"mechanism": mechanism, "max_length": 100})
    path = folder / "model.pt"
    aftexport.save(path, model=DocumentClassifier(config), labels=tiny_models.LABELS)
    return path


@pytest.mark.tensorrt
@pytest.mark.table(keep=0.15, by=any_case)
@pytest.mark.parametrize("mechanism", STEMS)
def test_every_mechanism_has_a_portable_engine(mechanism: str, tmp_path: Path) -> None:
    bundle = export(saved(tmp_path, mechanism), to="trt-rtx", precision="fp16", max_length=100)
    record = engine_file(bundle.path, "tensorrt_rtx").read_record()
    assert list(record.operators) == list(bundle.manifest.operators)
    assert record.settings.max_length == 100
    assert record.version == load("tensorrt_rtx").version
    assert bundle.files["model.trt-rtx.engine"] > 10_000


def test_pending_gpu_work_is_reported_everywhere(
    no_gpu: None, rtx_bundle: Path, capsys: Capture
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
    path = "fallback" if aftplugins.library("tensorrt") is None else "plugin"
    for words in (deferred, "compute capability 8.0, 8.6", "1 to 500 tokens", path):
        assert words in said


@pytest.mark.tensorrt
def test_bundle_without_tensorrt_lacks_only_engine(
    checkpoint_file: Path, tmp_path: Path, capsys: Capture
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


@pytest.mark.tensorrt
@pytest.mark.parametrize("kind", REFUSED)
def test_failed_build_leaves_nothing(kind: str, tmp_path: Path, capsys: Capture) -> None:
    words, said = REFUSED[kind]
    path = saved(tmp_path, "aft_full")
    before = listing(tmp_path)
    assert_refused(run_here([path, "--to", *words], capsys), said)
    assert listing(tmp_path) == before


@pytest.mark.tensorrt
def test_missing_wheel_names_install_command(checkpoint_file: Path, tmp_path: Path) -> None:
    words = (checkpoint_file, "--to", "trt-rtx", "--out", tmp_path / "b")
    outcome = without(["tensorrt_rtx"], "aftexport", *words, cwd=tmp_path)
    assert_refused(outcome, install_command("trt-rtx"))
    assert not listing(tmp_path)
