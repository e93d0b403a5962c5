"""Pieces of the portable bodies, in ONNX textual syntax.

Every piece computes in float32 for every input type. Its docstring lists the names that it
defines. It reads the names of ``common_constants`` and ``tokens`` (int64 ``[1]``).
Subgraphs read names of the enclosing graph.
"""

from collections.abc import Mapping

from aftexport.operators.domain import MASKED
from aftexport.operators.schema import as_float

SMALLEST_DENOMINATOR = 1e-25
"""The smallest trusted float32 denominator. A smaller one may have lost terms that matter.
A term that underflows is under 1e-38, so even a million lost terms are only 1e-7 of this bound."""

LOWEST = -3.4028234663852886e38
"""The lowest finite float32, and the lower bound of every maximum of logits. So differences
with a maximum are never NaN, and the weight of a masked key is 0."""


def constants(**values: float | int | list[int]) -> str:
    """Define scalar constants, and int64 vectors from lists."""
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
    """Define int64 scalars and vectors of one element, and the float scalars of the bodies."""
    return constants(
        zero=0, one=1, two=2, zero_1d=[0], one_1d=[1], axis1=[1], axis2=[2],
        zero_f=0.0, one_f=1.0, masked=MASKED, lowest=LOWEST,
    )  # fmt: skip


def inputs_as_float(*names: str, sequence: str = "query") -> str:
    """Cast inputs to float32 as ``<name>_f``; define the common constants and ``tokens``."""
    lines = common_constants() + f"tokens = Shape <start = 1, end = 2> ({sequence})\n"
    return lines + as_float(*names)


def valid_keys(lengths: str = "lengths") -> str:
    """Define ``valid``, bool ``[B, T]``: the keys within each document's length."""
    return f"""
        end = Squeeze(tokens)
        positions = Range(zero, end, one)
        length = Unsqueeze({lengths}, axis1)
        valid = Less(positions, length)
    """


def mask(key: str, result: str, *, rank: int, lengths: str = "lengths") -> str:
    """Define ``result``: ``key``, ``[B, T, ...]`` of ``rank``, with padded keys masked."""
    return (
        valid_keys(lengths)
        + f"""
        mask_axes = Constant <value_ints = {list(range(2, rank))}> ()
        valid_keys = Unsqueeze(valid, mask_axes)
        {result} = Where(valid_keys, {key}, masked)
    """
    )


def heads(name: str, result: str) -> str:
    """Reshape ``[B, T, D]`` to ``[B, T, num_heads, D/num_heads]``; needs ``head_shape``."""
    return f"{result} = Reshape({name}, head_shape)\n"


def head_shape() -> str:
    """Define ``head_shape``, the Reshape target ``[0, 0, num_heads, -1]``."""
    return """
        num_heads = Constant <value_int: int = @num_heads> ()
        num_heads_1d = Unsqueeze(num_heads, zero)
        keep_two = Constant <value_ints = [0, 0]> ()
        infer = Constant <value_ints = [-1]> ()
        head_shape = Concat <axis = 0> (keep_two, num_heads_1d, infer)
        packed_shape = Concat <axis = 0> (keep_two, infer)
    """


def gate(gate: str, query: str, mean: str, result: str) -> str:
    """Define ``result``: ``mean`` multiplied by the gate of ``query``."""
    if gate == "none":
        return f"{result} = Identity({mean})\n"
    function = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}[gate]
    return f"gated = {function}({query})\n{result} = Mul(gated, {mean})\n"


def output(result: str) -> str:
    """Define ``output``: ``result`` cast to the type of the query."""
    return f"output = CastLike({result}, query)\n"


def scan(
    step: str,
    *,
    states: Mapping[str, str],
    scanned: Mapping[str, str],
    outputs: Mapping[str, str],
    ranks: Mapping[str, int],
    axis: int = 1,
) -> str:
    """Run ``step`` once per token, from the first token to the last.

    ``states``, ``scanned`` and ``outputs`` map names in the step to tensors: the initial values,
    the inputs and the results. The step defines ``<state>_next`` and the outputs; ``ranks`` are
    those in it. ``axis`` is that of the tokens.
    """
    # The tokens are moved to the front: onnx's evaluator scans only the first axis, forwards. The
    # step reads no other tensors: OpenVINO's Scan gives it none.
    lines, operands = "", list(states.values())
    unique = next(iter(outputs.values()))
    for name, tensor in scanned.items():
        operands.append(f"{unique}_{name}_first")
        to_front = [axis, *(i for i in range(ranks[name] + 1) if i != axis)]
        lines += f"{operands[-1]} = Transpose <perm = {to_front}> ({tensor})\n"
    parameters = ", ".join(_declared(name, name, ranks) for name in (*states, *scanned))
    results = ", ".join(
        [_declared(name, f"{name}_next", ranks) for name in states]
        + [_declared(name, name, ranks) for name in outputs]
    )
    finals = [f"{unique}_{name}" for name in states]
    firsts = [f"{tensor}_first" for tensor in outputs.values()]
    body = f"step ({parameters}) => ({results}) {{ {step} }}"
    attributes = f"num_scan_inputs = {len(scanned)}, body = {body}"
    lines += f"{', '.join(finals + firsts)} = Scan <{attributes}> ({', '.join(operands)})\n"
    for (name, tensor), first in zip(outputs.items(), firsts, strict=True):
        to_back = [*range(1, axis + 1), 0, *range(axis + 1, ranks[name] + 1)]
        lines += f"{tensor} = Transpose <perm = {to_back}> ({first})\n"
    return lines


