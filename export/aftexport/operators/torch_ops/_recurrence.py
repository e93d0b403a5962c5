"""The recurrence of linear attention by heads: token by token, and in chunks of tokens.

The chunks are differentiable and linear in T.
Within a chunk, with E[t, u] = exp(g[u+1] + ... + g[t]) and D[t] = exp(g[0] + ... + g[t]):

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

import torch
from torch import Tensor
from torch.nn.functional import pad

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
