"""Equal formulas are one object with one order, wherever their parts lie in memory."""

import random

import onnx_ir as ir
import pytest

from aftexport.recognition.formula.algebra import add, multiply, sum_over
from aftexport.recognition.formula.axes import Axis, Unreadable
from aftexport.recognition.formula.keys import key
from aftexport.recognition.formula.terms import Leaf, Product, Sum, as_product, single_atom

NAMES = [f"tensor {letter}" for letter in "abcdefghijkl"]


def leaves(axis: Axis, order: list[str]) -> list[Product]:
    return [as_product(Leaf(ir.val(name), ((axis,),))) for name in order]


def test_factors_and_terms_have_canonical_order() -> None:
    axis = Axis((3, 4))
    given = leaves(axis, NAMES)
    shuffled = leaves(axis, random.Random(0).sample(NAMES, len(NAMES)))
    for combined in (lambda parts: multiply(*parts), add):
        assert key(combined(given)) == key(combined(shuffled))
    factors = [atom.value.name for atom, _ in multiply(*shuffled).factors if isinstance(atom, Leaf)]
    assert factors == NAMES


def test_orders_of_many_axes_are_skipped() -> None:
    axes = tuple(Axis((2, 3)) for _ in range(7))
    with pytest.raises(Unreadable, match="7 axes"):
        key(as_product(Sum(axes, as_product(Leaf(ir.val("x"), tuple((axis,) for axis in axes))))))


def test_summed_axes_keep_creation_order() -> None:
    axes = [Axis((size, size + 1)) for size in range(2, 8)]
    random.Random(0).shuffle(axes)
    total = single_atom(
        sum_over(axes, as_product(Leaf(ir.val("x"), tuple((axis,) for axis in axes))))
    )
    assert isinstance(total, Sum)
    assert [axis.sizes[0] for axis in total.axes] == list(range(2, 8))


def test_merged_sum_keeps_coefficient_and_exponent() -> None:
    outer, inner = Axis((2, 3)), Axis((4, 5))
    leaf = as_product(Leaf(ir.val("x"), ((outer,), (inner,))))
    body = Product(leaf.factors, coefficient=2.0, exponent=3.0)
    merged = sum_over((outer,), as_product(Sum((inner,), body)))
    whole = sum_over((outer, inner), body)
    assert (merged.coefficient, merged.exponent) == (2.0, 3.0)
    assert key(merged) == key(whole)
