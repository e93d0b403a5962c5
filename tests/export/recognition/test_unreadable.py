"""Values without a formula raise Unreadable, and errors in our own code are not hidden."""

from collections.abc import Callable

import numpy as np
import onnx.parser
import pytest
import torch

from aftexport.recognition.algebra import constant_factor, power
from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.patterns import PATTERNS
from aftexport.recognition.patterns.pattern import Subject
from aftexport.recognition.read.reader import axis_index, scalar
from aftexport.recognition.recognizer import recognize
from aftexport.recognition.terms import Axis, Product, Unreadable, number, regroup

from . import implementations
from .graphs import fused, scripted
from .layer import DIM

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

UNREADABLE: dict[str, tuple[Callable[[], object], str]] = {
    "division by zero": (lambda: power(number(0.0), -1.0), "divided by 0"),
    "root of a negative number": (lambda: power(number(-2.0), 0.5), "may be negative"),
    "infinite power": (lambda: power(number(-2.0), np.inf), "may be negative"),
    "overflow of a power": (lambda: power(number(1e-300), -2.0), "overflows"),
    "overflow of an exponent": (lambda: constant_factor(Product(exponent=1e3)), "overflows"),
    "uneven split": (lambda: regroup([Axis((6, 6))], [(4, 4), (2, 2)]), "unevenly"),
    "split of size zero": (lambda: regroup([Axis((6, 6))], [(0, 3), (2, 2)]), "unevenly"),
    "too few entries": (lambda: regroup([Axis((6, 6))], [(6, 6), (2, 2)]), "fewer entries"),
    "axis of a scalar": (lambda: axis_index(0, 0), "scalar"),
    "array for a scalar": (lambda: scalar(np.ones(3)), "one number"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_has_a_reason(name: str) -> None:
    read, reason = UNREADABLE[name]
    with pytest.raises(Unreadable, match=reason):
        read()


def test_zero_divisor_has_no_formula() -> None:
    """The constant factor of the divisor underflows to 0."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]>
        agraph (float[b, t, 4] x) => (float[b, t, 4] y)
        <float tiny = {1e-30}, int64[1] axis = {1}>
        {
            e = Exp(x)
            total = ReduceSum(e, axis)
            below = Mul(total, tiny)
            square = Mul(below, below)
            fourth = Mul(square, square)
            eighth = Mul(fourth, fourth)
            sixteenth = Mul(eighth, eighth)
            y = Div(e, sixteenth)
        }"""
    )
    found = recognize(normalize(model))
    assert found.matches == []
    assert "y" in found.unread


def test_error_in_a_pattern_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: Subject) -> None:
        raise ValueError("an error in our own code")

    monkeypatch.setitem(PATTERNS, "aft", broken)
    _, layer = next(pair for pair in implementations.layers().values() if pair[0].startswith("Aft"))
    example = torch.randn(2, 12, DIM, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="our own code"):
        fused(scripted(layer, example))
