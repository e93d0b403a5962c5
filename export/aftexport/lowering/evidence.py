"""The contribution of each token to chosen logits of a document.

If a head is linear and its input is a sum over the tokens, each logit is a sum over the tokens:

    logits = scale * sum_t x[t] W + b = sum_t (scale * x[t] W) + b

This holds for masked tokens and for tokens weighted by a softmax too. The graph returns the
summands of chosen logits beside the logits. They are exact for the last layer, and the computation
of the logits does not change. A summand is the product of x[t] with the document's *direction*,
``scale * W`` of that logit.

A maximum is a sum too: each channel of x[t] counts where it is the largest, and tokens with equal
largest values share it. So it is for the sum of the k largest values: tokens with the least of
these share its places. The logarithm of ``sum_t exp(x[t])`` is shared in the ratio of these
powers. If the number of tokens is subtracted from it, as in a mean of powers, all tokens share that
equally: the share of a token that decides stays positive.

The constant ``EXPLAINED`` has the choice: the logits of all heads of one sum are numbered one after
the other, and ``largest(i)`` stands for the largest logit of head i. A runtime that replaces the
constant by an input chooses for each document, see ``engines.onnxruntime.sessions``. Otherwise the
graph explains the largest logit of the first head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.lowering.graph_values import (
    axes_of,
    constants_of,
    is_reduction_over_tokens,
    main_input_of,
    pooling,
)
from aftexport.lowering.nodes import NewNodes
from aftexport.system.contract import EVIDENCE, EXPLAINED, LENGTHS, largest

DIRECTION = "evidence_direction"
"""The output with the directions of each document, float32 ``[batch, D, chosen]``."""


LARGEST, TIES = f"{EVIDENCE}_largest", f"{EVIDENCE}_ties"
"""The largest values of each channel with the ties of the least of these in the last row, and the
ties: the number of tokens with this value."""


_FLOAT = ir.DataType.FLOAT


_DOCUMENT_AXES = (1,)
"""The place of the axis that a number for each document or channel gets beside its tokens."""
_LAST_AXIS = (-1,)


class NoEvidence(Exception):  # noqa: N818 (an outcome, not an error)
    """The reason why a graph cannot return evidence, as its message."""


@dataclass(frozen=True)
class Explainable:
    """The heads whose logits a graph can explain."""

    tokens: str  # the name of the value whose sum the heads are linear in, ``[batch, tokens, D]``
    # For each of these heads the part of each logit that does not depend on the tokens, in the
    # order of their logits' numbers.
    offsets: Mapping[str, tuple[float, ...]]
    refused: Mapping[str, str]  # the reason against each other output per document


def explained_model(lowered: onnx.ModelProto, to: str) -> tuple[onnx.ModelProto, Explainable | str]:
    """Return a model that also returns evidence, and its kinds; or itself, with the reason."""
    if to != "onnx":
        return lowered, "TensorRT engines only output logits"
    explained = ir.from_proto(lowered)
    try:
        kinds = add_evidence(explained)
    except NoEvidence as reason:
        return lowered, str(reason)
    return ir.to_proto(explained), kinds


def add_evidence(model: ir.Model, outputs: Sequence[str] | None = None) -> Explainable:
    """Add an output ``evidence`` to a lowered graph, in place.

    It is float32 ``[batch, tokens]``, or ``[batch, chosen * tokens]`` with several chosen logits.
    The sum of a logit's evidence over the tokens, plus its offset, is the logit. Padding adds 0 if
    the model masks it.

    The graph needs the shapes of intermediate values and bare operators. All ``outputs`` must be
    explainable; None stands for the first output per document that is, and all others that are
    linear in the same sum.

    Raises:
        NoEvidence: if no head is linear in a sum over the tokens, or one of ``outputs`` is not;
            the model stays unchanged.
    """
    explainable, summands = _add_direction(model.graph, outputs)
    direction = model.graph.outputs.pop()
    evidence = add_products(model.graph, summands, direction)
    shape = main_input_of(model.graph).shape
    evidence.shape = None if shape is None else ir.Shape(shape[:2])
    return explainable


def add_direction(model: ir.Model, outputs: Sequence[str] | None = None) -> Explainable:
    """Add only the output ``DIRECTION``; see ``add_evidence``."""
    explainable, _ = _add_direction(model.graph, outputs)
    return explainable


def add_products(graph: ir.Graph, tokens: ir.Value, direction: ir.Value) -> ir.Value:
    """Add the output ``evidence`` to a graph and return it."""
    new = NewNodes(graph, EVIDENCE)
    product = new.add("MatMul", new.add("Cast", tokens, to=_FLOAT), direction)
    evidence = new.add("Flatten", new.add("Transpose", product, perm=[0, 2, 1]), axis=1)
    evidence.name, evidence.dtype = EVIDENCE, _FLOAT
    graph.extend(new.nodes)
    graph.outputs.append(evidence)
    return evidence


@dataclass(frozen=True)
class _Factor:
    """A factor per document between the sum and the head."""

    operator: str  # ``Mul`` or ``Div``
    operand: ir.Value
    rank: int  # the number of its axes


@dataclass(frozen=True)
class _LinearHead:
    """A linear head, ``logits = pooled W + b``."""

    output: ir.Value  # the logits
    pooled: ir.Value  # its input, ``[batch, D]``
    weight: ir.Value  # W, ``[D, classes]`` or, if ``is_transposed``, ``[classes, D]``
    is_transposed: bool
    offsets: NDArray[np.generic]  # b, ``[classes]``


@dataclass(frozen=True)
class _TokenSum:
    """A pooling of the tokens of a document, scaled by one number per document."""

    tokens: ir.Value  # the pooled value, ``[batch, tokens, D]``
    summed: ir.Value  # the same; or its largest values ``[batch, k, D]``, with 0 for padding
    result: ir.Value
    pooling: str  # the operator
    factors: tuple[_Factor, ...]  # the factors after it, the last one first
    largest: ir.Value | None = None  # the largest values as TopK returns them, if they are summed
    whole: ir.Value | None = None  # the input of the head, for the logarithm of a sum


def _add_direction(graph: ir.Graph, outputs: Sequence[str] | None) -> tuple[Explainable, ir.Value]:
    """Add the output DIRECTION; return its meaning, and the value that is summed."""
    search = _SummedHeads(graph)
    found: list[_LinearHead] = []
    total: _TokenSum | None = None
    refused = {}
    for output in search.documents if outputs is None else outputs:
        try:
            head, summed = search.find(output)
        except NoEvidence as reason:
            refused[output] = str(reason)
            continue
        if total is not None and summed != total:
            other = found[0].output.name
            refused[output] = f"it pools the tokens in another way than {other}"
            continue
        found.append(head)
        total = summed
    if total is None or (outputs is not None and refused):
        raise NoEvidence(next(iter(refused.values()), "every output is for tokens"))
    summands = _summands(graph, total)
    graph.outputs.append(_direction(graph, found, total))
    offsets = {str(head.output.name): tuple(map(float, head.offsets)) for head in found}
    return Explainable(str(summands.name), offsets, refused), summands


def _summands(graph: ir.Graph, total: _TokenSum) -> ir.Value:
    """Add the nodes of the values whose sum over the tokens is the result of a pooling.

    For the logarithm of a sum of powers, the sum is the input of the head.
    """
    if total.pooling in ("ReduceSum", "ReduceMean") and total.largest is None:
        return total.tokens
    new = NewNodes(graph, EVIDENCE)
    of_tokens = total.tokens.shape
    assert of_tokens is not None  # the axes were compared
    of_document = ir.Shape([of_tokens[0], 1, of_tokens[2]])
    x = _typed(new.add("Cast", total.tokens, to=_FLOAT), of_tokens)
    wide = new.add("Cast", total.result, to=_FLOAT)
    result = new.add("Unsqueeze", wide, new.constant(_DOCUMENT_AXES))
    _typed(result, of_document)
    if total.pooling == "ReduceLogSumExp":
        summands = _shares_of_logarithm(graph, new, total, (x, result))
    elif total.largest is None:
        summands = _largest_values(new, x, (result, result))
    else:
        largest, kept = (
            new.add("Cast", value, to=_FLOAT) for value in (total.largest, total.summed)
        )
        summands = _largest_values(new, x, (largest, kept))
    graph.extend(new.nodes)
    return summands


def _largest_values(new: NewNodes, x: ir.Value, pair: tuple[ir.Value, ir.Value]) -> ir.Value:
    """Add the nodes of the largest values of each channel; others are 0.

    ``pair`` has the k largest values, and the same with 0 for padding.
    """
    largest, kept = pair
    of_tokens = x.shape
    assert of_tokens is not None  # the caller sets it
    of_document = ir.Shape([of_tokens[0], 1, of_tokens[2]])
    axis, last = new.constant(_DOCUMENT_AXES), new.constant(_LAST_AXIS)

    def count(are_counted: ir.Value) -> ir.Value:
        numbers = new.add("Cast", are_counted, to=_FLOAT)
        if are_counted.shape is not None:
            _typed(numbers, are_counted.shape)
        return _typed(new.add("ReduceSum", numbers, axis, keepdims=1), of_document)

    least = _typed(new.add("Gather", largest, last, axis=1), of_document)
    is_least = _typed(new.add("Equal", x, least), of_tokens, ir.DataType.BOOL)
    ties = count(is_least)
    with_ties = new.add("Concat", largest, ties, axis=1)
    ties.name, with_ties.name = TIES, LARGEST
    _typed(with_ties, ir.Shape([of_tokens[0], None, of_tokens[2]]))
    # Tokens with the least value share its places among the largest.
    places = new.add("Mul", least, count(new.add("Equal", kept, least)))
    share = _typed(new.add("Div", places, new.add("Gather", with_ties, last, axis=1)), of_document)
    zero = new.constant(np.zeros((), np.float32))
    shared = _typed(new.add("Where", is_least, share, zero), of_tokens)
    is_larger = _typed(new.add("Greater", x, least), of_tokens, ir.DataType.BOOL)
    return _typed(new.add("Where", is_larger, x, shared), of_tokens)


def _shares_of_logarithm(
    graph: ir.Graph, new: NewNodes, total: _TokenSum, powers: tuple[ir.Value, ir.Value]
) -> ir.Value:
    """Add the nodes of each token's share of a logarithm, and of what was added to that."""
    x, logarithm = powers
    of_tokens, of_document = x.shape, logarithm.shape
    assert of_tokens is not None  # the caller sets them
    assert of_document is not None
    axis, zero = new.constant(_DOCUMENT_AXES), new.constant(np.zeros((), np.float32))
    scaled = logarithm
    for factor in reversed(total.factors):
        scale = new.add("Cast", factor.operand, to=_FLOAT)
        if factor.rank == 2:
            scale = new.add("Unsqueeze", scale, axis)
        scaled = _typed(new.add(factor.operator, scaled, scale), of_document)
    size = new.add("Shape", main_input_of(graph), start=1, end=2)
    counts = next((value for value in graph.inputs if value.name == LENGTHS), size)
    whole = new.add("Unsqueeze", new.add("Cast", total.whole, to=_FLOAT), axis)
    by_token = new.add("Unsqueeze", counts, new.constant((1, 2)))
    added = new.add("Div", new.add("Sub", whole, scaled), new.add("Cast", by_token, to=_FLOAT))
    _typed(added, of_document)
    positions = new.add(
        "Range", new.constant(np.array(0)), new.add("Squeeze", size), new.constant(np.array(1))
    )
    mask = new.add("Less", new.add("Unsqueeze", positions, axis), by_token)
    share = _typed(new.add("Exp", _typed(new.add("Sub", x, logarithm), of_tokens)), of_tokens)
    shared = _typed(new.add("Mul", share, scaled), of_tokens)
    equal = _typed(new.add("Where", mask, added, zero), of_tokens)
    return _typed(new.add("Add", shared, equal), of_tokens)


