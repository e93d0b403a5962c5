"""Means over all keys with a bias inside a window around the query: AFT-local and AFT-conv.

    Y[t] = sum_u exp(K[u] + b[t,u]) V[u] / (sum_u exp(K[u] + b[t,u]) + eps)
    b = 0 outside the window

Keys outside the window have bias 0. The obvious form is (exp(b) - 1) over the window
plus a sum over all keys. It cancels if one key dominates and its bias is very negative.
Here every term is positive: the sums before, inside and after the window are separate.

Shapes: keys ``[B, T, C, 1]``, values ``[B, T, C, E]``, bias ``[T or 1, W, C or 1, 1]``,
window of the positions ``t - left ... t - left + W - 1``.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums


def exact_body(causal: bool) -> str:
    """Define ``exact_means``, ``[B, T, C, E]``, for any range of keys and biases.

    Reads ``logits`` and ``values`` (4-d, padded keys masked), ``bias_rows`` ``[R, W, C or 1, 1]``,
    ``left``, ``width`` (int64 ``[1]``), ``log_eps`` and the common names.
    """
    # Running sums before and after the window, and loops over the places of the window.
    sides = ("before",) if causal else ("before", "after")
    lines = text.constants(half=0.5) + sums.cut_of("logits", cut="scan")
    lines += _before_body() + _sums_of("before_logits", "before_values", "before")
    if not causal:
        lines += _after_body() + _sums_of("mirrored_logits", "mirrored_values", "mirrored")
        for state in "mnd":
            lines += f"after_{state} = Gather <axis = 1> (mirrored_{state}, from_last)\n"
    lines += _padded_windows_body() + _best_pair_body() + _sides_body(sides) + _window_sums_body()
    lines += """
        half_top_part = Add(largest_key, largest_bias)
        half_top = Add(half_top_part, top_last)
        exact_top_sum = Add(half_top, half_top)
        exact_top = Max(exact_top_sum, lowest)
    """
    lines += text.add_eps("d_last", "exact_top", "d_eps")
    lines += text.divisor("d_eps", "exact_divisor")
    return lines + "exact_means = Div(n_last, exact_divisor)\n"


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


def _after_body() -> str:
    """Define ``mirrored_logits`` and ``_values``: at ``t`` the first token after its window."""
    # They run from the last token to the first, because sums run forwards only.
    return """
        after_width = Sub(width, left)
        after_end = Add(tokens, after_width)
        after_pads = Concat <axis = 0> (zero_1d, after_width)
        later_logits = Pad(logits, after_pads, masked, axis1)
        after_logits = Slice(later_logits, after_width, after_end, axis1)
        later_values = Pad(values, after_pads, zero_f, axis1)
        after_values = Slice(later_values, after_width, after_end, axis1)
        last_token = Sub(end, one)
        from_last = Sub(last_token, positions)
        mirrored_logits = Gather <axis = 1> (after_logits, from_last)
        mirrored_values = Gather <axis = 1> (after_values, from_last)
    """


def _padded_windows_body() -> str:
    """Define the keys and values around all windows, and the halves of the logits."""
    # A position beyond the last row of half_bias_rows uses the last row.
    return """
        window_right = Sub(width, left)
        after_window = Sub(window_right, one_1d)
        window_pads = Concat <axis = 0> (left, after_window)
        window_logits = Pad(logits, window_pads, masked, axis1)
        window_values = Pad(values, window_pads, zero_f, axis1)
        bias_row_count = Shape <start = 0, end = 1> (bias_rows)
        last_row = Sub(bias_row_count, one_1d)
        rows_of_tokens = Min(positions, last_row)
        window_places = Squeeze(width)
        half_window_logits = Mul(window_logits, half)
        half_bias_rows = Mul(bias_rows, half)
    """


def _at_place(prefix: str, index: str) -> str:
    """Define the keys and biases at one place of each window, ``[B, T, C, 1]``."""
    # <prefix>_positions are those of the keys. TensorRT-RTX 1.7 builds this Gather, but no Slice
    # whose ends depend on the number of a loop.
    return f"""
        {prefix}_positions = Add(positions, {index})
        {prefix}_key = Gather <axis = 1> (half_window_logits, {prefix}_positions)
        {prefix}_column = Gather <axis = 1> (half_bias_rows, {index})
        {prefix}_bias = Gather <axis = 0> ({prefix}_column, rows_of_tokens)
    """


def _best_pair_body() -> str:
    """Define ``best_key_last`` and ``best_bias_last``, halves of each window's largest logit."""
    # Of equal logits the largest key counts, and then the largest bias. See numerics.biased_mean.
    step = (
        _at_place("tried", "tried_place")
        + """
        tried_logit = Add(tried_key, tried_bias)
        best_logit = Add(best_key, best_bias)
        has_larger_logit = Greater(tried_logit, best_logit)
        has_equal_logit = Equal(tried_logit, best_logit)
        has_larger_key = Greater(tried_key, best_key)
        has_equal_key = Equal(tried_key, best_key)
        has_larger_bias = Greater(tried_bias, best_bias)
        has_larger_bias_alone = And(has_equal_key, has_larger_bias)
        has_larger_part = Or(has_larger_key, has_larger_bias_alone)
        has_larger_part_alone = And(has_equal_logit, has_larger_part)
        is_better = Or(has_larger_logit, has_larger_part_alone)
        best_key_next = Where(is_better, tried_key, best_key)
        best_bias_next = Where(is_better, tried_bias, best_bias)
    """
    )
    states = {"best_key": "no_logit", "best_bias": "no_logit"}
    return """
        no_logit_shape = Shape(logits)
        no_logit = Expand(masked, no_logit_shape)
    """ + text.loop(
        step,
        count="window_places",
        index="tried_place",
        states=states,
        ranks=dict.fromkeys(states, 4),
    )


