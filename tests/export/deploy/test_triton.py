"""The repository against Triton's schema, and run as Triton's backend would."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny_models
import tritonclient.http as triton
from bundles import changed_manifest, classes
from commands import Capture, assert_refused, listing, run_here, without
from input_models import FEATURES, MEAN, SCALE, feature_file
from onnx import parser
from rich.console import Console
from servers import free_port
from triton_schema import MODEL_CONFIG, parsed

import aftplugins
from aftexport.bundle.bundle import Bundle
from aftexport.bundle.features import Features
from aftexport.deploy import triton as repository
from aftexport.deploy.triton import add_normalization, start_command, write_repository
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.tensorrt.runtimes import load
from aftexport.errors import EngineError, UsageError
from aftexport.operators.domain import operators_in
from aftexport.options import EngineOptions
from aftexport.pipeline.export import export


@pytest.fixture(scope="module")
def written(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of a repository that is at its own path, as where Triton runs."""
    return written_to(tmp_path_factory.mktemp("repository"), Bundle.open(bundle_folder))


def written_to(out: Path, bundle: Bundle, **options: Any) -> Path:
    options = {"name": "toy", "mounted": str(out), "console": Console(quiet=True)} | options
    return write_repository(bundle, out, **options)


def answer_like_pytorch(session: onnxruntime.InferenceSession, bundle: Bundle) -> None:
    for case in bundle.golden():
        if case.subject == "model":
            [logits] = session.run(["logits"], dict(case.inputs))
            np.testing.assert_allclose(logits, case.outputs["logits"], rtol=1e-4, atol=1e-4)


def shape(tensor: Any) -> list[int]:
    """Return the shape of a model input or output by Triton's rules."""
    return [-1, *(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)]


def test_configuration_matches_graph(written: Path, bundle_folder: Path) -> None:
    config = parsed(written)
    assert (config.name, config.backend, config.max_batch_size) == ("toy", "onnxruntime", 8)
    graph = onnx.load(bundle_folder / "model.onnx").graph
    types = {"FLOAT": "TYPE_FP32", "INT64": "TYPE_INT64"}
    for tensors, values in ((config.input, graph.input), (config.output, graph.output)):
        assert [tensor.name for tensor in tensors] == [value.name for value in values]
        for tensor, value in zip(tensors, values, strict=True):
            of_graph = value.type.tensor_type
            assert shape(tensor) == [dim.dim_value or -1 for dim in of_graph.shape.dim]
            name = MODEL_CONFIG.DataType.Name(tensor.data_type)
            assert name == types[onnx.TensorProto.DataType.Name(of_graph.elem_type)]
            assert tensor.dims  # Triton has no tensor without an axis
    # Documents of different lengths run apart.
    assert config.HasField("dynamic_batching")
    assert not any(tensor.allow_ragged_batch for tensor in config.input)
    queue = config.dynamic_batching.default_queue_policy
    assert queue.max_queue_size > 0
    assert queue.default_timeout_microseconds > 0
    labels = (written / config.output[0].label_filename).read_text("utf-8")
    assert tuple(labels.splitlines()) == tiny_models.LABELS
    assert (written / "1" / config.default_model_filename).is_file()


def test_configuration_of_features_matches_graph(feature_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(feature_bundle)
    folder = written_to(tmp_path, bundle)
    config = parsed(folder)
    features, lengths = config.input
    data_types = MODEL_CONFIG.DataType
    assert (features.name, lengths.name) == ("input_features", "lengths")
    assert features.data_type == data_types.Value("TYPE_FP32")
    assert lengths.data_type == data_types.Value("TYPE_INT64")
    assert (shape(features), shape(lengths)) == ([-1, -1, FEATURES], [-1])
    assert not (folder / "tokenizer.json").exists()
    text = (folder / "config.pbtxt").read_text("utf-8")
    assert "# Right padding, [batch, tokens, features], and the number" in text
    assert "# Send features in their own units: the model begins with (x - mean) / scale" in text
    case = next(case for case in bundle.golden() if case.subject == "model")
    for tensor in config.input:
        array = case.inputs[tensor.name]
        assert all(size in (-1, n) for size, n in zip(shape(tensor), array.shape, strict=True))


def test_model_normalizes_features(feature_bundle: Path, tmp_path: Path) -> None:
    """Triton's clients and those of aftserve send the same numbers."""
    bundle = Bundle.open(feature_bundle)
    features = bundle.manifest.features
    assert features is not None
    folder = written_to(tmp_path, bundle)
    whole, served = map(onnxruntime.InferenceSession, (bundle.model_path, folder / "1/model.onnx"))
    document = np.random.default_rng(0).normal(MEAN, SCALE, (33, FEATURES)).astype(np.float32)
    lengths = np.array([33])
    feeds = {"input_features": features.normalized(document)[None], "lengths": lengths}
    [expected] = whole.run(["logits"], feeds)
    [logits] = served.run(["logits"], {"input_features": document[None], "lengths": lengths})
    np.testing.assert_allclose(logits, expected, rtol=1e-6, atol=1e-7)
    [other] = whole.run(["logits"], {"input_features": document[None], "lengths": lengths})
    assert np.abs(other - expected).max() > 0.01


needs_kernels = pytest.mark.skipif(
    aftplugins.library("onnxruntime") is None, reason=str(aftplugins.missing("onnxruntime"))
)


@needs_kernels
def test_kernels_take_every_setting(tmp_path: Path) -> None:
    bundle = export(
        out=tmp_path / "mixed.bundle",
        factory="tiny_models:MixedSettings",
        labels=tiny_models.LABELS,
        check_parity=False,
    )
    path = written_to(tmp_path / "r", bundle) / "1" / "model.onnx"
    assert {"AftSimple_none", "EfficientAttention_scaling"} <= bundle.manifest.operators.keys()
    served = operators_in(onnx.load(path))
    assert (served["AftSimple"], served["EfficientAttention"]) == (3, 2)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(aftplugins.library("onnxruntime")))
    session = onnxruntime.InferenceSession(path, options)
    answer_like_pytorch(session, bundle)


