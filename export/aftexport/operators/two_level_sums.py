"""Two-level sums over the tokens in ONNX textual syntax: within blocks, then over the blocks.

A runtime may add float32 numbers one by one. The error of a sum then grows with the number
of its terms: a million equal ones are off by 1e-2. In two levels neither sum has many terms.

A *cut* has ``<cut>_blocks`` blocks of ``<cut>_size`` elements (int64 ``[1]``). The blocks cover
the elements and a gap after them; the gap has fewer elements than there are blocks. Every piece
reads the names that ``onnx_text.common_constants`` defines.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators.domain import MAX_BLOCK

_SIDE_BY_SIDE = 16


def sum_cut(sequence: str, count: str = "tokens", cut: str = "sum") -> str:
    """Define a cut of ``sequence [B, count, ...]`` into the minimum number of blocks."""
    return _fewest(count, cut, f"{cut}_blocks") + _cut(sequence, count, cut)


def scan_cut(sequence: str) -> str:
    """Define the cut ``scan`` of the tokens into blocks that a ``Scan`` processes in parallel."""
    few, few_less_one = [_SIDE_BY_SIDE], [_SIDE_BY_SIDE - 1]
    return (
        text.constants(scan_few=few, scan_few_less_one=few_less_one)
        + _fewest("tokens", "scan", "scan_fewest")
        + """
        scan_few_up = Add(tokens, scan_few_less_one)
        scan_short_blocks = Div(scan_few_up, scan_few)
        scan_some_blocks = Min(scan_short_blocks, scan_few)
        scan_blocks = Max(scan_fewest, scan_some_blocks)
        """
        + _cut(sequence, "tokens", "scan")
    )


def _fewest(count: str, cut: str, result: str) -> str:
    limits = {f"{cut}_max": [MAX_BLOCK], f"{cut}_max_less_one": [MAX_BLOCK - 1]}
    return (
        text.constants(**limits)
        + f"""
        {cut}_max_up = Add({count}, {cut}_max_less_one)
        {cut}_full_blocks = Div({cut}_max_up, {cut}_max)
        {result} = Max({cut}_full_blocks, one_1d)
        """
    )


def _cut(sequence: str, count: str, cut: str) -> str:
    return f"""
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
