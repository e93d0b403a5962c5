"""Sums of ``exp(logit) value`` and ``exp(logit)`` up to each token, in ONNX textual syntax.

The sums are relative to the largest logit so far, so they are exact for any range. The blocks of
tokens are summed in parallel, each from 0; then the sums of the earlier blocks are added. See
``two_level_sums``, whose cut ``scan`` is read here.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums


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
        sums.join(blocks, f"{result}_covered", cut="scan")
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
    lines = sums.split(logits, f"{result}_logit", gap="masked", cut="scan")
    if values:
        lines += sums.split(values, f"{result}_value", cut="scan")
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