def _typed(value: ir.Value, shape: ir.Shape, dtype: ir.DataType = _FLOAT) -> ir.Value:
    """Give a value a type and a shape, by which the chunks tell its kind; return it."""
    value.dtype, value.shape = dtype, shape
    return value


def _direction(graph: ir.Graph, heads: Sequence[_LinearHead], total: _TokenSum) -> ir.Value:
    """Add the nodes of the directions, in float32.

    16 bits cannot represent the share of one token in a long document.
    """
    new = NewNodes(graph, EVIDENCE)
    value = _rows(new, heads, _chosen(new, heads))
    for factor in () if total.pooling == "ReduceLogSumExp" else total.factors:
        scale = new.add("Cast", factor.operand, to=_FLOAT)
        if factor.rank == 2:
            scale = new.add("Unsqueeze", scale, new.constant(_DOCUMENT_AXES))
        value = new.add(factor.operator, value, scale)
    if total.pooling == "ReduceMean":
        count = new.add("Shape", total.summed, start=1, end=2)
        value = new.add("Div", value, new.add("Cast", count, to=_FLOAT))
    direction = new.add("Transpose", value, perm=[0, 2, 1])
    direction.name, direction.dtype, direction.shape = DIRECTION, _FLOAT, ir.Shape([None] * 3)
    graph.extend(new.nodes)
    return direction


