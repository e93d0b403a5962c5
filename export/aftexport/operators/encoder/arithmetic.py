"""The types in which the bodies of the encoder's operators compute."""

from collections.abc import Iterable
from enum import Enum

from aftexport.operators.schema import Attribute, as_float

_BFLOAT16 = 16
_FLOAT = 1


class Arithmetic(Enum):
    """The types of a body's products and sums; the statistics of a norm are in float32."""

    FLOAT32 = "float32"
    TENSORS = "tensors"
    BFLOAT16 = "bfloat16"

    def names(self, *inputs: str) -> list[str]:
        """Return the values of the body in place of its inputs."""
        return [f"{name}_f" if self is Arithmetic.FLOAT32 else name for name in inputs]

    def casts(self, inputs: Iterable[str]) -> str:
        """Return the first lines of a body, which define the values of ``names``."""
        return as_float(*inputs) if self is Arithmetic.FLOAT32 else ""

    def product(self, result: str, left: str, right: str) -> str:
        """Return the lines of a matrix product."""
        if self is not Arithmetic.BFLOAT16:
            return f"{result} = MatMul({left}, {right})\n"
        return f"""
        {result}_left = Cast <to = {_BFLOAT16}> ({left})
        {result}_right = Cast <to = {_BFLOAT16}> ({right})
        {result}_rounded = MatMul({result}_left, {result}_right)
        {result} = Cast <to = {_FLOAT}> ({result}_rounded)
        """

    def gelu(self, result: str, x: str, *, has_operator: bool = True) -> str:
        """Return the lines of the exact GELU; opsets from 20 on have an operator for it."""
        # onnx's evaluator has no Gelu within a function, and ONNX Runtime fuses the parts of one.
        if self is Arithmetic.FLOAT32:
            return _gelu_parts(result, x)
        if has_operator:
            return f"{result} = Gelu({x})\n"
        if self is Arithmetic.BFLOAT16:
            return _gelu_parts(result, x)
        return (
            f"{x}_wide = Cast <to = {_FLOAT}> ({x})\n"
            + _gelu_parts(f"{result}_wide", f"{x}_wide")
            + f"{result} = CastLike({result}_wide, {x})\n"
        )

    def output(self, name: str, expression: str) -> str:
        """Return the lines of an output, which has the type of the input ``x``."""
        if self is not Arithmetic.FLOAT32:
            return f"{name} = {expression}\n"
        return f"{name}_result = {expression}\n{name} = CastLike({name}_result, x)\n"


def layer_norm(x: str, weight: str, bias: str) -> str:
    """Return the line of the norm, ``normed``."""
    return f"""
        normed = LayerNormalization <axis = -1, epsilon: float = @epsilon> ({x}, {weight}, {bias})
        """


def _gelu_parts(result: str, x: str) -> str:
    """Return the lines of the exact GELU by the error function, of an input in float32."""
    # The root has the type of the product, which is float64 where a float64 engine runs it.
    return f"""
        two_f = Constant <value_float = 2.0> ()
        two = CastLike(two_f, {x})
        sqrt_two = Sqrt(two)
        one_f = Constant <value_float = 1.0> ()
        half = Constant <value_float = 0.5> ()
        scaled = Div({x}, sqrt_two)
        error_function = Erf(scaled)
        twice_weight = Add(error_function, one_f)
        twice_activated = Mul({x}, twice_weight)
        {result} = Mul(twice_activated, half)
        """


EPSILON = Attribute("epsilon", 1e-5, "Constant that is added to the variance of the norm.")
PRECISION = Attribute(
    "precision",
    "fp32",
    "Precision of the products: fp32; bf16, with operands rounded to bfloat16; int8, with weights "
    "quantized by column and activations by row. Sums are float32 or int32. The portable body "
    "computes in float32.",
)
