import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod, ToFloat, TruncToInt

from aftexport.capture.shape_guards import Ranges, decide_condition, find_step

BATCH, TOKENS = sympy.symbols("batch tokens", integer=True, positive=True)
RANGES: Ranges = ((BATCH, 1, 1 << 16), (TOKENS, 1, 1 << 20))
WINDOWS = 16 * FloorDiv(TOKENS + 15, 16)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (sympy.Le(TOKENS, WINDOWS), True),
        (sympy.Gt(TOKENS, WINDOWS), False),
        (sympy.Eq(Mod(BATCH * (TOKENS + PythonMod(-TOKENS, 16)), 16 * BATCH), 0), True),
        (sympy.Lt(TruncToInt(ToFloat(TOKENS) * 0.5), TOKENS), True),
        (sympy.Ne(Mod(TOKENS, 64), 0), None),
        (sympy.Ne(TOKENS, (1 << 20) - 1), None),
        (sympy.Eq(FloorDiv(TOKENS, FloorDiv(TOKENS, 2)), 2), None),
        (sympy.Ge(TOKENS**4, 0), None),
        (sympy.Gt(sympy.sin(TOKENS), -2), None),
    ],
    ids=str,
)
def test_decided_by_every_size(condition: sympy.Basic, expected: bool | None) -> None:
    """The last ones: one exception of a million, a division by 0, overflow, and a function that is
    not known."""
    assert decide_condition(condition, RANGES) is expected


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (sympy.Gt(TOKENS, 40), 40),
        (sympy.Le(TOKENS, 40), 40),
        (sympy.Eq(TOKENS, 40), None),
        (sympy.Ne(Mod(TOKENS, 64), 0), None),
        (sympy.Gt(TOKENS, 5000), None),
    ],
    ids=str,
)
def test_step_is_one_change(condition: sympy.Basic, expected: int | None) -> None:
    assert find_step(condition, [TOKENS], 4096) == expected
