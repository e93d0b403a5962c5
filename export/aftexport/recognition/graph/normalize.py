"""What differs between writers of one formula, taken out where a library does it."""

import onnx
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    IdentityEliminationPass,
    LiftConstantsToInitializersPass,
    NameFixPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
)
from onnxscript import optimizer

from aftexport.operators.domain import opset_of

MIN_OPSET = 18
"""The first opset that the operators' portable bodies are written in."""
TARGET_OPSET = 20
_FIRST_OVERRIDABLE_IR = 4
"""The first version of the file format where an initializer that is an input may be overridden."""


def normalize(model: onnx.ModelProto) -> ir.Model:
    """A copy, with functions inlined, constants folded and common subexpressions computed once.

    Models of an opset that the portable bodies do not know are converted to a later one. Where the
    file's format asks for every initializer among the inputs, they are inputs no more.
    """
    is_old = model.ir_version < _FIRST_OVERRIDABLE_IR
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    if opset_of(model) < MIN_OPSET:
        model = onnx.version_converter.convert_version(model, TARGET_OPSET)
    graph = ir.from_proto(model)
    if is_old:
        RemoveInitializersFromInputsPass()(graph)
    LiftConstantsToInitializersPass()(graph)
    optimizer.fold_constants(graph)
    LiftConstantsToInitializersPass()(graph)
    for step in (
        IdentityEliminationPass(),
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        NameFixPass(),
    ):
        step(graph)
    return graph
