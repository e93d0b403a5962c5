"""Fastformer as its authors write it, and others."""

import math

import torch
from torch import Tensor, nn

from ..layer import DIM, HEADS, heads


class Fastformer(nn.Module):
    """The authors' code: separate heads, and a mask that is added to the logits."""

    def __init__(self, pool: str = "matmul", masked: bool = False, added: float = -10000.0) -> None:
        super().__init__()
        self.pool, self.masked, self.added = pool, masked, added
        self.query, self.key = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.query_att, self.key_att = nn.Linear(DIM, HEADS), nn.Linear(DIM, HEADS)
        self.transform = nn.Linear(DIM, DIM)

    def pooled(self, x: Tensor, att: nn.Linear, mask: Tensor) -> Tensor:
        """``[B, 1, D]``."""
        logits = att(x).transpose(1, 2) / math.sqrt(DIM // HEADS)
        if self.masked:
            logits = logits + mask
        if self.pool == "einsum":
            weight = torch.softmax(logits, -1)
            return torch.einsum("bht,bhtd->bhd", weight, heads(x)).reshape(x.shape[0], 1, DIM)
        if self.pool == "exp-sum":
            weight = torch.exp(logits - logits.amax(-1, keepdim=True))
            sums = (weight[..., None] * heads(x)).sum(2) / weight.sum(-1, keepdim=True)
            return sums.reshape(x.shape[0], 1, DIM)
        weight = torch.softmax(logits, -1).unsqueeze(2)
        return (weight @ heads(x)).transpose(1, 2).reshape(-1, 1, DIM)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = (1.0 - (x[..., 0] if mask is None else mask))[:, None] * self.added
        q, k = self.query(x), self.key(x)
        p = k * self.pooled(q, self.query_att, mask).repeat(1, x.shape[1], 1)
        return self.transform(self.pooled(p, self.key_att, mask) * q) + q


class MaskedFastformer(Fastformer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, (x[..., 0] > -1.0).float())


class FilledFastformer(Fastformer):
    """Logits of tokens that do not count are filled, and their rows are 0; the first one counts."""

    def __init__(self, filling: float, *, scaled_first: bool) -> None:
        super().__init__()
        self.filling, self.scaled_first = filling, scaled_first

    def pooled(self, x: Tensor, att: nn.Linear, mask: Tensor) -> Tensor:
        logits, root = att(x).transpose(1, 2), math.sqrt(DIM // HEADS)
        if self.scaled_first:
            logits = (logits / root).masked_fill(mask, self.filling)
        else:
            logits = torch.where(mask, self.filling, logits) / root
        weight = torch.softmax(logits, -1).unsqueeze(2)
        return (weight @ heads(x)).transpose(1, 2).reshape(-1, 1, DIM)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        left_out = ((x[..., 0] < -1.0) & (torch.arange(x.shape[1]) > 0))[:, None]
        q, k = self.query(x), self.key(x)
        p = k * self.pooled(q, self.query_att, left_out)
        mixed = self.pooled(p, self.key_att, left_out) * q
        return self.transform(mixed.masked_fill(left_out.transpose(1, 2), 0.0)) + q


class EspnetFastformer(Fastformer):
    """ESPnet's: logits of tokens that do not count are filled, and their weights are 0.

    A document may have no token that counts.
    """

    def __init__(self, filling: float) -> None:
        super().__init__()
        self.filling = filling

    def pooled(self, x: Tensor, att: nn.Linear, mask: Tensor) -> Tensor:
        logits = att(x).transpose(1, 2) / math.sqrt(DIM // HEADS)
        weight = torch.softmax(logits.masked_fill(mask, self.filling), -1).masked_fill(mask, 0.0)
        return (weight.unsqueeze(2) @ heads(x)).transpose(1, 2).reshape(-1, 1, DIM)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        left_out = (x[..., 0] > -1.0)[:, None].eq(0)
        q, k = self.query(x), self.key(x)
        p = k * self.pooled(q, self.query_att, left_out).repeat(1, x.shape[1], 1)
        return self.transform(self.pooled(p, self.key_att, left_out) * q) + q


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    found: dict[str, tuple[str, nn.Module]] = {
        f"fastformer_{pool}": ("Fastformer", Fastformer(pool))
        for pool in ("matmul", "einsum", "exp-sum")
    }
    found["fastformer_masked"] = "Fastformer", MaskedFastformer(masked=True)
    lowest = torch.finfo(torch.float32).min
    found["fastformer_lowest_added"] = "Fastformer", MaskedFastformer(masked=True, added=lowest)
    for name, filling, scaled_first in (
        ("infinity", -math.inf, False), ("lowest", lowest, True), ("low", -1e9, False),
    ):  # fmt: skip
        layer = FilledFastformer(filling, scaled_first=scaled_first)
        found[f"fastformer_filled_with_{name}"] = "Fastformer", layer
        found[f"fastformer_filled_twice_{name}"] = "Fastformer", EspnetFastformer(filling)
    return found
