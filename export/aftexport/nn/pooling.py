"""Pooling of a document's tokens to one vector.

Sums are computed in float32, because 16 bits lose their digits.
"""

import torch
from torch import Tensor, nn

from aftexport.operators.numerics import softmax_mean, valid_keys

PADDED_SCORE = -1e38
"""Score of padding. It is finite so that a softmax of only padding gives numbers in ONNX too."""


class MeanPooling(nn.Module):
    """Pooling by the mean of a document's own tokens."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Pool ``x [B, T, D]`` to ``[B, D]``; a document of no tokens gives 0."""
        valid = valid_keys(lengths, x.shape[1])[..., None]
        total = (x.float() if x.dtype.itemsize < 4 else x).masked_fill(~valid, 0).sum(1)
        return (total / lengths.clamp(1, x.shape[1])[:, None].to(total.dtype)).to(x.dtype)


class AttentionPooling(nn.Module):
    """Pooling by a mean weighted by a softmax of learned token scores."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Pool ``x [B, T, D]`` to ``[B, D]``."""
        scores = self.score(x)
        wide = (scores.float(), x.float()) if x.dtype.itemsize < 4 else (scores, x)
        valid = valid_keys(lengths, x.shape[1])[..., None]
        logits = torch.where(valid, wide[0], PADDED_SCORE)
        if torch.compiler.is_exporting():
            # Chunking and evidence recognize this form; passes.fuse_pooling makes its sum exact.
            pooled = (logits.softmax(1) * wide[1]).sum(1)
        else:
            pooled = softmax_mean(logits, wide[1]).squeeze(1)
        return pooled.to(x.dtype)
