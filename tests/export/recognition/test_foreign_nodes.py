"""The recurrent operators of ONNX and ONNX Runtime become ours, and the file computes the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import recurrent_graphs
from commands import run_here
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from recurrent_graphs import MICROSOFT, RULES, causal_conv, inputs_of, linear_attention

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import UsageError
from aftexport.recognition.onnx_file import fuse_file
from aftexport.recognition.result import Recognition

Arrays = dict[str, np.ndarray]

domains = pytest.mark.parametrize("domain", ["", MICROSOFT], ids=["onnx", "microsoft"])


def fused(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, Recognition]:
    onnx.save(model, folder / "in.onnx")
    recognition = fuse_file(folder / "in.onnx", folder / "out.onnx")
    return onnx.load(folder / "out.onnx"), recognition


def answers(model: onnx.ModelProto, inputs: Arrays) -> Arrays:
    """Return the outputs by ONNX Runtime's operator, or by the definition of ONNX."""
    names = [value.name for value in model.graph.output]
    if any(node.domain == MICROSOFT for node in model.graph.node):
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        return dict(zip(names, session.run(names, inputs), strict=True))
    return dict(zip(names, ReferenceEvaluator(model).run(names, inputs), strict=True))


def assert_same(model: onnx.ModelProto, changed: onnx.ModelProto, tokens: int = 7) -> None:
    inputs = inputs_of(model, tokens)
    found = OnnxRuntimeEngine(changed.SerializeToString()).run(inputs)
    for name, expected in answers(model, inputs).items():
        assert found[name].dtype == expected.dtype
        narrow = expected.dtype == np.float16
        np.testing.assert_allclose(found[name], expected, atol=2e-2 if narrow else 1e-5, rtol=1e-3)


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


