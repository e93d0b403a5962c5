"""The sizes of a model's intermediate values, and the token ids that make them largest.

A rare word of ordinary norm may drive one hidden unit far beyond all others. 16-bit numbers then
round coarsely or overflow, and cases of random tokens do not show it. The model therefore runs in
float32, with the maximum of each value as an output.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.shape_inference
from numpy.typing import NDArray
from onnx import TensorProto, helper

from aftexport.engines import Tensors
from aftexport.engines.cast_graph import widen
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.operators.domain import opset_of
from aftexport.system.contract import LENGTHS
from aftexport.system.onnx_files import MODEL, write_model

FIRST_INFINITE = 65520.0
"""The smallest number that becomes infinite in float16."""
MAX_PRODUCTS = 4e12
"""The maximum multiply-adds of a scan, a minute or two on two cores."""
_DOCUMENTS = 1024
"""The documents of a run, of one token each."""
_TOP = 8
"""The ids that are kept for each value."""
_SMALL_TENSOR = 1024
_SIZES_ONLY = frozenset(("ConstantOfShape", "Shape", "Size"))
_SATURATING = frozenset(("Exp", "LogSoftmax", "ReduceMax", "Relu", "Softmax"))
"""Operators for which minus infinity is as good as any very low number."""
_PASSING = frozenset((
    "Add", "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split",
    "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
"""Operators that hand minus infinity on."""


@dataclass(frozen=True)
class Extremes:
    """The token ids that make values of the model largest."""

    ids: tuple[int, ...]  # the most unusual first: by the largest ratio of a value to its median
    beyond: "Beyond | None" = None


@dataclass(frozen=True)
class Beyond:
    """A value beyond the range of float16."""

    value: str  # name of the value in the graph
    size: float  # its largest absolute number
    token: int | None  # id that causes it; None for an unknown one
    place: str  # document, for messages
    layer: str = ""  # path of the module that computes the value; empty if it is unknown


class Activations:
    """A model in float32 that returns the largest number of each of its values.

    The weights of the model are loaded, and its custom operators have bodies. Only a share of
    the values is measured, from the inputs on.
    """

    def __init__(self, model: onnx.ModelProto, share: float = 1.0) -> None:
        graph_model = onnx.inliner.inline_local_functions(model)
        element, names = _measured_values(graph_model)
        self.is_float16 = element == TensorProto.FLOAT16
        ranks = _ranks(graph_model)
        widen(graph_model, (element,), TensorProto.FLOAT)
        chosen = names[: max(1, round(share * len(names)))]
        self._values = _add_maxima(graph_model, chosen, ranks)
        if share < 1:
            _keep_needed(graph_model.graph, self._values)
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), graph_model)
            del graph_model
            self._engine = OnnxRuntimeEngine(Path(folder) / MODEL, fused=False)

    def measure(self, inputs: Tensors) -> dict[str, NDArray[np.float32]]:
        """Run the model; return the maxima of each value, for most values one per document."""
        given = {name: inputs[name] for name in self._engine.input_names}
        results = self._engine.run(given, outputs=self._values)
        return {self._values[name]: np.atleast_1d(x) for name, x in results.items()}

    def beyond(self, inputs: Tensors, place: str = "", token: int | None = None) -> Beyond | None:
        """Return the first value that float16 does not hold."""
        return self._beyond(self.measure(inputs), place, token) if self.is_float16 else None

    def _beyond(
        self, sizes: Mapping[str, NDArray[np.float32]], place: str, token: int | None
    ) -> Beyond | None:
        if not self.is_float16:
            return None
        for value, maxima in sizes.items():
            if maxima.size and (size := float(maxima.max())) >= FIRST_INFINITE:
                return Beyond(value, size, token, place)
        return None

    def scan(
        self,
        ids: NDArray[np.int64],
        make_inputs: Callable[[NDArray[np.int64]], Tensors],
        *,
        documents: int = _DOCUMENTS,
        advance: Callable[[int], None] = lambda done: None,
    ) -> Extremes:
        """Run each id as a document of one token."""
        ids = np.random.default_rng(0).permutation(ids)
        best: dict[str, list[tuple[float, int]]] = defaultdict(list)
        medians: dict[str, float] = {}
        beyond: Beyond | None = None
        for start in range(0, len(ids), documents):
            part = ids[start : start + documents]
            sizes = self.measure(make_inputs(part[:, None]))
            if beyond is None and (found := self._beyond(sizes, "a document of one token", None)):
                beyond = self._located(found, part, make_inputs)
            for value, maxima in sizes.items():
                if len(maxima) != len(part):
                    continue
                medians.setdefault(value, float(np.median(maxima)))
                top = np.argsort(maxima)[-_TOP:]
                found_here = [(float(maxima[i]), int(part[i])) for i in top]
                best[value] = sorted([*best[value], *found_here], reverse=True)[:_TOP]
            advance(min(start + documents, len(ids)))
        return Extremes(_ranked(best, medians), beyond)

    def _located(
        self,
        found: Beyond,
        ids: NDArray[np.int64],
        make_inputs: Callable[[NDArray[np.int64]], Tensors],
    ) -> Beyond:
        """Return the same finding with the id that causes it."""
        while len(ids) > 1:
            half = ids[: len(ids) // 2]
            maxima = self.measure(make_inputs(half[:, None]))[found.value]
            ids = half if maxima.max(initial=0) >= FIRST_INFINITE else ids[len(half) :]
        return Beyond(found.value, found.size, int(ids[0]), found.place)


def find_extremes(
    model: onnx.ModelProto,  # model, whose weights are loaded; its custom operators have bodies
    vocab_size: int | None,  # None for a model of features, of which only the cases run
    make_inputs: Callable[[NDArray[np.int64]], Tensors],  # of ids ``[documents, tokens]``
    *,
    documents: int | None = None,  # number of documents of a run; None for many
    max_tokens: int | None = None,  # maximum length of a document; None for no bound
    cases: Mapping[str, Tensors] | None = None,  # run if the graph has float16 values
    # ids done, all ids, their name
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None,
) -> Extremes:
    """Return the ids that make values of a model largest, by its activations in float32.

    Every id runs as a document of one token, if that takes at most ``MAX_PRODUCTS``. Otherwise
    every id runs through the first values only, and those that are largest there through all. Then
    the most unusual ids stand at every position of a document, and beside each other.
    """
    ids = np.arange(vocab_size or 0, dtype=np.int64)
    if not len(ids) and not cases:
        return Extremes(())
    documents = documents or _DOCUMENTS
    advance = lambda done: progress(done, len(ids), "token ids")  # noqa: E731
    share = MAX_PRODUCTS / max(1.0, weights_per_token(model) * len(ids))
    if share < 1:
        first = Activations(model, share)
        found = first.scan(ids, make_inputs, documents=documents, advance=advance)
        ids = np.array(found.ids, np.int64)
        del first
        advance = lambda done: None  # noqa: E731
    activations = Activations(model)
    found = activations.scan(ids, make_inputs, documents=documents, advance=advance)
    if found.beyond is not None or not activations.is_float16:
        return found
    length = min(_DOCUMENTS, max_tokens or _DOCUMENTS)
    tried: list[tuple[str, int | None, Tensors]] = []
    for token in found.ids[:_TOP]:
        repeated = make_inputs(np.full((1, length), token, np.int64))
        tried.append((f"a document of {length} times the same token", token, repeated))
    if found.ids:
        together = make_inputs(np.array(found.ids[:length], np.int64)[None])
        tried.append(("a document of unusual tokens", None, together))
    tried += [(f"the case {name!r}", None, inputs) for name, inputs in (cases or {}).items()]
    beyonds = (activations.beyond(inputs, place, token) for place, token, inputs in tried)
    return Extremes(found.ids, next((b for b in beyonds if b is not None), None))


def _ranked(
    best: Mapping[str, Sequence[tuple[float, int]]], medians: Mapping[str, float]
) -> tuple[int, ...]:
    ratios: dict[int, float] = {}
    for value, entries in best.items():
        for size, token in entries:
            ratio = size / medians[value] if medians[value] > 0 else size
            ratios[token] = max(ratio, ratios.get(token, 0.0))
    return tuple(sorted(ratios, key=lambda token: (-ratios[token], token)))


def weights_per_token(model: onnx.ModelProto) -> float:
    """Return the number of weights that multiply each token: those of two axes, less tables."""
    graph = model.graph
    tables = {n.input[0] for n in graph.node if n.op_type in ("Gather", "GatherElements")}
    return float(
        sum(
            np.prod(t.dims, dtype=np.float64)
            for t in graph.initializer
            if len(t.dims) > 1 and t.name not in tables
        )
    )


def _measured_values(model: onnx.ModelProto) -> tuple[int, list[str]]:
    """Return the narrowest floating-point type, and the values of that type that tokens change."""
    types = _element_types(model)
    narrow = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT)
    element = next((t for t in narrow if t in types.values()), TensorProto.FLOAT)
    changed = {value.name for value in model.graph.input if value.name != LENGTHS}
    names = []
    for node in model.graph.node:
        if node.op_type in _SIZES_ONLY or not changed.intersection(node.input):
            continue
        changed.update(node.output)
        names += [name for name in node.output if types.get(name) == element]
    return element, names


def _inferred(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield the described values of a graph, inferred without its large weights."""
    light = onnx.ModelProto()
    light.opset_import.extend(model.opset_import)
    light.ir_version = model.ir_version
    graph = light.graph
    graph.name = "light"
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        if np.prod(tensor.dims) <= _SMALL_TENSOR:
            graph.initializer.append(tensor)
        else:
            described = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(described)
    inferred = onnx.shape_inference.infer_shapes(light).graph
    yield from (*inferred.input, *inferred.value_info, *inferred.output)


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    return {v.name: v.type.tensor_type.elem_type for v in _inferred(model)}


