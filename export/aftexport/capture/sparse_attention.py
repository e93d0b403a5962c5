"""Forms for an export of the sparse attentions in models of transformers.

The library computes them in blocks, with branches on the number of tokens. Each form computes every
document as the library computes it by itself: there the result also depends on the padding.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

import aftexport.operators.torch_ops  # noqa: F401  registers the operators


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
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, band_mask)
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


# Beltagy et al., Longformer, arXiv 2004.05150, section 3.1. A classifier of documents has one
# global token, the first; other classes of the library have none.
def classified_by_longformer(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    global_attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    **_: Any,
) -> Any:
    """Return the result of LongformerForSequenceClassification."""
    from transformers.modeling_outputs import SequenceClassifierOutput  # loaded by the model

    _refuse_global_tokens(global_attention_mask)
    hidden = _longformer_vectors(
        self.longformer, input_ids, attention_mask, token_type_ids, has_global=True
    )
    return SequenceClassifierOutput(logits=self.classifier(hidden))


def encoded_by_longformer(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    global_attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    **_: Any,
) -> Any:
    """Return the result of LongformerModel without global tokens."""
    from transformers.models.longformer import modeling_longformer  # loaded by the model

    _refuse_global_tokens(global_attention_mask)
    hidden = _longformer_vectors(self, input_ids, attention_mask, token_type_ids, has_global=False)
    pooled = None if self.pooler is None else self.pooler(hidden)
    output = modeling_longformer.LongformerBaseModelOutputWithPooling
    return output(last_hidden_state=hidden, pooler_output=pooled)


def _refuse_global_tokens(mask: Tensor | None) -> None:
    if mask is not None:
        raise ValueError("expected no global_attention_mask, got one; only the first token can be")


def _longformer_vectors(
    model: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    *,
    has_global: bool,
) -> Tensor:
    assert input_ids is not None
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    hidden: Tensor = model.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
    for layer in model.encoder.layer:
        hidden = layer(hidden, attention_mask=mask.sum(1), is_global_attn=has_global)[0]
    return hidden


def attended_in_windows(
    self: Any, hidden_states: Tensor, attention_mask: Tensor, *, is_global_attn: bool, **_: Any
) -> tuple[Tensor]:
    """Return the result of LongformerSelfAttention; ``attention_mask [B]`` has the lengths."""
    lengths, window = attention_mask, self.one_sided_attn_window_size
    query, key, value = (part(hidden_states) for part in (self.query, self.key, self.value))
    if not is_global_attn:
        return (_attended(self, query, key, value, lengths, lengths, window)[0],)
    # The first key is apart from the window: every query sees it once.
    rest, rest_values = (nn.functional.pad(x[:, 1:], (0, 0, 0, 1)) for x in (key, value))
    counts = (lengths - 1).clamp(min=0)
    mixed, log_sum = _attended(self, query, rest, rest_values, lengths, counts, window, start=-1)
    query, first = (x.unflatten(2, (self.num_heads, -1)) for x in (query, key[:, :1]))
    score = (query * first).sum(3) * self.head_dim**-0.5
    share = (score - log_sum.to(score.dtype)).sigmoid().unsqueeze(3)
    mixed = mixed.reshape(query.shape)
    mixed = mixed + share * (value[:, :1].unflatten(2, (self.num_heads, -1)) - mixed)
    # A slice has strides of the whole, of which torch.export asks whether the batch is 1.
    query = self.query_global(hidden_states.index_select(1, torch.zeros_like(lengths[:1])))
    key, value = (part(hidden_states) for part in (self.key_global, self.value_global))
    whole = _attended(self, query, key, value, torch.ones_like(lengths), lengths, -1)[0]
    return (torch.cat([whole, mixed.flatten(2)[:, 1:]], 1),)


def _attended(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    key_lengths: Tensor,
    window: int,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention and the logarithms of its sums; -1 is a window without limits."""
    first = torch.full((1,), start, dtype=torch.int64, device=query.device)
    output, log_sum = torch.ops.aftexport.softmax_attention(
        *(query, key, value, None, None, lengths, layer.num_heads, 0.0, window, window, 0.0),
        key_lengths=key_lengths,
        query_start=first,
    )
    return output, log_sum
