"""The table of error bounds, with their reasons."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """The maximum error of equal outputs, with its reason.

    ``bound`` limits ``max |output - reference| / max(1, max |reference|)``.
    """

    bound: float
    reason: str


TOLERANCES = {
    "fp32": Tolerance(
        1e-4,
        "float32 rounds a logit of magnitude 1000 by 3e-5, and the exponential turns that "
        "into a relative error; sums over tokens and layers add less",
    ),
    "fp16": Tolerance(
        2e-2,
        "float16 weights and activations carry 11 bits, 5e-4 each; a few layers of them, "
        "with every sum over tokens in float32, stay within forty such steps",
    ),
    "bf16": Tolerance(
        2e-2,
        "bfloat16 operands carry 8 bits, 4e-3 each; a product of them has errors of "
        "either sign, which a float32 sum evens out",
    ),
    "int8": Tolerance(
        5e-2,
        "int8 steps are 1/127 of a column's or a row's largest value, 8e-3; their errors "
        "even out in a sum and add up over the layers",
    ),
}
"""Precision to tolerance, for every test and report."""
