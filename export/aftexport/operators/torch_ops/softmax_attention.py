"""Softmax attention in PyTorch; see ``mechanisms.softmax_attention``."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aftexport.operators.numerics import divisor, repeat_heads, split_heads, valid_keys
from aftexport.operators.torch_ops.torch_op import GroupedHeadsCall, Shapes, register_single

_BLOCK = 256
"""The number of queries whose products are in memory at the same time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _SoftmaxAttention(GroupedHeadsCall):
    """A call.

    ``sink`` is ``[H]``; ``bias`` is ``[H, 2R + 1]``, one for each distance from -R to R;
    ``cos_cache`` and ``sin_cache`` are ``[P, r / 2]``; ``query_start`` is int64 ``[1]``.
    """

    scale: float
    window_left: int
    window_right: int
    softcap: float
    interleaved: int
    sink: Tensor | None
    bias: Tensor | None
    cos_cache: Tensor | None
    sin_cache: Tensor | None
    query_start: Tensor | None

    def shapes(self) -> Shapes:
        """Return the shapes of the output and of the logarithms of the divisors."""
        return (*super().shapes(), (*self.query.shape[:2], self.num_heads))

    def empty(self) -> tuple[Tensor, Tensor]:
        """Return zeros, and the logarithms of the sinks."""
        output, log_sum = (self.query.new_zeros(shape) for shape in self.shapes())
        return output, log_sum + (-torch.inf if self.sink is None else self.sink)

    def check(self) -> None:
        super().check()
        self._check_numbers()
        self._check_beside()
        self._check_positions()

    def _check_numbers(self) -> None:
        op_type = self.op_type
        for name in ("window_left", "window_right"):
            if getattr(self, name) < -1:
                raise ValueError(
                    f"{op_type}: {name} must be a number of keys, or -1 for all, "
                    f"got {getattr(self, name)}"
                )
        for name in ("scale", "softcap"):
            number = getattr(self, name)
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{op_type}: {name} must be finite and at least 0, got {number}")
        if self.interleaved not in (0, 1):
            raise ValueError(f"{op_type}: interleaved must be 0 or 1, got {self.interleaved}")

    def _check_beside(self) -> None:
        op_type, heads = self.op_type, self.num_heads
        if self.sink is not None and self.sink.shape != (heads,):
            raise ValueError(
                f"{op_type}: sink must be [{heads}], got shape {tuple(self.sink.shape)}"
            )
        shape = None if self.bias is None else tuple(self.bias.shape)
        if shape is not None and (len(shape) != 2 or shape[0] != heads or shape[1] % 2 == 0):
            raise ValueError(
                f"{op_type}: bias must be [{heads}, an odd number of distances], got shape {shape}"
            )

    def _check_positions(self) -> None:
        op_type, cos, sin = self.op_type, self.cos_cache, self.sin_cache
        width = self.query.shape[2] // self.num_heads
        if (cos is None) != (sin is None):
            raise ValueError(f"{op_type}: cos_cache and sin_cache must be given together")
        if cos is not None and sin is not None:
            shape, tokens = tuple(cos.shape), max(self.query.shape[1], self.key.shape[1])
            if len(shape) != 2 or 2 * shape[1] > width:
                raise ValueError(
                    f"{op_type}: cos_cache must be [positions, at most {width // 2}], "
                    f"got shape {shape}"
                )
            if tuple(sin.shape) != shape:
                raise ValueError(
                    f"{op_type}: sin_cache must be {list(shape)}, got shape {tuple(sin.shape)}"
                )
            if tokens > shape[0]:
                raise ValueError(
                    f"{op_type}: cos_cache must have a row for each of {tokens} tokens, "
                    f"got {shape[0]} rows"
                )
        start = self.query_start
        if start is None:
            return
        if start.shape != (1,) or start.dtype != torch.int64:
            raise ValueError(
                f"{op_type}: query_start must be int64 [1], "
                f"got {start.dtype} of shape {tuple(start.shape)}"
            )
        if self.key_lengths is None:
            raise ValueError(f"{op_type}: query_start must come with key_lengths")

    @property
    def _first_position(self) -> int:
        return 0 if self.query_start is None else int(self.query_start)

    def reference(self) -> tuple[Tensor, Tensor]:
        """Compute the definition, row by row."""
        tokens, keys = self.query.shape[1], self.key.shape[1]
        return _joined([self._attended(t, t + 1, 0, keys) for t in range(tokens)])

    def compute(self) -> tuple[Tensor, Tensor]:
        """Compute ``reference`` in blocks of queries, from the keys that each block sees."""
        tokens, keys = self.query.shape[1], self.key.shape[1]
        blocks = []
        for start in range(0, tokens, _BLOCK):
            end = min(start + _BLOCK, tokens)
            left, right = start + self._first_position, end + self._first_position
            first = 0 if self.window_left < 0 else max(left - self.window_left, 0)
            last = keys if self.window_right < 0 else min(right + self.window_right, keys)
            first = min(first, keys - 1)  # a block that sees no key reads one, and masks it
            blocks.append(self._attended(start, end, first, max(last, first + 1)))
        return _joined(blocks)

    def _attended(self, start: int, end: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the rows of some queries, from the keys ``first`` to ``last``."""
        queries = split_heads(self.query[:, start:end], self.num_heads)
        keys, values = (
            split_heads(x[:, first:last], self.kv_heads) for x in (self.key, self.value)
        )
        counted = valid_keys(self.counted, self.key.shape[1])[:, first:last]
        keys, values = (torch.where(counted[..., None, None], x, 0) for x in (keys, values))
        queries = self._rotated(queries, start + self._first_position)
        keys, values = (
            repeat_heads(x, self.num_heads) for x in (self._rotated(keys, first), values)
        )
        scale = self.scale or queries.shape[-1] ** -0.5
        logits = torch.einsum("bthd,bshd->bhts", queries * scale, keys)
        if self.softcap:
            logits = self.softcap * (logits / self.softcap).tanh()
        device = logits.device
        rows = torch.arange(start, end, device=device)[:, None] + self._first_position
        distance = torch.arange(first, last, device=device) - rows
        if self.bias is not None:
            reach = self.bias.shape[1] // 2
            logits = logits + self.bias[:, distance.clamp(-reach, reach) + reach]
        seen = counted[:, None, None] & self._is_inside(distance)
        logits = torch.where(seen, logits, -torch.inf)
        top = logits.detach().amax(3, keepdim=True)
        if self.sink is not None:
            sink = self.sink[:, None, None]
            top = torch.maximum(top, sink.detach())
        top = top.clamp(min=torch.finfo(logits.dtype).min)
        weights = (logits - top).exp()
        total = weights.sum(3, keepdim=True)
        if self.sink is not None:
            total = total + (sink - top).exp()
        mixed = torch.einsum("bhts,bshe->bthe", weights / divisor(total), values)
        log_sum = torch.where(total == 0, -torch.inf, divisor(total).log() + top)
        return mixed.flatten(2), log_sum.squeeze(3).transpose(1, 2)

    def _rotated(self, x: Tensor, first: int) -> Tensor:
        """Rotate ``x [B, T, heads, d]``, whose tokens have the positions from ``first`` on.

        Positions outside of the caches, which only padding may have, count as their ends.
        """
        if self.cos_cache is None or self.sin_cache is None:
            return x
        rows = torch.arange(first, first + x.shape[1], device=x.device)
        rows = rows.clamp(0, self.cos_cache.shape[0] - 1)
        cos, sin = (cache[rows, None] for cache in (self.cos_cache, self.sin_cache))
        half = cos.shape[-1]
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
        else:
            a, b = turned[..., :half], turned[..., half:]
        pair = a * cos - b * sin, b * cos + a * sin
        joined = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((joined, rest), -1)

    def _is_inside(self, distance: Tensor) -> Tensor:
        """Return whether keys at some distances are in the window."""
        inside = torch.ones_like(distance, dtype=torch.bool)
        if self.window_left >= 0:
            inside = inside & (distance >= -self.window_left)
        if self.window_right >= 0:
            inside = inside & (distance <= self.window_right)
        return inside


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join outputs, and logarithms, along the tokens."""
    outputs, log_sums = zip(*parts, strict=True)
    return torch.cat(outputs, 1), torch.cat(log_sums, 1)


SOFTMAX_ATTENTION = register_single("SoftmaxAttention", _SoftmaxAttention)
