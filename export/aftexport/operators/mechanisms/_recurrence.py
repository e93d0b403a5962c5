"""The portable body of recurrent linear attention, in ONNX textual syntax."""

from aftexport.operators import onnx_text as text
from aftexport.operators.mechanisms._chunk_recurrence import chunk_loop
from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.schema import STATE_OUTPUT

GATED_RULES = ("gated", "gated_delta")
"""The update rules with a decay."""
DELTA_RULES = ("delta", "gated_delta")
"""The update rules with beta."""


def recurrence_body(
    *,
    update_rule: str,
    direction: str,
    normalizer: str,
    decay_granularity: str,
    present: frozenset[str],
) -> str:
    """Return the body for the settings and for the optional inputs that are present.

    Both directions are heads of one loop: the tokens of the reverse direction are turned around.
    """
    has_decay = update_rule in GATED_RULES
    has_beta = update_rule in DELTA_RULES
    _check_present(update_rule, {"decay": has_decay, "beta": has_beta}, present)
    by_channel = has_decay and decay_granularity == "channel"
    lines = text.inputs_as_float("query", "key", "value", *sorted(present)) + text.valid_keys()
    lines += _heads(normalizer == "sum")
    tensors = {"q": "queries", "k": "keys", "v": "values"}
    if has_decay:
        lines += _decays(by_channel)
        tensors["g"] = "decays"
    if has_beta:
        lines += _betas()
        tensors["b"] = "betas"
    ordered = {name: f"{tensor}_ordered" for name, tensor in tensors.items()}
    lines += _order(direction, tensors, ordered) + _past("past_state" in present, ordered)
    lines += chunk_loop(
        ordered, by_channel=by_channel, reads_reverse_before=direction == "bidirectional"
    )
    return lines + _directions_joined(direction) + _results(normalizer == "sum")


def _check_present(rule: str, needed: dict[str, bool], present: frozenset[str]) -> None:
    for name, is_needed in needed.items():
        if (name in present) != is_needed:
            raise ValueError(
                f"RecurrentLinearAttention: update_rule {rule} "
                f"{'requires' if is_needed else 'forbids'} the input {name}"
            )


def _heads(is_summed: bool) -> str:
    """Define ``queries [B, T, H, G, dk]``, ``keys`` and ``values [B, T, H, 1, *]``; padding is 0.

    With a normalizer, the values have one more channel, which is 1.
    """
    lines = """
        q_num_heads = Constant <value_int: int = @q_num_heads> ()
        num_heads = Constant <value_int: int = @kv_num_heads> ()
        num_heads_1d = Unsqueeze(num_heads, zero)
        group = Div(q_num_heads, num_heads)
        group_1d = Unsqueeze(group, zero)
        keep_two = Constant <value_ints = [0, 0]> ()
        infer = Constant <value_ints = [-1]> ()
        packed_shape = Concat <axis = 0> (keep_two, infer)
        query_shape = Concat <axis = 0> (keep_two, num_heads_1d, group_1d, infer)
        row_shape = Concat <axis = 0> (keep_two, num_heads_1d, one_1d, infer)
        valid_3d = Unsqueeze(valid, axis2)
        valid_query = Where(valid_3d, query_f, zero_f)
        valid_key = Where(valid_3d, key_f, zero_f)
        valid_value = Where(valid_3d, value_f, zero_f)
        queries = Reshape(valid_query, query_shape)
        keys = Reshape(valid_key, row_shape)
    """
    if not is_summed:
        return lines + "values = Reshape(valid_value, row_shape)\n"
    return (
        lines
        + """
        only_values = Reshape(valid_value, row_shape)
        last_axis = Constant <value_ints = [-1]> ()
        first_channel = Slice(only_values, zero_1d, one_1d, last_axis)
        ones_shape = Shape(first_channel)
        ones = ConstantOfShape <value = float[1] {1.0}> (ones_shape)
        values = Concat <axis = 4> (only_values, ones)
    """
    )


def _decays(by_channel: bool) -> str:
    """Define ``decays [B, T, H, 1, dk or 1]``, logarithms; that of padding is 0."""
    shape = "row_shape" if by_channel else "head_decay_shape"
    return f"""
        head_decay_shape = Concat <axis = 0> (keep_two, num_heads_1d, one_1d, one_1d)
        valid_decay = Where(valid_3d, decay_f, zero_f)
        decays = Reshape(valid_decay, {shape})
    """


