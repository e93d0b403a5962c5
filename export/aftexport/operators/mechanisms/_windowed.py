"""Means over all keys with a bias inside a window around the query: AFT-local and AFT-conv.

    Y[t] = sum_u exp(K[u] + b[t,u]) V[u] / sum_u exp(K[u] + b[t,u]),  b = 0 outside the window

Keys outside the window have bias 0. The obvious form is (exp(b) - 1) over the window
plus a sum over all keys. It cancels if one key dominates and its bias is very negative.
Here every term is positive: the sums before, inside and after the window are separate.

Shapes: keys ``[B, T, C, 1]``, values ``[B, T, C, E]``, bias ``[T or 1, W, C or 1, 1]``,
window of the positions ``t - left ... t - left + W - 1``.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.mechanisms import _running_sums as running


def exact_body(causal: bool) -> str:
    """Define ``exact_means``, ``[B, T, C, E]``, for any range of keys and biases.

    Reads ``logits`` and ``values`` (4-d, padded keys masked), ``bias_rows``
    ``[R, W, C or 1, 1]``, ``left``, ``width`` (int64 ``[1]``) and the common names.
    It uses running sums before and after the window, and all terms within the window.
    """
    lines = text.constants(half=0.5) + _before_body() + _padded_windows_body()
    lines += sums.scan_cut("logits")
    lines += _sums_of("before_logits", "before_values", "prefix", reverse=False)
    if not causal:
        lines += _after_body()
        lines += _sums_of("after_logits", "after_values", "suffix", reverse=True)
    scanned = {f"before_{state}": f"prefix_{state}_tokens" for state in "mnd"}
    if not causal:
        scanned |= {f"after_{state}": f"suffix_{state}_tokens" for state in "mnd"}
    return lines + text.scan(
        _row_body(("before",) if causal else ("before", "after")),
        states={},
        scanned=scanned,
        outputs={"row_mean": "exact_means"},
        ranks=dict.fromkeys((*scanned, "row_mean"), 3),
        counter="position",
    )


def _before_body() -> str:
    """Define ``before_logits`` and ``before_values``: at ``t`` the last token before its window."""
    return """
        before_width = Add(left, one_1d)
        before_pads = Concat <axis = 0> (before_width, zero_1d)
        earlier_logits = Pad(logits, before_pads, masked, axis1)
        before_logits = Slice(earlier_logits, zero_1d, tokens, axis1)
        earlier_values = Pad(values, before_pads, zero_f, axis1)
        before_values = Slice(earlier_values, zero_1d, tokens, axis1)
    """


def _padded_windows_body() -> str:
    """Define the window's padded keys and values, its offsets, and the halves of the logits."""
    return """
        after_width = Sub(width, left)
        window_right = Sub(after_width, one_1d)
        window_pads = Concat <axis = 0> (left, window_right)
        window_logits = Pad(logits, window_pads, masked, axis1)
        window_values = Pad(values, window_pads, zero_f, axis1)
        last_row = Shape <start = 0, end = 1> (bias_rows)
        last_index = Sub(last_row, one_1d)
        window_width = Squeeze(width)
        window_offsets = Range(zero, window_width, one)
        half_window_logits = Mul(window_logits, half)
        half_bias_rows = Mul(bias_rows, half)
    """


def _after_body() -> str:
    """Define ``after_logits`` and ``after_values``: at ``t`` the first token after its window."""
    return """
        after_end = Add(tokens, after_width)
        after_pads = Concat <axis = 0> (zero_1d, after_width)
        later_logits = Pad(logits, after_pads, masked, axis1)
        after_logits = Slice(later_logits, after_width, after_end, axis1)
        later_values = Pad(values, after_pads, zero_f, axis1)
        after_values = Slice(later_values, after_width, after_end, axis1)
    """


def _row_body(sides: tuple[str, ...]) -> str:
    """Define ``row_mean``, ``[B, C, E]``: the mean of one position over all keys."""
    step = _window_body() + _relative_body(sides)
    for kind in "nd":
        total = f"window_{kind}"
        for side in sides:
            step += f"""
                {side}_{kind}_part = Mul({side}_{kind}, {side}_decay)
                {side}_{kind}_total = Add({total}, {side}_{kind}_part)
            """
            total = f"{side}_{kind}_total"
        step += f"row_{kind} = Identity({total})\n"
    step += text.divisor("row_d", "row_divisor")
    return step + "row_mean = Div(row_n, row_divisor)\n"


