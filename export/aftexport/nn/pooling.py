"""From the tokens of a document to one vector. Sums are float32: 16 bits lose them."""

import torch
from torch import Tensor, nn

from aftexport.operators.numerics import softmax_mean, valid_keys

PADDED_SCORE = -1e38
"""Finite: a softmax of nothing but padding must give numbers in the exported graph too."""


class MeanPooling(nn.Module):
    """The mean of a document's own tokens."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """``x [B, T, D]`` to ``[B, D]``; a document of no tokens gives 0."""
        valid = valid_keys(lengths, x.shape[1])[..., None]
        total = (x.float() if x.dtype.itemsize < 4 else x).masked_fill(~valid, 0).sum(1)
        return (total / lengths.clamp(1, x.shape[1])[:, None].to(total.dtype)).to(x.dtype)


class AttentionPooling(nn.Module):
    """A mean weighted by a learned score of each token (softmax over the tokens)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """``x [B, T, D]`` to ``[B, D]``."""
        scores = self.score(x)
        wide = (scores.float(), x.float()) if x.dtype.itemsize < 4 else (scores, x)
        valid = valid_keys(lengths, x.shape[1])[..., None]
        logits = torch.where(valid, wide[0], PADDED_SCORE)
        if torch.compiler.is_exporting():
            # The form that chunks and evidence know; ``fuse.pooling`` makes its sum exact.
            pooled = (logits.softmax(1) * wide[1]).sum(1)
        else:
            pooled = softmax_mean(logits, wide[1]).squeeze(1)
        return pooled.to(x.dtype)
