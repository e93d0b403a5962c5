"""The builder that TensorRT and TensorRT-RTX share; the latter builds without a GPU."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import engines
import onnx
import pytest
import several_heads
import torch
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.engines.tensorrt.builder import BuiltEngine, build, network_types
from aftexport.engines.tensorrt.runtimes import LOGIT_TYPES, TensorRt, load
from aftexport.engines.tensorrt.settings import build_settings
from aftexport.errors import EngineError, UsageError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.options import EngineOptions
from aftexport.system.installation import install_command


@pytest.fixture(scope="module")
def rtx() -> TensorRt:
    return load("tensorrt_rtx")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.graph(tmp_path_factory.mktemp("model"))


def built(rtx: TensorRt, model: Path, precision: str, **options: object) -> BuiltEngine:
    asked = EngineOptions(**options)  # type: ignore[arg-type]
    settings = build_settings("trt-rtx", asked, precision=precision, max_tokens=300)
    return build(rtx, model, settings, precision=precision)


@pytest.mark.parametrize("precision", LOGIT_TYPES)
def test_engine_has_types_of_graph(precision: str, rtx: TensorRt, tmp_path: Path) -> None:
    engine = built(rtx, engines.graph(tmp_path, precision), precision)
    assert engine.types == {
        "input_ids": "int64", "lengths": "int64", "logits": LOGIT_TYPES[precision]
    }  # fmt: skip
    assert engine.operators == {"AftSimple": "portable"}
    assert len(engine.engine) > 10_000


def test_engine_has_every_output(rtx: TensorRt, tmp_path: Path) -> None:
    program = capture(several_heads.Tokens(), dtype=torch.float16)
    onnx.save(finish(lower(program), precision="fp16", fuse=False), tmp_path / "model.onnx")
    engine = built(rtx, tmp_path / "model.onnx", "fp16")
    outputs = {name: kind for name, kind in engine.types.items() if kind != "int64"}
    assert outputs == dict.fromkeys(several_heads.TOKEN_TASKS, "float16")


class Recurrence(nn.Module):
    """A recurrence whose node has neither a past state nor beta."""

    def __init__(self, direction: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 3)
        self.direction = direction

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        settings = ("gated", self.direction, "sum", "channel", 2, 2, 0.0, 1e-6)
        rows, _ = torch.ops.aftexport.recurrent_linear_attention(
            x.sigmoid(), x.exp(), x, None, -x.abs(), None, lengths, *settings
        )
        return self.head(rows.amax(1))


def test_node_without_optional_inputs_builds(rtx: TensorRt, tmp_path: Path) -> None:
    program = capture(Recurrence("bidirectional"), dtype=torch.float32)
    onnx.save(finish(lower(program), precision="fp32", fuse=False), tmp_path / "model.onnx")
    engine = built(rtx, tmp_path / "model.onnx", "fp32")
    assert engine.operators == {"RecurrentLinearAttention": "portable"}


def test_only_fp32_keeps_product_bits(rtx: TensorRt, tmp_path: Path) -> None:
    ways = {p: built(rtx, engines.graph(tmp_path, p), p).engine for p in LOGIT_TYPES}
    assert {p: b"tf32=0" in engine for p, engine in ways.items()} == {
        "fp32": True, "fp16": False, "bf16": False
    }  # fmt: skip


def test_types_other_than_requested_are_refused(rtx: TensorRt, model: Path) -> None:
    with pytest.raises(EngineError, match="logits of type bfloat16 for bf16, got float16"):
        built(rtx, model, "bf16")


@pytest.mark.parametrize(
    ("mechanism", "works"),
    [("aft_simple", True), ("aft_conv", True), ("efficient_attention", False)],
)
def test_capability_75_bodies_avoid_float32_products(
    mechanism: str, works: bool, rtx: TensorRt, tmp_path: Path
) -> None:
    model = engines.graph(tmp_path, mechanism=mechanism)
    if works:
        assert built(rtx, model, "fp16", compute_capabilities=(75, 86)).engine
    else:
        with pytest.raises(UsageError, match="EfficientAttention multiplies in float32"):
            built(rtx, model, "fp16", compute_capabilities=(75, 86))


def test_several_fast_lengths_and_workspace_work(rtx: TensorRt, model: Path) -> None:
    options = {"opt_lengths": (10, 200), "max_batch": 2, "workspace_mib": 64}
    assert built(rtx, model, "fp16", **options).engine


def unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "Telepathy"


def missing_body(model: onnx.ModelProto) -> None:
    del model.functions[:]


def wrong_type(model: onnx.ModelProto) -> None:
    weight = next(t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16)
    wide = onnx.numpy_helper.to_array(weight).astype("float32")
    weight.CopyFrom(onnx.numpy_helper.from_array(wide, weight.name))


@pytest.mark.parametrize(
    ("damage", "said"),
    [(unknown_operator, "Telepathy"), (missing_body, "AftSimple"), (wrong_type, "type")],
)
def test_refused_graph_error_has_reason(
    damage: Callable[[onnx.ModelProto], None], said: str, rtx: TensorRt, model: Path, tmp_path: Path
) -> None:
    """The parser or the builder refuses the graph."""
    graph = onnx.load(model)
    damage(graph)
    onnx.save(graph, tmp_path / "model.onnx")
    with pytest.raises(EngineError, match=said):
        built(rtx, tmp_path / "model.onnx", "fp16")


def test_file_without_model_is_refused(rtx: TensorRt, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(EngineError, match=r"cannot parse model\.onnx"):
        built(rtx, tmp_path / "model.onnx", "fp16")


def test_progress_is_reported_and_can_stop(rtx: TensorRt, model: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    options = {"precision": "fp16"}
    build(rtx, model, engines.SETTINGS, **options, progress=lambda *step: seen.append(step))  # type: ignore[arg-type]
    assert len({phase for phase, _, _ in seen}) > 1
    assert all(0 <= done <= total for _, done, total in seen)

    def stop(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(rtx, model, engines.SETTINGS, precision="fp16", progress=stop)


@pytest.mark.filterwarnings("ignore:Use Deprecated")  # this builder times nothing
def test_timings_spare_foreign_file(rtx: TensorRt, model: Path, tmp_path: Path) -> None:
    """Timings are kept, and a file of another kind is not overwritten."""
    timings = tmp_path / "timings"
    build(rtx, model, engines.SETTINGS, precision="fp16", timing_cache=timings)
    assert timings.stat().st_size > 0
    timings.write_bytes(b"something else")
    with pytest.raises(EngineError, match="--timing-cache"):
        build(rtx, model, engines.SETTINGS, precision="fp16", timing_cache=timings)
    assert timings.read_bytes() == b"something else"


def test_library_without_plugins_is_refused(rtx: TensorRt, model: Path, tmp_path: Path) -> None:
    (tmp_path / "libaftplugins_tensorrt.so").write_bytes(b"no library")
    with pytest.raises(EngineError, match="plugins"):
        build(
            rtx,
            model,
            engines.SETTINGS,
            precision="fp16",
            plugins=tmp_path / "libaftplugins_tensorrt.so",
        )


def test_the_network_is_read_by_name(rtx: TensorRt) -> None:
    network = rtx.module.Builder(rtx.logger).create_network(0)
    network.add_input("ids", rtx.module.DataType.INT64, (-1, 3))
    assert network_types(network) == {"ids": "int64"}


def test_missing_graph_library_names_install_command(
    rtx: TensorRt, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if "tensorrt.graph_rewrites" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx_graphsurgeon", None)
    with pytest.raises(EngineError, match="onnx_graphsurgeon is not installed") as caught:
        built(rtx, model, "fp16")
    assert install_command("trt-rtx") in caught.value.remedy


def test_only_builds_import_graph_library() -> None:
    code = (
        "import sys, aftexport.deploy.build_engine, aftexport.engines.tensorrt.builder\n"
        "assert 'onnx_graphsurgeon' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_runtime_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    load.cache_clear()
    with pytest.raises(EngineError) as caught:
        load("tensorrt")
    assert install_command("trt") in caught.value.remedy
