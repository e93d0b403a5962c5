"""Recurrent linear attention in PyTorch; see ``mechanisms.recurrent_linear_attention``.

It runs token by token, or in chunks of tokens, differentiable and linear in T. Within a chunk, with
E[t, u] = exp(g[u+1] + ... + g[t]) and D[t] = exp(g[0] + ... + g[t]):

    (I + A) V' = beta (V - D K S),  A[t, u] = beta[t] E[t, u] K[t] . K[u] for u < t
    Y = D Q S + (Q K^T * E) V'
    S of the next chunk = D[last] S + (E[last] K)^T V'

Yang et al., Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484, section 3, and
arXiv 2412.06464, section 3.3. The system is solved for V' with the state inside, because U - W S
of the papers cancels. Each logarithm of E is a sum of its own: a difference of running sums would
lose the digits of small sums beside large ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.mechanisms.recurrent_linear_attention import DELTA_RULES, GATED_RULES
from aftexport.operators.numerics import check_lengths, check_positive_eps, valid_keys
from aftexport.operators.torch_ops.torch_op import Call, Shapes, register_single

_CHUNK = 64
"""The number of tokens whose pairs are multiplied out."""
_CHANNEL_CHUNK = 16
"""The same with a decay for each channel, where each pair has as many factors as channels."""
_SECTION = 2048
"""The number of tokens whose pairs are in memory at the same time."""
_CHANNEL_SECTION = 256
"""The same with a decay for each channel."""


@dataclass(frozen=True)
class Recurrence:
    """The tensors of a recurrence by heads; tokens of padding change no state and read 0."""

    query: Tensor  # [B, T, H, G, dk]; the G query heads of a group read one state
    key: Tensor  # [B, T, H, dk]
    value: Tensor  # [B, T, H, E]; E is dv, or dv + 1 with a normalizer, with 1 in the last channel
    decay: Tensor | None  # logarithm of the factor of the state, [B, T, H, dk or 1]
    beta: Tensor | None  # [B, T, H]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Recurrence":
        """Return the results of ``change`` for all tensors that there are."""
        return Recurrence(
            change(self.query),
            change(self.key),
            change(self.value),
            None if self.decay is None else change(self.decay),
            None if self.beta is None else change(self.beta),
        )


def token_by_token(
    tokens: Recurrence, state: Tensor, *, reads_written: bool
) -> tuple[Tensor, Tensor]:
    """Return the definition's ``[B, T, H, G, E]`` before the scale, and the last state.

    ``state`` is ``[B, H, dk, E]``. With ``reads_written`` a query reads its own token's write.
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


