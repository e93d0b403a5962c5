"""Forms for an export of the sparse attentions in models of transformers.

The library computes them in blocks, with branches on the number of tokens. Each form computes every
document as the library computes it by itself: there the result also depends on the padding.
"""

import math
from typing import Any

import torch
from torch import Tensor


# Zaheer et al., Big Bird, arXiv 2007.14062, section 2. Outside training, the library takes the
# first block for each random block, so its keys count several times.
def encoded_by_big_bird(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    **_: Any,
) -> Any:
    """Return the result of BigBirdModel by full attention with the mask of its blocks."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling  # loaded by the model

    assert input_ids is not None
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    vectors = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
    bias = _block_bias(self.config, mask).to(vectors.dtype)
    # A layer reads the mask of its own kind of attention.
    hidden = self.encoder(vectors, attention_mask=bias, band_mask=bias).last_hidden_state
    pooled = None if self.pooler is None else self.activation(self.pooler(hidden[:, 0]))
    return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)


def attended_by_blocks(
    self: Any, hidden_states: Tensor, band_mask: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """Return the result of BigBirdBlockSparseAttention, by the mask of ``encoded_by_big_bird``."""
    query, key, value = (
        part(hidden_states).unflatten(2, (self.num_attention_heads, -1)).transpose(1, 2)
        for part in (self.query, self.key, self.value)
    )
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, band_mask)
    return mixed.transpose(1, 2).flatten(2), None


def _block_bias(config: Any, mask: Tensor) -> Tensor:
    """Return ``[B, 1, T, T]``: the logarithm of the number of times that a query counts a key."""
    size, random = config.block_size, config.num_random_blocks
    lengths = mask.sum(1)[:, None, None, None]
    places = torch.arange(mask.shape[1], device=mask.device)
    query, key = places[:, None] // size, places[None, :] // size
    last = (lengths - 1) // size
    is_global = (query == 0) | (query == last)
    is_seen = is_global | (key == 0) | (key == last) | ((query - key).abs() <= 1)
    is_repeated = (key == 0) & ~is_global
    if config.attention_type == "original_full":
        is_sparse = lengths < 0
    else:
        is_sparse = lengths > (5 + 2 * random) * size  # the library's limit of full attention
    counts = torch.where(is_sparse & is_repeated, math.log(1 + random), 0.0)
    return torch.where((is_seen | ~is_sparse) & (places < lengths), counts, -math.inf)
