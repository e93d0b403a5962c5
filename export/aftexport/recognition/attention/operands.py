"""Queries, keys and values of softmax attention as channels of a value ``[B, T, C]``.

The nodes before the products only move entries: Transpose, Reshape, Slice and so on. They are run
on the numbers of the entries, which shows the channel that each head reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.comparison import part_of, run_once, runner
from aftexport.recognition.graph.shape_probe import Arrays, ProbedGraph
from aftexport.recognition.patterns.pattern import NearMissFound

Indices = NDArray[np.int64]

MOVES = frozenset({
    "Cast", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze",
    "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that only move entries of their first input."""


@dataclass(frozen=True)
class Operand:
    """A value with the documents and tokens as two of its axes, and the channels of each head."""

    source: ir.Value
    order: tuple[int, ...]  # the axes of documents and tokens, and then the others
    channels: Indices  # the channel of the others, flattened, for each head: [heads, d]
    scale: float = 1.0  # the factor of the product's operand

    @property
    def is_in_order(self) -> bool:
        """Whether the value has the documents first and the tokens second."""
        return self.order == tuple(range(len(self.order)))


def runs_of(probed: ProbedGraph) -> list[Arrays]:
    """Return the runs with all values, one for each size."""
    runs = {tuple(a.shape for a in run.values()): run for run in (*probed.runs, *probed.edge_runs)}
    return [*runs.values()]


def path_up(value: ir.Value, probed: ProbedGraph) -> Iterator[tuple[ir.Value, float]]:
    """Yield a value and those before it that only move and scale, each with the factor since."""
    factor = 1.0
    while True:
        yield value, factor
        node = value.producer()
        if node is None:
            return
        source = node.inputs[0]
        if node.op_type in ("Mul", "Div"):
            other = node.inputs[1]
            if source is None or other is None:
                return
            number = probed.number(other)
            if number is None and node.op_type == "Mul":
                source, number = other, probed.number(source)
            if not number:
                return
            factor *= number if node.op_type == "Mul" else 1 / number
        elif node.op_type not in MOVES or source is None or not probed.is_float(source):
            return
        value = source


@dataclass(frozen=True)
class Rotation:
    """A source that is multiplied by tables of cosines and sines before a product."""

    source: ir.Value
    factor: float  # of the product's operand
    cosines: tuple[ir.Value, ...]
    sines: tuple[ir.Value, ...]

    def filled(self, cosine: float, sine: float) -> dict[ir.Value, float]:
        """Return the tables, each with one number at all places."""
        return dict.fromkeys(self.cosines, cosine) | dict.fromkeys(self.sines, sine)


@dataclass(frozen=True)
class Reading:
    """The operand ``[*lead, T, d]`` of a product, read as entries of sources."""

    value: ir.Value
    probed: ProbedGraph
    lead: Sequence[tuple[int, ...]]  # the sizes before the last two axes in each run
    is_turned: bool = False  # whether its last axes are [d, T]
    is_scaled: bool = True  # whether it may be a source times a number

    def operand(self, rotation: Rotation | None = None) -> Operand:
        """Return the source with the channels of the heads, before a rotation if one is given.

        Raises:
            NearMissFound: if the heads are not channels of one value.
        """
        first, scale = self.value, 1.0
        if rotation is not None:
            first, scale = rotation.source, rotation.factor
        found: list[Operand] = []
        for source, factor in path_up(first, self.probed):
            if len((self.probed.shapes(source) or [()])[0]) < 3:
                continue
            if scale * factor != 1 and not self.is_scaled:
                break
            operand = self._read(source, scale * factor, rotation)
            if operand is None:
                continue
            if len(operand.order) == 3 and operand.is_in_order:
                return operand
            found.append(operand)
        if not found:
            raise NearMissFound(f"the heads of {self.value.name} are not channels of one value")
        in_order = [operand for operand in found if operand.is_in_order]
        return (in_order or found)[-1]

    def _read(self, source: ir.Value, factor: float, rotation: Rotation | None) -> Operand | None:
        """Return the operand as channels of a source; None if it is not."""
        order: tuple[int, ...] | None = None
        channels: Indices | None = None
        given = {} if rotation is None else rotation.filled(1.0, 0.0)
        # The runs of several documents and tokens tell the axes; the others must agree.
        for run, lead in zip(runs_of(self.probed), self.lead, strict=True):
            entries = self.entries(source, factor, run, lead, given)
            if entries is None or entries.min(initial=1) < 1:
                return None
            places = np.unravel_index(entries - 1, run[str(source.name)].shape)
            order = order or _order(places)
            if order is None or not _agrees(places, order):
                return None
            sizes = [run[str(source.name)].shape[axis] for axis in order[2:]]
            flat = np.ravel_multi_index([places[axis][0, :, 0] for axis in order[2:]], sizes)
            if channels is not None and not np.array_equal(channels, flat):
                return None
            channels = flat
        assert order is not None  # there are runs
        assert channels is not None
        return Operand(source, order, channels, factor)

    def entries(
        self,
        source: ir.Value,
        factor: float,
        run: Arrays,
        lead: tuple[int, ...],
        given: Mapping[ir.Value, float],
    ) -> Indices | None:
        """Return the entry of a source, from 1 on, at each place ``[B, H, T, d]``.

        An entry may have the other sign. None for a value of more than one entry.
        """
        exact = moved(self.value, source, run, self.probed, given)
        if exact is None:
            return None
        whole = np.rint(exact / factor)
        if np.abs(exact / factor - whole).max(initial=0) > 1e-3:
            return None
        entries = whole.swapaxes(-1, -2) if self.is_turned else whole
        entries = np.broadcast_to(entries, (*lead, *entries.shape[-2:])).astype(np.int64)
        return entries.reshape(batch_of(run), -1, *entries.shape[-2:])


