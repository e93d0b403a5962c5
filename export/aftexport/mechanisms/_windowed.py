"""Means over all keys with a bias inside a window around the query: AFT-local and AFT-conv.

    Y[t] = sum_u exp(K[u] + b[t,u]) V[u] / sum_u exp(K[u] + b[t,u]),  b = 0 outside the window

Keys outside the window count, with bias 0. The tempting form, (exp(b) - 1) over
the window plus a sum over all keys, cancels where one key dominates and its bias
is very negative; here every term is positive: the sums before, inside and after
the window are taken apart.

Shapes: keys ``[B, T, C, 1]``, values ``[B, T, C, E]``, bias ``[T or 1, W, C or 1, 1]``,
window of the positions ``t - left ... t - left + W - 1``.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from aftexport.mechanisms import _text as text


def means(key: Tensor, value: Tensor, bias: Tensor, left: int, causal: bool) -> Tensor:
    """The definition, row by row; returns ``[B, T, C, E]``."""
    tokens, width = key.shape[1], bias.shape[1]
    rows = []
    for t in range(tokens):
        end = t + 1 if causal else tokens
        first, last = max(t - left, 0), min(t - left + width, end)
        row = bias[min(t, bias.shape[0] - 1), first - (t - left) : last - (t - left)]
        logits = key[:, :end].clone()
        logits[:, first:last] += row
        rows.append((logits.softmax(1) * value[:, :end]).sum(1))
    return torch.stack(rows, 1)


def outside_sums(pair: Tensor, left: int, width: int, causal: bool) -> Tensor:
    """Sums ``pair``, ``[B, T, ...]``, over the tokens before and after each window."""
    tokens, trailing = pair.shape[1], (0, 0) * (pair.dim() - 2)
    sums = pad(pair.cumsum(1), (*trailing, left + 1, 0))[:, :tokens]
    if not causal:
        right = width - left
        suffix = pair.flip(1).cumsum(1).flip(1)
        sums = sums + pad(suffix, (*trailing, 0, right))[:, right:]
    return sums


def exact_body(causal: bool) -> str:
    """Defines ``exact_means``, ``[B, T, C, E]``, for any range of keys and biases.

    Reads ``logits`` and ``values`` (4-d, padded keys masked), ``bias_rows``
    ``[R, W, C or 1, 1]``, ``left``, ``width`` (int64 ``[1]``) and the common names.
    Running maxima before and after the window; the window is taken whole.
    """
    lines = """
        before_width = Add(left, one_1d)
        before_pads = Concat <axis = 0> (before_width, zero_1d)
        earlier_logits = Pad(logits, before_pads, masked, axis1)
        before_logits = Slice(earlier_logits, zero_1d, tokens, axis1)
        earlier_values = Pad(values, before_pads, zero_f, axis1)
        before_values = Slice(earlier_values, zero_1d, tokens, axis1)
        after_width = Sub(width, left)
        window_right = Sub(after_width, one_1d)
        window_pads = Concat <axis = 0> (left, window_right)
        window_logits = Pad(logits, window_pads, masked, axis1)
        window_values = Pad(values, window_pads, zero_f, axis1)
        first_logit = Gather <axis = 1> (logits, zero)
        d_zero = Mul(first_logit, zero_f)
        m_start = Add(d_zero, masked)
        first_value = Gather <axis = 1> (values, zero)
        n_zero = Mul(first_value, zero_f)
        last_row = Shape <start = 0, end = 1> (bias_rows)
        last_index = Sub(last_row, one_1d)
        window_width = Squeeze(width)
        window_offsets = Range(zero, window_width, one)
    """
    ranks = dict.fromkeys(
        (
            "m",
            "n",
            "d",
            "logit",
            "v",
            "am",
            "an",
            "ad",
            "after_m",
            "after_n",
            "after_d",
            "row_mean",
        ),
        3,
    )
    if not causal:
        lines += """
            after_end = Add(tokens, after_width)
            after_pads = Concat <axis = 0> (zero_1d, after_width)
            later_logits = Pad(logits, after_pads, masked, axis1)
            after_logits = Slice(later_logits, after_width, after_end, axis1)
            later_values = Pad(values, after_pads, zero_f, axis1)
            after_values = Slice(later_values, after_width, after_end, axis1)
        """
        lines += text.scan(
            text.online_update("m", "n", "d", "logit", "v")
            + "am = Identity(m_next)\nan = Identity(n_next)\nad = Identity(d_next)\n",
            states={"m": "m_start", "n": "n_zero", "d": "d_zero"},
            scanned={"logit": "after_logits", "v": "after_values"},
            outputs={"am": "suffix_m", "an": "suffix_n", "ad": "suffix_d"},
            ranks=ranks,
            reverse=True,
        )
    step = (
        text.online_update("m", "n", "d", "logit", "v")
        + """
        row_index = Min(position, last_index)
        window = Add(position, window_offsets)
        row_4d = Gather <axis = 0> (bias_rows, row_index)
        window_keys = Gather <axis = 1> (window_logits, window)
        biased = Add(window_keys, row_4d)
        window_max = ReduceMax <keepdims = 0> (biased, axis1)
    """
    )
    step += (
        "top = Max(m_next, window_max, after_m)\n"
        if not causal
        else "top = Max(m_next, window_max)\n"
    )
    step += """
        top_4d = Unsqueeze(top, axis1)
        window_shifted = Sub(biased, top_4d)
        window_weight = Exp(window_shifted)
        window_v = Gather <axis = 1> (window_values, window)
        window_weighted = Mul(window_weight, window_v)
        window_n = ReduceSum <keepdims = 0> (window_weighted, axis1)
        window_d = ReduceSum <keepdims = 0> (window_weight, axis1)
        before_drop = Sub(m_next, top)
        before_decay = Exp(before_drop)
        before_n = Mul(n_next, before_decay)
        before_d = Mul(d_next, before_decay)
        some_n = Add(window_n, before_n)
        some_d = Add(window_d, before_d)
    """
    if causal:
        step += "row_mean = Div(some_n, some_d)\n"
    else:
        step += """
            after_drop = Sub(after_m, top)
            after_decay = Exp(after_drop)
            later_n = Mul(after_n, after_decay)
            later_d = Mul(after_d, after_decay)
            all_n = Add(some_n, later_n)
            all_d = Add(some_d, later_d)
            row_mean = Div(all_n, all_d)
        """
    scanned = {"logit": "before_logits", "v": "before_values"}
    if not causal:
        scanned |= {"after_m": "suffix_m", "after_n": "suffix_n", "after_d": "suffix_d"}
    return lines + text.scan(
        step,
        states={"m": "m_start", "n": "n_zero", "d": "d_zero"},
        scanned=scanned,
        outputs={"row_mean": "exact_means"},
        ranks=ranks,
        counter="position",
    )


def outside_body(causal: bool) -> str:
    """Defines ``outside``: the sums of ``pair``, ``[B, T, ...]``, beyond each window."""
    lines = """
        shift = Add(left, one_1d)
        prefix = CumSum(pair, one)
        prefix_pads = Concat <axis = 0> (shift, zero_1d)
        prefix_padded = Pad(prefix, prefix_pads, , axis1)
        before = Slice(prefix_padded, zero_1d, tokens, axis1)
    """
    if causal:
        return lines + "outside = Identity(before)\n"
    return (
        lines
        + """
        lead = Sub(width, left)
        suffix = CumSum <reverse = 1> (pair, one)
        suffix_pads = Concat <axis = 0> (zero_1d, lead)
        suffix_padded = Pad(suffix, suffix_pads, , axis1)
        lead_end = Add(lead, tokens)
        after = Slice(suffix_padded, lead, lead_end, axis1)
        outside = Add(before, after)
    """
    )
