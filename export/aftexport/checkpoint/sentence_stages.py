"""The modules after the transformer in a folder of sentence-transformers, by their formulas."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aftexport.checkpoint.transformers_module import TransformersModel

_MIN_TOKENS = 1e-9
"""The smallest divisor of a mean, as in the library."""
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""The kinds of pooling, in the order in which the library joins them."""
ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.SiLU)
}


class Pooling(nn.Module):
    """One vector of a document from those of its tokens, special tokens included.

    Args:
        modes: the kinds of pooling, one or several of ``POOLINGS``, whose vectors are joined.
    """

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self._modes = tuple(modes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return ``[batch, width]`` for each mode, joined.

        Args:
            tokens: ``[batch, tokens, width]``.
            mask: int64 ``[batch, tokens]``, 1 for a token and 0 for padding after all tokens.
        """
        parts = [_pooled(mode, tokens, mask) for mode in self._modes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Normalization(nn.Module):
    """Vectors of length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Return vectors ``[batch, width]`` divided by their length."""
        return nn.functional.normalize(vectors, dim=1)


class SentenceModel(nn.Module):
    """A model that takes token ids and a mask, and returns a vector of each document.

    Args:
        tokens: the model of the tokens' vectors.
        pooling: the pooling.
        stages: the modules after it, in their order.
        max_length: the maximum tokens of a document; None for no limit.
    """

    def __init__(
        self,
        tokens: TransformersModel,
        pooling: Pooling,
        stages: Sequence[nn.Module],
        max_length: int | None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.pooling = pooling
        self.stages = nn.Sequential(*stages)
        self.max_length = max_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return ``[batch, width]``; see ``TransformersModel.forward``."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        vectors: Tensor = self.stages(self.pooling(self.tokens(input_ids, attention_mask), mask))
        return vectors


def _pooled(mode: str, tokens: Tensor, mask: Tensor) -> Tensor:
    is_token = mask[:, :, None] > 0
    weights = mask[:, :, None].to(tokens.dtype)
    if mode == "cls":
        return tokens[:, 0]
    if mode == "max":
        return tokens.masked_fill(~is_token, float("-inf")).amax(1)
    if mode == "lasttoken":
        last = (mask.sum(1) - 1)[:, None, None].expand(-1, 1, tokens.shape[2])
        return tokens.gather(1, last)[:, 0]
    if mode == "weightedmean":
        weights = weights * weights.cumsum(1)  # 1, 2, 3, ...
    total = (tokens.masked_fill(~is_token, 0.0) * weights).sum(1)
    count = weights.sum(1).clamp(min=_MIN_TOKENS)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)
