"""The chunked form of the update rules in plain PyTorch, for torch.compile.

It is the WY form of Yang et al. (arXiv 2406.06484 and 2412.06464), as libraries write it in
PyTorch, with chunks of 64 tokens. One graph over all chunks takes minutes to compile. So the loop
over the chunks is compiled for a section of them, and all else for the whole document.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 64
_SECTION = 16
"""The number of chunks of a compiled loop."""
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Chunks(NamedTuple):
    """The parts that do not need the state, with the number of the chunk in front.

    Attributes:
        query: ``[N, B, H, C, d]``, decayed from the start of the chunk and scaled.
        pairs: ``[N, B, H, C, C]``, the products of queries and keys.
        key: ``[N, B, H, d, C]``, decayed to the end of the chunk.
        value: ``[N, B, H, C, d]``; with a delta rule, the solution for a state of 0.
        erased: ``[N, B, H, C, d]``, the factors of the state in that solution; None without beta.
        factor: ``[N, B, H, 1, 1]``, the decay of the chunk; None without decays.
    """

    query: Tensor
    pairs: Tensor
    key: Tensor
    value: Tensor
    erased: Tensor | None
    factor: Tensor | None


def compile_static(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled for the shapes of its first call, and for any threads."""
    return torch.compile(
        function, dynamic=False, fullgraph=True, options={"cpp.dynamic_threads": True}
    )


class ChunkedForm:
    """The chunked form with its three parts compiled."""

    def __init__(self, compiler: Compiler = compile_static) -> None:
        self._split, self._carry, self._read = compiler(split), compiler(carry), compiler(read)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        *,
        heads: int,
        scale: float,
    ) -> Tensor:
        """Return the output ``[B, T, H d]``; T is a multiple of ``CHUNK``."""
        chunks: Chunks = self._split(query, key, value, decay, beta, heads, scale)
        width = chunks.query.shape[-1]
        state = query.new_zeros(*chunks.query.shape[1:3], width, width)
        states, values = [], []
        for start in range(0, len(chunks.query), _SECTION):
            part = partial(_part, start=start)
            taken = (part(chunks.key), part(chunks.value), part(chunks.erased), part(chunks.factor))
            before, written, state = self._carry(*taken, state)
            states.append(before)
            values.append(written)
        output: Tensor = self._read(chunks.query, chunks.pairs, states, values)
        return output


def _part(tensor: Tensor | None, start: int) -> Sequence[Tensor] | None:
    return None if tensor is None else tensor[start : start + _SECTION].unbind(0)


def split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    heads: int,
    scale: float,
) -> Chunks:
    """Return all that does not need the state."""
    by_chunk = partial(_by_chunk, heads=heads)
    query, key, value = by_chunk(query) * scale, by_chunk(key), by_chunk(value)
    keys_across, factor, erased = key.transpose(-1, -2), None, None
    ratios = torch.ones(CHUNK, CHUNK).tril()
    from_start = logs = None
    if decay is not None:
        logs = by_chunk(decay).cumsum(3)
        later = ratios == 0
        ratios = (logs - logs.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
        from_start = logs.exp()
    pairs = (query @ keys_across) * ratios
    if beta is not None:
        beta = by_chunk(beta)
        rows = beta * key
        system = (rows @ keys_across) * ratios
        entered = rows if from_start is None else rows * from_start
        right = torch.cat((beta * value, entered), -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        value, erased = (x.contiguous() for x in solved.chunk(2, -1))
    if logs is not None and from_start is not None:
        query = query * from_start
        keys_across = keys_across * (logs[..., -1:, :] - logs).exp().transpose(-1, -2)
        factor = from_start[..., -1:, :].contiguous()
    return Chunks(query, pairs, keys_across.contiguous(), value.contiguous(), erased, factor)


def carry(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    erased: Sequence[Tensor] | None,
    factors: Sequence[Tensor] | None,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before the chunks, the values that they write, and the last state."""
    states, written = [], []
    for n, (key, value) in enumerate(zip(keys, values, strict=True)):
        states.append(state)
        new = value if erased is None else value - erased[n] @ state
        written.append(new)
        state = (state if factors is None else factors[n] * state) + key @ new
    return torch.stack(states), torch.stack(written), state


def read(
    query: Tensor, pairs: Tensor, states: Sequence[Tensor], values: Sequence[Tensor]
) -> Tensor:
    """Return the output of all chunks, ``[B, T, H d]``."""
    rows = query @ torch.cat(list(states)) + pairs @ torch.cat(list(values))
    return rows.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)


def _by_chunk(tensor: Tensor, heads: int) -> Tensor:
    """Return ``[B, T, H d]`` as ``[N, B, H, C, d]``."""
    batch, tokens, channels = tensor.shape
    parts = tensor.reshape(batch, tokens // CHUNK, CHUNK, heads, channels // heads)
    return parts.permute(1, 0, 3, 2, 4)
