"""The part of a model that computes one tensor from others."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.reference
import torch
from onnx import TensorProto
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_scan

from aftexport.bundle.golden import Array
from aftexport.engines.cast_graph import widen
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, Provider
from aftexport.operators.domain import DOMAIN, operator_name, operators_in
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.operators.torch_ops import expected_outputs


class Subgraph:
    """A separate model that computes one tensor of a model from others.

    ``model`` has an input for each tensor of ``starts`` that it needs, and ``inputs`` has their
    values.
    """

    def __init__(self, model: onnx.ModelProto, target: str, starts: Mapping[str, Array]) -> None:
        known = {name: value for name, value in starts.items() if name != target}
        nodes = _nodes(model.graph, target, known)
        read = {name for node in nodes for name in _reads(node)}
        self.inputs = {name: value for name, value in known.items() if name in read}
        weights = [tensor for tensor in model.graph.initializer if tensor.name in read]
        inputs = [
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim
            )
            for name, value in self.inputs.items()
        ]
        graph = onnx.helper.make_graph(
            nodes, "subgraph", inputs, [onnx.ValueInfoProto(name=target)], weights
        )
        self._target = target
        self.model = onnx.helper.make_model(
            graph,
            functions=model.functions,
            opset_imports=model.opset_import,
            ir_version=model.ir_version,
        )

    @property
    def node(self) -> onnx.NodeProto:
        """The node that computes the tensor."""
        node: onnx.NodeProto = next(n for n in self.model.graph.node if self._target in n.output)
        return node

    def run(self, *, fused: bool, provider: Provider = "cpu") -> Array:
        """Compute the tensor in ONNX Runtime; see ``OnnxRuntimeEngine``."""
        engine = OnnxRuntimeEngine(self.model.SerializeToString(), fused=fused, provider=provider)
        return engine.run(self.inputs)[self._target]

    def run_wide(self) -> Array:
        """Compute the tensor in float64; custom operators run as their bodies."""
        return run_bodies(self.model, self.inputs)

    def run_defined(self) -> Array:
        """Compute the tensor in float64; custom operators run as their definitions in PyTorch."""
        bare = onnx.ModelProto()
        bare.CopyFrom(self.model)
        del bare.functions[:]
        return _run(bare, self.inputs, [_definition(name) for name in operators_in(self.model)])

    def in_float32(self) -> "Subgraph | None":
        """Return a copy with products in float32; None if all products already are."""
        changed = self._copy()
        narrow = [
            attribute
            for node in changed.model.graph.node
            if node.domain == DOMAIN
            for attribute in node.attribute
            if attribute.name == "precision" and attribute.s != b"fp32"
        ]
        for attribute in narrow:
            attribute.s = b"fp32"
        return changed if narrow else None

    def transposed(self, weight: str) -> "Subgraph":
        """Return a copy with a square weight transposed."""
        changed = self._copy()
        for tensor in changed.model.graph.initializer:
            if tensor.name == weight:
                array = onnx.numpy_helper.to_array(tensor).T.copy()
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, weight))
        return changed

    def _copy(self) -> "Subgraph":
        copy = object.__new__(Subgraph)
        copy.inputs, copy._target = self.inputs, self._target
        copy.model = onnx.ModelProto()
        copy.model.CopyFrom(self.model)
        return copy


def _nodes(graph: onnx.GraphProto, target: str, known: Collection[str]) -> list[onnx.NodeProto]:
    """Return the nodes that compute ``target`` from ``known`` tensors, in order."""
    producers = {name: i for i, node in enumerate(graph.node) for name in node.output}
    needed, left = set[int](), [target]
    while left:
        index = producers.get(left.pop())
        if index is None or index in needed:
            continue
        needed.add(index)
        left += [name for name in _reads(graph.node[index]) if name not in known]
    return [graph.node[i] for i in sorted(needed)]


def _reads(node: onnx.NodeProto) -> set[str]:
    inner = (n for a in node.attribute if a.HasField("g") for n in a.g.node)
    return {name for name in node.input if name}.union(*(_reads(n) for n in inner))


_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def run_bodies(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> Array:
    """Return the model's first output; custom operators run as their bodies."""
    # Inline the bodies, because the evaluator does not resolve their attribute references.
    return _run(onnx.inliner.inline_local_functions(model), inputs, [])


