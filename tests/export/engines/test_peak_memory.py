"""The predicted memory of a run, from the graph, and the memory that a run takes."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from altered_bundles import SOFTMAX, softmax_bundle
from commands import run_python
from hypothesis import given
from hypothesis import strategies as st
from one_node import OneNode

from aftexport.engines.peak_memory import (
    PeakMemory,
    _Run,
    _without_weights,
    predict_memory,
    product_shares,
)

MARGIN = 1.6
"""Factor of the predictions for the blocks of the runtime's arena."""
MIB = 1 << 20
MEASURE = """
import json, sys
from pathlib import Path
import numpy as np
from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(one.split()[1]) for one in lines if one.startswith(name))

def inputs(documents, tokens):
    given = {
        "input_ids": np.full((documents, tokens), 5, np.int64),
        "lengths": np.full(documents, tokens, np.int64),
    }
    return {name: given[name] for name in bundle.manifest.inputs}

bundle, fused = Bundle.open(Path(sys.argv[1])), sys.argv[2] == "fused"
engine = OnnxRuntimeEngine(bundle.model_path, threads=1, fused=fused)
taken = []
for documents, tokens in json.loads(sys.argv[3]):
    engine.run(inputs(1, 16))
    engine.release()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    engine.run(inputs(documents, tokens))
    taken.append(status("VmHWM") - before)
print(json.dumps(taken))
"""


def written(folder: Path, text: str) -> Path:
    model = onnx.parser.parse_model(text)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def bytes_at(path: Path, tokens: int) -> float:
    """Return the predicted bytes at one of the evaluated lengths, without the margin."""
    return dict(predict_memory(path, 512, fused=False).points)[tokens] / MARGIN


def test_live_tensors_are_summed(tmp_path: Path) -> None:
    """Where holds its output, its two choices spread over the mask, the mask and its input."""
    path = written(tmp_path, SOFTMAX)
    for tokens in (128, 512):
        pairs = tokens * tokens
        # The ids stay until the end of the run.
        assert bytes_at(path, tokens) == pytest.approx((4 * 4 + 1) * pairs + 8 * tokens, rel=0.01)


def test_body_of_scan_counts_once(tmp_path: Path) -> None:
    """A loop over rows holds one row at a time, and all rows of its output."""
    path = written(
        tmp_path,
        """
        < ir_version: 8, opset_import: [ "" : 18 ] >
        scanned (int64[batch, tokens] input_ids) => (float[rows, columns] found)
        <int64[1] first = {0}, float zero = {0}>
        {
            row = Squeeze(input_ids, first)
            values = Cast <to = 1> (row)
            last, found = Scan <num_scan_inputs = 1, body = step (float s, float v)
                => (float t, float[columns] out)
                { t = Add(s, v) scaled = Mul(values, v) out = Exp(scaled) }> (zero, values)
        }
        """,
    )
    for tokens in (128, 512):
        pairs = tokens * tokens
        assert bytes_at(path, tokens) == pytest.approx(4 * pairs + 20 * tokens, rel=0.01)


def test_computed_sizes_are_known(tmp_path: Path) -> None:
    """A dimension that is computed from the length is its value, not a guess."""
    path = written(
        tmp_path,
        """
        < ir_version: 8, opset_import: [ "" : 18 ] >
        blocks (int64[batch, tokens] input_ids) => (int64[n, 8, 8] found)
        <int64 zero = {0}, int64 one = {1}, int64 block = {32}, int64[2] eights = {8, 8},
         int64[1] front = {0}>
        {
            sizes = Shape(input_ids)
            tokens = Gather(sizes, one)
            count = Div(tokens, block)
            numbers = Range(zero, count, one)
            length = Shape(numbers)
            shape = Concat <axis = 0> (length, eights)
            filled = ConstantOfShape <value = int64[1] {3}> (shape)
            found = Neg(filled)
        }
        """,
    )
    for tokens in (128, 512):
        blocks = tokens // 32
        expected = 2 * 8 * 64 * blocks + 8 * tokens
        assert bytes_at(path, tokens) == pytest.approx(expected, rel=0.05, abs=64)


def test_half_precision_counts_as_widened(tmp_path: Path) -> None:
    """The CPU has no products in 16 bits: the runtime computes them in float32."""
    text = """
        < ir_version: 8, opset_import: [ "" : 18 ] >
        halves (int64[batch, tokens] input_ids) => ({kind}[batch, tokens] found)
        {{ values = Cast <to = {number}> (input_ids) found = Neg(values) }}
        """
    halves = written(tmp_path, text.format(kind="float16", number=10))
    found = bytes_at(halves, 512)
    assert found == bytes_at(written(tmp_path, text.format(kind="float", number=1)), 512)


