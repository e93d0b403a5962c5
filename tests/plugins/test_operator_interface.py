"""The shapes and attributes that the operators require, and their errors."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

from .runner import INPUTS, LIBRARY, WITH_HEADS, one_node, random_inputs, run, session_of


@pytest.mark.parametrize("shape", [None, [None] * 3, ["batch", None, 4], ["batch", "tokens", 4]])
def test_unknown_dimensions_stay_open(shape: list[Any] | None) -> None:
    model = one_node("AftSimple")
    node, graph = model.graph.node[0], model.graph
    node.input[0] = "given"
    graph.node.insert(0, helper.make_node("Reshape", ["query", "target"], ["given"]))
    graph.node.extend([
        helper.make_node("Shape", ["result"], ["shape"]),
        helper.make_node("MatMul", ["result", "value"], ["product"]),
    ])  # fmt: skip
    graph.input.append(helper.make_tensor_value_info("target", TensorProto.INT64, [None]))
    if shape is not None:
        graph.value_info.append(helper.make_tensor_value_info("given", TensorProto.FLOAT, shape))
    graph.output.extend([
        helper.make_tensor_value_info("shape", TensorProto.INT64, [3]),
        helper.make_tensor_value_info("product", TensorProto.FLOAT, [None] * 3),
    ])  # fmt: skip
    inputs = random_inputs("AftSimple", 2, 4, 4)
    feeds = dict(zip(INPUTS["AftSimple"], inputs, strict=True))
    found, product = session_of(model).run(
        ["shape", "product"], {**feeds, "target": np.array([2, 4, 4])}
    )
    assert found.tolist() == [2, 4, 4]
    assert product.shape == (2, 4, 4)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 0), (0, 3)])
@pytest.mark.parametrize("causal", ["", "Causal"])
@pytest.mark.parametrize("op", INPUTS)
def test_empty_input_has_empty_output(op: str, causal: str, batch: int, tokens: int) -> None:
    """The runtime has no memory for a tensor without elements."""
    inputs = random_inputs(causal + op, batch, tokens, 4)
    assert run(causal + op, inputs).shape == (batch, tokens, 4)


@pytest.mark.parametrize("op", WITH_HEADS)
def test_default_is_one_head(op: str) -> None:
    inputs = random_inputs(op, 1, 10, 8)
    np.testing.assert_array_equal(run(op, inputs), run(op, inputs, num_heads=1))


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"scale": 7}, "scale is of a wrong type, expected a float"),
        ({"scale": "7"}, "scale is of a wrong type, expected a float"),
        ({"num_heads": 2.5}, "num_heads is of a wrong type, expected an integer"),
        ({"normalization": 1}, "normalization is of a wrong type, expected text"),
    ],
)
def test_attribute_of_wrong_type_is_refused(attribute: dict[str, Any], expected: str) -> None:
    """It is not taken for an absent attribute."""
    inputs = random_inputs("EfficientAttention", 1, 10, 8)
    with pytest.raises(RuntimeException, match=f"EfficientAttention: {expected}"):
        run("EfficientAttention", inputs, **attribute)


@pytest.mark.parametrize("op", ["AftSimple", "AftFull", "CausalAftLocal", "AftConv"])
def test_eps_is_zero_by_default(op: str) -> None:
    inputs = random_inputs(op, 1, 10, 4)
    np.testing.assert_array_equal(run(op, inputs, eps=0.0), run(op, inputs))


@pytest.mark.parametrize("eps", [-0.5, math.inf, math.nan])
@pytest.mark.parametrize(
    "op", ["AftSimple", "AftFull", "CausalAftLocal", "AftConv", "NormalizedLinearAttention"]
)
def test_eps_out_of_range_is_refused(op: str, eps: float, tmp_path: Path) -> None:
    """A file of other people may have any number; the torch operators refuse these too."""
    path = tmp_path / "model.onnx"
    onnx.save(one_node(op, eps=eps), path)
    expected = rf"{op}: eps is -?{abs(eps):g}, expected a finite number of at least 0"
    with pytest.raises(RuntimeException, match=expected):
        session_of(onnx.load(path))


@pytest.mark.parametrize("eps", [math.inf, math.nan])
def test_eps_without_normalizer_is_ignored(eps: float) -> None:
    op = "NormalizedLinearAttention"
    inputs = random_inputs(op, 1, 10, 4)
    found = run(op, inputs, normalizer="none", eps=eps)
    np.testing.assert_array_equal(found, run(op, inputs, normalizer="none"))


@pytest.mark.parametrize("op", ["EfficientAttention", "CausalNormalizedLinearAttention"])
def test_heads_without_channels_are_refused(op: str) -> None:
    """With kv_num_heads the value may be wider than the key."""
    inputs = random_inputs(op, 1, 10, 4)
    empty = [inputs[0][..., :0], inputs[1][..., :0], *inputs[2:]]
    with pytest.raises((Fail, InvalidArgument), match="expected at least one channel per head"):
        run(op, empty, num_heads=2, kv_num_heads=2)


def test_errors_name_operator_shapes_and_reason() -> None:
    def message(op: str, inputs: list[np.ndarray], **attributes: Any) -> str:
        with pytest.raises((Fail, InvalidArgument, RuntimeException)) as error:
            run(op, inputs, **attributes)
        return str(error.value)

    inputs = random_inputs("AftFull", 1, 10, 4)
    inputs[3] = inputs[3][:6, :6]
    assert (
        "AftFull: query has shape [1, 10, 4], longer than position_bias [6, 6] allows"
        in message("AftFull", inputs)
    )
    inputs = random_inputs("CausalAftLocal", 1, 10, 4, window=3)
    inputs[3] = inputs[3][:9]
    assert "CausalAftLocal: query has shape [1, 10, 4], longer than band [9, 3] allows" in message(
        "CausalAftLocal", inputs
    )
    inputs = random_inputs("EfficientAttention", 1, 10, 10)
    assert "not divisible by num_heads 3" in message("EfficientAttention", inputs, num_heads=3)
    inputs = random_inputs("AftSimple", 1, 10, 4)
    assert "key has shape [1, 9, 4], expected [1, 10, 4]" in message(
        "AftSimple", [inputs[0], inputs[1][:, :9], *inputs[2:]]
    )
    assert 'gate is "softplus", expected sigmoid, tanh, none or relu' in message(
        "AftSimple", inputs, gate="softplus"
    )
    inputs_of_heads = random_inputs("NormalizedLinearAttention", 1, 10, 4)
    for op in ("EfficientAttention", "CausalNormalizedLinearAttention"):
        assert "kv_num_heads is 3, expected a divisor of num_heads 2" in message(
            op, inputs_of_heads, num_heads=2, kv_num_heads=3
        )
        assert "key has shape [1, 10, 4], expected [1, 10, 2]" in message(
            op, inputs_of_heads, num_heads=2, kv_num_heads=1
        )
        wide = [*inputs_of_heads[:2], inputs_of_heads[2][..., :2], inputs_of_heads[3]]
        assert "value has shape [1, 10, 2], expected [1, 10, 4]" in message(op, wide, num_heads=2)
    assert 'normalizer is "max", expected add, clamp or none' in message(
        "NormalizedLinearAttention", inputs_of_heads, normalizer="max"
    )
    assert 'precision is "int4", expected fp32, fp16, bf16 or int8' in message(
        "AftFull", random_inputs("AftFull", 1, 10, 4), precision="int4"
    )
    inputs[-1] = np.array([1, 2], np.int64)
    assert "lengths has shape [2], expected [1]" in message("AftSimple", inputs)


# A window of a million keys takes each task 1 GB, whatever the document.
OUT_OF_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from plugins.runner import INPUTS, random_inputs, session

names = INPUTS["AftLocal"]
small = random_inputs("AftLocal", 4, 512, 64)
large = [*small[:3], np.zeros((1, 1_999_999), np.float32), small[4]]
one = session("AftLocal", threads=2)
before = one.run(None, dict(zip(names, small)))[0]
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1500 << 20),) * 2)  # for one thread of the two
failures = 0
while failures < 5:
    try:
        one.run(None, dict(zip(names, large)))
    except Exception as error:
        failures += 1
        print(error)
assert np.array_equal(one.run(None, dict(zip(names, small)))[0], before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
def test_failed_allocation_spares_next_run() -> None:
    """An allocation that fails on a thread of the runtime makes only that run fail."""
    assert LIBRARY is not None
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("AftLocal: std::bad_alloc") == 5, done.stdout
