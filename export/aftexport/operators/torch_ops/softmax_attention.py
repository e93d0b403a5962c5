"""Softmax attention in PyTorch; see ``mechanisms.softmax_attention``."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aftexport.operators.numerics import divisor, repeat_heads, split_heads, valid_keys
from aftexport.operators.torch_ops.torch_op import GroupedHeadsCall, register_single

_BLOCK = 256
"""The number of queries whose products are in memory at the same time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _SoftmaxAttention(GroupedHeadsCall):
    """A call.

    ``sink`` is ``[H]``; ``bias`` is ``[H, 2R + 1]``, one for each distance from -R to R.
    """

    scale: float
    window_left: int
    window_right: int
    softcap: float
    sink: Tensor | None
    bias: Tensor | None

    def check(self) -> None:
        super().check()
        op_type, heads = self.op_type, self.num_heads
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
        if self.sink is not None and self.sink.shape != (heads,):
            raise ValueError(
                f"{op_type}: sink must be [{heads}], got shape {tuple(self.sink.shape)}"
            )
        shape = None if self.bias is None else tuple(self.bias.shape)
        if shape is not None and (len(shape) != 2 or shape[0] != heads or shape[1] % 2 == 0):
            raise ValueError(
                f"{op_type}: bias must be [{heads}, an odd number of distances], got shape {shape}"
            )

    def reference(self) -> Tensor:
        """Compute the definition, row by row."""
        rows = [self._attended(t, t + 1, 0, self.key.shape[1]) for t in range(self.query.shape[1])]
        return torch.cat(rows, 1)

    def compute(self) -> Tensor:
        """Compute ``reference`` in blocks of queries, from the keys that each block sees."""
        tokens, keys = self.query.shape[1], self.key.shape[1]
        blocks = []
        for start in range(0, tokens, _BLOCK):
            end = min(start + _BLOCK, tokens)
            first = 0 if self.window_left < 0 else max(start - self.window_left, 0)
            last = keys if self.window_right < 0 else min(end + self.window_right, keys)
            first = min(first, keys - 1)  # a block that sees no key reads one, and masks it
            blocks.append(self._attended(start, end, first, max(last, first + 1)))
        return torch.cat(blocks, 1)

    def _attended(self, start: int, end: int, first: int, last: int) -> Tensor:
        """Return the rows of some queries, from the keys ``first`` to ``last``."""
        queries = split_heads(self.query[:, start:end], self.num_heads)
        keys, values = (
            repeat_heads(split_heads(x[:, first:last], self.kv_heads), self.num_heads)
            for x in (self.key, self.value)
        )
        counted = valid_keys(self.counted, self.key.shape[1])[:, first:last]
        keys, values = (torch.where(counted[..., None, None], x, 0) for x in (keys, values))
        scale = self.scale or queries.shape[-1] ** -0.5
        logits = torch.einsum("bthd,bshd->bhts", queries * scale, keys)
        if self.softcap:
            logits = self.softcap * (logits / self.softcap).tanh()
        device = logits.device
        rows = torch.arange(start, end, device=device)[:, None]
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
        return mixed.flatten(2)

    def _is_inside(self, distance: Tensor) -> Tensor:
        """Return whether keys at some distances are in the window."""
        inside = torch.ones_like(distance, dtype=torch.bool)
        if self.window_left >= 0:
            inside = inside & (distance >= -self.window_left)
        if self.window_right >= 0:
            inside = inside & (distance <= self.window_right)
        return inside


SOFTMAX_ATTENTION = register_single("SoftmaxAttention", _SoftmaxAttention)