@needs_kernels
def test_model_and_kernels_answer_like_pytorch(written: Path, bundle_folder: Path) -> None:
    config = parsed(written)
    [library] = config.model_operations.op_library_filename
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(library)
    options.enable_cpu_mem_arena = config.parameters["enable_mem_arena"].string_value != "0"
    session = onnxruntime.InferenceSession(written / "1" / "model.onnx", options)
    answer_like_pytorch(session, Bundle.open(bundle_folder))
    # As the dynamic batcher puts together what has one length.
    ids = np.random.default_rng(0).integers(0, 250, (5, 33))
    [together] = session.run(["logits"], {"input_ids": ids, "lengths": np.full(5, 33)})
    for row, logits in zip(ids, together, strict=True):
        feeds = {"input_ids": row[None], "lengths": np.array([33])}
        [alone] = session.run(["logits"], feeds)
        np.testing.assert_allclose(logits, alone[0], rtol=1e-5, atol=1e-6)


def test_model_file_and_bundle_agree(
    checkpoint_file: Path, bundle_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    of_model, of_bundle = tmp_path / "a", tmp_path / "b"
    outcome = run_here([checkpoint_file, "--to", "triton", "--out", of_model], capsys)
    assert outcome.code == 0, outcome.err
    assert "within" in outcome.out
    assert "tritonserver --model-repository=/models" in outcome.out
    words = [str(bundle_folder), "--to", "triton", "--out", str(of_bundle), "--name", "model"]
    outcome = without(["torch"], "aftexport", *words, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert listing(of_model) == listing(of_bundle)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_no_batching_allows_one_document(bundle_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle_folder, tmp_path / "m.bundle")
    bundle = Bundle.open(changed_manifest(copy, {"batching": False}))
    folder = written_to(tmp_path / "r", bundle)
    assert parsed(folder).max_batch_size == 1
    with pytest.raises(UsageError, match="--max-batch must be 1 for a bundle exported with"):
        written_to(tmp_path / "q", bundle, max_batch=2)


def test_half_precision_is_said(checkpoint_file: Path, tmp_path: Path, capsys: Capture) -> None:
    words = [checkpoint_file, "--to", "triton", "--precision", "fp16", "--max-batch", "3"]
    assert run_here([*words, "--out", tmp_path / "r"], capsys).code == 0
    config = parsed(tmp_path / "r" / "model")
    value = onnx.load(tmp_path / "r" / "model" / "1" / "model.onnx").graph.output[0]
    half = value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    name = MODEL_CONFIG.DataType.Name(config.output[0].data_type)
    assert name == ("TYPE_FP16" if half else "TYPE_FP32")
    assert config.max_batch_size == 3


def test_model_without_kernels_runs_bodies(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:  # fmt: skip
    monkeypatch.setenv("AFTEXPORT_PORTABLE", "1")
    outcome = run_here([bundle_folder, "--to", "triton", "--out", tmp_path / "r"], capsys)
    assert outcome.code == 0
    assert "AFTEXPORT_PORTABLE" in outcome.out
    folder = tmp_path / "r" / "model"
    assert not parsed(folder).HasField("model_operations")
    assert {path.name for path in (folder / "1").iterdir()} == {"model.onnx", "model.onnx.data"}


def test_repository_keeps_other_models(
    bundle_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = [bundle_folder, "--to", "triton", "--out", tmp_path]
    assert run_here([*words, "--name", "a"], capsys).code == 0
    before = listing(tmp_path)
    assert run_here([*words, "--name", "b"], capsys).code == 0
    assert before.items() <= listing(tmp_path).items()
    before = listing(tmp_path)
    assert_refused(run_here([*words, "--name", "b"], capsys), "exists", "--force")
    (tmp_path / "b" / "1" / "model.onnx").write_bytes(b"")
    assert run_here([*words, "--name", "b", "--force"], capsys).code == 0
    assert listing(tmp_path) == before


def test_foreign_files_stay(bundle_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.pbtxt").write_text('name: "theirs"\n')
    before = listing(tmp_path)
    words = [bundle_folder, "--to", "triton", "--force"]
    for more, said in (
        (["--out", tmp_path, "--name", "theirs"], "was not written by aftexport"),
        (["--out", theirs], "must be a repository"),
        (["--out", bundle_folder], "must be a repository"),
        (["--out", bundle_folder / "in"], "lies in the bundle"),
        (["--out", tmp_path, "--name", "../up"], "--name"),
        (["--out", tmp_path, "--mounted", 'relative"'], "--mounted"),
    ):
        assert_refused(run_here([*words, *more], capsys), said)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "triton", "--precision", "fp16"], "--precision"),
        (["--to", "onnx", "--name", "a"], "--to triton"),
    ],
)
def test_options_of_something_else_are_refused(
    words: list[str], said: str, bundle_folder: Path, capsys: Capture
) -> None:
    outcome = run_here([bundle_folder, *words], capsys)
    assert outcome.code == 2
    assert said in outcome.err


def test_label_of_two_lines_is_refused(bundle_copy: Path, tmp_path: Path) -> None:
    """Its second line would move the labels after it."""
    changed_manifest(bundle_copy, classes(["a\nb", "c", "d"]))
    with pytest.raises(UsageError, match=r"without line breaks for Triton, got 'a\\nb'"):
        written_to(tmp_path / "r", Bundle.open(bundle_copy))
    assert not (tmp_path / "r").exists()


def test_windows_are_refused(bundle_copy: Path, tmp_path: Path) -> None:
    changed_manifest(bundle_copy, {"windows": {"tokens": 64, "stride": 48, "aggregate": "mean"}})
    with pytest.raises(UsageError, match="Triton reads no documents in windows"):
        written_to(tmp_path / "r", Bundle.open(bundle_copy))
    assert not (tmp_path / "r").exists()


def test_unsupported_engine_is_refused(rtx_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    words = [rtx_bundle, "--to", "triton", "--out", tmp_path / "r"]
    assert_refused(run_here(words, capsys), "TensorRT-RTX", "--to trt")
    assert listing(tmp_path) == {}


@pytest.fixture(scope="module")
def trt_bundle(checkpoint_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("trt") / "model.bundle"
    options = EngineOptions(opt_lengths=(64, 256), max_batch=3)
    return export(checkpoint_file, to="trt", out=out, precision="fp16", engine=options)


def test_unbuildable_engine_is_reported(
    no_gpu: None, trt_bundle: Bundle, tmp_path: Path, capsys: Capture
) -> None:
    words = [trt_bundle.path, "--to", "triton", "--out", tmp_path / "r"]
    try:
        load("tensorrt")
    except EngineError as error:
        reason = error.problem
    else:
        reason = "GPU"
    assert_refused(run_here(words, capsys), reason)
    assert listing(tmp_path) == {}


@pytest.fixture
def built_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Built:
        """In place of the engine alone, which takes a GPU."""

        def read(self, wanted: object) -> tuple[bytes, None]:
            return b"plan", None

    monkeypatch.setattr(repository, "build", lambda *_, **__: Built())
    monkeypatch.setattr(repository, "wanted_here", lambda *_: None)


@pytest.mark.usefixtures("built_engine")
def test_engine_of_features_expects_normalized(tmp_path: Path) -> None:
    described = feature_file(tmp_path)
    options = EngineOptions(opt_lengths=(64,), max_batch=3)
    bundle = export(
        factory="input_models:Sensors", feature_file=described, to="trt",
        out=tmp_path / "m.bundle", precision="fp16", engine=options,
    )  # fmt: skip
    folder = written_to(tmp_path / "r", bundle)
    assert shape(parsed(folder).input[0]) == [-1, -1, FEATURES]
    text = (folder / "config.pbtxt").read_text("utf-8")
    assert "# Send normalized features, (x - mean) / scale in float32: the engine" in text


@pytest.mark.usefixtures("built_engine")
def test_the_configuration_of_an_engine(trt_bundle: Bundle, tmp_path: Path) -> None:
    folder = written_to(tmp_path, trt_bundle)
    config = parsed(folder)
    assert (config.backend, config.max_batch_size) == ("tensorrt", 3)
    [group] = config.instance_group
    assert group.kind == MODEL_CONFIG.ModelInstanceGroup.KIND_GPU
    assert list(group.profile) == ["0", "1"]  # for 64 and for 256 tokens
    assert not config.HasField("model_operations")
    assert (folder / "1" / config.default_model_filename).read_bytes() == b"plan"
    # The engine carries its plugins; TensorRT runs what an engine carries only where told so.
    assert "version-compatible=true" in start_command(folder, "/models")


TEXT = """<ir_version: 8, opset_import: ["" : 17]>
graph (float[batch, tokens, 2] input_features, bool chosen) => (float[batch, tokens, 2] y) {
    y = If (chosen) <
        then_branch = then () => (float[batch, tokens, 2] a) { a = Identity (input_features) },
        else_branch = else () => (float[batch, tokens, 2] b) { b = Neg (input_features) }
    >
}"""


@pytest.mark.parametrize("mean", [None, (1.5, -2.0)])
@pytest.mark.parametrize("scale", [None, (0.1, 3.0)])
def test_inner_graphs_read_normalized_features(
    mean: tuple[float, ...] | None, scale: tuple[float, ...] | None
) -> None:
    model = parser.parse_model(TEXT)
    features = Features(names=("a", "b"), mean=mean, scale=scale)
    add_normalization(model, features)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["input_features", "chosen"]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    document = np.random.default_rng(0).standard_normal((1, 7, 2), np.float32)
    for chosen, sign in ((True, 1), (False, -1)):
        feeds = {"input_features": document, "chosen": np.array(chosen)}
        [found] = session.run(None, feeds)
        np.testing.assert_array_equal(found[0], sign * features.normalized(document[0]))


SERVER = shutil.which("tritonserver")
needs_triton = pytest.mark.skipif(
    SERVER is None, reason="no tritonserver with the backend onnxruntime is on the PATH"
)


@pytest.fixture(scope="module")
def client(written: Path) -> Iterator[triton.InferenceServerClient]:
    out = written.parent
    port = free_port()
    words = [f"--model-repository={out}", f"--http-port={port}", "--http-address=127.0.0.1",
             "--allow-grpc=false", "--allow-metrics=false"]  # fmt: skip
    log = out.parent / "triton.log"
    with log.open("wb") as file:
        process = subprocess.Popen([str(SERVER), *words], stdout=file, stderr=file)
    client = triton.InferenceServerClient(f"127.0.0.1:{port}", concurrency=16)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text("utf-8")
            try:
                if client.is_model_ready("toy"):
                    break
            except ConnectionRefusedError:
                time.sleep(0.1)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(60)


def request(ids: np.ndarray, lengths: np.ndarray) -> list[triton.InferInput]:
    feeds = {"input_ids": ids, "lengths": lengths[:, None]}
    inputs = []
    for name, array in feeds.items():
        inputs.append(triton.InferInput(name, array.shape, "INT64"))
        inputs[-1].set_data_from_numpy(array.astype(np.int64))
    return inputs


@needs_triton
def test_the_golden_cases(client: triton.InferenceServerClient, bundle_folder: Path) -> None:
    for case in Bundle.open(bundle_folder).golden():
        if case.subject == "model":
            inputs = request(case.inputs["input_ids"], case.inputs["lengths"])
            answer = client.infer("toy", inputs)
            np.testing.assert_allclose(answer.as_numpy("logits"), case.outputs["logits"], atol=1e-4)


@needs_triton
def test_documents_of_all_lengths_at_once(
    client: triton.InferenceServerClient, bundle_folder: Path
) -> None:
    engine = OnnxRuntimeEngine(bundle_folder / "model.onnx")
    draw = np.random.default_rng(0)
    lengths = draw.choice([1, 7, 64, 64, 64, 200, 500], 200)
    documents = [draw.integers(0, 250, (1, length)) for length in lengths]
    waiting = [client.async_infer("toy", request(ids, np.array([ids.size]))) for ids in documents]
    for ids, answer in zip(documents, waiting, strict=True):
        alone = engine.run({"input_ids": ids, "lengths": np.array([ids.size])})["logits"]
        logits = answer.get_result().as_numpy("logits")
        np.testing.assert_allclose(logits, alone, rtol=1e-4, atol=1e-5)
    [statistics] = client.get_inference_statistics("toy")["model_stats"]
    assert statistics["inference_count"] >= 200
    assert statistics["execution_count"] <= statistics["inference_count"]
