"""Masks of softmax attention, identified by their values at many sizes.

A mask is computed from sizes and lengths only. It is run at sizes around and beyond each number in
its nodes, with documents of several lengths. The scores that it hides must be those of the padding
and of the keys outside a window, for every token of a document, and the rest must depend on the
head and the distance only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftexport.recognition.attention.structure import Mask
from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.patterns.pattern import NearMissFound
from aftexport.system.contract import LENGTHS

Array = NDArray[np.generic]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

HIDDEN = -9000.0
"""The number from which on an added number hides a key: some models add -10,000."""
_MAX_TOKENS = 4200
"""The most tokens at which masks are run: a mask of more has over 16 million numbers."""
_MAX_BIAS_TOKENS = 2200
"""The most tokens at which biases are run, which have numbers for each head."""
_ONE_DOCUMENT = 1100
"""The tokens from which on one document is run at a time."""
_UNBOUNDED = 2**31 - 1
"""The smallest number by which exporters mean no end."""
_MAX_NUMBERS = 4096
"""The most numbers of a constant that are read as sizes; a table of more has its own size."""
_FIRST_SIZES = (1, 2, 3, 5, 7, 16, 33)


@dataclass(frozen=True)
class MaskForm:
    """The meaning of the masks of one attention."""

    window_left: int  # the number of keys seen before a query's position; -1 for all
    window_right: int
    is_padding_hidden: bool
    bias: NDArray[np.float32] | None  # [H, 2R + 1], by the distance


class SizeRunner:
    """The values of a graph that depend on sizes and lengths only, at any size."""

    def __init__(self, model: ir.Model, probed: ProbedGraph) -> None:
        self._model = model
        self._probed = probed
        self._engines: dict[tuple[ir.Value, ...], tuple[OnnxRuntimeEngine, list[ir.Node]]] = {}
        names = [str(v.name) for v in model.graph.inputs if v.const_value is None]
        self._inputs = names
        self.has_lengths = LENGTHS in names
        runs = [*probed.runs, *filter(None, [probed.long_run])]
        self._sizes = [self._size_of(run) for run in runs]

    def _size_of(self, run: Mapping[str, Array]) -> tuple[int, int]:
        shapes = (run[name].shape for name in self._inputs if name != LENGTHS)
        batch, tokens = (*next(shapes, ()), 1, 1)[:2]
        return int(batch), int(tokens)

    def shape(self, value: ir.Value, batch: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of any value at other sizes.

        Raises:
            NearMissFound: if an axis grows neither with the documents nor with the tokens.
        """
        shapes = self._probed.shapes(value)
        if shapes is None:
            raise NearMissFound(f"the shape of {value.name} is unknown")
        return tuple(self._axis(sizes, batch, tokens, value) for sizes in zip(*shapes, strict=True))

    def _axis(self, sizes: Sequence[int], batch: int, tokens: int, value: ir.Value) -> int:
        if len(set(sizes)) == 1:
            return sizes[0]
        for of_batch, of_tokens in ((1, 0), (0, 1), (1, 1)):
            units = [b**of_batch * t**of_tokens for b, t in self._sizes]
            factor = sizes[0] // units[0]
            if all(size == factor * unit for size, unit in zip(sizes, units, strict=True)):
                return int(factor * batch**of_batch * tokens**of_tokens)
        raise NearMissFound(f"an axis of {value.name} is neither of documents nor of tokens")

    def run(
        self, values: Sequence[ir.Value], lengths: NDArray[np.int64], tokens: int
    ) -> list[Array]:
        """Return the values for documents of some lengths, padded to ``tokens``.

        Raises:
            EngineError: if they do not run at this size.
        """
        key = tuple(values)
        if key not in self._engines:
            self._engines[key] = self._engine(values)
        engine, sized = self._engines[key]
        feeds: dict[str, Array] = {}
        for node in sized:
            source = node.inputs[0]
            assert source is not None
            feeds[str(node.outputs[0].name)] = self._size(node, source, len(lengths), tokens)
        if LENGTHS in engine.input_names:
            feeds[LENGTHS] = lengths
        outputs = engine.run({name: feeds[name] for name in engine.input_names})
        return [
            value.const_value.numpy() if value.const_value is not None else outputs[str(value.name)]
            for value in values
        ]

    def _size(self, node: ir.Node, source: ir.Value, batch: int, tokens: int) -> Array:
        shape = np.array(self.shape(source, batch, tokens), np.int64)
        if node.op_type == "Size":
            return np.array(shape.prod(), np.int64)
        start, end = node.attributes.get_int("start", 0), node.attributes.get("end")
        return shape[start : None if end is None else end.as_int()]

    def _engine(self, values: Sequence[ir.Value]) -> tuple[OnnxRuntimeEngine, list[ir.Node]]:
        nodes, sized, inputs = self.nodes_of(values)
        constants = {
            v for node in nodes for v in node.inputs if v is not None and v.const_value is not None
        }
        order = {node: place for place, node in enumerate(self._model.graph)}
        info = onnx.helper.make_tensor_value_info
        whole = onnx.TensorProto.INT64
        graph = onnx.helper.make_graph(
            [ir.to_proto(node) for node in sorted(nodes, key=order.__getitem__)],
            "sizes",
            [info(LENGTHS, whole, [None])] * bool(inputs)
            + [
                info(str(n.outputs[0].name), whole, [None] if n.op_type == "Shape" else [])
                for n in sized
            ],
            [onnx.ValueInfoProto(name=str(v.name)) for v in values if v.const_value is None],
            [
                onnx.numpy_helper.from_array(np.asarray(v.const_value.numpy()), str(v.name))
                for v in constants
                if v.const_value is not None
            ],
        )
        opset = [onnx.helper.make_opsetid("", self._probed.opset)]
        made = onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)
        try:
            engine = OnnxRuntimeEngine(
                made.SerializeToString(), threads=1, fused=False, optimized=False
            )
        except EngineError as error:
            raise NearMissFound(f"its mask does not run ({error})") from error
        return engine, sized

    def nodes_of(
        self, values: Sequence[ir.Value]
    ) -> tuple[list[ir.Node], list[ir.Node], list[ir.Value]]:
        """Return the nodes of values, the nodes Shape and Size among them, and their inputs."""
        nodes, sized, inputs = dict[ir.Node, None](), dict[ir.Node, None](), []
        pending = [*values]
        while pending:
            value = pending.pop()
            node = value.producer()
            if node is None:
                if value.const_value is None and value not in inputs:
                    inputs.append(value)
            elif node.op_type in ("Shape", "Size"):
                sized[node] = None
            elif node not in nodes:
                nodes[node] = None
                pending += [v for v in node.inputs if v is not None]
        return list(nodes), list(sized), inputs


