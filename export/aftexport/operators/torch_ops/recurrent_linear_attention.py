"""Recurrent linear attention in PyTorch; see ``mechanisms.recurrent_linear_attention``."""

from typing import Any

import torch
from torch import Tensor

from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.mechanisms.recurrent_linear_attention import DELTA_RULES, GATED_RULES
from aftexport.operators.numerics import check_lengths, check_positive_eps, valid_keys
from aftexport.operators.torch_ops._recurrence import Recurrence, by_heads, token_by_token
from aftexport.operators.torch_ops._recurrent_chunks import chunk_by_chunk
from aftexport.operators.torch_ops.torch_op import register_recurrent


def _check(
    op_type: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    lengths: Tensor,
    *,
    update_rule: str,
    normalizer: str,
    q_num_heads: int,
    kv_num_heads: int,
    eps: float,
    **settings: Any,
) -> None:
    _check_rule(op_type, update_rule, normalizer, eps)
    key_width = _check_heads(op_type, query, key, value, q_num_heads, kv_num_heads)
    for name, tensor, rules in (("decay", decay, GATED_RULES), ("beta", beta, DELTA_RULES)):
        if (tensor is not None) != (update_rule in rules):
            verb = "requires" if update_rule in rules else "forbids"
            raise ValueError(f"{op_type}: update_rule {update_rule} {verb} the input {name}")
    if decay is not None:
        by_channel = settings["decay_granularity"] == "channel"
        _check_tokens(op_type, "decay", decay, query, key_width if by_channel else kv_num_heads)
    if beta is not None:
        is_shared = beta.shape[-1:] == (1,)
        _check_tokens(op_type, "beta", beta, query, 1 if is_shared else kv_num_heads)
    check_lengths(op_type, query, lengths)
    if past_state is not None:
        named = {"normalizer": normalizer, "q_num_heads": q_num_heads, **settings}
        _, state = _shapes(query, key, value, kv_num_heads=kv_num_heads, **named)
        if past_state.shape != state:
            raise ValueError(
                f"{op_type}: past_state must be {list(state)}, got shape {tuple(past_state.shape)}"
            )


def _check_rule(op_type: str, update_rule: str, normalizer: str, eps: float) -> None:
    if normalizer == "sum" and update_rule in DELTA_RULES:
        raise ValueError(
            f"{op_type}: normalizer must be none for update_rule {update_rule}, got sum"
        )
    if normalizer == "sum":
        check_positive_eps(op_type, eps)


