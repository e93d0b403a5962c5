"""A graph run at several sizes, to know the shape of everything in it.

Shapes in a file are incomplete, and names of its dims prove nothing: what differs from run to run
is a dynamic axis, what does not is a fixed one.
"""

import itertools
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftexport.operators.domain import opset_of
from aftexport.recognition.graph.upstream import any_above

Arrays = Mapping[str, NDArray[np.generic]]
Naming = Literal["apart", "alike", "none"]

_SIZES = ((2, 7), (3, 5))
"""Of the runs that axes are told apart by."""
_NAMINGS: Sequence[Naming] = ("apart", "alike", "none")
"""What the names of dynamic dims say, the most first: one size for each name, as queries and keys
may be of different sequences; which dims are equal, as exporters give one axis several names; or
nothing.
"""
_EDGE_SIZES = ((1, 1), (2, 33))
"""Of runs that a rewrite has to hold in as well, where the model takes such sizes."""
_LONG_TOKENS = 269
"""Tokens of a document that shows what blocks, crops and clamps make of long ones. Of what is
between, only the shapes, the sizes and the conditions are kept.
"""
_SHAPE_OF = "shape of "


class NoRunnableSizes(Exception):  # noqa: N818, an outcome and not an error
    """The reason why the model runs at none of the sizes that were tried."""