def loop(
    step: str,
    *,
    count: str,
    index: str,
    states: Mapping[str, str],
    ranks: Mapping[str, int],
    output: str = "",
) -> str:
    """Run ``step`` for each ``index`` from 0 up to ``count``, int64 scalars.

    The step reads the names of ``states``, with their initial values, and any other tensors. It
    defines ``<state>_next``, whose last one becomes ``<state>_last``, and ``output``, which is
    stacked as ``<output>_stack``.
    """
    # The stack must be reshaped to [count, ...]: onnx's evaluator joins the tensors instead.
    parameters = "".join(f", {_declared(name, name, ranks)}" for name in states)
    results = [_declared(name, f"{name}_next", ranks) for name in states]
    results += [_declared(output, output, ranks)] if output else []
    finals = [f"{name}_last" for name in states] + ([f"{output}_stack"] if output else [])
    head = f"step (int64 {index}, bool {index}_runs{parameters})"
    body = f"{head} => (bool {index}_goes_on, {', '.join(results)})"
    return f"""
        {index}_starts = Constant <value = bool {{1}}> ()
        {", ".join(finals)} = Loop <
            body = {body} {{ {index}_goes_on = Identity({index}_runs) {step} }}
        > ({", ".join([count, f"{index}_starts", *states.values()])})
    """


def _declared(name: str, value: str, ranks: Mapping[str, int]) -> str:
    return f"float[{', '.join(f'{name}_dim{i}' for i in range(ranks[name]))}] {value}"


def log_eps() -> str:
    """Define ``log_eps``, the logarithm of the attribute ``eps``; -inf for 0."""
    return """
        eps = Constant <value_float: float = @eps> ()
        log_eps = Log(eps)
    """


def add_eps(total: str, maximum: str, result: str) -> str:
    """Define ``result``: ``total`` relative to ``exp(maximum)`` plus eps; needs ``log_eps``."""
    return f"""
        {result}_rise = Sub(log_eps, {maximum})
        {result}_eps = Exp({result}_rise)
        {result} = Add({total}, {result}_eps)
    """


def divisor(total: str, result: str) -> str:
    """Define ``result``: ``total`` with 1 for 0, so that the mean is 0 if every key is masked."""
    return f"""
        {result}_is_zero = Equal({total}, zero_f)
        {result} = Where({result}_is_zero, one_f, {total})
    """


def finite_maximum(maximum: str, result: str) -> str:
    """Define ``result``, at least ``lowest``; ``<result>_is_none`` if every key is masked."""
    return f"""
        {result}_is_none = Less({maximum}, lowest)
        {result} = Max({maximum}, lowest)
    """


def weighted_pair(values: str, *, axis: int) -> str:
    """Define ``pair``: values weighted by exp(``logits`` - ``key_max``), and then the weights."""
    # key_max is the largest logit over axis 1; see finite_maximum.
    return (
        "key_max_of_all = ReduceMax <keepdims = 1> (logits, axis1)\n"
        + finite_maximum("key_max_of_all", "key_max")
        + f"""
        key_shifted = Sub(logits, key_max)
        key_weight = Exp(key_shifted)
        weighted = Mul(key_weight, {values})
        pair = Concat <axis = {axis}> (weighted, key_weight)
    """
    )


def largest_pair(logit: str, key: str, bias: str, result: str) -> str:
    """Define the largest ``<result>_logit [B, 1, ...]`` of axis 1, its ``_key``, ``_bias``."""
    # Of equal logits the largest key counts, and then the largest bias. ArgMax with GatherElements
    # would be shorter, but onnx's evaluator gathers from 64 elements at most.
    return f"""
        {result}_logit = ReduceMax <keepdims = 1> ({logit}, axis1)
        {result}_is_largest = Equal({logit}, {result}_logit)
        {result}_keys = Where({result}_is_largest, {key}, masked)
        {result}_key = ReduceMax <keepdims = 1> ({result}_keys, axis1)
        {result}_has_key = Equal({key}, {result}_key)
        {result}_is_pair = And({result}_is_largest, {result}_has_key)
        {result}_biases = Where({result}_is_pair, {bias}, masked)
        {result}_bias = ReduceMax <keepdims = 1> ({result}_biases, axis1)
    """


def guarded_division(exact: str) -> str:
    """Define ``mean``: ``numerator / denominator``, or ``exact_mean`` of ``exact``."""
    # The exact form runs only if a denominator is too small for the sums to be trusted.
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
