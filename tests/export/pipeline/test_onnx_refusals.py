"""ONNX files and options that are refused, and the options with which such a file is accepted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import assert_refused, listing, run_here
from onnx import TensorProto, helper
from onnx_texts import ALL_INPUTS, VOCABULARY, Builder, bundle_of, saved, text_model

from aftexport.errors import TraceError, UsageError
from aftexport.pipeline.export import export


def noise(build: Builder, pooled: str) -> str:
    return build.node("Add", pooled, build.node("RandomNormalLike", pooled))


def sum_of_batch(build: Builder, pooled: str) -> str:
    total = build.node("ReduceSum", pooled, build.constant(np.array([0])), keepdims=1)
    return build.node("Add", pooled, total)


def extra_input() -> onnx.ModelProto:
    model = text_model()
    extra = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["b", 3, "h", "w"])
    model.graph.input.append(extra)
    return model


def only_labels() -> onnx.ModelProto:
    model = text_model()
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["label"], axis=1))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, None))
    return model


def one_hot_ids() -> onnx.ModelProto:
    build = Builder()
    depth, values = build.constant(VOCABULARY), build.constant(np.array([0, 1], np.float32))
    x = build.node("OneHot", "input_ids", depth, values)
    pooled = build.node("ReduceMean", x, build.constant(np.array([1])), keepdims=0)
    build.node("MatMul", pooled, build.weight(VOCABULARY, 3), output="logits")
    given = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])]
    results = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 3])]
    graph = helper.make_graph(build.nodes, "text", given, results, build.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def sound_model() -> onnx.ModelProto:
    build = Builder()
    pooled = build.node("ReduceMean", "frames", build.constant(np.array([1])), keepdims=0)
    build.node("MatMul", pooled, build.weight(5, 3), output="logits")
    given = [helper.make_tensor_value_info("frames", TensorProto.FLOAT, ["b", "s", 5])]
    results = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 3])]
    graph = helper.make_graph(build.nodes, "sound", given, results, build.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def bfloat16_node() -> onnx.ModelProto:
    def with_offset(build: Builder, pooled: str) -> str:
        offset = helper.make_tensor("offset", TensorProto.BFLOAT16, [1], [0.5])
        build.nodes.append(helper.make_node("Constant", [], ["offset"], value=offset))
        narrow = build.node("Cast", pooled, to=TensorProto.BFLOAT16)
        return build.node("Cast", build.node("Add", narrow, "offset"), to=TensorProto.FLOAT)

    return text_model(extend=with_offset)


BAD: dict[str, tuple[onnx.ModelProto, dict[str, Any], str]] = {
    "fixed tokens": (text_model(axes=("b", 128)), {}, "tokens fixed at 128"),
    "fixed batch": (text_model(axes=(1, "s")), {}, "batch fixed at 1"),
    "another input": (extra_input(), {}, r"the inputs .*got .*pixel_values \[b, 3, h, w\]"),
    "no numbers": (only_labels(), {}, "output of floating-point numbers, got none"),
    "ids without a table": (one_hot_ids(), {}, "--vocab-size"),
    "too many ids": (text_model(), {"vocab_size": 41}, "at most 40, the rows of the table"),
    "too long": (text_model(ALL_INPUTS), {"max_length": 20}, "--max-length must be at most 16"),
    "random": (text_model(extend=noise), {}, "outputs are random"),
    "sum over the batch": (text_model(extend=sum_of_batch), {}, r"other documents.*--no-batching"),
    "float64": (text_model(dtype=np.float64), {}, "Expected float32 or float16 for the output"),
    "factory": (text_model(), {"factory": "a:b"}, "a PyTorch model with --factory a:b"),
    "usual opset": (text_model(), {"opset": 20}, "a PyTorch model with --opset 20"),
    "pickle": (text_model(), {"allow_pickle": True}, "a PyTorch model with --allow-pickle"),
    "opset": (text_model(), {"opset": 19}, "a PyTorch model with --opset 19"),
    "precision": (text_model(), {"precision": "fp16"}, "whose weights keep their types"),
    "int8 of 16 bits": (text_model(dtype=np.float16), {"precision": "int8"}, "float16, got int8"),
    "bf16 of 16 bits": (text_model(dtype=np.float16), {"precision": "bf16"}, "float16, got bf16"),
    "auto of 16 bits": (text_model(dtype=np.float16), {"precision": "auto"}, "float16, got auto"),
    "input": (text_model(), {"inputs": {"weight": "number"}}, "model with --input weight"),
    "features of ids": (text_model(), {"features": 9}, "file of token ids, got --features 9"),
    "ids of features": (
        sound_model(), {"vocab_size": 9}, "file of features, got --vocab-size 9"),
    "bfloat16 in a node": (bfloat16_node(), {}, "float32 or float16 in an ONNX file, got bfloat16"),
    "length": (text_model(), {"max_length": 0}, "--max-length must be from 1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_file_or_option_is_refused(kind: str, tmp_path: Path) -> None:
    model, options, message = BAD[kind]
    path = saved(tmp_path, model)
    before = listing(tmp_path)
    with pytest.raises((TraceError, UsageError), match=message):
        export(path, **options)
    assert listing(tmp_path) == before


def test_ids_without_a_table_need_their_number(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, one_hot_ids(), vocab_size=VOCABULARY)
    assert bundle.manifest.vocab_size == VOCABULARY


def test_sum_over_the_batch_runs_alone(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, text_model(extend=sum_of_batch), batching=False)
    assert not bundle.manifest.batching


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no model", b"\x08\x08" * 50])
def test_other_bytes_are_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    outcome = run_here([tmp_path / "model.onnx", "--to", "onnx"], capsys)
    assert_refused(outcome, "model.onnx")


def test_features_are_the_input(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, sound_model())
    assert bundle.manifest.inputs == ("input_features",)
    assert bundle.manifest.features is not None
    assert bundle.manifest.features.count == 5
    assert json.loads((bundle.path / "parity.json").read_text())["checked"]