@dataclass(frozen=True)
class ProbedGraph:
    """The values of a graph, as they came out of runs at different sizes.

    Attributes:
        model: that was run.
        runs: by name, for the runs that tell axes apart.
        more: the same, at sizes on the edge.
        naming: what the names of dims say.
        long: the inputs and outputs of a run of ``_LONG`` tokens, or as many as the model takes,
            and of what is between the shapes, conditions, and the integers of up to one dimension,
            which are sizes; nothing where it takes no more than the others.
    """

    model: onnx.ModelProto
    runs: Sequence[Arrays]
    edge_runs: Sequence[Arrays]
    naming: Naming
    long_run: Arrays
    _changing: MutableMapping[ir.Value, bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def opset(self) -> int:
        """Of the standard operators."""
        return opset_of(self.model)

    def constant(self, value: ir.Value | None) -> NDArray[np.generic] | None:
        """The numbers of an initializer, None for what is computed."""
        if value is None or value.const_value is None or value.is_graph_input():
            return None
        return value.const_value.numpy()

    def has(self, value: ir.Value) -> bool:
        """Whether a value was there when the graph was measured."""
        return str(value.name) in self.runs[0]

    def fixed_value(self, value: ir.Value | None) -> NDArray[np.generic] | None:
        """What is the same at every size: constants, and what is made of sizes that are fixed."""
        if value is None:
            return None
        if any_above(value, self._changing, self._is_changing):
            return None
        return self._repeated(value)

    def _is_changing(self, value: ir.Value) -> bool | None:
        if self._repeated(value) is None:
            return True
        # What is made of others may be the same by its branch or clamp, for short documents.
        return False if value.producer() is None or _is_size(value) else None

    def _repeated(self, value: ir.Value) -> NDArray[np.generic] | None:
        """A constant, or what was computed and came out the same in every run that kept it."""
        array = self.constant(value)
        if array is not None or value.producer() is None:
            return array
        arrays = self.in_every_run(value)
        if arrays is None or not all(np.array_equal(a, arrays[0]) for a in arrays):
            return None
        return arrays[0]

    def in_every_run(self, value: ir.Value) -> list[NDArray[np.generic]] | None:
        """What was computed, at every size and in the long run if it kept it; None if not."""
        name = str(value.name)
        arrays = [run[name] for run in (*self.runs, *self.edge_runs) if name in run]
        if len(arrays) < len(self.runs) + len(self.edge_runs):
            return None
        return [*arrays, self.long_run[name]] if name in self.long_run else arrays

    def number(self, value: ir.Value) -> float | None:
        """The one number that a floating-point value is, if it is steady."""
        array = self._first(value)
        if array is None or array.size != 1 or not self.is_float(value):
            return None
        array = self.fixed_value(value)
        return None if array is None else float(array.reshape(()))

    def shapes(self, value: ir.Value) -> list[tuple[int, ...]] | None:
        """The shape in every run."""
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
        """The type of the numbers."""
        array = self.constant(value)
        return array.dtype if array is not None else self.runs[0][str(value.name)].dtype

    def is_float(self, value: ir.Value) -> bool:
        """Whether the numbers are floating-point."""
        array = self._first(value)
        return array is not None and (array.dtype.kind == "f" or "float" in array.dtype.name)

    def is_boolean(self, value: ir.Value) -> bool:
        """Whether a value is true or false."""
        array = self._first(value)
        return array is not None and array.dtype.kind == "b"

    def _first(self, value: ir.Value) -> NDArray[np.generic] | None:
        """A constant, or what was computed in the first run."""
        array = self.constant(value)
        return array if array is not None else self.runs[0].get(str(value.name))

    def run_at(self, values: Iterable[ir.Value], batch: int, tokens: int) -> Arrays | None:
        """Some values, and the inputs, at other sizes; nothing else of the graph is computed.

        Returns:
            By name; None where the model does not run at these sizes.
        """
        model = _with_outputs(self.model, [str(value.name) for value in values])
        try:
            engine = _engine(model)
            return _run(engine, self.model, batch, tokens, self.naming)
        except EngineError:
            return None


def depends_on_inputs(value: ir.Value) -> bool:
    """Whether a value depends on what the graph is given, and not only on the shape of it."""
    return any_above(value, _DEPENDING, _depends)


_DEPENDING: MutableMapping[ir.Value, bool] = weakref.WeakKeyDictionary()


def _depends(value: ir.Value) -> bool | None:
    node = value.producer()
    if node is None:
        return value.const_value is None
    return False if node.op_type in ("Shape", "Size") else None


def _is_size(value: ir.Value) -> bool:
    """Whether a value is made of the shape of another, not of its numbers."""
    node = value.producer()
    if node is not None and node.op_type in ("Gather", "Slice"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is not None and node.op_type in ("Shape", "Size")


def probe(model: onnx.ModelProto) -> ProbedGraph:
    """Runs a model at several sizes.

    Raises:
        NoRunnableSizes: with the runtime's reason.
    """
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
    """What ``ProbedGraph.long_run`` is, of a model that had this other run."""
    given = {value.name for value in model.graph.input}
    outputs = [value.name for value in model.graph.output]
    kept = [name for name, array in run.items() if name not in given and _is_kept(array)]
    wanted = dict.fromkeys((*outputs, *kept, *(_SHAPE_OF + name for name in run)))
    described = _with_outputs(model, list(wanted))
    described.graph.node.extend(
        onnx.helper.make_node("Shape", [name], [_SHAPE_OF + name]) for name in run
    )
    engine = _engine(described)
    found: Arrays = {}
    taken, refused, tokens = _EDGE_SIZES[-1][1], _LONG_TOKENS + 1, _LONG_TOKENS
    while tokens > taken:
        try:
            found, taken = _run(engine, model, 1, tokens, naming), tokens
        except EngineError:
            refused = tokens
        tokens = (taken + refused) // 2
    return found


def _is_kept(array: NDArray[np.generic]) -> bool:
    """Whether an array is a size, or a condition of two positions."""
    if array.dtype.kind == "b":
        return len([n for n in array.shape if n > 1]) <= 2
    return array.dtype.kind == "i" and array.ndim <= 1


def _engine(model: onnx.ModelProto) -> OnnxRuntimeEngine:
    """Runs a graph as it is: ONNX Runtime 1.31 crashes where it optimizes some with all outputs."""
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
    for given in model.graph.input:
        if given.name in constants:
            continue
        shape = []
        for index, dim in enumerate(given.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value > 0:
                shape.append(dim.dim_value)
                continue
            place = min(index, 1)
            if naming == "apart":
                name = dim.dim_param or f"{given.name} {index}"
                if name not in sizes:
                    sizes[name] = next(free[place])
            else:
                name = (naming == "alike" and dim.dim_param) or str(place)
                sizes.setdefault(name, (batch, tokens)[place])
            shape.append(sizes[name])
        dtype = onnx.helper.tensor_dtype_to_np_dtype(given.type.tensor_type.elem_type)
        if dtype.kind in "iub":
            # 1 is an id, a length, and what a mask has where a token counts.
            inputs[given.name] = np.ones(shape, dtype)
        else:
            inputs[given.name] = random.standard_normal(shape).astype(dtype)
    # Sequences of tensors come out as lists, and have no shape.
    found = engine.run(inputs).items()
    return inputs | {name: array for name, array in found if isinstance(array, np.ndarray)}
