"""Tokens and states of recurrent linear attention by heads, and the recurrence itself."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aftexport.operators.numerics import valid_keys


@dataclass(frozen=True)
class Recurrence:
    """The tensors of a recurrence by heads; tokens of padding change no state and read 0.

    Attributes:
        query: ``[B, T, H, G, dk]``; the G query heads of a group read one state.
        key: ``[B, T, H, dk]``.
        value: ``[B, T, H, E]``; E is dv, or dv + 1 with a normalizer, with 1 in the last channel.
        decay: logarithm of the factor of the state, ``[B, T, H, dk]`` or ``[B, T, H, 1]``.
        beta: ``[B, T, H]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    beta: Tensor | None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Recurrence":
        """Return the results of ``change`` for all tensors that there are."""
        return Recurrence(
            change(self.query),
            change(self.key),
            change(self.value),
            None if self.decay is None else change(self.decay),
            None if self.beta is None else change(self.beta),
        )


def by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    lengths: Tensor,
    *,
    heads: int,
    groups: int,
    is_summed: bool,
) -> Recurrence:
    """Return the tensors of the operator by heads."""
    batch, tokens = query.shape[:2]
    valid = valid_keys(lengths, tokens)[..., None]

    def split(tensor: Tensor) -> Tensor:
        chosen = torch.where(valid, tensor, 0)
        return chosen.reshape(batch, tokens, heads, tensor.shape[2] // heads)

    values = split(value)
    if is_summed:
        values = torch.cat((values, torch.ones_like(values[..., :1])), 3)
    queries = split(query)
    return Recurrence(
        query=queries.reshape(batch, tokens, heads, groups, queries.shape[3] // groups),
        key=split(key),
        value=values,
        decay=None if decay is None else split(decay),
        beta=None if beta is None else split(beta.expand(batch, tokens, heads))[..., 0],
    )


def token_by_token(
    tokens: Recurrence, state: Tensor, *, reads_written: bool
) -> tuple[Tensor, Tensor]:
    """Return the definition's ``[B, T, H, G, E]`` before the scale, and the last state.

    Args:
        tokens: the tokens in the order of the recurrence.
        state: ``[B, H, dk, E]``.
        reads_written: whether a query reads the state with its own token.
    """
    rows = []
    for t in range(tokens.key.shape[1]):
        if tokens.decay is not None:
            state = state * tokens.decay[:, t].exp()[..., None]
        decayed, key, value = state, tokens.key[:, t], tokens.value[:, t]
        if tokens.beta is not None:
            retrieved = torch.einsum("bhc,bhce->bhe", key, state)
            value = tokens.beta[:, t, :, None] * (value - retrieved)
        state = state + key[..., :, None] * value[..., None, :]
        rows.append(tokens.query[:, t] @ (state if reads_written else decayed))
    if not rows:
        return tokens.query.new_zeros(*tokens.query.shape[:4], state.shape[3]), state.clone()
    return torch.stack(rows, 1), state