def _check_heads(
    op_type: str, query: Tensor, key: Tensor, value: Tensor, q_num_heads: int, kv_num_heads: int
) -> int:
    """Raise ValueError unless the heads divide the channels; return the channels of the key."""
    if query.dim() != 3:
        raise ValueError(
            f"{op_type}: query must be [batch, tokens, channels], got shape {tuple(query.shape)}"
        )
    if kv_num_heads < 1 or q_num_heads < 1 or q_num_heads % kv_num_heads:
        raise ValueError(
            f"{op_type}: q_num_heads must be a positive multiple of kv_num_heads, "
            f"got {q_num_heads} and {kv_num_heads}"
        )
    if query.shape[2] % q_num_heads:
        raise ValueError(
            f"{op_type}: q_num_heads must divide the {query.shape[2]} channels of query, "
            f"got {q_num_heads}"
        )
    key_width = kv_num_heads * (query.shape[2] // q_num_heads)
    _check_tokens(op_type, "key", key, query, key_width)
    if value.dim() != 3 or value.shape[2] % kv_num_heads:
        raise ValueError(
            f"{op_type}: value must be [batch, tokens, channels] with a multiple of "
            f"{kv_num_heads} channels, got shape {tuple(value.shape)}"
        )
    _check_tokens(op_type, "value", value, query, value.shape[2])
    return key_width


def _check_tokens(op_type: str, name: str, tensor: Tensor, query: Tensor, width: int) -> None:
    expected = (query.shape[0], query.shape[1], width)
    if tensor.shape != expected:
        raise ValueError(
            f"{op_type}: {name} must be {list(expected)}, got shape {tuple(tensor.shape)}"
        )


def _shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Tensor | None,
    direction: str,
    normalizer: str,
    q_num_heads: int,
    kv_num_heads: int,
    **__: Any,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    width = value.shape[2] // kv_num_heads
    states = kv_num_heads * (2 if direction == "bidirectional" else 1)
    return (query.shape[0], query.shape[1], q_num_heads * width), (
        query.shape[0],
        states,
        key.shape[2] // kv_num_heads,
        width + (normalizer == "sum"),
    )


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    lengths: Tensor,
    **attributes: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the definition, token by token.

    Args:
        query: ``[B, T, Hq dk]``.
        key: ``[B, T, H dk]``.
        value: ``[B, T, H dv]``.
        past_state: ``[B, S, dk, E]``; None counts as 0.
        decay: ``[B, T, H]`` or ``[B, T, H dk]``, exactly for the gated rules.
        beta: ``[B, T, H]`` or ``[B, T, 1]``, exactly for the delta rules.
        lengths: int64 ``[B]``.
        attributes: the attributes of the operator.

    Returns:
        The output ``[B, T, Hq dv]``, and the states after the last token of each direction.
    """
    tokens = _tokens(query, key, value, decay, beta, lengths, **attributes)
    return _run(token_by_token, tokens, past_state, lengths, **attributes)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    lengths: Tensor,
    **attributes: Any,
) -> tuple[Tensor, Tensor]:
    """Compute ``reference`` in chunks of tokens.

    A decay above 0 may overflow where the definition does not, for example beside a state of 0. The
    chunks are then computed again in float64, and at last token by token. No precision helps
    against NaN and infinity in the inputs, so their results stay.
    """
    tokens = _tokens(query, key, value, decay, beta, lengths, **attributes)
    output, state = _run(chunk_by_chunk, tokens, past_state, lengths, **attributes)
    if _are_finite(output, state) or not _have_finite_factors(tokens, past_state):
        return output, state
    wide, wide_past = tokens.mapped(Tensor.double), past_state
    if past_state is not None:
        wide_past = past_state.double()
    for recurrence in (chunk_by_chunk, token_by_token):
        output, state = _run(recurrence, wide, wide_past, lengths, **attributes)
        if _are_finite(output, state):
            break
    return output.to(query.dtype), state.to(query.dtype)


def _are_finite(*tensors: Tensor | None) -> bool:
    return all(tensor is None or bool(tensor.isfinite().all()) for tensor in tensors)


def _have_finite_factors(tokens: Recurrence, past_state: Tensor | None) -> bool:
    """Return whether all factors are finite; that of the decay -inf is 0."""
    decay = tokens.decay
    return _are_finite(tokens.query, tokens.key, tokens.value, tokens.beta, past_state) and (
        decay is None or bool((decay < torch.inf).all())
    )


def _tokens(
    *tensors: Any, q_num_heads: int, kv_num_heads: int, normalizer: str, **_: Any
) -> Recurrence:
    return by_heads(
        *tensors,
        heads=kv_num_heads,
        groups=q_num_heads // kv_num_heads,
        is_summed=normalizer == "sum",
    )


def _backwards(tensor: Tensor) -> Tensor:
    return tensor.flip(1)


def _run(
    recurrence: Any,
    tokens: Recurrence,
    past_state: Tensor | None,
    lengths: Tensor,
    *,
    direction: str,
    normalizer: str,
    scale: float,
    eps: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Run ``recurrence`` in the directions, and divide or scale the sum of the rows."""
    names = ("forward", "reverse") if direction == "bidirectional" else (direction,)
    batch, count, heads, width = tokens.key.shape
    if past_state is None:
        states_shape = (batch, len(names) * heads, width, tokens.value.shape[3])
        past_state = tokens.key.new_zeros(states_shape)
    total, states = None, []
    for name, past in zip(names, torch.split(past_state, heads, 1), strict=True):
        ordered = tokens if name == "forward" else tokens.mapped(_backwards)
        is_second = name == "reverse" and direction == "bidirectional"
        rows, state = recurrence(ordered, past, reads_written=not is_second)
        rows = rows if name == "forward" else rows.flip(1)
        total = rows if total is None else total + rows
        states.append(state)
    assert total is not None
    if normalizer == "sum":
        total = total[..., :-1] / (total[..., -1:] + max(eps, MIN_EPS))
    else:
        total = total * (scale or width**-0.5)
    valid = valid_keys(lengths, count)[..., None]
    return torch.where(valid, total.flatten(2), 0), torch.cat(states, 1)


RECURRENT_LINEAR_ATTENTION = register_recurrent(
    "RecurrentLinearAttention",
    check=_check,
    compute=compute,
    reference=reference,
    shapes=_shapes,
)
