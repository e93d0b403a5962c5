"""The portable body of recurrent linear attention, in ONNX textual syntax."""

from aftexport.operators import onnx_text as text
from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.schema import STATE_OUTPUT


def recurrence_body(
    *,
    update_rule: str,
    direction: str,
    normalizer: str,
    decay_granularity: str,
    present: frozenset[str],
) -> str:
    """Return the body for the settings and for the optional inputs that are present."""
    with_decay = update_rule in ("gated", "gated_delta")
    with_beta = update_rule in ("delta", "gated_delta")
    expected = {n for n, has in (("decay", with_decay), ("beta", with_beta)) if has}
    if present - {"past_state"} != expected:
        raise ValueError(
            f"RecurrentLinearAttention: update_rule {update_rule} takes "
            f"{' and '.join(sorted(expected)) or 'neither decay nor beta'}, got a node with "
            f"{', '.join(sorted(present)) or 'neither'}"
        )
    lines = text.inputs_as_float("query", "key", "value", *sorted(present)) + text.valid_keys()
    lines += _heads(normalizer == "sum")
    scanned = {"q": "queries", "k": "keys", "v": "values"}
    if with_decay:
        lines += _decays(decay_granularity)
        scanned["d"] = "decays"
    if with_beta:
        lines += _betas()
        scanned["b"] = "betas"
    lines += _past("past_state" in present, direction == "bidirectional")
    if direction != "reverse":
        lines += _direction("forward", scanned, reads_written=True)
    if direction != "forward":
        lines += _direction("reverse", scanned, reads_written=direction == "reverse")
    return lines + _results(direction, normalizer == "sum")


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


def _decays(granularity: str) -> str:
    """Define ``decays [B, T, H, dk or 1, 1]``, the factors of the state; that of padding is 1."""
    width = "infer" if granularity == "channel" else "one_1d"
    return f"""
        decay_shape = Concat <axis = 0> (keep_two, num_heads_1d, {width}, one_1d)
        valid_decay = Where(valid_3d, decay_f, zero_f)
        decay_factors = Exp(valid_decay)
        decays = Reshape(decay_factors, decay_shape)
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


def _past(is_given: bool, is_bidirectional: bool) -> str:
    """Define ``forward_past`` and ``reverse_past``, ``[B, H, dk, E]``."""
    if not is_given:
        return """
            batch = Shape <start = 0, end = 1> (query)
            key_width = Shape <start = 4, end = 5> (keys)
            value_width = Shape <start = 4, end = 5> (values)
            past_shape = Concat <axis = 0> (batch, num_heads_1d, key_width, value_width)
            forward_past = ConstantOfShape <value = float[1] {0.0}> (past_shape)
            reverse_past = Identity(forward_past)
        """
    if not is_bidirectional:
        return """
            forward_past = Identity(past_state_f)
            reverse_past = Identity(past_state_f)
        """
    return """
        far = Constant <value_ints = [9223372036854775807]> ()
        forward_past = Slice(past_state_f, zero_1d, num_heads_1d, axis1)
        reverse_past = Slice(past_state_f, num_heads_1d, far, axis1)
    """


def _direction(name: str, scanned: dict[str, str], *, reads_written: bool) -> str:
    """Define ``<name>_read [B, T, H, G, E]`` and ``<name>_state``."""
    lines, operands = "", dict(scanned)
    if name == "reverse":
        lines += """
            last = Sub(end, one)
            below = Constant <value_int = -1> ()
            backwards = Range(last, below, below)
        """
        for key, tensor in scanned.items():
            operands[key] = f"{tensor}_backwards"
            lines += f"{operands[key]} = Gather <axis = 1> ({tensor}, backwards)\n"
    kept = "state"
    step = ""
    if "d" in scanned:
        kept = "decayed"
        step += "decayed = Mul(state, d)\n"
    written = "v"
    if "b" in scanned:
        written = "corrected"
        step += f"""
            retrieved = MatMul(k, {kept})
            missing = Sub(v, retrieved)
            corrected = Mul(missing, b)
        """
    step += f"""
        column = Transpose <perm = [0, 1, 3, 2]> (k)
        product = MatMul(column, {written})
        state_next = Add({kept}, product)
        read = MatMul(q, {"state_next" if reads_written else kept})
    """
    result = f"{name}_read" if name == "forward" else "reverse_read_backwards"
    lines += text.scan(
        step,
        states={"state": f"{name}_past"},
        scanned=operands,
        outputs={"read": result},
        ranks=dict.fromkeys(("state", "read", *operands), 4),
    )
    if name == "reverse":
        lines += f"reverse_read = Gather <axis = 1> ({result}, backwards)\n"
    return lines + f"{name}_state = Identity({result}_state)\n"


def _results(direction: str, is_summed: bool) -> str:
    """Define the outputs from what both directions read."""
    if direction == "bidirectional":
        lines = """
            read = Add(forward_read, reverse_read)
            state = Concat <axis = 1> (forward_state, reverse_state)
        """
    else:
        lines = f"read = Identity({direction}_read)\nstate = Identity({direction}_state)\n"
    if is_summed:
        lines += (
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
        lines += """
            given_scale = Constant <value_float: float = @scale> ()
            width = Shape <start = 4, end = 5> (keys)
            width_f = Cast <to = 1> (width)
            root = Sqrt(width_f)
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
        {STATE_OUTPUT} = CastLike(state, query)
    """
    )
