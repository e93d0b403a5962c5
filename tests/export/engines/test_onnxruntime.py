import platform
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from commands import assert_refused, run_python
from memory import NEEDS_PROC, fresh_mib, resident_mib

import aftplugins
from aftexport.engines import Engine, RunStoppedError, Stop
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, Provider, operator_paths, package
from aftexport.engines.onnxruntime.package import check_package
from aftexport.engines.torch import TorchEngine
from aftexport.errors import EngineError, UsageError
from aftexport.nn import DocumentClassifier
from aftexport.parity import TOLERANCES
from aftexport.system.installation import install_command
from aftexport.system.process import give_back

HAS_CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
NEEDS_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="ONNX Runtime has no CUDA execution provider")
WAY = "portable" if aftplugins.library("onnxruntime") is None else "fused"


def inputs(*ids: list[int]) -> dict[str, np.ndarray]:
    lengths = np.array([len(row) for row in ids])
    width = max(lengths)
    padded = [row + [0] * (width - len(row)) for row in ids]
    return {"input_ids": np.array(padded), "lengths": lengths}


@pytest.mark.parametrize("form", ["path", "bytes"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("provider", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_the_logits_are_pytorchs(
    provider: Provider, form: str, fused: bool, bundle_folder: Path, classifier: DocumentClassifier
) -> None:
    path = bundle_folder / "model.onnx"
    model = path if form == "path" else path.read_bytes()
    engine = OnnxRuntimeEngine(model, folder=bundle_folder, fused=fused, provider=provider)
    given = inputs([5, 6, 7], [9] * 40, [299])
    logits = engine.run(given)["logits"]
    with torch.inference_mode():
        expected = classifier(*(torch.from_numpy(given[n]) for n in engine.input_names)).numpy()
    bound = TOLERANCES["fp32"].bound * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=bound)


@NEEDS_PROC
def test_memory_is_kept_until_released(bundle_folder: Path) -> None:
    """It is kept from run to run and goes back when it is released."""
    engine = OnnxRuntimeEngine(bundle_folder / "model.onnx", threads=1)
    long = inputs([7] * 500_000)
    others = [inputs([7] * n) for n in np.random.default_rng(0).integers(1, 500_000, 20)]
    engine.run(inputs([7]))
    give_back()  # otherwise the run may use memory that other tests freed
    resting = resident_mib()
    expected = engine.run(long)["logits"]
    taken, fresh = resident_mib() - resting, fresh_mib()
    assert taken > 64
    for given in (long, *others, long):
        engine.run(given)
    assert fresh_mib() - fresh < taken / 2
    assert resident_mib() - resting < 1.5 * taken
    for _ in range(2):
        engine.release()
    assert resident_mib() - resting < taken / 2
    np.testing.assert_array_equal(engine.run(long)["logits"], expected)


@NEEDS_PROC
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc keeps what was freed")
def test_release_returns_memory_others_freed(bundle_folder: Path) -> None:
    engine = OnnxRuntimeEngine(bundle_folder / "model.onnx", threads=1)
    engine.release()
    resting = resident_mib()
    # 256 MiB: the heap may have some of them free already.
    blocks = [np.ones(1 << 14, np.uint8) for _ in range(1 << 14)]
    del blocks[:-1]  # the last one is above them all
    assert resident_mib() - resting > 100
    engine.release()
    assert resident_mib() - resting < 20


def test_operators_report_kernel_or_body(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = operator_paths(bundle_folder / "model.onnx")
    assert paths["AftSimple"] == WAY
    assert set(paths.values()) <= {"portable", "fused"}
    monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, "1")
    assert operator_paths(bundle_folder / "model.onnx") == dict.fromkeys(paths, "portable")


@pytest.mark.skipif(HAS_CUDA, reason="ONNX Runtime has the CUDA execution provider")
def test_missing_provider_error_names_package(bundle_folder: Path) -> None:
    with pytest.raises(
        EngineError,
        match=r"Expected CUDAExecutionProvider, got ONNX.*uninstall --yes onnxruntime;.*\[cuda\]",
    ):
        OnnxRuntimeEngine(bundle_folder / "model.onnx", provider="cuda")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"input_ids": np.zeros((1, 2), np.int64)}, "an input is missing"),
        ({"input_ids": np.zeros((1, 2)), "lengths": np.array([2])}, "of another type"),
        ({"input_ids": np.zeros(2, np.int64), "lengths": np.array([2])}, "of another rank"),
        ({"input_ids": np.array([[300]]), "lengths": np.array([1])}, "id outside"),
        ({**inputs([1]), "extra": np.array([1])}, "an input too many"),
    ],
)
def test_unsuitable_inputs_give_engine_error(
    given: dict[str, np.ndarray], kind: str, bundle_folder: Path
) -> None:
    engine = OnnxRuntimeEngine(bundle_folder / "model.onnx")
    with pytest.raises(EngineError) as failure:
        engine.run(given, Stop())
    assert not isinstance(failure.value, RunStoppedError)
    assert engine.run(inputs([1, 2]))["logits"].shape == (1, 3)