def _chosen(new: NewNodes, heads: Sequence[_LinearHead]) -> ir.Value:
    """Add the nodes of the numbers of the chosen logits."""
    chosen = explained = new.constant(np.array([[largest(0)]]))
    explained.name = EXPLAINED
    first = 0
    for place, head in enumerate(heads):
        label = new.add("ArgMax", head.output, axis=1, keepdims=1)
        if first:
            label = new.add("Add", label, new.constant([first]))
        is_largest = new.add("Equal", explained, new.constant([largest(place)]))
        chosen = new.add("Where", is_largest, label, chosen)
        first += len(head.offsets)
    return chosen


def _rows(new: NewNodes, heads: Sequence[_LinearHead], chosen: ir.Value) -> ir.Value:
    """Add the nodes of the chosen rows of all weights, float32 ``[batch, chosen, D]``."""
    rows: ir.Value | None = None
    first = 0
    for head in heads:
        start, index = new.constant([first]), chosen
        if len(heads) > 1:  # the numbers of other heads would be outside this head's weight
            ends = (new.constant(np.array(end)) for end in (0, len(head.offsets) - 1))
            index = new.add("Clip", new.add("Sub", chosen, start), *ends)
        row = new.add("Gather", head.weight, index, axis=0 if head.is_transposed else 1)
        if not head.is_transposed:
            row = new.add("Transpose", row, perm=[1, 2, 0])
        wide = new.add("Cast", row, to=_FLOAT)
        if rows is not None:
            is_own = new.add("GreaterOrEqual", chosen, start)
            by_row = new.add("Unsqueeze", is_own, new.constant(_LAST_AXIS))
            wide = new.add("Where", by_row, wide, rows)
        rows = wide
        first += len(head.offsets)
    assert rows is not None  # there is a head
    return rows


