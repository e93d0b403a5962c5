"""Attributes that several operators share."""

from aftexport.operators.schema import Attribute

GATE = Attribute(
    "gate",
    "sigmoid",
    "Function of the query that multiplies the result; none leaves the query out.",
    ("sigmoid", "tanh", "none", "relu"),
    cpu_only_choices=("relu",),
)
NUM_HEADS = Attribute("num_heads", 1, "Number of heads; divides the channels of query and value.")
DENOMINATOR_EPS = Attribute(
    "eps",
    0.0,
    "Added to each sum of weights exp(key + bias), as they are, without any shift by a maximum.",
    is_cpu_only=True,
)
KV_NUM_HEADS = Attribute(
    "kv_num_heads",
    0,
    "Number of heads of key and value; divides num_heads. Query head i reads head "
    "i // (num_heads / kv_num_heads). 0: num_heads, and values as wide as keys.",
    is_cpu_only=True,
)
