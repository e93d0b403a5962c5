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

from aftexport.domain import DOMAIN
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, Provider
from aftexport.engines.widening import widen
from aftexport.operators import OnnxOperator
from aftexport.parity.case import Array
from aftexport.registry import ALL_OPERATORS

_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


class Cone:
    """What computes one tensor of a model from others, as a model of its own.

    Args:
        model: with its weights.
        target: the tensor.
        given: what it starts from, with the values; those that are not needed are left out.

    Attributes:
        model: with an input for each of ``given`` that is needed.
        inputs: their values.
    """

    def __init__(self, model: onnx.ModelProto, target: str, given: Mapping[str, Array]) -> None:
        known = {name: value for name, value in given.items() if name != target}
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
            nodes, "cone", inputs, [onnx.ValueInfoProto(name=target)], weights
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
        """The node whose result the tensor is."""
        found: onnx.NodeProto = next(n for n in self.model.graph.node if self._target in n.output)
        return found

    def run(self, *, fused: bool, provider: Provider = "cpu") -> Array:
        """Computes the tensor in ONNX Runtime; see ``OnnxRuntimeEngine``."""
        engine = OnnxRuntimeEngine(self.model.SerializeToString(), fused=fused, provider=provider)
        return engine.run(self.inputs)[self._target]

    def run_wide(self) -> Array:
        """Computes the tensor in float64, custom operators by their bodies."""
        model = _widened(onnx.inliner.inline_local_functions(self.model))
        # ONNX's reference scans forwards along the first axis alone; ONNX Runtime does it all,
        # but has no Gelu in float64.
        if _scans(model.graph):
            engine = OnnxRuntimeEngine(model.SerializeToString(), fused=False)
            return engine.run(self._wide_inputs())[self._target]
        return self._referred(model, [])

    def run_defined(self) -> Array:
        """Computes the tensor in float64, custom operators by their definitions.

        Standard operators are those of the ONNX standard's own reference.
        """
        model = _widened(self.model)
        del model.functions[:]
        used = {n.op_type for n in model.graph.node if n.domain == DOMAIN}
        return self._referred(model, [_definition(ALL_OPERATORS[name]) for name in sorted(used)])

    def _referred(self, model: onnx.ModelProto, own: list[type[OpRun]]) -> Array:
        with np.errstate(all="ignore"):  # weights that overflowed are infinite
            evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=[_GELU, *own])
            outputs: Any = evaluator.run(None, self._wide_inputs())
            return np.asarray(outputs[0])

    def _wide_inputs(self) -> dict[str, Array]:
        return {
            name: value.astype(np.float64) if value.dtype.kind == "f" else value
            for name, value in self.inputs.items()
        }

    def with_attribute(self, name: str, value: str) -> "Cone | None":
        """The same with another setting of its custom nodes; None where none has it so far."""
        changed = self._copy()
        found = [
            attribute
            for node in changed.model.graph.node
            if node.domain == DOMAIN
            for attribute in node.attribute
            if attribute.name == name and attribute.s.decode() != value
        ]
        for attribute in found:
            attribute.s = value.encode()
        return changed if found else None

    def transposed(self, weight: str) -> "Cone":
        """The same with a square weight transposed."""
        changed = self._copy()
        for tensor in changed.model.graph.initializer:
            if tensor.name == weight:
                array = onnx.numpy_helper.to_array(tensor).T.copy()
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, weight))
        return changed

    def _copy(self) -> "Cone":
        copy = object.__new__(Cone)
        copy.inputs, copy._target = self.inputs, self._target
        copy.model = onnx.ModelProto()
        copy.model.CopyFrom(self.model)
        return copy


def _nodes(graph: onnx.GraphProto, target: str, known: Collection[str]) -> list[onnx.NodeProto]:
    """The nodes that ``target`` depends on down to what is ``known``, in order."""
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


def _gelu(self: Any, x: Array, approximate: str = "none") -> tuple[Array]:
    wide = torch.from_numpy(np.array(x))
    return (torch.nn.functional.gelu(wide, approximate=approximate).numpy(),)


_GELU = type("Gelu", (OpRun,), {"op_domain": "", "_run": _gelu})
"""Which ONNX's reference evaluator lacks."""


def _definition(operator: OnnxOperator) -> type[OpRun]:
    """The operator for ONNX's reference evaluator, by its definition."""

    def run(self: Any, *inputs: Array, **_: object) -> tuple[Array, ...]:
        given = {a.name: onnx.helper.get_attribute_value(a) for a in self.onnx_node.attribute}
        attributes = {}
        for attribute in operator.attributes:
            value = given.get(attribute.name, attribute.default)
            attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
        tensors = [torch.from_numpy(np.array(array)) for array in inputs]
        with torch.inference_mode():
            return tuple(t.numpy() for t in operator.expected(*tensors, **attributes))

    return type(operator.op_type, (OpRun,), {"op_domain": DOMAIN, "_run": run})


def _scans(graph: onnx.GraphProto) -> bool:
    inner = (a.g for node in graph.node for a in node.attribute if a.HasField("g"))
    return any(node.op_type == "Scan" for node in graph.node) or any(map(_scans, inner))


def _widened(model: onnx.ModelProto) -> onnx.ModelProto:
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    widen(wide, _NARROW, TensorProto.DOUBLE)
    return wide