def _run(model: onnx.ModelProto, inputs: Mapping[str, Array], own: list[type[OpRun]]) -> Array:
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    widen(wide, _NARROW, TensorProto.DOUBLE)
    wide_inputs = {
        name: value.astype(np.float64) if value.dtype.kind == "f" else value
        for name, value in inputs.items()
    }
    with np.errstate(all="ignore"):  # overflowed weights are infinite
        evaluator = onnx.reference.ReferenceEvaluator(wide, new_ops=[Scan, _ERF, _GELU, *own])
        outputs: Any = evaluator.run(None, wide_inputs)
    return np.asarray(outputs[0])


def _definition(op_type: str) -> type[OpRun]:
    operator = ALL_OPERATORS[operator_name(op_type)]

    def run(self: Any, *inputs: Array, **_: object) -> tuple[Array, ...]:
        attributes = operator.attributes_of(self.onnx_node)
        tensors = [torch.from_numpy(np.array(array)) for array in inputs]
        with torch.inference_mode():
            return tuple(t.numpy() for t in expected_outputs(operator, *tensors, **attributes))

    return type(op_type, (OpRun,), {"op_domain": DOMAIN, "_run": run})


def _gelu(self: Any, x: Array, approximate: str = "none") -> tuple[Array]:
    wide = torch.from_numpy(np.array(x))
    return (torch.nn.functional.gelu(wide, approximate=approximate).numpy(),)


_GELU = type("Gelu", (OpRun,), {"op_domain": "", "_run": _gelu})
"""The operator Gelu, which the reference evaluator lacks."""


def _erf(self: Any, x: Array) -> tuple[Array]:
    return (torch.special.erf(torch.from_numpy(np.array(x))).numpy(),)


_ERF = type("Erf", (OpRun,), {"op_domain": "", "_run": _erf})
"""The operator Erf, which the reference evaluator computes in float32."""


class Scan(op_scan.Scan):
    """A Scan along any axis and in both directions.

    The evaluator's own Scan only runs forwards along the first axis.
    """

    op_domain = ""

    def __init__(self, node: onnx.NodeProto, parameters: dict[str, Any]) -> None:
        OpRun.__init__(self, node, parameters)
        inner: Any = self
        self.input_names, self.output_names = inner.body.input_names, inner.body.output_names
        count = inner.num_scan_inputs
        outputs = len(self.output_names) - (len(self.input_names) - count)
        self._inputs = _ways(inner.scan_input_axes, inner.scan_input_directions, count)
        self._outputs = _ways(inner.scan_output_axes, inner.scan_output_directions, outputs)
        inner.scan_output_axes = inner.scan_output_directions = None
        self.input_axes_ = self.input_directions_ = [0] * count

    def _run(self, *args: Array, **attributes: Any) -> tuple[Array, ...]:
        states = len(args) - len(self._inputs)
        scanned = [
            np.moveaxis(array, axis, 0)[::step]
            for array, (axis, step) in zip(args[states:], self._inputs, strict=True)
        ]
        forwards: Any = super()._run  # the method has no type annotations
        results = forwards(*args[:states], *scanned, **attributes)
        stacked = [
            np.moveaxis(array[::step], 0, axis)
            for array, (axis, step) in zip(results[states:], self._outputs, strict=True)
        ]
        return (*results[:states], *stacked)


def _ways(
    axes: list[int] | None, directions: list[int] | None, count: int
) -> list[tuple[int, int]]:
    """Return the axis and the step, 1 or -1, of each scanned tensor."""
    steps = [-1 if backwards else 1 for backwards in directions or [0] * count]
    return list(zip(axes or [0] * count, steps, strict=True))
