"""The causal softmax form of Efficient Attention, in ONNX textual syntax.

The context up to a token is a sum of outer products of key weights and values. It is relative to
the largest logit so far of each key channel, so it is exact for any range. Each block of tokens
starts from 0; then the contexts of the earlier blocks are added.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.mechanisms import _running_sums as running


def causal_softmax_body() -> str:
    """Define ``attended``, ``[B, T, H, e]``: each query with the mean context up to its token.

    Reads ``asking``, ``logits`` and ``values``, ``[B, T, H, *]``, and the common names.
    """
    lines = sums.scan_cut("query") + running.running_sums("logits", "run", rank=4)
    lines += sums.split("asking", "asking_blocks", cut="scan")
    lines += sums.split("values", "value_blocks", cut="scan")
    lines += text.divisor("run_d", "run_divisor")
    lines += _weights_body() + _own_block_body() + _earlier_blocks_body()
    lines += "attended_blocks = Add(of_own_block, of_earlier)\n"
    return lines + running.tokens_of("attended_blocks", "attended")


def _weights_body() -> str:
    """Define the divided queries, and the decay and the weight of each token in its block."""
    return """
        asked_blocks = Div(asking_blocks, run_divisor)
        all_but_last = Sub(scan_size, one_1d)
        earlier_m = Slice(run_m, zero_1d, all_but_last, axis2)
        start_shape = Concat <axis = 0> (scan_states_shape, one_1d, run_logit_width)
        no_logit = Expand(lowest, start_shape)
        shifted_m = Concat <axis = 2> (no_logit, earlier_m)
        drop_blocks = Sub(shifted_m, run_m)
        decay_blocks = Exp(drop_blocks)
        rise_blocks = Sub(run_logit, run_m)
        weight_blocks = Exp(rise_blocks)
        value_width = Shape <start = 3> (values)
        contexts_shape = Concat <axis = 0> (scan_states_shape, run_logit_width, value_width)
        no_contexts = Expand(zero_f, contexts_shape)
    """


def _own_block_body() -> str:
    """Define ``of_own_block``, ``[B, blocks, size, H, e]``: the part of the token's own block."""
    step = (
        text.constants(row_axis=[-2], column_axis=[-1])
        + """
        decay_column = Unsqueeze(decay, column_axis)
        n_kept = Mul(n, decay_column)
        weight_column = Unsqueeze(weight, column_axis)
        value_row = Unsqueeze(v, row_axis)
        n_new = Mul(weight_column, value_row)
        n_next = Add(n_kept, n_new)
        asked_row = Unsqueeze(q, row_axis)
        answer_row = MatMul(asked_row, n_next)
        answer = Squeeze(answer_row, row_axis)
    """
    )
    scanned = {"q": "asked", "decay": "decay", "weight": "weight", "v": "value"}
    return text.scan(
        step,
        states={"n": "no_contexts"},
        scanned={name: f"{tensor}_blocks" for name, tensor in scanned.items()},
        outputs={"answer": "of_own_block"},
        ranks={"n": 5} | dict.fromkeys((*scanned, "answer"), 4),
        axis=2,
    )


def _earlier_blocks_body() -> str:
    """Define ``of_earlier``, ``[B, blocks, size, H, e]``: the part of the earlier blocks."""
    lines = """
        final_m = Slice(run_m, all_but_last, scan_size, axis2)
        block_rise = Sub(run_logit, final_m)
        block_weight = Exp(block_rise)
        columns = Transpose <perm = [0, 1, 3, 4, 2]> (block_weight)
        rows = Transpose <perm = [0, 1, 3, 2, 4]> (value_blocks)
        block_contexts = MatMul(columns, rows)
        block_m = Squeeze(final_m, axis2)
        blocks_less_one = Sub(scan_blocks, one_1d)
        earlier_block_m = Slice(block_m, zero_1d, blocks_less_one, axis1)
        no_block_shape = Concat <axis = 0> (scan_batch, one_1d, run_logit_width)
        no_block_logit = Expand(lowest, no_block_shape)
        before_m = Concat <axis = 1> (no_block_logit, earlier_block_m)
        block_drop = Sub(before_m, block_m)
        block_decay = Exp(block_drop)
        context_shape = Concat <axis = 0> (scan_batch, run_logit_width, value_width)
        no_context = Expand(zero_f, context_shape)
    """
    step = (
        text.constants(column_axis=[-1])
        + """
        before = Identity(n)
        decay_column = Unsqueeze(decay, column_axis)
        n_kept = Mul(n, decay_column)
        n_next = Add(n_kept, of_block)
    """
    )
    lines += text.scan(
        step,
        states={"n": "no_context"},
        scanned={"decay": "block_decay", "of_block": "block_contexts"},
        outputs={"before": "contexts_before"},
        ranks={"n": 4, "decay": 3, "of_block": 4, "before": 4},
    )
    return (
        lines
        + """
        before_m_column = Unsqueeze(before_m, axis2)
        asked_drop = Sub(before_m_column, run_m)
        asked_decay = Exp(asked_drop)
        asked_before = Mul(asked_blocks, asked_decay)
        asked_heads = Transpose <perm = [0, 1, 3, 2, 4]> (asked_before)
        earlier_heads = MatMul(asked_heads, contexts_before)
        of_earlier = Transpose <perm = [0, 1, 3, 2, 4]> (earlier_heads)
    """
    )