@pytest.mark.table(keep=0.1)
@domains
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=["each", "grouped", "one"])
@pytest.mark.parametrize("has_state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_linear_attention_becomes_ours(
    domain: str,
    rule: str,
    heads: tuple[int, int],
    has_state: bool,
    by_channel: bool,
    tmp_path: Path,
) -> None:
    model = linear_attention(
        domain, rule=rule, heads=heads, has_state=has_state, by_channel=by_channel, chunk_size=16
    )
    changed, recognition = fused(model, tmp_path)
    assert operators(changed) == {"RecurrentLinearAttention", "Shape", "Expand"}
    (node,) = (n for n in changed.graph.node if n.op_type == "RecurrentLinearAttention")
    assert (node.input[3] != "") == has_state
    assert [imported.domain for imported in changed.opset_import] == ["", "ai.aftexport"]
    assert changed.opset_import[0].version == 20
    assert [replaced.value for replaced in recognition.translated] == ["output"]
    assert_same(model, changed)
    assert_same(model, changed, tokens=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"scale": 0.25},
        {"shared_beta": True},
        {"rule": "delta", "shared_beta": True, "has_state": True},
    ],
    ids=["scale", "beta", "delta"],
)
@domains
def test_attributes_keep_their_meaning(
    domain: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = linear_attention(domain, **settings)
    assert_same(model, fused(model, tmp_path)[0])


def test_default_rule_is_gated_delta(tmp_path: Path) -> None:
    model = linear_attention("")
    (node,) = model.graph.node
    kept = [a for a in node.attribute if a.name != "update_rule"]
    del node.attribute[:]
    node.attribute.extend(kept)
    assert_same(model, fused(model, tmp_path)[0])


@pytest.mark.parametrize("own_type", [TensorProto.FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize("state_type", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_state_keeps_its_type(own_type: int, state_type: int, tmp_path: Path) -> None:
    """A state of float32 beside float16 tensors keeps its digits."""
    model = linear_attention("", has_state=True, own_type=own_type, state_type=state_type)
    changed, _ = fused(model, tmp_path)
    assert_same(model, changed)
    if state_type == TensorProto.FLOAT:
        inputs = inputs_of(model, 1)
        inputs["decay"] = np.zeros_like(inputs["decay"])
        inputs["beta"] = np.zeros_like(inputs["beta"])
        found = OnnxRuntimeEngine(changed.SerializeToString()).run(inputs)["present_state"]
        np.testing.assert_allclose(found, inputs["past_state"], rtol=1e-6)


def test_more_states_than_query_heads(tmp_path: Path) -> None:
    """Each query head of ONNX Runtime's operator then reads several states in turn."""
    model = linear_attention(MICROSOFT, heads=(2, 4), has_state=True)
    changed, _ = fused(model, tmp_path)
    assert "RecurrentLinearAttention" in operators(changed)
    assert_same(model, changed)


@pytest.mark.table(keep=0.2)
@domains
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("has_state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("activation", [None, "none", "silu", "swish"])
@pytest.mark.parametrize("taps", [1, 3])
def test_convolution_becomes_ours(
    domain: str, has_bias: bool, has_state: bool, activation: str | None, taps: int, tmp_path: Path
) -> None:
    has_state = has_state and taps > 1
    chosen = {} if activation is None else {"activation": activation}
    model = causal_conv(domain, has_bias=has_bias, has_state=has_state, taps=taps, **chosen)
    changed, _ = fused(model, tmp_path)
    assert "CausalDepthwiseConv" in operators(changed)
    assert_same(model, changed)
    assert_same(model, changed, tokens=1)


@pytest.mark.parametrize("has_state", [False, True], ids=["zero", "state"])
def test_last_channels_need_no_transpose(has_state: bool, tmp_path: Path) -> None:
    model = causal_conv(MICROSOFT, has_state=has_state, is_last=True, channels_last=1)
    changed, _ = fused(model, tmp_path)
    assert operators(changed) == {"CausalDepthwiseConv", "Shape", "Expand"}
    assert_same(model, changed)


def test_dilated_filter_gets_zeros(tmp_path: Path) -> None:
    model = causal_conv(MICROSOFT, has_state=True, dilation=2, span=4)
    changed, _ = fused(model, tmp_path)
    assert "CausalDepthwiseConv" in operators(changed)
    assert_same(model, changed)


def test_long_dilated_filter_stays(tmp_path: Path) -> None:
    """With zeros between its taps, the filter would have four million numbers for each channel."""
    model = causal_conv(MICROSOFT, dilation=2**21)
    del model.graph.output[1]
    model.graph.node[0].output[1] = ""
    changed, recognition = fused(model, tmp_path)
    assert "CausalConvWithState" in operators(changed)
    assert not recognition.translated


@domains
def test_transposes_that_cancel_are_removed(domain: str, tmp_path: Path) -> None:
    """A model with the channels last turns them around the convolution; ours needs neither."""
    model = causal_conv(domain)
    node = model.graph.node[0]
    node.input[0], node.output[0] = "turned", "convolved"
    model.graph.node.insert(0, helper.make_node("Transpose", ["input"], ["turned"], perm=[0, 2, 1]))
    model.graph.node.append(helper.make_node("Transpose", ["convolved"], ["back"], perm=[0, 2, 1]))
    model.graph.node.append(helper.make_node("Relu", ["back"], ["output"]))
    for value in (model.graph.input[0], model.graph.output[0]):
        shape = value.type.tensor_type.shape
        shape.dim[1].CopyFrom(onnx.TensorShapeProto.Dimension(dim_param="T"))
        shape.dim[2].CopyFrom(onnx.TensorShapeProto.Dimension(dim_value=recurrent_graphs.CHANNELS))
    changed, _ = fused(model, tmp_path)
    kinds = [n.op_type for n in changed.graph.node]
    assert kinds.count("Transpose") == 1  # that of the state, an output of the model
    assert_same(model, changed)


@pytest.mark.parametrize(
    "model",
    [linear_attention(MICROSOFT, state_window=2), causal_conv(MICROSOFT, state_window=2)],
    ids=["attention", "convolution"],
)
def test_window_of_states_stays(model: onnx.ModelProto, tmp_path: Path) -> None:
    """ONNX Runtime only runs such nodes on GPUs, so that nothing can be compared."""
    shape = model.graph.output[1].type.tensor_type.shape
    dims = [onnx.TensorShapeProto.Dimension(dim_value=2), *shape.dim]
    del shape.dim[:]
    shape.dim.extend(dims)
    changed, recognition = fused(model, tmp_path)
    assert changed == model
    assert not recognition.translated


def without(model: onnx.ModelProto, attribute: str) -> onnx.ModelProto:
    (node,) = model.graph.node
    kept = [a for a in node.attribute if a.name != attribute]
    del node.attribute[:]
    node.attribute.extend(kept)
    return model


def with_channels(
    model: onnx.ModelProto, name: str, size: int, *, axis: int = -1
) -> onnx.ModelProto:
    (value,) = (given for given in model.graph.input if given.name == name)
    value.type.tensor_type.shape.dim[axis].dim_value = size
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (linear_attention("", update_rule="fast", rule="gated_delta"), "update_rule linear, gated"),
        (linear_attention("", absent=["decay"]), "the input decay for update_rule gated_delta"),
        (linear_attention("", absent=["beta"], rule="delta"), "the input beta for update_rule del"),
        (linear_attention("", update_rule="linear", rule="gated"), "no input decay for update_"),
        (linear_attention("", heads=(2, 4)), "q_num_heads as a multiple of kv_num_heads"),
        (linear_attention("", q_num_heads=3), "q_num_heads as a multiple of kv_num_heads"),
        (without(linear_attention(""), "kv_num_heads"), "kv_num_heads above 0"),
        (with_channels(linear_attention(""), "decay", 3), "2 or 8 channels of decay"),
        (with_channels(linear_attention(""), "beta", 4), "1 or 2 channels of beta"),
        (with_channels(linear_attention(""), "key", 9), "8 channels of key for its heads"),
        (with_channels(linear_attention("", has_state=True), "past_state", 9), "past_state [B, 2"),
        (causal_conv("", activation="relu"), "activation none, silu, swish"),
        (with_channels(causal_conv(""), "input", 5, axis=1), "6 channels of the input"),
        (with_channels(causal_conv("", has_state=True), "past_state", 5), "past_state of 2 tokens"),
    ],
)
def test_wrong_node_is_named(model: onnx.ModelProto, expected: str, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "in.onnx")
    with pytest.raises(UsageError) as caught:
        fuse_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert expected in str(caught.value)
    assert repr(model.graph.node[0].name) in str(caught.value)
    assert not (tmp_path / "out.onnx").exists()


def test_command_lists_replaced_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(linear_attention(""), tmp_path / "in.onnx")
    words = ["fuse", tmp_path / "in.onnx", tmp_path / "out.onnx", "--report", tmp_path / "r.json"]
    done = run_here(words, capsys)
    assert done.code == 0
    assert "ai.onnx.LinearAttention" in done.out
    assert "unchanged" not in done.out
    (replaced,) = json.loads((tmp_path / "r.json").read_text())["translated"]
    assert replaced["operator"] == "RecurrentLinearAttention"


def test_weights_that_are_computed(tmp_path: Path) -> None:
    """A filter that is an input has no constant shape; shape inference gives the channels."""
    model = causal_conv("", has_state=True)
    weight = model.graph.initializer.pop(0)
    taps = numpy_helper.to_array(weight)
    described = helper.make_tensor_value_info("taps", TensorProto.FLOAT, taps.shape)
    model.graph.input.append(described)
    model.graph.node.insert(0, helper.make_node("Neg", ["taps"], ["weight"]))
    changed, _ = fused(model, tmp_path)
    assert "CausalDepthwiseConv" in operators(changed)
    assert_same(model, changed)