class _SummedHeads:
    """The search for linear heads of sums over the tokens."""

    def __init__(self, graph: ir.Graph) -> None:
        self._outputs = {str(value.name): value for value in graph.outputs}
        self._document = axes_of(main_input_of(graph))[:2]
        self._constants = constants_of(graph)

    @property
    def documents(self) -> Sequence[str]:
        """The names of the outputs per document."""
        return [name for name, value in self._outputs.items() if len(axes_of(value)) == 2]

    def find(self, output: str) -> tuple[_LinearHead, _TokenSum]:
        """Return the head of an output ``[batch, classes]`` and its sum; raises NoEvidence."""
        if output not in self._outputs:
            raise NoEvidence(f"{output} is not computed from the tokens")
        head = self._head(self._outputs[output])
        total = self._total_behind(head.pooled)
        axes = axes_of(total.tokens)
        if axes[:2] != self._document or len(axes) != 3:
            operator = _producer(total.result).op_type
            raise NoEvidence(f"{operator} ({total.result.name}) does not sum the input's tokens")
        return head, total

    def _head(self, output: ir.Value) -> _LinearHead:
        node, offsets = _producer(output), None
        if node.op_type == "Add":
            offsets = next((a for v in node.inputs if (a := self._constant(v)) is not None), None)
            inner = next((v for v in node.inputs if self._constant(v) is None), None)
            if offsets is None:
                raise NoEvidence("the head is not one linear layer")
            node = _producer(inner)
        settings = {name: a.value for name, a in node.attributes.items()}
        is_plain = settings.get("alpha", 1.0) == 1.0 and settings.get("beta", 1.0) == 1.0
        is_product = node.op_type in ("Gemm", "MatMul")
        not_linear = NoEvidence(f"the head ends in {node.op_type}, not in one linear layer")
        if not (is_product and is_plain) or settings.get("transA", 0):
            raise not_linear
        pooled, weight, *bias = node.inputs
        numbers = self._constant(weight)
        if pooled is None or weight is None or numbers is None or numbers.ndim != 2:
            raise not_linear
        is_transposed = bool(settings.get("transB", 0))
        if bias and bias[0] is not None:
            if offsets is not None or self._constant(bias[0]) is None:
                raise NoEvidence("the head is not one linear layer")
            offsets = self._constant(bias[0])
        classes = numbers.shape[0 if is_transposed else 1]
        flat = np.zeros(1) if offsets is None else offsets.ravel()
        if flat.size not in (1, classes):
            raise NoEvidence("the head is not one linear layer")
        return _LinearHead(output, pooled, weight, is_transposed, np.broadcast_to(flat, classes))

    def _total_behind(self, pooled: ir.Value) -> _TokenSum:
        whole, factors = pooled, list[_Factor]()
        shift: NoEvidence | None = None
        while True:
            node = _producer(pooled)
            operands = [value for value in node.inputs if value is not None]
            last = f"{node.op_type} ({pooled.name})"
            between = NoEvidence(f"{last} is between the sum over the tokens and the head")
            is_sum = is_reduction_over_tokens(node, self._constants)
            how = pooling(node, self._constants)
            if is_sum or how in ("max", "logsumexp"):
                if len(axes_of(pooled)) != 2:
                    raise NoEvidence(f"{last} keeps an axis of tokens")
                (summed, *_), given = operands, (node.op_type, tuple(factors))
                if how == "logsumexp":
                    return _TokenSum(summed, summed, pooled, *given, whole=whole)
                if shift is not None:
                    raise shift
                tokens, largest = self._tokens_behind(summed) if is_sum else (summed, None)
                return _TokenSum(tokens, summed, pooled, *given, largest)
            if node.op_type in ("Add", "Div", "Mul", "Sub"):
                places = [1, 0] if node.op_type in ("Add", "Mul") else [1]
                place = next((i for i in places if self._is_factor(operands[i])), None)
                is_shift = node.op_type in ("Add", "Sub")
                if place is None:
                    raise (
                        between
                        if is_shift
                        else NoEvidence(f"{last} does not scale by one number per document")
                    )
                operand = operands[place]
                if is_shift:
                    shift = shift or between
                else:
                    factors.append(_Factor(node.op_type, operand, len(self._shape(operand) or ())))
                pooled = operands[1 - place]
            elif node.op_type in ("Cast", "Identity"):
                pooled = operands[0]
            else:
                raise between

    def _tokens_behind(self, summed: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """Return the value of the tokens, and its largest values if only those are summed."""
        mask, largest = summed.producer(), summed
        if mask is not None and mask.op_type == "Where" and mask.inputs[1] is not None:
            other = self._constant(mask.inputs[2])
            if other is not None and not other.any():
                largest = mask.inputs[1]
        node = largest.producer()
        if node is None or pooling(node, self._constants) != "top_k":
            return summed, None
        tokens = node.inputs[0]
        assert tokens is not None  # TopK needs it
        padding = tokens.producer()
        if padding is not None and padding.op_type == "Pad" and padding.inputs[0] is not None:
            tokens = padding.inputs[0]
        return tokens, largest

    def _is_factor(self, value: ir.Value) -> bool:
        """Return whether a value has one number for each document, or one for all."""
        shape = self._shape(value)
        return shape is not None and (len(shape) == 0 or shape[-1] == 1)

    def _shape(self, value: ir.Value) -> Sequence[str | int] | None:
        numbers = self._constant(value)
        if numbers is not None:
            return numbers.shape
        return None if value.shape is None else axes_of(value)

    def _constant(self, value: ir.Value | None) -> NDArray[np.generic] | None:
        return None if value is None else self._constants.get(str(value.name))


def _producer(value: ir.Value | None) -> ir.Node:
    node = None if value is None else value.producer()
    if node is None:
        name = "" if value is None else value.name
        raise NoEvidence(f"{name} is not computed from the tokens")
    return node
