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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from aftexport.lowering.graph_values import main_input_of
from aftexport.lowering.new_nodes import NewNodes
from aftexport.lowering.summed_heads import LinearHead, NoEvidence, SummedHeads, TokenSum
from aftexport.system.contract import EVIDENCE, EXPLAINED, largest

DIRECTION = "evidence_direction"
"""The output with the directions of each document, float32 ``[batch, D, chosen]``."""

_FLOAT = ir.DataType.FLOAT
_LAST_AXIS = (-1,)


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


def add_evidence(model: ir.Model, outputs: Sequence[str] | None = None) -> Explainable:
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
    explainable, total = _add_direction(model.graph, outputs)
    direction = model.graph.outputs.pop()
    evidence = add_products(model.graph, total.tokens, direction)
    shape = main_input_of(model.graph).shape
    evidence.shape = None if shape is None else ir.Shape(shape[:2])
    return explainable


def add_direction(model: ir.Model, outputs: Sequence[str] | None = None) -> Explainable:
    """Add only the output ``DIRECTION``; see ``add_evidence``."""
    explainable, _ = _add_direction(model.graph, outputs)
    return explainable


def add_products(graph: ir.Graph, tokens: ir.Value, direction: ir.Value) -> ir.Value:
    """Add the output ``evidence`` to a graph and return it.

    Args:
        graph: the graph.
        tokens: the summed value, see ``Explainable``.
        direction: the directions.
    """
    new = NewNodes(graph, EVIDENCE)
    product = new.add("MatMul", new.add("Cast", tokens, to=_FLOAT), direction)
    evidence = new.add("Flatten", new.add("Transpose", product, perm=[0, 2, 1]), axis=1)
    evidence.name, evidence.dtype = EVIDENCE, _FLOAT
    graph.extend(new.nodes)
    graph.outputs.append(evidence)
    return evidence


def _add_direction(graph: ir.Graph, outputs: Sequence[str] | None) -> tuple[Explainable, TokenSum]:
    search = SummedHeads(graph)
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
            other = found[0].output.name
            refused[output] = f"it pools the tokens in another way than {other}"
            continue
        found.append(head)
        total = summed
    if total is None or (outputs is not None and refused):
        raise NoEvidence(next(iter(refused.values()), "every output is for tokens"))
    graph.outputs.append(_direction(graph, found, total))
    offsets = {str(head.output.name): tuple(map(float, head.offsets)) for head in found}
    return Explainable(str(total.tokens.name), offsets, refused), total


def _direction(graph: ir.Graph, heads: Sequence[LinearHead], total: TokenSum) -> ir.Value:
    """Add the nodes of the directions, in float32.

    16 bits cannot represent the share of one token in a long document.
    """
    new = NewNodes(graph, EVIDENCE)
    value = _rows(new, heads, _chosen(new, heads))
    for factor in total.factors:
        scale = new.add("Cast", factor.operand, to=_FLOAT)
        if factor.rank == 2:
            scale = new.add("Unsqueeze", scale, new.constant(_LAST_AXIS))
        value = new.add(factor.operator, value, scale)
    if total.is_mean:
        count = new.add("Shape", total.tokens, start=1, end=2)
        value = new.add("Div", value, new.add("Cast", count, to=_FLOAT))
    direction = new.add("Transpose", value, perm=[0, 2, 1])
    direction.name, direction.dtype, direction.shape = DIRECTION, _FLOAT, ir.Shape([None] * 3)
    graph.extend(new.nodes)
    return direction


def _chosen(new: NewNodes, heads: Sequence[LinearHead]) -> ir.Value:
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


def _rows(new: NewNodes, heads: Sequence[LinearHead], chosen: ir.Value) -> ir.Value:
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