def _window_body() -> str:
    """Define halves of the window's keys and biases, and those of its largest logit.

    See ``numerics.biased_mean``. A position beyond the last row of ``half_bias_rows`` uses the
    last row.
    """
    return """
        row_index = Min(position, last_index)
        window = Add(position, window_offsets)
        window_bias = Gather <axis = 0> (half_bias_rows, row_index)
        window_key = Gather <axis = 1> (half_window_logits, window)
        window_v = Gather <axis = 1> (window_values, window)
        window_logit = Add(window_key, window_bias)
    """ + text.largest_pair("window_logit", "window_key", "window_bias", "window_best")


def _relative_body(sides: tuple[str, ...]) -> str:
    """Define the window's sums and each side's decay, relative to the largest logit of all."""
    lines = ""
    for side in sides:
        lines += f"""
            {side}_half = Mul({side}_m, half)
            {side}_logit = Unsqueeze({side}_half, axis1)
        """
    logits = ", ".join(f"{side}_logit" for side in sides)
    lines += f"""
        largest = Max(window_best_logit, {logits})
        in_window = Equal(window_best_logit, largest)
        best_key = Where(in_window, window_best_key, largest)
        best_bias = Where(in_window, window_best_bias, zero_f)
        window_key_part = Sub(window_key, best_key)
        window_bias_part = Sub(window_bias, best_bias)
        window_relative = Add(window_key_part, window_bias_part)
        window_top = ReduceMax <keepdims = 1> (window_relative, axis1)
    """
    for side in sides:
        lines += f"""
            {side}_key_part = Sub({side}_logit, best_key)
            {side}_relative = Sub({side}_key_part, best_bias)
        """
    relatives = ", ".join(f"{side}_relative" for side in sides)
    lines += f"top = Max(window_top, {relatives})\n"
    for part in ("window", *sides):
        lines += f"""
            {part}_half_drop = Sub({part}_relative, top)
            {part}_drop = Add({part}_half_drop, {part}_half_drop)
            {part}_weight = Exp({part}_drop)
        """
    for side in sides:
        lines += f"{side}_decay = Squeeze({side}_weight, axis1)\n"
    return (
        lines
        + """
        window_weighted = Mul(window_weight, window_v)
        window_n = ReduceSum <keepdims = 0> (window_weighted, axis1)
        window_d = ReduceSum <keepdims = 0> (window_weight, axis1)
    """
    )


def _sums_of(logits: str, values: str, result: str, *, reverse: bool) -> str:
    lines = running.running_sums(logits, result, rank=4, values=values, reverse=reverse)
    for state in "mnd":
        lines += running.tokens_of(f"{result}_{state}", f"{result}_{state}_tokens")
    return lines


def outside_body(causal: bool) -> str:
    """Define ``outside``, ``[B, T, ...]``: the sums of ``pair_blocks`` beyond each window.

    Reads ``pair_blocks`` of the cut ``sum``, ``left`` and ``width``.
    """
    lines = sums.running_total("pair_blocks", "prefix")
    if causal:
        return (
            lines
            + """
            shift = Add(left, one_1d)
            shift_shape = Concat <axis = 0> (sum_batch, shift, prefix_width)
            shift_gap = Expand(zero_f, shift_shape)
            shifted = Concat <axis = 1> (shift_gap, prefix)
            outside = Slice(shifted, zero_1d, tokens, axis1)
        """
        )
    lines += sums.running_total("pair_blocks", "suffix", reverse=True)
    return (
        lines
        + """
        skipped = Add(width, one_1d)
        skipped_shape = Concat <axis = 0> (sum_batch, skipped, prefix_width)
        skipped_gap = Expand(zero_f, skipped_shape)
        before = Concat <axis = 1> (skipped_gap, prefix)
        after = Concat <axis = 1> (suffix, skipped_gap)
        shifted = Add(before, after)
        lead = Sub(width, left)
        places = Add(positions, lead)
        outside = Gather <axis = 1> (shifted, places)
    """
    )
