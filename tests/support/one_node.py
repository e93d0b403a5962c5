"""A model of one custom node with its portable body, every axis dynamic, and its runs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import aftplugins
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.operators.schema import INTEGER_INPUTS, STATE_OUTPUT

Arrays = dict[str, np.ndarray]
Attributes = Mapping[str, int | float | str]


def open_session(model: onnx.ModelProto, library: Path | None) -> onnxruntime.InferenceSession:
    """Return a session on the CPU, with a kernel library or by the bodies."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # it would keep the memory of the longest document
    if library is not None:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@dataclass(frozen=True)
class OneNode:
    """A node without the absent inputs, for tensors of one type."""

    op_type: str
    attributes: tuple[tuple[str, int | float | str], ...]
    present: frozenset[str]
    dtype: str = "float32"
    opset: int = 20

    @classmethod
    def of(
        cls,
        op_type: str,
        attributes: Attributes,
        present: Collection[str],
        dtype: str = "float32",
        opset: int = 20,
    ) -> Self:
        return cls(op_type, tuple(attributes.items()), frozenset(present), dtype, opset)

    @classmethod
    def for_inputs(
        cls, op_type: str, attributes: Attributes, inputs: Arrays, opset: int = 20
    ) -> Self:
        """Return the node that takes inputs of these names and types."""
        dtype = next(str(x.dtype) for x in inputs.values() if x.dtype.kind == "f")
        return cls.of(op_type, attributes, inputs, dtype, opset)

    def node(self) -> onnx.NodeProto:
        operator = ALL_OPERATORS[self.op_type]
        names = [name if name in self.present else "" for name in operator.inputs]
        while not names[-1]:
            names.pop()
        attributes = dict(self.attributes) | PLUGIN_ATTRIBUTES
        return helper.make_node(self.op_type, names, self._outputs(), domain=DOMAIN, **attributes)

    def _outputs(self) -> list[str]:
        operator = ALL_OPERATORS[self.op_type]
        return [n for n in operator.outputs if n not in operator.optional or n in self.present]

    def model(self) -> onnx.ModelProto:
        operator, chosen = ALL_OPERATORS[self.op_type], dict(self.attributes)
        element = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        ranks = {n: len(s.split()) for n, s in zip(operator.inputs, operator.shapes, strict=True)}
        ranks |= dict.fromkeys(operator.outputs, 3)
        ranks[STATE_OUTPUT] = ranks.get("past_state", 3)

        def declared(name: str) -> onnx.ValueInfoProto:
            kind = onnx.TensorProto.INT64 if name in INTEGER_INPUTS else element
            axes = [f"{name}_{axis}" for axis in range(ranks[name])]
            return helper.make_tensor_value_info(name, kind, axes)

        inputs = [declared(name) for name in operator.inputs if name in self.present]
        outputs = [declared(name) for name in self._outputs()]
        settings = {a.name: str(chosen.get(a.name, a.default)) for a in operator.settings}
        return helper.make_model(
            helper.make_graph([self.node()], self.op_type, inputs, outputs),
            functions=[operator.function(settings, self.opset, self.present)],
            opset_imports=[
                helper.make_opsetid("", self.opset),
                helper.make_opsetid(DOMAIN, VERSION),
            ],
            ir_version=10,
        )

    def run(self, inputs: Arrays, *, kernel: bool = False) -> list[np.ndarray]:
        """Run the body, or the kernel if it is built; one session serves every shape."""
        if kernel and (reason := aftplugins.missing("onnxruntime")):
            pytest.skip(reason)
        results: list[np.ndarray] = _session(self, kernel).run(None, inputs)
        return results


@cache
def _session(node: OneNode, kernel: bool) -> onnxruntime.InferenceSession:
    return open_session(node.model(), aftplugins.library("onnxruntime") if kernel else None)