def chunk_by_chunk(
    tokens: Recurrence, state: Tensor, *, reads_written: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``token_by_token`` in chunks; the arguments and results are the same."""
    count = tokens.key.shape[1]
    rows, lost = [], torch.zeros_like(state)
    size = _CHANNEL_SECTION if _is_by_channel(tokens) else _SECTION
    for start in range(0, count, size):
        chunks = _split(tokens.mapped(partial(_rows, start=start, end=start + size)))
        read, state, lost = _read_section(chunks, state, lost, reads_written)
        rows.append(read)
    if not rows:
        return tokens.query.new_zeros(*tokens.query.shape[:4], state.shape[3]), state.clone()
    return torch.cat(rows, 1)[:, :count], state


def _rows(tensor: Tensor, start: int, end: int) -> Tensor:
    return tensor[:, start:end]


def _is_by_channel(tokens: Recurrence) -> bool:
    return tokens.decay is not None and tokens.decay.shape[3] > 1


def _split(tokens: Recurrence) -> Recurrence:
    """Return ``[B, T, H, ...]`` as ``[B, H, N, C, ...]``; added tokens change no state."""
    count = tokens.key.shape[1]
    size = min(_CHANNEL_CHUNK if _is_by_channel(tokens) else _CHUNK, count)

    def split(x: Tensor) -> Tensor:
        padded = pad(x, (*(0, 0) * (x.dim() - 2), 0, -count % size))
        return padded.reshape(len(x), padded.shape[1] // size, size, *x.shape[2:]).movedim(3, 1)

    return tokens.mapped(split)


def _read_section(
    chunks: Recurrence, state: Tensor, lost: Tensor, reads_written: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows ``[B, T, H, G, E]`` of chunks ``[B, H, N, C, ...]``, and the states after."""
    # lost is the part of a state that rounding left out.
    query, key = chunks.query.transpose(3, 4), chunks.key  # [B, H, N, G, C, dk]
    # The keys of the delta rule are rows like those of the queries.
    rows = query if chunks.beta is None else torch.cat((query, key[:, :, :, None]), 3)
    products = _pairs(rows, key, chunks.decay)
    pairs = products[:, :, :, : query.shape[3]].tril(0 if reads_written else -1)
    from_start, to_end = _decays(chunks.decay)
    if from_start is not None and to_end is not None:
        read, ended = query * from_start[:, :, :, None], key * to_end
        last = from_start[:, :, :, -1, :, None]
        entered = key * from_start
    else:
        read, ended, entered, last = query, key, key, None
    ended = ended.transpose(-1, -2)
    system = beta = None
    if chunks.beta is not None:
        beta = chunks.beta[..., None]
        system = beta * products[:, :, :, -1].tril(-1)

    states, values = [], []
    for n in range(key.shape[2]):
        value = chunks.value[:, :, n]
        if system is not None and beta is not None:
            missing = beta[:, :, n] * (value - entered[:, :, n] @ state)
            value = torch.linalg.solve_triangular(
                system[:, :, n], missing, upper=False, unitriangular=True
            )
        states.append(state)
        values.append(value)
        factor = 1.0 if last is None else last[:, :, n]
        state, lost = _added(factor * state, ended[:, :, n] @ value, factor * lost)
    before, written = torch.stack(states, 2), torch.stack(values, 2)
    result = read @ before[:, :, :, None] + pairs @ written[:, :, :, None]
    return result.permute(0, 2, 4, 1, 3, 5).flatten(1, 2), state, lost


def _added(total: Tensor, term: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``total + term`` and its rounding error: a million equal chunks keep their digits."""
    rest = term + lost
    result = total + rest
    return result, (rest - (result - total)).detach()


def _pairs(query: Tensor, key: Tensor, decay: Tensor | None) -> Tensor:
    """Return ``(Q K^T) * E``, ``[B, H, N, G, C, C]``; the pairs with u > t are meaningless."""
    if decay is None:
        return query @ key[:, :, :, None].transpose(-1, -2)
    size = key.shape[3]
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).tril(-1)[..., None]
    # [B, H, N, t, u, dk or 1]: the sum of the decays after u and up to t
    sums = torch.where(later, decay[:, :, :, :, None], 0).cumsum(3)
    if decay.shape[4] == 1:
        products = query @ key[:, :, :, None].transpose(-1, -2)
        return products * sums[:, :, :, None, ..., 0].exp()
    weighted = sums.exp() * key[:, :, :, None]  # [B, H, N, t, u, dk]
    return torch.stack([(weighted * q[..., None, :]).sum(5) for q in query.unbind(3)], 3)


def _decays(decay: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the factors from the start up to each token, and from each token to the end."""
    if decay is None:
        return None, None
    after = pad(decay[:, :, :, 1:].flip(3).cumsum(3), (0, 0, 1, 0)).flip(3)
    return decay.cumsum(3).exp(), after.exp()


@dataclass(frozen=True, kw_only=True, eq=False)
class _RecurrentLinearAttention(Call):
    """A call; decay and beta are given exactly for the rules that read them."""

    query: Tensor  # [B, T, Hq dk]
    key: Tensor  # [B, T, H dk]
    value: Tensor  # [B, T, H dv]
    past_state: Tensor | None  # [B, S, dk, E]; None counts as 0
    decay: Tensor | None  # [B, T, H] or [B, T, H dk]
    beta: Tensor | None  # [B, T, H] or [B, T, 1]
    lengths: Tensor  # int64 [B]
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
        """Compute ``reference`` in chunks of tokens."""
        # A decay above 0 may overflow where the definition does not, for example beside a state of
        # 0. The chunks are then computed again in float64, and at last token by token. No precision
        # helps against NaN and infinity in the inputs, so their results stay.
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
