"""Two-level and running sums over the tokens in ONNX text: within blocks, then over the blocks.

A runtime may add float32 numbers one by one. The error of a sum then grows with the number
of its terms: a million equal ones are off by 1e-2. In two levels neither sum has many terms.

A *cut* has ``<cut>_blocks`` blocks of ``<cut>_size`` elements (int64 ``[1]``). The blocks cover
the elements and a gap after them; the gap has fewer elements than there are blocks. Every piece
reads the names that ``onnx_text.common_constants`` defines.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators.domain import MAX_BLOCK, SIDE_BY_SIDE


def cut_of(sequence: str, count: str = "tokens", cut: str = "sum") -> str:
    """Define a cut of ``sequence [B, count, ...]``: few blocks of few elements.

    Up to ``SIDE_BY_SIDE ** 2`` elements, no block has more than ``SIDE_BY_SIDE``.
    """
    constants = text.constants(
        **{
            f"{cut}_few": [SIDE_BY_SIDE],
            f"{cut}_few_less_one": [SIDE_BY_SIDE - 1],
            f"{cut}_max": [MAX_BLOCK],
            f"{cut}_max_less_one": [MAX_BLOCK - 1],
        }
    )
    return (
        constants
        + f"""
        {cut}_few_up = Add({count}, {cut}_few_less_one)
        {cut}_short_blocks = Div({cut}_few_up, {cut}_few)
        {cut}_some_blocks = Min({cut}_short_blocks, {cut}_few)
        {cut}_max_up = Add({count}, {cut}_max_less_one)
        {cut}_full_blocks = Div({cut}_max_up, {cut}_max)
        {cut}_blocks = Max({cut}_full_blocks, {cut}_some_blocks, one_1d)
        {cut}_batch = Shape <start = 0, end = 1> ({sequence})
        {cut}_count_up = Add({count}, {cut}_blocks)
        {cut}_count_up_less = Sub({cut}_count_up, one_1d)
        {cut}_some = Div({cut}_count_up_less, {cut}_blocks)
        {cut}_size = Max({cut}_some, one_1d)
        {cut}_covered = Mul({cut}_blocks, {cut}_size)
        {cut}_missing = Sub({cut}_covered, {count})
        {cut}_gap_shape = Concat <axis = 0> ({cut}_batch, {cut}_missing)
        {cut}_states_shape = Concat <axis = 0> ({cut}_batch, {cut}_blocks)
        {cut}_split_shape = Concat <axis = 0> ({cut}_states_shape, {cut}_size)
        {cut}_joined_shape = Concat <axis = 0> ({cut}_batch, {cut}_covered)
    """
    )


def split(name: str, result: str, *, gap: str = "zero_f", cut: str = "sum") -> str:
    """Reshape ``name``, ``[B, count, ...]``, to ``[B, blocks, size, ...]``.

    ``<result>_width`` becomes the shape of an element. The scalar ``gap`` fills the gap:
    ``zero_f``, or ``masked`` for logits.
    """
    return f"""
        {result}_width = Shape <start = 2> ({name})
        {result}_gap_shape = Concat <axis = 0> ({cut}_gap_shape, {result}_width)
        {result}_gap = Expand({gap}, {result}_gap_shape)
        {result}_whole = Concat <axis = 1> ({name}, {result}_gap)
        {result}_shape = Concat <axis = 0> ({cut}_split_shape, {result}_width)
        {result} = Reshape({result}_whole, {result}_shape)
    """


def join(blocks: str, result: str, *, cut: str = "sum") -> str:
    """Reshape ``blocks``, ``[B, blocks, size, ...]``, to ``[B, covered elements, ...]``."""
    return f"""
        {result}_width = Shape <start = 3> ({blocks})
        {result}_shape = Concat <axis = 0> ({cut}_joined_shape, {result}_width)
        {result} = Reshape({blocks}, {result}_shape)
    """


def total(blocks: str, result: str) -> str:
    """Sum ``blocks``, ``[B, blocks, size, ...]``, to ``[B, 1, ...]``."""
    return f"""
        {result}_of_blocks = ReduceSum <keepdims = 0> ({blocks}, axis2)
        {result} = ReduceSum <keepdims = 1> ({result}_of_blocks, axis1)
    """


def running_total(
    blocks: str, result: str, *, exclusive: bool = False, reverse: bool = False, cut: str = "sum"
) -> str:
    """Define the running sum of ``blocks [B, blocks, size, ...]``: ``[B, covered, ...]``."""
    return f"""
        {result}_within = CumSum <exclusive = {int(exclusive)}, reverse = {int(reverse)}> (
            {blocks}, two
        )
        {result}_totals = ReduceSum <keepdims = 1> ({blocks}, axis2)
        {result}_others = CumSum <exclusive = 1, reverse = {int(reverse)}> ({result}_totals, one)
        {result}_blocks = Add({result}_within, {result}_others)
    """ + join(f"{result}_blocks", result, cut=cut)


def largest(blocks: str, result: str) -> str:
    """Define the maximum of ``blocks [B, blocks, size, ...]`` over both, ``[B, 1, 1, ...]``."""
    # ONNX Runtime reduces one axis after the other several times faster than both at once.
    return f"""
        {result}_of_blocks = ReduceMax <keepdims = 1> ({blocks}, axis2)
        {result}_of_all = ReduceMax <keepdims = 1> ({result}_of_blocks, axis1)
    """ + text.finite_maximum(f"{result}_of_all", result)


def softmax_weights(logits: str, result: str, *, has_eps: bool = False) -> str:
    """Define the softmax weights ``<result>`` of ``logits [B, blocks, size, ...]``.

    The gap is ``masked``. The largest weight is 1. Their sum ``[B, 1, ...]`` is ``<result>_sum``,
    and ``<result>_total`` with 1 for 0. For ``has_eps``, ``log_eps`` must be defined.
    """
    lines = largest(logits, f"{result}_max")
    lines += f"""
        {result}_shifted = Sub({logits}, {result}_max)
        {result} = Exp({result}_shifted)
    """
    if has_eps:
        lines += total(result, f"{result}_weights")
        lines += f"{result}_top = Squeeze({result}_max, axis1)\n"
        lines += text.add_eps(f"{result}_weights", f"{result}_top", f"{result}_sum")
    else:
        lines += total(result, f"{result}_sum")
    return lines + text.divisor(f"{result}_sum", f"{result}_total")


def context(keys: str, values: str, result: str) -> str:
    """Sum ``key^T value`` of ``[B, blocks, size, H, *]`` over the tokens: ``[B, H, d, e]``."""
    return f"""
        {result}_columns = Transpose <perm = [0, 1, 3, 4, 2]> ({keys})
        {result}_rows = Transpose <perm = [0, 1, 3, 2, 4]> ({values})
        {result}_of_blocks = MatMul({result}_columns, {result}_rows)
        {result} = ReduceSum <keepdims = 0> ({result}_of_blocks, axis1)
    """


# Running sums of exp(logit) value and exp(logit) up to each token. They are relative to the largest
# logit so far, so they are exact for any range. The blocks of tokens of the cut ``scan`` are summed
# in parallel, each from 0; then the sums of the earlier blocks are added.
def running_mean(logits: str, values: str, result: str, *, has_eps: bool = False) -> str:
    """Define the mean ``[B, T, ...]`` of values up to each token, weighted by ``exp(logits)``.

    Logits and values have rank 4. For ``has_eps``, ``log_eps`` must be defined.
    """
    lines = running_sums(logits, result, rank=4, values=values)
    total = f"{result}_d"
    if has_eps:
        lines += text.add_eps(total, f"{result}_m", f"{result}_d_eps")
        total = f"{result}_d_eps"
    lines += text.divisor(total, f"{result}_divisor")
    lines += f"{result}_blocks = Div({result}_n, {result}_divisor)\n"
    return lines + tokens_of(f"{result}_blocks", result)


def tokens_of(blocks: str, result: str) -> str:
    """Reshape ``blocks``, ``[B, blocks, size, ...]`` of the cut, to ``[B, T, ...]``."""
    return (
        join(blocks, f"{result}_covered", cut="scan")
        + f"{result} = Slice({result}_covered, zero_1d, tokens, axis1)\n"
    )


def running_sums(logits: str, result: str, *, rank: int, values: str = "") -> str:
    """Define ``<result>_m``, ``_d`` and, for ``values``, ``_n``: ``[B, blocks, size, ...]``.

    ``_m`` is the largest logit up to each token, at least ``lowest``. The sums ``_d`` of weights
    and ``_n`` of weighted values are relative to it. The blocks are ``<result>_logit`` and
    ``_value``.
    """
    kinds = ("n", "d") if values else ("d",)
    states = ("m", *kinds)
    lines = split(logits, f"{result}_logit", gap="masked", cut="scan")
    if values:
        lines += split(values, f"{result}_value", cut="scan")
    for shape, start in (("scan_states_shape", "block"), ("scan_batch", "all")):
        for state in states:
            width = f"{result}_{'value' if state == 'n' else 'logit'}_width"
            filler = "lowest" if state == "m" else "zero_f"
            lines += f"""
                {result}_{start}_{state}_shape = Concat <axis = 0> ({shape}, {width})
                {result}_{start}_{state} = Expand({filler}, {result}_{start}_{state}_shape)
            """
    lines += _within_blocks(result, states, rank)
    lines += _before_blocks(result, states, rank)
    lines += f"{result}_m = Max({result}_m_within, {result}_m_before)\n"
    for part in ("within", "before"):
        lines += f"""
            {result}_{part}_drop = Sub({result}_m_{part}, {result}_m)
            {result}_{part}_decay = Exp({result}_{part}_drop)
        """
    for kind in kinds:
        lines += f"""
            {result}_{kind}_own = Mul({result}_{kind}_within, {result}_within_decay)
            {result}_{kind}_others = Mul({result}_{kind}_before, {result}_before_decay)
            {result}_{kind} = Add({result}_{kind}_own, {result}_{kind}_others)
        """
    return lines


def _within_blocks(result: str, states: tuple[str, ...], rank: int) -> str:
    scanned = {"logit": f"{result}_logit"}
    if "n" in states:
        scanned["v"] = f"{result}_value"
    step = _entering(states, {"n": "v"})
    step += "".join(f"{state}_here = Identity({state}_next)\n" for state in states)
    return text.scan(
        step,
        states={state: f"{result}_block_{state}" for state in states},
        scanned=scanned,
        outputs={f"{state}_here": f"{result}_{state}_within" for state in states},
        ranks=dict.fromkeys((*states, *scanned, *(f"{state}_here" for state in states)), rank),
        axis=2,
    )


def _before_blocks(result: str, states: tuple[str, ...], rank: int) -> str:
    finals = {f"block_{state}": f"{result}_m_within_{state}" for state in states}
    scanned = {"logit" if name == "block_m" else name: final for name, final in finals.items()}
    step = "".join(f"{state}_so_far = Identity({state})\n" for state in states)
    step += _entering(states, {state: f"block_{state}" for state in states})
    outputs = {f"{state}_so_far": f"{result}_{state}_before_block" for state in states}
    lines = text.scan(
        step,
        states={state: f"{result}_all_{state}" for state in states},
        scanned=scanned,
        outputs=outputs,
        ranks=dict.fromkeys((*states, *scanned, *outputs), rank - 1),
    )
    for state in states:
        name = f"{result}_{state}_before"
        lines += f"{name} = Unsqueeze({name}_block, axis2)\n"
    return lines


def _entering(states: tuple[str, ...], entering: dict[str, str]) -> str:
    """Define ``<state>_next``: the states after one key, or the sums of several keys."""
    # entering has the weighted tensor of each sum; a sum of weights has no entry.
    lines = """
        m_next = Max(m, logit)
        drop = Sub(m, m_next)
        decay = Exp(drop)
        rise = Sub(logit, m_next)
        weight = Exp(rise)
    """
    for kind in states[1:]:
        lines += f"{kind}_kept = Mul({kind}, decay)\n"
        if kind in entering:
            lines += f"{kind}_new = Mul(weight, {entering[kind]})\n"
            lines += f"{kind}_next = Add({kind}_kept, {kind}_new)\n"
        else:
            lines += f"{kind}_next = Add({kind}_kept, weight)\n"
    return lines
