"""The contribution of each token to chosen logits of a document.

If a head is linear and its input is a sum over the tokens, each logit is a sum over the tokens:

    logits = scale * sum_t x[t] W + b = sum_t (scale * x[t] W) + b

This holds for masked tokens and for tokens weighted by a softmax too. The graph returns the
summands of chosen logits beside the logits. They are exact for the last layer, and the computation
of the logits does not change. A summand is the product of x[t] with the document's *direction*,
``scale * W`` of that logit.

The constant ``EXPLAINED`` has the choice: the logits of all heads of one sum are numbered one after
the other, and ``largest(i)`` stands for the largest logit of head i. A runtime that replaces the
constant by an input chooses for each document, see ``engines.explained_input``. Otherwise the graph
explains the largest logit of the first head.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from aftexport.contract import EVIDENCE, EXPLAINED, largest
from aftexport.passes.graph_values import dims_of, main_input_of
from aftexport.passes.summed_heads import LinearHead, NoEvidence, SummedHeads, TokenSum

DIRECTION = "evidence_direction"
"""The output with the directions of each document, float32 ``[batch, D, chosen]``."""

_PREFIX = "evidence_"
_FLOAT = onnx.TensorProto.FLOAT


@dataclass(frozen=True)
class Explainable:
    """The heads whose logits a graph can explain.

    Attributes:
        tokens: the name of the value whose sum the heads are linear in, ``[batch, tokens, D]``.
        offsets: for each of these heads the part of each logit that does not depend on the tokens,
            in the order of their logits' numbers.
        refused: the reason against each other output per document.
    """

    tokens: str
    offsets: Mapping[str, tuple[float, ...]]
    refused: Mapping[str, str]


def add_evidence(model: onnx.ModelProto, outputs: Sequence[str] | None = None) -> Explainable:
    """Add an output ``evidence`` to a lowered graph, in place.

    It is float32 ``[batch, tokens]``, or ``[batch, chosen * tokens]`` with several chosen logits.
    The sum of a logit's evidence over the tokens, plus its offset, is the logit. Padding adds 0 if
    the model masks it.

    Args:
        model: the result of ``lowering.lower``, with the shapes of intermediate values and bare
            operators.
        outputs: the outputs that must be explainable; None for the first output per document that
            is, and all others that are linear in the same sum.

    Returns:
        The explainable heads.

    Raises:
        NoEvidence: if no head is linear in a sum over the tokens, or one of ``outputs`` is not;
            the model stays unchanged.
    """
    explainable = add_direction(model, outputs)
    graph = model.graph
    graph.output.pop()
    graph.node.extend(products(explainable.tokens))
    axes = dims_of(graph)[main_input_of(graph)][:2]
    graph.output.append(onnx.helper.make_tensor_value_info(EVIDENCE, _FLOAT, axes))
    return explainable


def add_direction(model: onnx.ModelProto, outputs: Sequence[str] | None = None) -> Explainable:
    """Add only the output ``DIRECTION``; see ``add_evidence``."""
    search = SummedHeads(model)
    found: list[LinearHead] = []
    total: TokenSum | None = None
    refused = {}
    for output in search.documents if outputs is None else outputs:
        try:
            head, summed = search.find(output)
        except NoEvidence as reason:
            refused[output] = str(reason)
            continue
        if total is not None and summed != total:
            refused[output] = f"it pools the tokens in another way than {found[0].output}"
            continue
        found.append(head)
        total = summed
    if total is None or (outputs is not None and refused):
        raise NoEvidence(next(iter(refused.values()), "every output is for tokens"))
    graph = model.graph
    graph.node.extend(_nodes(found, total))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([[largest(0)]]), EXPLAINED))
    direction = onnx.helper.make_tensor_value_info(DIRECTION, _FLOAT, [None] * 3)
    graph.output.append(direction)
    offsets = {head.output: tuple(map(float, head.offsets)) for head in found}
    return Explainable(total.tokens, offsets, refused)


def products(tokens: str) -> list[onnx.NodeProto]:
    """Return the nodes that compute the output ``evidence`` from the directions.

    Args:
        tokens: the name of the summed value, see ``Explainable``.
    """
    make = onnx.helper.make_node
    wide, product, rows = (_PREFIX + step for step in ("tokens", "products", "rows"))
    return [
        make("Cast", [tokens], [wide], to=_FLOAT),
        make("MatMul", [wide, DIRECTION], [product]),
        make("Transpose", [product], [rows], perm=[0, 2, 1]),
        make("Flatten", [rows], [EVIDENCE], axis=1),
    ]


def _nodes(heads: Sequence[LinearHead], total: TokenSum) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of the directions, in float32.

    16 bits cannot represent the share of one token in a long document.
    """
    make, value = onnx.helper.make_node, _PREFIX + "weight"
    yield make("Constant", [], [_PREFIX + "last_axis"], value_ints=[-1])
    yield from _chosen(heads)
    yield from _rows(heads, value)
    for place, factor in enumerate(total.factors):
        scale, scaled = (f"{_PREFIX}{step}_{place}" for step in ("factor", "scaled"))
        yield make("Cast", [factor.name], [scale], to=_FLOAT)
        if factor.rank == 2:
            yield make("Unsqueeze", [scale, _PREFIX + "last_axis"], [f"{scale}_by_row"])
            scale = f"{scale}_by_row"
        yield make(factor.operator, [value, scale], [scaled])
        value = scaled
    if total.is_mean:
        yield make("Shape", [total.tokens], [_PREFIX + "count"], start=1, end=2)
        yield make("Cast", [_PREFIX + "count"], [_PREFIX + "tokens_count"], to=_FLOAT)
        yield make("Div", [value, _PREFIX + "tokens_count"], [_PREFIX + "mean"])
        value = _PREFIX + "mean"
    yield make("Transpose", [value], [DIRECTION], perm=[0, 2, 1])


