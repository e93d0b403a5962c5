"""Small ONNX models of texts, node by node, with chosen inputs, types and faults."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from aftexport.bundle.bundle import Bundle
from aftexport.pipeline.export import export

VOCABULARY = 40
LABELS = ("letter", "invoice", "contract")
ALL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_DIM = 8


class Builder:
    """The nodes and the constants of a graph."""

    def __init__(self, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.dtype = dtype
        self._random = np.random.default_rng(0)

    def weight(self, *shape: int) -> str:
        return self.constant((self._random.standard_normal(shape)).astype(self.dtype))

    def constant(self, array: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op_type: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        name = output or f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name


def mean_of_tokens(build: Builder, inputs: Sequence[str]) -> str:
    """Return the mean of the tokens' vectors by the mask, ``[batch, 8]``."""
    float_type = helper.np_dtype_to_tensor_dtype(np.dtype(build.dtype))
    x = build.node("Gather", build.weight(VOCABULARY, _DIM), "input_ids")
    if "token_type_ids" in inputs:
        kinds = build.node("Gather", build.weight(2, _DIM), "token_type_ids")
        x = build.node("Add", x, kinds)
    if "position_ids" in inputs:
        places = build.node("Gather", build.weight(16, _DIM), "position_ids")
        x = build.node("Add", x, places)
    axes = build.constant(np.array([1]))
    if "attention_mask" not in inputs:
        return build.node("ReduceMean", x, axes, keepdims=0)
    mask = build.node("Cast", "attention_mask", to=float_type)
    column = build.node("Unsqueeze", mask, build.constant(np.array([2])))
    total = build.node("ReduceSum", build.node("Mul", x, column), axes, keepdims=0)
    return build.node("Div", total, build.node("ReduceSum", mask, axes, keepdims=1))


def text_model(
    inputs: Sequence[str] = ("input_ids", "attention_mask"),
    *,
    types: dict[str, int] | None = None,
    axes: Sequence[object] = ("b", "s"),
    output: str = "logits",
    dtype: type[np.floating[Any]] = np.float32,
    extend: Callable[[Builder, str], str] | None = None,
) -> onnx.ModelProto:
    """Return a classifier of the mean of its tokens.

    ``types`` are element types other than int64 by the name of the input. ``extend`` adds nodes
    between the mean and the head.
    """
    build = Builder(dtype)
    pooled = mean_of_tokens(build, inputs)
    if extend is not None:
        pooled = extend(build, pooled)
    build.node("MatMul", pooled, build.weight(_DIM, len(LABELS)), output=output)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    given = [
        helper.make_tensor_value_info(name, (types or {}).get(name, TensorProto.INT64), axes)
        for name in inputs
    ]
    results = [helper.make_tensor_value_info(output, element, ["b", len(LABELS)])]
    graph = helper.make_graph(build.nodes, "text", given, results, build.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def bundle_of(folder: Path, model: onnx.ModelProto, **options: Any) -> Bundle:
    """Export a model to a bundle in a folder."""
    path = saved(folder, model)
    return export(path, out=folder / "out.bundle", labels=list(LABELS), **options)


def answers(path: Path, ids: Sequence[int]) -> Any:
    """Return the logits of one document by plain ONNX Runtime and the file's own inputs."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    count = len(ids)
    values: dict[str, Any] = {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, count)),
        "token_type_ids": np.zeros((1, count)),
        "position_ids": np.arange(count)[None],
    }
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_,
             "tensor(float)": np.float32}  # fmt: skip
    feeds = {i.name: values[i.name].astype(kinds[i.type]) for i in session.get_inputs()}
    return session.run(None, feeds)[0][0]
