"""Recurrent linear attention in PyTorch; see ``mechanisms.recurrent_linear_attention``."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.mechanisms.recurrent_linear_attention import DELTA_RULES, GATED_RULES
from aftexport.operators.numerics import check_lengths, check_positive_eps, valid_keys
from aftexport.operators.torch_ops._recurrence import Recurrence, chunk_by_chunk, token_by_token
from aftexport.operators.torch_ops.torch_op import Call, Shapes, register_single


@dataclass(frozen=True, kw_only=True, eq=False)
class _RecurrentLinearAttention(Call):
    """A call.

    Attributes:
        query: ``[B, T, Hq dk]``.
        key: ``[B, T, H dk]``.
        value: ``[B, T, H dv]``.
        past_state: ``[B, S, dk, E]``; None counts as 0.
        decay: ``[B, T, H]`` or ``[B, T, H dk]``, exactly for the gated rules.
        beta: ``[B, T, H]`` or ``[B, T, 1]``, exactly for the delta rules.
        lengths: int64 ``[B]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    past_state: Tensor | None
    decay: Tensor | None
    beta: Tensor | None
    lengths: Tensor
    update_rule: str
    direction: str
    normalizer: str
    decay_granularity: str
    q_num_heads: int
    kv_num_heads: int
    scale: float
    eps: float

    def check(self) -> None:
        self._check_rule()
        key_width = self._check_heads()
        for name, rules in (("decay", GATED_RULES), ("beta", DELTA_RULES)):
            if (getattr(self, name) is not None) != (self.update_rule in rules):
                verb = "requires" if self.update_rule in rules else "forbids"
                raise ValueError(
                    f"{self.op_type}: update_rule {self.update_rule} {verb} the input {name}"
                )
        if self.decay is not None:
            by_channel = self.decay_granularity == "channel"
            self._check_tokens("decay", self.decay, key_width if by_channel else self.kv_num_heads)
        if self.beta is not None:
            is_shared = self.beta.shape[-1:] == (1,)
            self._check_tokens("beta", self.beta, 1 if is_shared else self.kv_num_heads)
        check_lengths(self.op_type, self.query, self.lengths)
        state = self.shapes()[1]
        if self.past_state is not None and self.past_state.shape != state:
            raise ValueError(
                f"{self.op_type}: past_state must be {list(state)}, "
                f"got shape {tuple(self.past_state.shape)}"
            )

    def _check_rule(self) -> None:
        if self.normalizer != "sum":
            return
        if self.update_rule in DELTA_RULES:
            raise ValueError(
                f"{self.op_type}: normalizer must be none for update_rule {self.update_rule}, "
                "got sum"
            )
        check_positive_eps(self.op_type, self.eps)

    def _check_heads(self) -> int:
        """Check that the heads divide the channels; return the channels of the key."""
        op_type, query, value = self.op_type, self.query, self.value
        query_heads, heads = self.q_num_heads, self.kv_num_heads
        if query.dim() != 3:
            raise ValueError(
                f"{op_type}: query must be [batch, tokens, channels], "
                f"got shape {tuple(query.shape)}"
            )
        if heads < 1 or query_heads < 1 or query_heads % heads:
            raise ValueError(
                f"{op_type}: q_num_heads must be a positive multiple of kv_num_heads, "
                f"got {query_heads} and {heads}"
            )
        if query.shape[2] % query_heads:
            raise ValueError(
                f"{op_type}: q_num_heads must divide the {query.shape[2]} channels of query, "
                f"got {query_heads}"
            )
        key_width = heads * (query.shape[2] // query_heads)
        self._check_tokens("key", self.key, key_width)
        if value.dim() != 3 or value.shape[2] % heads:
            raise ValueError(
                f"{op_type}: value must be [batch, tokens, channels] with a multiple of "
                f"{heads} channels, got shape {tuple(value.shape)}"
            )
        self._check_tokens("value", value, value.shape[2])
        return key_width

    def _check_tokens(self, name: str, tensor: Tensor, width: int) -> None:
        expected = (*self.query.shape[:2], width)
        if tensor.shape != expected:
            raise ValueError(
                f"{self.op_type}: {name} must be {list(expected)}, got shape {tuple(tensor.shape)}"
            )

    def shapes(self) -> Shapes:
        """Return the shapes of the output, and of the states after the last token."""
        batch, tokens, _ = self.query.shape
        width, states = self.value.shape[2] // self.kv_num_heads, self.kv_num_heads
        if self.direction == "bidirectional":
            states *= 2
        key_width = self.key.shape[2] // self.kv_num_heads
        columns = width + (self.normalizer == "sum")
        return (batch, tokens, self.q_num_heads * width), (batch, states, key_width, columns)

    def reference(self) -> tuple[Tensor, Tensor]:
        """Compute the definition, token by token."""
        return self._run(token_by_token, self._by_heads(), self.past_state)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Compute ``reference`` in chunks of tokens.

        A decay above 0 may overflow where the definition does not, for example beside a state of 0.
        The chunks are then computed again in float64, and at last token by token. No precision
        helps against NaN and infinity in the inputs, so their results stay.
        """
        tokens, past_state = self._by_heads(), self.past_state
        output, state = self._run(chunk_by_chunk, tokens, past_state)
        if _are_finite(output, state) or not _have_finite_factors(tokens, past_state):
            return output, state
        tokens = tokens.mapped(Tensor.double)
        if past_state is not None:
            past_state = past_state.double()
        for recurrence in (chunk_by_chunk, token_by_token):
            output, state = self._run(recurrence, tokens, past_state)
            if _are_finite(output, state):
                break
        return output.to(self.query.dtype), state.to(self.query.dtype)

    def _by_heads(self) -> Recurrence:
        """Return the tensors by heads."""
        batch, count = self.query.shape[:2]
        heads, groups = self.kv_num_heads, self.q_num_heads // self.kv_num_heads
        valid = valid_keys(self.lengths, count)[..., None]

        def split(tensor: Tensor) -> Tensor:
            chosen = torch.where(valid, tensor, 0)
            return chosen.reshape(batch, count, heads, tensor.shape[2] // heads)

        values, queries, beta = split(self.value), split(self.query), self.beta
        if self.normalizer == "sum":
            values = torch.cat((values, torch.ones_like(values[..., :1])), 3)
        return Recurrence(
            query=queries.reshape(batch, count, heads, groups, queries.shape[3] // groups),
            key=split(self.key),
            value=values,
            decay=None if self.decay is None else split(self.decay),
            beta=None if beta is None else split(beta.expand(batch, count, heads))[..., 0],
        )

    def _run(
        self, recurrence: Any, tokens: Recurrence, past_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run ``recurrence`` in the directions, and divide or scale the sum of the rows."""
        is_both = self.direction == "bidirectional"
        names = ("forward", "reverse") if is_both else (self.direction,)
        batch, count, heads, width = tokens.key.shape
        if past_state is None:
            states_shape = (batch, len(names) * heads, width, tokens.value.shape[3])
            past_state = tokens.key.new_zeros(states_shape)
        total, states = None, []
        for name, past in zip(names, torch.split(past_state, heads, 1), strict=True):
            ordered = tokens if name == "forward" else tokens.mapped(_backwards)
            is_second = name == "reverse" and is_both
            rows, state = recurrence(ordered, past, reads_written=not is_second)
            rows = rows if name == "forward" else rows.flip(1)
            total = rows if total is None else total + rows
            states.append(state)
        assert total is not None
        if self.normalizer == "sum":
            total = total[..., :-1] / (total[..., -1:] + max(self.eps, MIN_EPS))
        else:
            total = total * (self.scale or width**-0.5)
        valid = valid_keys(self.lengths, count)[..., None]
        return torch.where(valid, total.flatten(2), 0), torch.cat(states, 1)


def _are_finite(*tensors: Tensor | None) -> bool:
    return all(tensor is None or bool(tensor.isfinite().all()) for tensor in tensors)


def _have_finite_factors(tokens: Recurrence, past_state: Tensor | None) -> bool:
    """Return whether all factors are finite; that of the decay -inf is 0."""
    decay = tokens.decay
    return _are_finite(tokens.query, tokens.key, tokens.value, tokens.beta, past_state) and (
        decay is None or bool((decay < torch.inf).all())
    )


def _backwards(tensor: Tensor) -> Tensor:
    return tensor.flip(1)


RECURRENT_LINEAR_ATTENTION = register_single("RecurrentLinearAttention", _RecurrentLinearAttention)