def sizes_to_try(runner: SizeRunner, values: Sequence[ir.Value]) -> Iterator[tuple[int, int]]:
    """Yield batches and tokens: small ones, those around each number of the nodes, and larger ones.

    Raises:
        NearMissFound: if a number is larger than the masks that can be tried.
    """
    numbers = sorted(_numbers(runner, values))
    if numbers and numbers[-1] + 2 > _MAX_TOKENS:
        raise NearMissFound(
            f"its mask has the number {numbers[-1]}, and is tried up to {_MAX_TOKENS} tokens"
        )
    around = {n + step for n in numbers for step in (-1, 0, 1, 2)}
    largest = min(2 * numbers[-1] + 5 if numbers else 40, _MAX_TOKENS)
    if numbers:
        largest = max(largest if largest < _ONE_DOCUMENT else 0, numbers[-1] + 2)
    few = sorted({*_FIRST_SIZES, *around, largest})
    if len(few) > 40:  # numbers such as every position: the largest ones matter
        few = [*few[:20], *few[-12:]]
    for tokens in few:
        if tokens > 0:
            yield (1 if tokens > _ONE_DOCUMENT else 3), tokens


def _numbers(runner: SizeRunner, values: Sequence[ir.Value]) -> set[int]:
    """Return the numbers and sizes that the nodes of values are given, from 2 on."""
    nodes, _, _ = runner.nodes_of(values)
    found: set[int] = set()
    for node in nodes:
        for value in node.inputs:
            if value is None or value.const_value is None:
                continue
            array = np.asarray(value.const_value.numpy())
            found |= {size for size in array.shape if size > 1}
            # Other factors than sizes, such as -10,000, are of the scores.
            is_size = array.dtype.kind in "iu" or node.op_type not in ("Div", "Mul", "Where")
            if is_size and array.dtype.kind in "iuf" and array.size <= _MAX_NUMBERS:
                numbers = np.abs(array[np.isfinite(array)].astype(np.float64))
                found |= {int(n) for n in numbers[numbers < _UNBOUNDED]}
    return {n for n in found if n > 1}