def _ranks(model: onnx.ModelProto) -> dict[str, int]:
    """Return the number of axes of each value, where it is known."""
    return {
        v.name: len(v.type.tensor_type.shape.dim)
        for v in _inferred(model)
        if v.type.tensor_type.HasField("shape")
    }


def _add_maxima(
    model: onnx.ModelProto, names: Sequence[str], ranks: Mapping[str, int]
) -> dict[str, str]:
    """Add an output with the maxima of each value; return the value of each output.

    Infinite numbers are masks, and do not count. Where minus infinity is as good as a very low
    number, negative numbers do not count either.
    """
    graph, one_sided = model.graph, _one_sided(model.graph)
    has_input = opset_of(model) >= 18
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([1], np.int64), "measured_axis"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.float32), "measured_zero"))
    outputs = {}
    for number, name in enumerate(names):
        base = f"measured_{number}"
        size, last = name, f"{base}_size"
        if name not in one_sided:
            graph.node.append(helper.make_node("Abs", [name], [f"{base}_abs"]))
            size = f"{base}_abs"
        graph.node.append(helper.make_node("IsInf", [size], [f"{base}_isinf"]))
        graph.node.append(
            helper.make_node("Where", [f"{base}_isinf", "measured_zero", size], [last])
        )
        attributes: dict[str, Any] = {"keepdims": 0}
        inputs = [last]
        if ranks.get(name, 0) > 0:
            graph.node.append(helper.make_node("Flatten", [last], [f"{base}_flat"], axis=1))
            inputs = [f"{base}_flat", "measured_axis"] if has_input else [f"{base}_flat"]
            attributes |= {} if has_input else {"axes": [1]}
        graph.node.append(helper.make_node("ReduceMax", inputs, [base], **attributes))
        graph.output.append(helper.make_tensor_value_info(base, TensorProto.FLOAT, None))
        outputs[base] = name
    return outputs


def _one_sided(graph: onnx.GraphProto) -> set[str]:
    """Return the values whose very low numbers may as well be minus infinity."""
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in graph.node:
        for place, name in enumerate(node.input):
            readers[name].append((node, place))
    outputs, found = {value.name for value in graph.output}, set[str]()
    for node in reversed(graph.node):
        for name in node.output:
            is_low = (
                name not in outputs
                and readers[name]
                and all(
                    reader.op_type in _SATURATING
                    or (
                        reader.op_type in _PASSING
                        and (reader.op_type != "Sub" or place == 0)
                        and found.issuperset(reader.output)
                    )
                    for reader, place in readers[name]
                )
            )
            if is_low:
                found.add(name)
    return found


def _keep_needed(graph: onnx.GraphProto, outputs: Collection[str]) -> None:
    """Remove the outputs other than ``outputs``, and the nodes that only they need."""
    needed, kept = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
            for attribute in node.attribute:
                needed.update(_read_inside(attribute.g))
    kept.reverse()
    values = [value for value in graph.output if value.name in outputs]
    del graph.node[:], graph.output[:]
    graph.node.extend(kept)
    graph.output.extend(values)


def _read_inside(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            yield from _read_inside(attribute.g)
    yield from (value.name for value in graph.output)