def _sides_body(sides: tuple[str, ...]) -> str:
    """Define the sums of the sides, and the pair of the largest logit of all."""
    # sides_relative is half of the sides' largest logit relative to that pair; sides_n and sides_d
    # are relative to it.
    lines = "".join(f"{side}_logit = Mul({side}_m, half)\n" for side in sides)
    lines += f"""
        window_logit = Add(best_key_last, best_bias_last)
        largest = Max(window_logit, {", ".join(f"{side}_logit" for side in sides)})
        in_window = Equal(window_logit, largest)
        largest_key = Where(in_window, best_key_last, largest)
        largest_bias = Where(in_window, best_bias_last, zero_f)
    """
    for side in sides:
        lines += f"""
            {side}_key_part = Sub({side}_logit, largest_key)
            {side}_relative = Sub({side}_key_part, largest_bias)
        """
    lines += f"sides_relative = Max(lowest, {', '.join(f'{side}_relative' for side in sides)})\n"
    for side in sides:
        lines += _doubled_exponential(f"{side}_relative", "sides_relative", f"{side}_weight")
        lines += f"""
            {side}_n_part = Mul({side}_n, {side}_weight)
            {side}_d_part = Mul({side}_d, {side}_weight)
        """
    for kind in "nd":
        parts = ", ".join(f"{side}_{kind}_part" for side in sides)
        lines += f"sides_{kind} = Sum({parts})\n"
    return lines


def _window_sums_body() -> str:
    """Define ``n_last`` and ``d_last``: the sums of the sides and of the places of each window."""
    step = (
        _at_place("added", "place")
        + """
        added_key_part = Sub(added_key, largest_key)
        added_bias_part = Sub(added_bias, largest_bias)
        added_relative = Add(added_key_part, added_bias_part)
        top_next = Max(top, added_relative)
    """
        + _doubled_exponential("top", "top_next", "kept_weight")
        + _doubled_exponential("added_relative", "top_next", "added_weight")
        + """
        added_value = Gather <axis = 1> (window_values, added_positions)
        n_kept = Mul(n, kept_weight)
        n_added = Mul(added_weight, added_value)
        n_next = Add(n_kept, n_added)
        d_kept = Mul(d, kept_weight)
        d_next = Add(d_kept, added_weight)
    """
    )
    states = {"top": "sides_relative", "n": "sides_n", "d": "sides_d"}
    ranks = dict.fromkeys(states, 4)
    return text.loop(step, count="window_places", index="place", states=states, ranks=ranks)


def _doubled_exponential(half: str, top: str, result: str) -> str:
    """Define ``exp(2 (half - top))``."""
    return f"""
        {result}_half_drop = Sub({half}, {top})
        {result}_drop = Add({result}_half_drop, {result}_half_drop)
        {result} = Exp({result}_drop)
    """


def _sums_of(logits: str, values: str, result: str) -> str:
    """Define the running sums ``<result>_m``, ``_n`` and ``_d`` by token, ``[B, T, C, *]``."""
    blocks = f"{result}_sums"
    lines = sums.running_sums(logits, blocks, rank=4, values=values)
    return lines + "".join(sums.tokens_of(f"{blocks}_{s}", f"{result}_{s}") for s in "mnd")


def outside_body(causal: bool) -> str:
    """Define ``outside``: the sums of ``pair_blocks`` (cut ``sum``) beyond each window."""
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
