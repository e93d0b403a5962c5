"""Shapes of all values of a graph, from runs at several sizes.

The shapes in a file are incomplete, and equal names of dims prove nothing. An axis is dynamic if
its size differs between runs, and fixed otherwise.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftexport.operators.domain import opset_of

Arrays = Mapping[str, NDArray[np.generic]]
Naming = Literal["apart", "alike", "none"]

_SIZES = ((2, 7), (3, 5))
"""The batch and tokens of the runs that show which axes are dynamic."""
_NAMINGS: Sequence[Naming] = ("apart", "alike", "none")
"""The ways to choose sizes by the names of dynamic dims, in the order of trial.

apart: a different size for each name, since queries and keys may be different sequences.
alike: the batch or the tokens for each name, by its first dim: one axis may have several names.
none: the batch for the first dim, the tokens for all others.
"""
_EDGE_SIZES = ((1, 1), (2, 33))
"""The batch and tokens of runs at the edge, skipped if the model does not accept the sizes."""
_LONG_TOKENS = 269
"""The tokens of a document that is long enough to show the effect of blocks, crops and clamps.

Of the values inside the graph, only shapes, sizes and conditions are kept.
"""
_SHAPE_OF = "shape of "
_MOVES_OF_SIZES = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Operators whose result is the same number in another type or shape."""


class NoRunnableSizes(Exception):  # noqa: N818, an outcome and not an error
    """The reason why the model runs at none of the sizes that were tried."""


