"""Equal formulas are one object with one order, wherever their parts lie in memory."""

import random

import onnx_ir as ir
import pytest

from aftexport.recognition.algebra import add, key, multiply, sum_over
from aftexport.recognition.terms import (
    Axis,
    Exp,
    Leaf,
    Product,
    Sum,
    Unreadable,
    as_product,
    regroup,
    single_atom,
)

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


VALUES = {name: ir.val(name) for name in "abc"}


def leaf(name: str, *axes: Axis) -> Product:
    return as_product(Leaf(VALUES[name], tuple((axis,) for axis in axes)))


def axes(count: int) -> list[Axis]:
    return [Axis((4, 4)) for _ in range(count)]


def scores(row: Axis, column: Axis, *, crossed: bool = False) -> Product:
    """A sum of exponentials of sums, of axes of its own."""
    summed, inner, other = axes(3)
    product = sum_over([inner, other], multiply(leaf("a", summed, inner), leaf("b", inner, other)))
    logits = add([product, leaf("c", *((column, row) if crossed else (row, column)))])
    return sum_over([summed], as_product(Exp(multiply(logits, leaf("a", row, summed)))))


def test_nested_sums_equal_by_any_names() -> None:
    row, column = axes(2)
    assert key(scores(row, column)) == key(scores(row, column))
    assert key(scores(row, column)) != key(scores(row, column, crossed=True))
    assert key(scores(row, column)) != key(scores(column, row))


def test_axes_in_same_places_are_permuted() -> None:
    """They are tried in every order."""

    def cycle(first: int) -> Product:
        around = axes(3)
        order = [around[(first + i) % 3] for i in range(3)]
        pairs = zip(order, order[1:] + order[:1], strict=True)
        return sum_over(around, multiply(*(leaf("a", *pair) for pair in pairs)))

    assert len({key(cycle(first)) for first in range(3)}) == 1


def test_key_changes_after_axis_split() -> None:
    whole, row = Axis((4, 4)), Axis((3, 3))
    remembered = sum_over([whole], multiply(leaf("a", row, whole), leaf("b", whole, whole)))
    before = key(remembered)
    regroup([whole], [(2, 2), (2, 2)])
    made_after = sum_over([whole], multiply(leaf("a", row, whole), leaf("b", whole, whole)))
    assert key(remembered) == key(made_after) != before


def test_long_keys_are_distinct_digests() -> None:
    axis = Axis((4, 4))
    exponentials = [
        as_product(Exp(add([leaf("a", axis), Product(coefficient=float(n))]))) for n in range(400)
    ]
    sums = [add([*exponentials[:n], leaf("b", axis)]) for n in (398, 399)]
    keys = {key(total) for total in sums}
    assert len(keys) == 2
    assert all(len(text) < 200 for text in keys)
