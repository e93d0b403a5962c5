"""Attributes that the encoder operators share."""

from aftexport.operators.schema import Attribute

EPSILON = Attribute("epsilon", 1e-5, "Constant that is added to the variance of the norm.")
PRECISION = Attribute(
    "precision",
    "fp32",
    "Precision of the products: fp32; bf16, with operands rounded to bfloat16; int8, with weights "
    "quantized by column and activations by row. Sums are float32 or int32. The portable body "
    "computes in float32.",
)