def test_packed_keys_are_counted(tmp_path: Path) -> None:
    """SoftmaxAttention packs the keys and values of the heads that it shares, and pads values."""
    inputs = ("query", "key", "value", "lengths")
    attributes = {"num_heads": 4, "kv_num_heads": 2, "window_left": -1, "window_right": -1}
    model = OneNode.of("SoftmaxAttention", attributes, inputs).model()
    for value, channels in zip(model.graph.input, (32, 16, 24), strict=False):
        value.type.tensor_type.shape.dim[2].dim_value = channels
    onnx.save(model, tmp_path / "model.onnx")
    memory = dict(predict_memory(tmp_path / "model.onnx", 512, fused=True).points)[512]
    given, output, packed = 4 * (32 + 16 + 24) * 512, 4 * 48 * 512, 4 * 2 * (8 + 32) * 512
    assert memory / MARGIN == pytest.approx(given + output + packed, rel=0.01)


def test_multiply_adds_are_counted(tmp_path: Path) -> None:
    """A loop counts its products once for each step, and a kernel counts those of its body."""
    text = """
        < ir_version: 8, opset_import: [ "" : 18 ] >
        products (int64[batch, tokens] input_ids) => (float[batch, tokens, 6] found)
        <int64[1] last = {2}, int64[1] first = {1}, float[1, 8] row = {1, 1, 1, 1, 1, 1, 1, 1}>
        {
            ids = Cast <to = 1> (input_ids)
            columns = Unsqueeze(ids, last)
            wide = MatMul(columns, row)
            narrow = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
                body = step (float[batch, 8] x) => (float[batch, 4] y)
                { y = MatMul(x, weight) }> (wide)
            found = Einsum <equation = "...i,io->...o"> (narrow, more)
        }
        """
    model = onnx.parser.parse_model(text)
    for name, shape in {"weight": (8, 4), "more": (4, 6)}.items():
        weight = onnx.numpy_helper.from_array(np.ones(shape, np.float32), name)
        model.graph.initializer.append(weight)
    run = _Run(*_without_weights(model), 64)
    run.peak()
    assert run.products == {"fp32": 64 * (8 + 8 * 4 + 4 * 6)}
    inputs = {"x": (64, 8), "norm_weight": (8,), "norm_bias": (8,), "weight": (8, 4), "bias": (4,)}
    node = OneNode.of("LayerNormLinear", {"precision": "int8"}, inputs).model()
    for value in node.graph.input:
        for place, size in enumerate(reversed(inputs[value.name])):
            value.type.tensor_type.shape.dim[-1 - place].dim_value = size
    assert product_shares(node, 64) == {"int8": 1.0}


@given(
    st.tuples(*[st.floats(1, 1e9)] + [st.floats(0, 1e6)] * 2),
    st.integers(1, 40_000),
    st.integers(1, 8),
)
def test_interpolation_is_never_too_little(
    factors: tuple[float, float, float], tokens: int, documents: int
) -> None:
    def size(length: int) -> float:
        return sum(factor * length**power for power, factor in enumerate(factors))

    memory = PeakMemory([(n, int(size(n)) + 1) for n in (32, 128, 512, 2048, 8192, 32_768)])
    found = memory.bytes_of(tokens, documents)
    if 32 <= tokens <= 32_768:
        assert found >= documents * size(tokens) * (1 - 1e-9)
        assert found <= documents * 1.3 * (size(tokens) + 2)
    longest = memory.longest(found // documents, 50_000)
    assert longest >= min(tokens, 50_000)
    assert longest == 1 or memory.fits(found // documents, 1, longest)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/clear_refs")
@pytest.mark.parametrize("path", ["fused", "portable"])
@pytest.mark.parametrize("kind", ["softmax", "ours"])
def test_runs_stay_within_prediction(
    kind: str, path: str, bundle_folder: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(bundle_folder, tmp_path / "model.bundle"))
    shapes = [(1, 65_536), (4, 16_384)]
    if kind == "softmax":
        softmax_bundle(bundle)
        shapes = [(1, 1024), (1, 3000), (3, 1024)]
    outcome = run_python("-c", MEASURE, str(bundle), path, json.dumps(shapes), cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    memory = predict_memory(bundle / "model.onnx", fused=path == "fused")
    for (documents, tokens), taken in zip(shapes, json.loads(outcome.out), strict=True):
        predicted = memory.bytes_of(tokens, documents)
        assert taken - MIB <= predicted <= 2.5 * taken + 2 * MIB, (documents, tokens)