def lengths_of(batch: int, tokens: int) -> Iterator[NDArray[np.int64]]:
    """Yield lengths of documents, of which the longest has all tokens or some fewer."""
    if batch == 1:
        yield np.array([tokens])
        if tokens > 1:
            yield np.array([tokens - tokens // 3])
        return
    yield np.array([tokens, (tokens + 1) // 2, 1])
    yield np.array([max(tokens - 2, 1), tokens, max(tokens // 3, 1)])


@dataclass(frozen=True)
class _Sample:
    """The masks of some documents: the hidden scores, and the finite numbers added to others."""

    lengths: NDArray[np.int64]
    hidden: Bools  # [B or 1, H or 1, T, S]
    added: Floats  # [B or 1, H or 1, T, S]

    @property
    def tokens(self) -> int:
        return int(self.hidden.shape[-1])

    def seen(self, document: int) -> Bools:
        """Return the scores of a document that count, of all tokens."""
        hidden: Bools = self.hidden[min(document, len(self.hidden) - 1), 0]
        return ~hidden


def identify(
    masks: Sequence[Mask], product: ir.Value, runner: SizeRunner, num_heads: int
) -> MaskForm:
    """Return the meaning of masks of the scores ``product``.

    Raises:
        NearMissFound: if they have another meaning.
    """
    if not masks:
        return MaskForm(-1, -1, is_padding_hidden=False, bias=None)
    sizes = [*sizes_to_try(runner, [mask.value for mask in masks])]
    form, larger = _form_of(masks, product, runner, sizes, num_heads)
    holds = {True, False} if runner.has_lengths else {False}
    for batch, tokens in (*sizes, *larger):
        for lengths in lengths_of(batch, tokens):
            sample = _sample(masks, product, runner, lengths, tokens)
            if sample is None:
                continue  # longer than the model takes
            holds = {is_padding for is_padding in holds if _agrees(sample, form, is_padding)}
            if not holds:
                raise NearMissFound(
                    "its mask hides other keys than padding and those outside a window, at "
                    f"{tokens} tokens"
                )
    return replace(form, is_padding_hidden=True in holds)


def _form_of(
    masks: Sequence[Mask],
    product: ir.Value,
    runner: SizeRunner,
    sizes: Sequence[tuple[int, int]],
    num_heads: int,
) -> tuple[MaskForm, list[tuple[int, int]]]:
    """Return window and bias of a long document, and further sizes at which to try a bias."""
    samples = (
        _sample(masks, product, runner, next(lengths_of(batch, tokens)), tokens)
        for batch, tokens in reversed(sizes)
    )
    sample = next((found for found in samples if found is not None), None)
    if sample is None:
        raise NearMissFound("its mask runs at no size")
    left, right = _window(sample)
    bias, tokens = _bias(sample), sample.tokens
    # A bias may grow beyond the numbers in its nodes, as that of buckets by logarithms does.
    while bias is not None and bias.shape[1] > tokens and tokens < _MAX_BIAS_TOKENS:
        tokens = min(2 * tokens, _MAX_BIAS_TOKENS)
        longer = _sample(masks, product, runner, next(lengths_of(1, tokens)), tokens)
        if longer is None:
            break
        bias = _bias(longer)
    if bias is None:
        return MaskForm(left, right, is_padding_hidden=False, bias=None), []
    reach = bias.shape[1] // 2
    if bias.shape[1] > tokens and -1 in (left, right):
        raise NearMissFound("its bias by distance has no bound")
    bias = np.broadcast_to(bias, (num_heads, bias.shape[1]))
    form = MaskForm(left, right, is_padding_hidden=False, bias=bias)
    return form, [(1, min(8 * reach + 2, _MAX_BIAS_TOKENS))]


def _sample(
    masks: Sequence[Mask],
    product: ir.Value,
    runner: SizeRunner,
    lengths: NDArray[np.int64],
    tokens: int,
) -> _Sample | None:
    """Run the masks for documents of some lengths; None if they do not run at this size."""
    if not runner.has_lengths:
        lengths = np.full(len(lengths), tokens)
    batch, shape = len(lengths), runner.shape(product, len(lengths), tokens)
    hidden, added = np.zeros((1, 1, 1, 1), bool), np.zeros((1, 1, 1, 1))
    try:
        arrays = runner.run([mask.value for mask in masks], lengths, tokens)
    except EngineError:
        return None
    for mask, array in zip(masks, arrays, strict=True):
        where = runner.shape(mask.where, batch, tokens)
        if len(shape) == len(where) == 4 and shape[0] == batch:
            array = array.reshape(*[1] * (4 - array.ndim), *array.shape)
        else:
            array = np.broadcast_to(array, where).reshape(batch, -1, *shape[-2:])
        if mask.kind == "added":
            with np.errstate(over="ignore"):
                numbers = array.astype(np.float64) * mask.number
            hides = numbers <= HIDDEN
            added = added + np.where(hides, 0.0, numbers)
        elif mask.number > HIDDEN:
            raise NearMissFound(f"its mask sets scores to {mask.number:g}")
        else:
            hides = array.astype(bool) == (mask.kind == "hidden")
        hidden = hidden | hides
    if hidden.shape[1] > 1:
        if (hidden != hidden[:, :1]).any():
            raise NearMissFound("its mask differs between heads")
        hidden = hidden[:, :1]
    if not np.isfinite(added).all():
        raise NearMissFound("its mask adds infinity or NaN")
    square = (shape[-2], shape[-1])
    if square != (tokens, tokens):
        raise NearMissFound(f"it has {square[0]} queries and {square[1]} keys for {tokens} tokens")
    return _Sample(
        lengths,
        np.broadcast_to(hidden, (*hidden.shape[:2], *square)),
        np.broadcast_to(added, (*added.shape[:2], *square)),
    )


def _distances(tokens: int) -> NDArray[np.int64]:
    """Return the distance from each query to each key, ``[T, T]``."""
    return np.arange(tokens) - np.arange(tokens)[:, None]


def _window(sample: _Sample) -> tuple[int, int]:
    """Return the window of the longest document on both sides."""
    tokens, seen = sample.tokens, sample.seen(int(sample.lengths.argmax()))
    if not seen.any():
        raise NearMissFound("its mask hides every key")
    distance = _distances(tokens)[seen]
    left, right = -int(distance.min()), int(distance.max())
    return tuple(  # type: ignore[return-value]  # of two numbers
        -1 if reach >= tokens - 1 and tokens > 1 else max(reach, 0) for reach in (left, right)
    )


def _bias(sample: _Sample) -> NDArray[np.float32] | None:
    """Return the number added at each distance ``[H or 1, 2R + 1]``, the same beyond ``R``."""
    if not sample.added.any():
        return None
    longest, tokens = int(sample.lengths.argmax()), sample.tokens
    seen = sample.seen(longest)
    added = sample.added[min(longest, len(sample.added) - 1)]
    places = _distances(tokens) + tokens - 1
    by_distance = np.zeros((len(added), 2 * tokens - 1))
    by_distance[:, places[seen]] = added[:, seen]
    if (by_distance[:, places[seen]] != added[:, seen]).any():
        raise NearMissFound("its bias depends on more than head and distance")
    has = np.zeros(2 * tokens - 1, bool)
    has[places[seen]] = True
    sides = (slice(tokens - 1, None), slice(tokens - 1, None, -1))
    reach = max(_reach(by_distance[:, side], has[side]) for side in sides)
    return by_distance[:, tokens - 1 - reach : tokens + reach].astype(np.float32)


def _reach(side: Floats, is_seen: Bools) -> int:
    """Return the distance from which on the numbers of one side are the same."""
    seen = np.flatnonzero(is_seen)
    last = side[:, seen[-1:]]
    differs = np.flatnonzero((side[:, seen] != last).any(0))
    return int(seen[differs[-1]]) + 1 if len(differs) else 0


def _agrees(sample: _Sample, form: MaskForm, is_padding_hidden: bool) -> bool:
    """Return whether masks have a form, at the tokens of each document."""
    tokens = sample.tokens
    distance = _distances(tokens)
    inside = np.ones((tokens, tokens), bool)
    if form.window_left >= 0:
        inside &= distance >= -form.window_left
    if form.window_right >= 0:
        inside &= distance <= form.window_right
    bias = np.zeros((1, 1, 1), np.float32)
    if form.bias is not None:
        reach = form.bias.shape[1] // 2
        bias = form.bias[:, distance.clip(-reach, reach) + reach]
    for document, length in enumerate(sample.lengths):
        rows = length if is_padding_hidden else tokens
        wanted = inside[:rows] & (np.arange(tokens) < rows)
        if not np.array_equal(sample.seen(document)[:rows], wanted):
            return False
        added = sample.added[min(document, len(sample.added) - 1)].astype(np.float32)
        if (np.where(wanted, added[:, :rows], 0) != np.where(wanted, bias[:, :rows], 0)).any():
            return False
    return True


def sink_of(sink: ir.Value, product: ir.Value, runner: SizeRunner, num_heads: int) -> Array:
    """Return the logit of each head ``[H]`` of a column that is joined to the scores.

    Raises:
        NearMissFound: if it depends on more than the head.
    """
    numbers = None
    for tokens in _FIRST_SIZES:
        (array,) = runner.run([sink], np.array([tokens, 1]), tokens)
        shape = runner.shape(product, 2, tokens)
        array = np.broadcast_to(array, (*shape[:-1], 1)).reshape(2, num_heads, tokens)
        numbers = array[0, :, 0] if numbers is None else numbers
        if (array != numbers[:, None]).any():
            raise NearMissFound("its sink differs between tokens")
    assert numbers is not None
    return numbers
