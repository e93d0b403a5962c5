"""The error of a PyTorch model whose documents change each other, with the operator to blame.

Apart from ``independence``, which needs no torch.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from aftexport.bundle.golden import Array
from aftexport.capture.shape_guards import last_own_line
from aftexport.errors import TraceError
from aftexport.parity.comparison import Differences
from aftexport.pipeline.independence import Breach
from aftexport.system.contract import main_input
from aftexport.system.internals.torch_operators import OpOverload

_BOUND = 1e-3
"""Bound of a difference: the program may be in float16, and a batch sums in another order."""


_LAYOUT = frozenset({"reshape", "flatten", "unflatten", "contiguous", "clone", "cat", "pad",
                     "constant_pad_nd", "to", "_to_copy", "stack", "index_select",
                     "sym_size"})  # fmt: skip


def breach_error(breach: Breach, program: ExportedProgram) -> TraceError:
    """Return the error that names the operator through which documents change each other."""
    operator = _first_divergence(program, breach.inputs, breach.row, breach.alone())
    if breach.is_of_padding:
        named = f": {operator} is the first whose result differs" if operator else ""
        return TraceError(
            "Expected scores that do not depend on padding, got a difference of "
            f"{breach.error:.1e} if a longer document shares the run{named}.",
            "Mask the tokens from lengths on, or add --no-batching, which runs each document "
            "separately.",
        )
    named = f": {operator} computes over the batch" if operator else ""
    return TraceError(
        "Expected scores that do not depend on the other documents of a batch, got a difference "
        f"of {breach.error:.1e}{named}.",
        "Compute each document separately, or add --no-batching, which runs each document "
        "separately.",
    )


def _first_divergence(
    program: ExportedProgram, batch: Mapping[str, Array], row: int, alone: Mapping[str, Array]
) -> str:
    """Return the operator and the user's line at which a document differs; empty if none does.

    This is the first operator whose result has a batch axis and differs, or the one that
    computed its operand over the whole batch, as a maximum does.
    """
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    main = main_input(batch)
    shape = next(n for n in module.graph.nodes if n.name == main).meta["val"].shape
    tokens = alone[main].shape[1]
    together, single = _results(module, batch), _results(module, alone)
    differing: dict[fx.Node, bool] = {}  # to whether the result has a batch axis
    compared = set[fx.Node]()
    for node in module.graph.nodes:
        if node not in together:
            continue
        parts = (
            _part(node, together[node], shape, row, tokens),
            _part(node, single[node], shape, 0, tokens),
        )
        if parts[0] is None or parts[1] is None:
            continue
        compared.add(node)
        if _is_different(parts[0], parts[1]):
            differing[node] = any(_is_axis(n, shape[0]) for n in node.meta["val"].shape)
    node = next((n for n, has_batch in differing.items() if has_batch), None)
    while node is not None:
        over_batch = [n for n in node.all_input_nodes if differing.get(n) is False]
        if not over_batch:
            return _name(_mixing(node, compared))
        node = over_batch[0]
    return ""


def _mixing(node: fx.Node, compared: Collection[fx.Node]) -> fx.Node:
    """Return the nearest operator that mixes entries, among those that could not be compared.

    A tensor of windows has a different number of windows in each run. So the first visible
    difference is at the operator that joins the windows.
    """
    waiting, seen = [node], {node}
    while waiting:
        candidate = waiting.pop(0)
        if not _is_elementwise_or_layout(candidate):
            return candidate
        before = [n for n in candidate.all_input_nodes if n not in seen and n not in compared]
        waiting += [n for n in before if n.op == "call_function"]
        seen.update(before)
    return node


def _is_elementwise_or_layout(node: fx.Node) -> bool:
    """Return whether an operator is elementwise, or only moves numbers."""
    if not isinstance(node.target, OpOverload):
        return True
    own = node.target._schema.name.rpartition("::")[2]
    return torch.Tag.pointwise in node.target.tags or node.target.is_view or own in _LAYOUT


class _Recorder(fx.Interpreter):
    """An interpreter that keeps each operator's result."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.results: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor):
            self.results[n] = result.clone()  # a later operator may write to the tensor
        return result


def _results(module: fx.GraphModule, inputs: Mapping[str, Array]) -> dict[fx.Node, Tensor]:
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    recorder = _Recorder(module)
    with torch.inference_mode():
        recorder.run(*(torch.from_numpy(np.array(inputs[name])) for name in names))
    return recorder.results


def _part(node: fx.Node, result: Tensor, shape: torch.Size, row: int, tokens: int) -> Tensor | None:
    """Return the document's part of a result; None if an axis is neither batch nor tokens."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    for axis, size in enumerate(value.shape):
        if _is_axis(size, shape[0]):
            result = result.narrow(axis, row, 1)
        elif _is_axis(size, shape[1]):
            result = result.narrow(axis, 0, tokens)
        elif isinstance(size, torch.SymInt):
            return None
    return result


def _is_axis(size: int | torch.SymInt, axis: int | torch.SymInt) -> bool:
    """Return whether a dynamic size is that of an axis of the inputs."""
    # The operator == raises an error for a size that depends on values, as that of x[ids > 10].
    return isinstance(size, torch.SymInt) and str(size) == str(axis)


def _is_different(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    pair = (one.double().numpy(), other.double().numpy())
    if np.array_equal(*pair, equal_nan=True):  # masked logits may be infinite
        return False
    finite = np.isfinite(pair[0]) & np.isfinite(pair[1])
    return not (
        np.array_equal(pair[0][~finite], pair[1][~finite], equal_nan=True)
        and Differences.between(pair[0][finite], pair[1][finite]).error <= _BOUND
    )


def _name(node: fx.Node) -> str:
    """Return an operator's name with the user's line, as in ``max (model.py, line 9)``."""
    operator = str(node.meta.get("torch_fn", ("", node.target))[1]).rpartition(".")[2]
    line = last_own_line(node.meta)
    return f"{operator} ({line})" if line else operator