@pytest.mark.parametrize("content", [b"", b"junk", onnx.ModelProto().SerializeToString()])
def test_file_without_model_gives_engine_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    for model in (tmp_path / "model.onnx", content, tmp_path / "absent.onnx"):
        with pytest.raises(EngineError, match="cannot load"):
            OnnxRuntimeEngine(model)


@pytest.mark.parametrize(
    ("opset", "element", "remedy"),
    [
        (99, "float", "lower --opset"),
        (20, "bfloat16", "Write the operator"),
    ],
)
def test_refused_model_gets_fitting_remedy(opset: int, element: str, remedy: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : {opset}]>
        graph ({element}[1] x) => ({element}[1] y) {{ a = Identity (x) y = Det (a) }}""")
    with pytest.raises(EngineError, match="cannot load") as refused:
        OnnxRuntimeEngine(model.SerializeToString())
    assert remedy in refused.value.remedy


def test_unloadable_kernel_library_is_named(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "libaftplugins_onnxruntime.so"
    broken.write_text("no library")
    monkeypatch.setattr(aftplugins, "library", lambda runtime: broken)
    with pytest.raises(EngineError, match="libaftplugins_onnxruntime"):
        OnnxRuntimeEngine(bundle_folder / "model.onnx")
    OnnxRuntimeEngine(bundle_folder / "model.onnx", fused=False)


@pytest.mark.skipif(WAY == "portable", reason="no fused kernels")
def test_unknown_instruction_set_lists_known_ones(bundle_folder: Path, tmp_path: Path) -> None:
    words = ("-m", "aftexport", "inspect", bundle_folder)
    outcome = run_python(*words, cwd=tmp_path, AFTEXPORT_ISA="avx3")
    assert_refused(outcome, "AFTEXPORT_ISA", "avx3", "baseline, avx2, avx512", "Unset")
    assert run_python(*words, cwd=tmp_path, AFTEXPORT_ISA="").code == 0


def test_stopped_run_leaves_engine_usable(bundle_folder: Path) -> None:
    engine = OnnxRuntimeEngine(bundle_folder / "model.onnx", threads=1)
    short, long = inputs([5, 6, 7]), inputs([7] * 2_000_000)
    expected, stop = engine.run(short)["logits"], Stop()
    timer = threading.Timer(0.05, stop.request)
    timer.start()
    with pytest.raises(RunStoppedError):
        engine.run(long, stop)
    timer.join()
    np.testing.assert_array_equal(engine.run(short)["logits"], expected)


@pytest.mark.parametrize("name", ["onnxruntime", "torch"])
def test_run_stopped_early_never_begins(
    name: str, bundle_folder: Path, classifier: DocumentClassifier
) -> None:
    engines: dict[str, Engine] = {
        "onnxruntime": OnnxRuntimeEngine(bundle_folder / "model.onnx"),
        "torch": TorchEngine(classifier, ("input_ids", "lengths")),
    }
    stop = Stop()
    stop.request()
    with pytest.raises(RunStoppedError):
        engines[name].run(inputs([5]), stop)


def test_impossible_thread_counts_are_refused(bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="threads must be at most 1,024"):
        OnnxRuntimeEngine(bundle_folder / "model.onnx", threads=100_000)


COMMANDS = {"aftexport": ["verify", "absent.bundle"], "aftserve": ["absent.bundle"]}


def metadata_of(name: str, folder: Path) -> None:
    """Put the metadata of a package into a folder, as an installer does."""
    info = folder / f"{name.replace('-', '_')}-1.31.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.31.1\n")


def broken_runtime(folder: Path) -> None:
    """Put a module into a folder; its import ends the process, as that of mixed files may."""
    folder.mkdir(exist_ok=True)
    (folder / "onnxruntime.py").write_text("import os; os._exit(99)\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_two_packages_are_refused_before_import(command: str, tmp_path: Path) -> None:
    """This environment has the real package, and the folder has the metadata of a second one."""
    metadata_of("onnxruntime-gpu", tmp_path / "site")
    broken_runtime(tmp_path / "site")
    outcome = run_python(
        "-m", command, *COMMANDS[command], cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")
    )
    assert_refused(
        outcome,
        "got onnxruntime and onnxruntime-gpu",
        f"pip uninstall --yes onnxruntime onnxruntime-gpu; then {install_command('cpu')}",
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_no_package_names_command(command: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['onnxruntime'] = None; "
        f"from {command}.cli import main; sys.exit(main())"
    )
    outcome = run_python("-c", code, *COMMANDS[command], cwd=tmp_path)
    assert_refused(outcome, "ONNX Runtime is not installed.", f"Run: {install_command('cpu')}")


def test_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``plugins/onnxruntime`` is such a folder, in the current folder of a checkout."""
    (tmp_path / "onnxruntime").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.setattr(package, "PACKAGES", ())
    with pytest.raises(EngineError, match="ONNX Runtime is not installed"):
        check_package()
