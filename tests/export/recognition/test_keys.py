"""Equal formulas have equal keys, whatever the names and splits of their axes."""

import onnx_ir as ir

from aftexport.recognition.formula.algebra import add, multiply, sum_over
from aftexport.recognition.formula.axes import Axis, regroup
from aftexport.recognition.formula.keys import key
from aftexport.recognition.formula.terms import Exp, Leaf, Product, as_product

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
