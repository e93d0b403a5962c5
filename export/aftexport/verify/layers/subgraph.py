"""The part of a model that computes one tensor from others."""

from collections.abc import Collection, Mapping

import onnx

from aftexport.bundle.golden import Array
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, Provider
from aftexport.operators.domain import DOMAIN
from aftexport.verify.layers.float64 import run_bodies, run_definitions


class Subgraph:
    """A separate model that computes one tensor of a model from others.

    Args:
        model: the model with its weights.
        target: name of the computed tensor.
        starts: the starting tensors with their values; unneeded ones are left out.

    Attributes:
        model: the separate model, with an input for each needed tensor of ``starts``.
        inputs: the values of the inputs.
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
        """Compute the tensor in float64; custom operators run as their definitions."""
        return run_definitions(self.model, self.inputs)

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
