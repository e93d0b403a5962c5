"""Attributes that the encoder operators share."""

from aftexport.operators.schema import Attribute

EPSILON = Attribute("epsilon", 1e-5, "Added to the variance of the norm.")
PRECISION = Attribute(
    "precision",
    "fp32",
    "Of the products: fp32; bf16, operands rounded to bfloat16; int8, weights by column and "
    "activations by row. Sums are float32 or int32. The portable body computes in float32.",
)
