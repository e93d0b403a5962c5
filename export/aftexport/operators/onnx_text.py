"""Pieces of the portable bodies, in ONNX textual syntax.

Every piece computes in float32 whatever the type of the inputs, names what it
defines, and reads the names of ``common_constants`` and ``tokens`` (int64 ``[1]``).
Subgraphs read names of the graph around them.
"""

from collections.abc import Mapping

from aftexport.operators.numerics import MASKED
from aftexport.operators.schema import as_float

SMALLEST_DENOMINATOR = 1e-25
"""Below this a float32 denominator may have lost terms that count: what underflows
is under 1e-38 a term, so even a million of them are 1e-7 of this."""

LOWEST = -3.4028234663852886e38
"""The lowest finite float32. Maxima of logits are at least this, so that differences
with them are never NaN, and the weight of a masked key is 0."""


def constants(**values: float | int | list[int]) -> str:
    """Defines scalar constants, and int64 vectors from lists."""
    lines = []
    for name, value in values.items():
        if isinstance(value, list):
            lines.append(f"{name} = Constant <value_ints = {value}> ()")
        elif isinstance(value, float):
            lines.append(f"{name} = Constant <value_float: float = {value}> ()")
        else:
            lines.append(f"{name} = Constant <value_int = {value}> ()")
    return "\n".join(lines) + "\n"


def common_constants() -> str:
    """Defines int64 scalars and vectors of one element, and the float scalars of the bodies."""
    return constants(
        zero=0, one=1, two=2, zero_1d=[0], one_1d=[1], axis1=[1], axis2=[2],
        zero_f=0.0, one_f=1.0, masked=MASKED, lowest=LOWEST,
    )  # fmt: skip


def inputs_as_float(*names: str) -> str:
    """Casts inputs to float32 as ``<name>_f`` and defines the common constants and ``tokens``."""
    lines = common_constants() + "tokens = Shape <start = 1, end = 2> (query)\n"
    return lines + as_float(*names)


def valid_keys() -> str:
    """Defines ``valid``, bool ``[B, T]``: the keys within each document's length."""
    return """
        end = Squeeze(tokens)
        positions = Range(zero, end, one)
        length = Unsqueeze(lengths, axis1)
        valid = Less(positions, length)
    """


def mask(key: str, result: str, *, rank: int) -> str:
    """Gives the padded keys of ``key``, ``[B, T, ...]`` of ``rank``, a logit of no weight."""
    return (
        valid_keys()
        + f"""
        mask_axes = Constant <value_ints = {list(range(2, rank))}> ()
        valid_keys = Unsqueeze(valid, mask_axes)
        {result} = Where(valid_keys, {key}, masked)
    """
    )


def heads(name: str, result: str) -> str:
    """Reshapes ``[B, T, D]`` to ``[B, T, num_heads, D/num_heads]``; needs ``head_shape``."""
    return f"{result} = Reshape({name}, head_shape)\n"


def head_shape() -> str:
    """Defines ``head_shape``, the Reshape target ``[0, 0, num_heads, -1]``."""
    return """
        num_heads = Constant <value_int: int = @num_heads> ()
        num_heads_1d = Unsqueeze(num_heads, zero)
        keep_two = Constant <value_ints = [0, 0]> ()
        infer = Constant <value_ints = [-1]> ()
        head_shape = Concat <axis = 0> (keep_two, num_heads_1d, infer)
        packed_shape = Concat <axis = 0> (keep_two, infer)
    """


def gate(gate: str, query: str, mean: str, result: str) -> str:
    """Multiplies by the gate of the query."""
    if gate == "none":
        return f"{result} = Identity({mean})\n"
    function = {"sigmoid": "Sigmoid", "tanh": "Tanh"}[gate]
    return f"gated = {function}({query})\n{result} = Mul(gated, {mean})\n"


def output(result: str) -> str:
    """Returns ``result`` in the type of the query."""
    return f"output = CastLike({result}, query)\n"


def scan(
    step: str,
    *,
    states: Mapping[str, str],
    scanned: Mapping[str, str],
    outputs: Mapping[str, str],
    ranks: Mapping[str, int],
    scan_axis: int = 1,
    output_axis: int = 1,
    counter: str = "",
    reverse: bool = False,
) -> str:
    """Runs ``step`` once per token.

    Args:
        step: statements; read the names of ``states`` and ``scanned``, define
            ``<state>_next`` for every state and the names of ``outputs``.
        states: state in the step, to its initial value.
        scanned: name in the step, to the tensor it is a token of.
        outputs: name in the step, to the tensor it becomes.
        ranks: of each name, within the step.
        scan_axis: the axis of the tokens in what is scanned.
        output_axis: the axis of the tokens in what is put out.
        counter: a name in the step for the token's position, int64 scalar.
        reverse: from the last token to the first.
    """
    if not states:
        # TensorRT's parser refuses a Scan that carries no state from step to step.
        states, ranks = {"unused": "zero_f"}, {**ranks, "unused": 0}
        step += "unused_next = Identity(unused)\n"

    def declare(name: str, value: str) -> str:
        return f"float[{', '.join(f'{name}_dim{i}' for i in range(ranks[name]))}] {value}"

    parameters = [declare(name, name) for name in (*states, *scanned)]
    operands = [*states.values(), *scanned.values()]
    axes = [scan_axis] * len(scanned)
    if counter:
        parameters.append(f"int64 {counter}")
        operands.append("positions")
        axes.append(0)
    results = ", ".join(
        [declare(name, f"{name}_next") for name in states] + [declare(o, o) for o in outputs]
    )
    unique = next(iter(outputs.values()))
    finals = ", ".join([f"{unique}_{name}" for name in states] + list(outputs.values()))
    attributes = [
        f"num_scan_inputs = {len(axes)}",
        f"scan_input_axes = {axes}",
        f"scan_output_axes = {[output_axis] * len(outputs)}",
        f"scan_input_directions = {[int(reverse)] * len(axes)}",
        f"scan_output_directions = {[int(reverse)] * len(outputs)}",
        f"body = step ({', '.join(parameters)}) => ({results}) {{ {step} }}",
    ]
    return f"{finals} = Scan <{', '.join(attributes)}> ({', '.join(operands)})\n"


def divisor(total: str, result: str) -> str:
    """Defines sums of weights to divide by: 1 where no key counts, so that the mean is 0."""
    return f"""
        {result}_is_zero = Equal({total}, zero_f)
        {result} = Where({result}_is_zero, one_f, {total})
    """


def finite_maximum(maximum: str, result: str) -> str:
    """Defines ``result``, at least ``lowest``, and ``<result>_is_none`` where no key counts."""
    return f"""
        {result}_is_none = Less({maximum}, lowest)
        {result} = Max({maximum}, lowest)
    """


def guarded_division(exact: str) -> str:
    """Defines ``mean`` from ``numerator`` and ``denominator`` where no term was lost.

    Args:
        exact: statements that define ``exact_mean``; run only where a
            denominator is so small that the sums cannot be trusted.
    """
    return f"""
        smallest = ReduceMin <keepdims = 0> (denominator)
        threshold = Constant <value_float: float = {SMALLEST_DENOMINATOR}> ()
        lost = Less(smallest, threshold)
        mean = If (lost) <
            then_branch = exact_form () => (exact_mean) {{ {exact} }},
            else_branch = separable_form () => (separable_mean) {{
                separable_mean = Div(numerator, denominator)
            }}
        >
    """