def moved(
    value: ir.Value,
    source: ir.Value,
    run: Arrays,
    probed: ProbedGraph,
    given: Mapping[ir.Value, float] | None = None,  # values with one number at all places
) -> NDArray[np.float64] | None:
    """Return the entry of ``source`` in each entry of ``value``, from 1 on, in one run."""
    shape = run[str(source.name)].shape
    numbers = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)  # 0 stands for no entry
    if value is source:
        return numbers
    given = given or {}
    part = part_of(value, [source, *given], probed)
    if source not in part.inputs:
        return None
    feeds = {
        str(v.name): np.full(run[str(v.name)].shape, given[v]) if v in given else run[str(v.name)]
        for v in part.inputs
    }
    return run_once(runner(part, probed.opset), feeds | {str(source.name): numbers})


def batch_of(run: Arrays) -> int:
    """Return the number of documents of a run."""
    return int(next(iter(run.values())).shape[0])


def _order(places: tuple[Indices, ...]) -> tuple[int, ...] | None:
    """Return the axes of documents and tokens, and then the others; None if there are none."""
    shape = places[0].shape
    rows = np.arange(shape[0]).reshape(-1, 1, 1, 1)
    tokens = np.arange(shape[2]).reshape(1, 1, -1, 1)
    of = [
        [axis for axis, place in enumerate(places) if (place == wanted).all()]
        for wanted in (rows, tokens)
    ]
    if not of[0] or not of[1] or of[0][0] == of[1][0]:
        return None
    first, second = of[0][0], of[1][0]
    return (first, second, *(axis for axis in range(len(places)) if axis not in (first, second)))


def _agrees(places: tuple[Indices, ...], order: tuple[int, ...]) -> bool:
    shape = places[0].shape
    return (
        bool((places[order[0]] == np.arange(shape[0]).reshape(-1, 1, 1, 1)).all())
        and bool((places[order[1]] == np.arange(shape[2]).reshape(1, 1, -1, 1)).all())
        and all(bool((places[axis] == places[axis][:1, :, :1]).all()) for axis in order[2:])
    )


def grouped(channels: Indices, others: Indices) -> Indices:
    """Return the channels of each head ``[G, d]`` that a group of queries reads.

    ``others`` are those of the values, or of the keys; a group shares both.

    Raises:
        NearMissFound: if the heads are shared in another order.
    """
    heads = len(channels)
    both = np.concatenate([channels, others], 1)
    starts = [0, *(h for h in range(1, heads) if not np.array_equal(both[h], both[h - 1]))]
    own = channels[starts]
    if heads % len(own) or not np.array_equal(np.repeat(own, heads // len(own), 0), channels):
        raise NearMissFound("its heads share keys in another order than groups")
    return own


def is_result(value: ir.Value, result: ir.Value, probed: ProbedGraph, heads: int) -> bool:
    """Return whether a value has the entries of a result ``[B, H, T, e]`` as ``[B, T, H e]``.

    Its axes may be split or joined, as in ``[B, T, H, e]`` or ``[B T, H e]``.
    """
    for run in runs_of(probed):
        entries = moved(value, result, run, probed)
        shape = run[str(result.name)].shape
        batch, tokens, width = batch_of(run), shape[-2], shape[-1]
        if entries is None or np.prod(shape) != batch * heads * tokens * width:
            return False
        numbers = np.arange(1, 1 + np.prod(shape)).reshape(batch, heads, tokens, width)
        wanted = numbers.transpose(0, 2, 1, 3)
        if not np.array_equal(entries.reshape(-1), wanted.reshape(-1)):
            return False
    return True