@dataclass(frozen=True)
class ProbedGraph:
    """The values of a graph in runs at different sizes."""

    model: onnx.ModelProto  # the model that was run
    runs: Sequence[Arrays]  # the values by name, in the runs that show which axes are dynamic
    edge_runs: Sequence[Arrays]  # the values by name, in runs at the edge
    naming: Naming
    # A run of ``_LONG_TOKENS`` tokens, or as many as the model accepts: inputs and outputs, all
    # shapes, and conditions and sizes inside the graph. It is empty if the model does not accept
    # more tokens than in the other runs.
    long_run: Arrays
    _changing: MutableMapping[ir.Value, bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def opset(self) -> int:
        """The opset of the standard operators."""
        return opset_of(self.model)

    def constant(self, value: ir.Value | None) -> NDArray[np.generic] | None:
        """Return the numbers of an initializer, None for a computed value."""
        if value is None or value.const_value is None or value.is_graph_input():
            return None
        return value.const_value.numpy()

    def has(self, value: ir.Value) -> bool:
        """Return whether the graph had a value when it was probed."""
        return str(value.name) in self.runs[0]

    def fixed_value(self, value: ir.Value | None) -> NDArray[np.generic] | None:
        """Return a constant or a value that is computed from fixed sizes, None for any other."""
        if value is None:
            return None
        if any_above(value, self._changing, self._is_changing):
            return None
        return self._repeated(value)

    def _is_changing(self, value: ir.Value) -> bool | None:
        if self._repeated(value) is None:
            return True
        # A branch or clamp may keep a value the same only for short documents.
        return False if value.producer() is None or _is_size(value) else None

    def _repeated(self, value: ir.Value) -> NDArray[np.generic] | None:
        """Return a constant, or a value that was the same in every run that kept it."""
        array = self.constant(value)
        if array is not None or value.producer() is None:
            return array
        arrays = self.in_every_run(value)
        if arrays is None or not all(np.array_equal(a, arrays[0]) for a in arrays):
            return None
        return arrays[0]

    def in_every_run(self, value: ir.Value) -> list[NDArray[np.generic]] | None:
        """Return a value in every run, None if a run lacks it; the long run may lack it."""
        name = str(value.name)
        arrays = [run[name] for run in (*self.runs, *self.edge_runs) if name in run]
        if len(arrays) < len(self.runs) + len(self.edge_runs):
            return None
        return [*arrays, self.long_run[name]] if name in self.long_run else arrays

    def number(self, value: ir.Value) -> float | None:
        """Return a floating-point value of one number that is the same at every size, else None."""
        array = self._first(value)
        if array is None or array.size != 1 or not self.is_float(value):
            return None
        array = self.fixed_value(value)
        return None if array is None else float(array.reshape(()))

    def size(self, value: ir.Value) -> tuple[int, ...] | None:
        """Return the size of a dim that a value of one number holds, in the order of ``shapes``.

        Return None for a value that is anything but one entry of a shape, as a number of its own.
        """
        array = self._first(value)
        if array is None or array.size != 1 or array.dtype.kind not in "if":
            return None
        entry = value
        while (node := entry.producer()) is not None and node.op_type in _MOVES_OF_SIZES:
            if _is_size(entry) or node.inputs[0] is None:
                break
            entry = node.inputs[0]
        first, arrays = self._first(entry), self.in_every_run(entry)
        if not _is_size(entry) or arrays is None or first is None or first.size != 1:
            return None
        kept = [*arrays[: len(self.runs)], *arrays[len(self.runs) + len(self.edge_runs) :]]
        sizes = tuple(int(array.reshape(())) for array in kept)
        is_long = len(sizes) == len(self.runs) + bool(self.long_run)
        return sizes if is_long and min(sizes) > 0 and len(set(sizes)) > 1 else None

    def shapes(self, value: ir.Value | None) -> list[tuple[int, ...]] | None:
        """Return the shape in every run, None if there is no value or a run lacks it."""
        if value is None:
            return None
        array, name = self.constant(value), str(value.name)
        if array is not None:
            return [array.shape] * (len(self.runs) + bool(self.long_run))
        if any(name not in run for run in self.runs):
            return None
        shapes = [run[name].shape for run in self.runs]
        return (
            [*shapes, tuple(map(int, self.long_run[_SHAPE_OF + name]))] if self.long_run else shapes
        )

    def dtype(self, value: ir.Value) -> np.dtype[np.generic]:
        """Return the type of the numbers."""
        array = self.constant(value)
        return array.dtype if array is not None else self.runs[0][str(value.name)].dtype

    def is_float(self, value: ir.Value) -> bool:
        """Return whether the numbers are floating-point."""
        array = self._first(value)
        return array is not None and (array.dtype.kind == "f" or "float" in array.dtype.name)

    def is_boolean(self, value: ir.Value) -> bool:
        """Return whether a value is boolean."""
        array = self._first(value)
        return array is not None and array.dtype.kind == "b"

    def _first(self, value: ir.Value) -> NDArray[np.generic] | None:
        """Return a constant, or a value in the first run."""
        array = self.constant(value)
        return array if array is not None else self.runs[0].get(str(value.name))

    def run_at(self, values: Iterable[ir.Value], batch: int, tokens: int) -> Arrays | None:
        """Compute some values of the graph, and no others, at other sizes.

        Return the values and the inputs by name, None if the model does not run at these sizes.
        """
        model = _with_outputs(self.model, [str(value.name) for value in values])
        try:
            engine = _engine(model)
            return _run(engine, self.model, batch, tokens, self.naming)
        except EngineError:
            return None


def depends_on_inputs(value: ir.Value) -> bool:
    """Return whether a value depends on the numbers in the inputs, and not only on their shapes."""
    return any_above(value, _DEPENDING, _depends)


_DEPENDING: MutableMapping[ir.Value, bool] = weakref.WeakKeyDictionary()


def _depends(value: ir.Value) -> bool | None:
    node = value.producer()
    if node is None:
        return value.const_value is None
    return False if node.op_type in ("Shape", "Size") else None


def _is_size(value: ir.Value) -> bool:
    """Return whether a value is computed from the shape of another."""
    node = value.producer()
    if node is not None and node.op_type in ("Gather", "Slice"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is not None and node.op_type in ("Shape", "Size")


def probe(model: onnx.ModelProto) -> ProbedGraph:
    """Run a model at several sizes; raises NoRunnableSizes with the reason of the runtime."""
    names = [name for node in model.graph.node for name in node.output if name]
    traced = _with_outputs(model, names)
    try:
        engine = _engine(traced)
    except (EngineError, ValueError) as error:
        raise NoRunnableSizes(str(error)) from error
    reason = ""
    for naming in _NAMINGS:
        runs = []
        try:
            for batch, tokens in _SIZES:
                runs.append(_run(engine, model, batch, tokens, naming))
        except EngineError as error:
            reason = reason or str(error)
            continue
        edge_runs = []
        for batch, tokens in _EDGE_SIZES:
            try:
                edge_runs.append(_run(engine, model, batch, tokens, naming))
            except EngineError:
                continue  # not every model takes one token, or 33
        return ProbedGraph(model, runs, edge_runs, naming, _run_long(model, runs[0], naming))
    raise NoRunnableSizes(reason)


def _run_long(model: onnx.ModelProto, run: Arrays, naming: Naming) -> Arrays:
    """Return ``ProbedGraph.long_run`` of a model, of which another run is known."""
    inputs = {value.name for value in model.graph.input}
    outputs = [value.name for value in model.graph.output]
    kept = [name for name, array in run.items() if name not in inputs and _is_kept(array)]
    wanted = dict.fromkeys((*outputs, *kept, *(_SHAPE_OF + name for name in run)))
    described = _with_outputs(model, list(wanted))
    described.graph.node.extend(
        onnx.helper.make_node("Shape", [name], [_SHAPE_OF + name]) for name in run
    )
    engine = _engine(described)
    arrays: Arrays = {}
    taken, refused, tokens = _EDGE_SIZES[-1][1], _LONG_TOKENS + 1, _LONG_TOKENS
    while tokens > taken:
        try:
            arrays, taken = _run(engine, model, 1, tokens, naming), tokens
        except EngineError:
            refused = tokens
        tokens = (taken + refused) // 2
    return arrays


def _is_kept(array: NDArray[np.generic]) -> bool:
    """Return whether an array is a size or a condition on at most two positions."""
    if array.dtype.kind == "b":
        return len([n for n in array.shape if n > 1]) <= 2
    return array.dtype.kind == "i" and array.ndim <= 1


def _engine(model: onnx.ModelProto) -> OnnxRuntimeEngine:
    """Make a runner without optimization: ONNX Runtime 1.31 crashes on some graphs otherwise."""
    return OnnxRuntimeEngine(model.SerializeToString(), threads=1, fused=False, optimized=False)


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.output[:]
    del changed.graph.value_info[:]
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return changed


def _run(
    engine: OnnxRuntimeEngine, model: onnx.ModelProto, batch: int, tokens: int, naming: Naming
) -> Arrays:
    constants = {tensor.name for tensor in model.graph.initializer}
    sizes: dict[str, int] = {}
    free = itertools.count(batch), itertools.count(tokens)
    random = np.random.default_rng(0)
    inputs: dict[str, NDArray[np.generic]] = {}
    for graph_input in model.graph.input:
        if graph_input.name in constants:
            continue
        shape = []
        for index, dim in enumerate(graph_input.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value > 0:
                shape.append(dim.dim_value)
                continue
            place = min(index, 1)
            if naming == "apart":
                name = dim.dim_param or f"{graph_input.name} {index}"
                if name not in sizes:
                    sizes[name] = next(free[place])
            else:
                name = (naming == "alike" and dim.dim_param) or str(place)
                sizes.setdefault(name, (batch, tokens)[place])
            shape.append(sizes[name])
        dtype = onnx.helper.tensor_dtype_to_np_dtype(graph_input.type.tensor_type.elem_type)
        if dtype.kind in "iub":
            # 1 is a valid token id, a valid length, and the mask value of a token that counts.
            inputs[graph_input.name] = np.ones(shape, dtype)
        else:
            inputs[graph_input.name] = random.standard_normal(shape).astype(dtype)
    # Sequences of tensors are lists without a shape.
    outputs = engine.run(inputs).items()
    return inputs | {name: array for name, array in outputs if isinstance(array, np.ndarray)}


def any_above(
    value: ir.Value,
    known: MutableMapping[ir.Value, bool],  # the results so far; new results are added
    # A predicate that returns None if the inputs of a value's node decide.
    decide: Callable[[ir.Value], bool | None],
) -> bool:
    """Return whether ``decide`` holds for a value or any value that it is computed from."""
    pending = [value]
    while pending:
        last = pending[-1]
        if last not in known:
            answer = decide(last)
            node = last.producer()
            inputs = [v for v in node.inputs if v is not None] if node is not None else []
            if answer is None and any(known.get(v) for v in inputs):
                answer = True
            unknown = [v for v in inputs if v not in known] if answer is None else []
            if unknown:
                pending += unknown
                continue
            known[last] = bool(answer)
        pending.pop()
    return known[value]