def _chosen(heads: Sequence[LinearHead]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of ``evidence_chosen``, the numbers of the chosen logits."""
    make, chosen, first = onnx.helper.make_node, EXPLAINED, 0
    for place, head in enumerate(heads):
        label, code, is_code, result, start = (
            f"{_PREFIX}{step}_{place}" for step in ("class", "code", "is_code", "chosen", "first")
        )
        yield make("ArgMax", [head.output], [label], axis=1, keepdims=1)
        yield make("Constant", [], [start], value_ints=[first])
        if place:
            yield make("Add", [label, start], [f"{label}_of_all"])
            label = f"{label}_of_all"
        yield make("Constant", [], [code], value_ints=[largest(place)])
        yield make("Equal", [EXPLAINED, code], [is_code])
        result = result if place + 1 < len(heads) else _PREFIX + "chosen"
        yield make("Where", [is_code, label, chosen], [result])
        chosen, first = result, first + len(head.offsets)


def _rows(heads: Sequence[LinearHead], result: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of the chosen rows of all weights, float32 ``[batch, chosen, D]``."""
    make, chosen, rows = onnx.helper.make_node, _PREFIX + "chosen", ""
    for place, head in enumerate(heads):
        own, row, wide, is_own = (
            f"{_PREFIX}{step}_{place}" for step in ("own", "row", "wide", "is_own")
        )
        index, start = chosen, f"{_PREFIX}first_{place}"
        if len(heads) > 1:  # the numbers of other heads would be outside this head's weight
            yield make("Constant", [], [f"{own}_none"], value_int=0)
            yield make("Constant", [], [f"{own}_last"], value_int=len(head.offsets) - 1)
            yield make("Sub", [chosen, start], [f"{own}_any"])
            yield make("Clip", [f"{own}_any", f"{own}_none", f"{own}_last"], [own])
            index = own
        axis = 0 if head.is_transposed else 1
        yield make("Gather", [head.weight, index], [row], axis=axis)
        if not head.is_transposed:
            yield make("Transpose", [row], [f"{row}_by_document"], perm=[1, 2, 0])
            row = f"{row}_by_document"
        is_last = place + 1 == len(heads)
        if not place:
            rows = result if is_last else wide
            yield make("Cast", [row], [rows], to=_FLOAT)
            continue
        yield make("Cast", [row], [wide], to=_FLOAT)
        yield make("GreaterOrEqual", [chosen, start], [is_own])
        yield make("Unsqueeze", [is_own, _PREFIX + "last_axis"], [f"{is_own}_row"])
        joined = result if is_last else f"{_PREFIX}joined_{place}"
        yield make("Where", [f"{is_own}_row", wide, rows], [joined])
        rows = joined
