"""The cause that measured steps name."""

from dataclasses import replace

import numpy as np
import pytest

from aftexport.verify.layers.blame import Steps, Verdict, judge

BOUND = 1e-5
CLEAN = Steps(
    served_again=0.0,
    kernel=1e-7,
    kernel_precision=0.0,
    body_precision=1e-7,
    body=1e-15,
    definition=1e-15,
    weight_precision=0.0,
    torch_in_same_types=1e-7,
)
CASES = {
    "a broken kernel": ({"kernel": 1e-2}, True, "kernel", False),
    "a kernel that varies": ({"served_again": 1e-3}, True, "kernel", False),
    "a kernel as far as its rounding": (
        {"kernel": 5e-2, "body_precision": 1e-2, "torch_in_same_types": 1e-2},
        True,
        "precision",
        False,
    ),
    "int8 products": ({"kernel_precision": 1e-2}, True, "precision", False),
    "float16 weights": ({"weight_precision": 1e-3}, False, "precision", False),
    "a wrong weight": ({"definition": 1e-2}, True, "export", False),
    "a wrong body": ({"body": 1e-2}, False, "export", False),
    "a wrong body beside a kernel": (
        {"body": 1e-2, "kernel_precision": 1e-3},
        True,
        "precision",
        False,
    ),
    "a formula that loses digits": ({"body_precision": 1e-2}, False, "export", True),
    "PyTorch loses them too": (
        {"body_precision": 1e-2, "torch_in_same_types": 1e-2},
        False,
        "precision",
        False,
    ),
    "PyTorch lacks the operator": (
        {"body_precision": 1e-2, "torch_in_same_types": np.inf},
        False,
        "precision",
        False,
    ),
}


@pytest.mark.parametrize(("changes", "fused", "cause", "loses"), CASES.values(), ids=CASES)
def test_largest_step_names_the_cause(
    changes: dict[str, float], fused: bool, cause: str, loses: bool
) -> None:
    assert judge(replace(CLEAN, **changes), BOUND, fused=fused) == Verdict(cause, loses)
