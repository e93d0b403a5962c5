"""Products of tensors, read as sums over the contracted axes of products of entries."""

import onnx_ir as ir

from aftexport.recognition.formula import algebra
from aftexport.recognition.formula.algebra import add, multiply
from aftexport.recognition.formula.axes import Axis, Dims, fresh
from aftexport.recognition.formula.terms import Product
from aftexport.recognition.formula.unreadable import Unreadable
from aftexport.recognition.formula.windows import sum_over
from aftexport.recognition.read.reader import Reader


def _matmul(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    first, second = reader.input(node, 0), reader.input(node, 1)
    ranks = len(reader.shape(first)), len(reader.shape(second))
    if min(ranks) < 2:
        return None
    summed = fresh(reader.shape(first)[-1])
    batch, row, column = dims[:-2], dims[-2], dims[-1]
    return sum_over(
        summed,
        multiply(
            reader.broadcast(first, (*batch, row, summed)),
            reader.broadcast(second, (*batch, summed, column)),
        ),
    )


def _gemm(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    first, second = reader.input(node, 0), reader.input(node, 1)
    summed = fresh(reader.shape(first)[0 if node.attributes.get_int("transA", 0) else 1])
    rows: Dims = (dims[0], summed)
    columns: Dims = (summed, dims[1])
    if node.attributes.get_int("transA", 0):
        rows = (summed, dims[0])
    if node.attributes.get_int("transB", 0):
        columns = (dims[1], summed)
    product = sum_over(
        summed, multiply(reader.broadcast(first, rows), reader.broadcast(second, columns))
    )
    product = algebra.scaled(product, node.attributes.get_float("alpha", 1.0))
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return product
    bias = reader.broadcast(node.inputs[2], dims)
    bias = algebra.scaled(bias, node.attributes.get_float("beta", 1.0))
    return add((product, bias), node.outputs[0], dims)


def _einsum(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    left, arrow, right = node.attributes.get_string("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in right:
        # The dims without letters; the last of them are shared by all terms.
        rest = [chr(0x3B1 + i) for i in range(len(dims) - len(right) + 3)]
        ranks = [len(reader.shape(v)) for v in node.inputs if v is not None]
        terms = [
            term.replace("...", "".join(rest[len(rest) - (rank - len(term) + 3) :]))
            for term, rank in zip(terms, ranks, strict=True)
        ]
        right = right.replace("...", "".join(rest))
    if not arrow or any("." in t or len(set(t)) != len(t) for t in (*terms, right)):
        return None
    ranks = [len(reader.shape(reader.input(node, i))) for i in range(len(node.inputs))]
    if list(map(len, (*terms, right))) != [*ranks, len(dims)]:
        raise Unreadable(f"the equation of an Einsum does not fit its {len(ranks)} inputs")
    axes = dict(zip(right, dims, strict=True))
    summed: list[Axis] = []
    for term, value in zip(terms, node.inputs, strict=True):
        for letter, sizes in zip(term, reader.shape(value), strict=True):  # type: ignore[arg-type]
            if letter not in axes:
                axes[letter] = fresh(sizes)
                summed += axes[letter]
    factors = [
        reader.broadcast(value, tuple(axes[letter] for letter in term))  # type: ignore[arg-type]
        for term, value in zip(terms, node.inputs, strict=True)
    ]
    return sum_over(summed, multiply(*factors))


FORMULAS = {"Einsum": _einsum, "Gemm": _gemm, "MatMul": _matmul}
