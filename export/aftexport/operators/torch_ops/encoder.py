"""The operators around the attention of an encoder in PyTorch; ``operators.encoder`` has them."""

from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from aftexport.operators.numerics import mask_keys, softmax


def _normed(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, epsilon: float) -> Tensor:
    """Return the layer norm of ``x [B, T, D]``; ``epsilon`` is added to the variance."""
    return layer_norm(x, x.shape[-1:], norm_weight, norm_bias, epsilon)


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    epsilon: float,
) -> Tensor:
    """Compute the definition; ``weight`` is ``[D, E]``, ``bias`` ``[E]``."""
    return _normed(x, norm_weight, norm_bias, epsilon) @ weight + bias


def layer_norm_query_key_value(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, *weights_and_biases: Tensor, epsilon: float
) -> tuple[Tensor, ...]:
    """Compute query, key and value; each has a weight ``[D, E]`` and then a bias ``[E]``."""
    normed = _normed(x, norm_weight, norm_bias, epsilon)
    pairs = zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True)
    return tuple(normed @ weight + bias for weight, bias in pairs)


def layer_norm_feed_forward(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    *,
    epsilon: float,
) -> Tensor:
    """Compute the definition; ``weight_in`` is ``[D, F]``, ``weight_out`` ``[F, D]``."""
    normed = _normed(x, norm_weight, norm_bias, epsilon)
    return x + gelu(normed @ weight_in + bias_in) @ weight_out + bias_out


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Compute the definition; ``x`` is ``[B, T, E]``, ``weight`` ``[E, D]``."""
    return residual + x @ weight + bias


def layer_norm_fastformer(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    alpha_weight: Tensor,
    beta_weight: Tensor,
    weight: Tensor,
    bias: Tensor,
    lengths: Tensor,
    *,
    epsilon: float,
    num_heads: int,
) -> Tensor:
    """Compute the definition; see ``operators.encoder`` for the shapes and the formula."""
    normed = _normed(x, norm_weight, norm_bias, epsilon)

    def pool(logits: Tensor, head_weight: Tensor, head_bias: Tensor) -> Tensor:
        means = softmax(mask_keys(logits, lengths)).transpose(1, 2) @ normed
        per_head = head_weight.reshape(len(head_weight), num_heads, -1).transpose(0, 1)
        pooled = means[:, :, None] @ per_head
        return pooled.flatten(1)[:, None] + head_bias

    global_query = pool(normed @ alpha_weight, query_weight, query_bias)
    beta = key_weight @ (global_query.transpose(1, 2) * beta_weight)
    global_key = global_query * pool(normed @ beta, key_weight, key_bias)
    mixed = normed @ (query_weight * global_key @ weight + query_weight)
    return x + mixed + (query_bias * global_key) @ weight + query_bias + bias
