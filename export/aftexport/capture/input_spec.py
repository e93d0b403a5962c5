"""The inputs of a captured program, with their bounds."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from aftexport.capture.model_spec import InputSpec
from aftexport.capture.vocabulary import read_maximum, read_vocabulary
from aftexport.errors import TraceError, UsageError
from aftexport.extra_inputs import ExtraInput
from aftexport.system.contract import FEATURES, INPUTS, MAX_TOKENS, main_input

_aten = torch.ops.aten


def input_spec(
    program: ExportedProgram,
    # The number of ids by ``--vocab-size``; None to read it from the program.
    vocab_size: int | None = None,
    extras: Sequence[ExtraInput] = (),
) -> InputSpec:
    """Return the input specification of a captured program.

    Raises:
        TraceError: if inputs differ from those of ``capture`` or have fixed axes, or if
            ``vocab_size`` is None and the ids are not looked up in a table.
        UsageError: if ``vocab_size`` exceeds the rows of a table, or is for a model of features.
    """
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    names = tuple(map(str, program.graph_signature.user_inputs))
    by_name = {extra.name: extra for extra in extras}
    is_known = tuple(name for name in names if name not in by_name) in INPUTS
    if not (is_known and by_name.keys() <= set(names)):
        more = "".join(f", {name}" for name in by_name)
        raise TraceError(
            f"Expected a program with inputs (input_ids{more}), (input_features{more}) or one of "
            f"them with lengths, got ({', '.join(names)}).",
            "Export it with inputs named input_ids [batch, tokens] or input_features [batch, "
            "tokens, features] and, if used, lengths [batch]. Declare others by --input NAME=KIND.",
        )
    tokens = next(n for n in placeholders if n.name == main_input(names))
    shape = tokens.meta["val"].shape
    num_features = _num_features(tokens) if tokens.name == FEATURES else None
    for axis, size in zip(("batch", "tokens"), shape[:2], strict=True):
        if isinstance(size, int) and not (axis == "tokens" and size == 1):
            raise TraceError(
                f"Expected a program with a dynamic {axis} axis, got {axis} fixed at {size}.",
                "Pass dynamic_shapes to torch.export.export for batch and tokens.",
            )
    vocabulary = None
    if num_features is None:
        vocabulary = read_vocabulary(program, tokens, vocab_size)
    elif vocab_size is not None:
        raise UsageError(
            f"--vocab-size is for models of token ids, got {vocab_size} for a model of features.",
            "Leave --vocab-size out.",
        )
    upper = 1
    if not isinstance(shape[1], int):
        upper = min(upper_bound(program, shape[1]), _rows(program, shape[1].node.expr))
    return InputSpec(
        names,
        vocabulary.size if vocabulary else None,
        num_features,
        vocabulary.embedding if vocabulary else "",
        None if upper >= MAX_TOKENS else upper,
        tuple(
            _completed(program, node, by_name[node.name], tokens)
            for node in placeholders
            if node.name in by_name
        ),
    )


def _completed(program: ExportedProgram, node: Node, extra: ExtraInput, tokens: Node) -> ExtraInput:
    """Return the extra input of a program, with the maximum of its integers."""
    value = node.meta["val"]
    shape = [tokens.meta["val"].shape[0], *extra.shape(tokens.meta["val"].shape[1])]
    is_same = [str(size) for size in value.shape] == [str(size) for size in shape]
    if not is_same or str(value.dtype) != f"torch.{extra.dtype}":
        raise TraceError(
            f"Expected the input {extra.name} {extra.layout} in the program, got {value.dtype} "
            f"{list(value.shape)}.",
            "Correct --input, or export the program with such an input.",
        )
    if extra.dtype == "float32":
        return extra
    return extra.model_copy(update={"maximum": read_maximum(program, node, extra)})


def _num_features(tokens: Node) -> int:
    """Return the size of the last axis of ``input_features``."""
    value = tokens.meta["val"]
    fixed = value.shape[2] if value.ndim == 3 else None
    if not isinstance(fixed, int) or value.dtype != torch.float32:
        raise TraceError(
            "Expected input_features float32 [batch, tokens, features] with a fixed number of "
            f"features, got {value.dtype} {list(value.shape)}.",
            "Export the program with float32 features, and convert them in forward.",
        )
    return fixed


def upper_bound(program: ExportedProgram, size: torch.SymInt) -> int:
    """Return the upper bound of a size of tokens; ``MAX_TOKENS`` if it has none."""
    bounds = program.range_constraints.get(size.node.expr)
    # The upper bound of an unbounded axis is sympy's infinity, which int() refuses.
    is_bounded = bounds is not None and isinstance(bounds.upper, sympy.Integer)
    return min(int(bounds.upper), MAX_TOKENS) if is_bounded else MAX_TOKENS


_SAME_NUMBERS = frozenset((
    _aten.unsqueeze.default, _aten.expand.default, _aten.expand_as.default, _aten.view.default,
    _aten.reshape.default, _aten.repeat.default, _aten.to.dtype, _aten.to.device,
    _aten.to.dtype_layout, _aten.contiguous.default, _aten.clone.default, _aten._to_copy.default,
))  # fmt: skip


def _rows(program: ExportedProgram, tokens: sympy.Expr) -> int:
    """Return the maximum number of tokens for which every position embedding has a row."""
    max_tokens = MAX_TOKENS
    for node in program.graph.find_nodes(op="call_function", target=_aten.embedding.default):
        table: Any
        table, index = node.args[:2]
        needed = _end(index)
        if needed is not None and needed.free_symbols == {tokens}:
            rows = int(table.meta["val"].shape[0])
            ends = partial(needed.subs, tokens)
            max_tokens = bisect_right(range(1, max_tokens + 1), rows, key=ends)
    return max_tokens


def _end(index: Any) -> sympy.Expr | None:
    """Return one more than the largest position in ``index``; None unless it is a range."""
    more = 0
    while index.target in _SAME_NUMBERS or index.target is _aten.add.Tensor:
        if index.target is _aten.add.Tensor:
            if not isinstance(index.args[1], int):
                return None
            more += index.args[1]
        index = index.args[0]
    ends = {_aten.arange.default: 0, _aten.arange.start: 1, _aten.arange.start_step: 1}
    if index.target not in ends or len(index.args) > 2:
        return None
    end = index.args[ends[index.target]]
    symbol = end.meta["val"] if isinstance(end, Node) else end
    return symbol.node.expr + more if isinstance(symbol, torch.SymInt) else None