def _betas() -> str:
    """Define ``betas [B, T, H, 1, 1]``; that of padding is 0."""
    return """
        beta_lead = Shape <start = 0, end = 2> (beta)
        beta_shape = Concat <axis = 0> (beta_lead, num_heads_1d)
        beta_heads = Expand(beta_f, beta_shape)
        valid_beta = Where(valid_3d, beta_heads, zero_f)
        betas = Reshape(valid_beta, row_shape)
    """


def _order(direction: str, tensors: dict[str, str], ordered: dict[str, str]) -> str:
    """Define the tensors in the order of the recurrence; ``bidirectional`` doubles the heads."""
    if direction == "forward":
        return "".join(f"{ordered[n]} = Identity({x})\n" for n, x in tensors.items())
    lines = """
        last_place = Sub(end, one)
        below = Constant <value_int = -1> ()
        backwards = Range(last_place, below, below)
    """
    for name, tensor in tensors.items():
        if direction == "reverse":
            lines += f"{ordered[name]} = Gather <axis = 1> ({tensor}, backwards)\n"
        else:
            lines += f"""
                {tensor}_backwards = Gather <axis = 1> ({tensor}, backwards)
                {ordered[name]} = Concat <axis = 2> ({tensor}, {tensor}_backwards)
            """
    return lines


def _past(is_given: bool, ordered: dict[str, str]) -> str:
    """Define ``past``, ``[B, S, 1, dk, E]``, and ``nothing``, zeros of the same shape."""
    lines = f"""
        batch = Shape <start = 0, end = 1> (query)
        state_count = Shape <start = 2, end = 3> ({ordered["k"]})
        key_width = Shape <start = 4, end = 5> ({ordered["k"]})
        value_width = Shape <start = 4, end = 5> ({ordered["v"]})
        past_shape = Concat <axis = 0> (batch, state_count, one_1d, key_width, value_width)
        nothing = ConstantOfShape <value = float[1] {{0.0}}> (past_shape)
    """
    if is_given:
        return lines + "past = Unsqueeze(past_state_f, axis2)\n"
    return lines + "past = Identity(nothing)\n"


def _directions_joined(direction: str) -> str:
    """Define ``read [B, T, H, G, E]`` from ``read_ordered``."""
    if direction == "forward":
        return "read = Identity(read_ordered)\n"
    if direction == "reverse":
        return "read = Gather <axis = 1> (read_ordered, backwards)\n"
    return """
        all_states = Constant <value_ints = [9223372036854775807]> ()
        read_forward = Slice(read_ordered, zero_1d, num_heads_1d, axis2)
        read_backwards = Slice(read_ordered, num_heads_1d, all_states, axis2)
        read_reverse = Gather <axis = 1> (read_backwards, backwards)
        read = Add(read_forward, read_reverse)
    """


def _results(is_summed: bool) -> str:
    """Define the outputs from ``read`` and from the last state."""
    if is_summed:
        lines = (
            text.constants(min_eps=MIN_EPS)
            + """
            last_1d = Constant <value_ints = [-1]> ()
            far_1d = Constant <value_ints = [9223372036854775807]> ()
            numerator = Slice(read, zero_1d, last_1d, last_axis)
            total = Slice(read, last_1d, far_1d, last_axis)
            eps = Constant <value_float: float = @eps> ()
            positive_eps = Max(eps, min_eps)
            positive = Add(total, positive_eps)
            result = Div(numerator, positive)
        """
        )
    else:
        lines = """
            given_scale = Constant <value_float: float = @scale> ()
            key_width_f = Cast <to = 1> (key_width)
            root = Sqrt(key_width_f)
            usual_scale = Reciprocal(root)
            no_scale = Equal(given_scale, zero_f)
            scale = Where(no_scale, usual_scale, given_scale)
            result = Mul(read, scale)
        """
    return (
        lines
        + f"""
        packed = Reshape(result, packed_shape)
        valid_result = Where(valid_3d, packed, zero_f)
        output = CastLike(valid_result, query)
        state_4d = Squeeze(state_last, axis2)
        {STATE_OUTPUT} = CastLike(state_4d, query)
    """
    )
