"""Attributes that several operators share."""

from aftexport.operators.schema import Attribute

GATE = Attribute(
    "gate",
    "sigmoid",
    "Function of the query that multiplies the result; none leaves the query out.",
    ("sigmoid", "tanh", "none"),
)
NUM_HEADS = Attribute("num_heads", 1, "Number of heads; divides the channels of query and value.")
