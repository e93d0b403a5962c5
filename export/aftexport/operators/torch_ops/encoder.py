"""The operators around the attention of an encoder in PyTorch; ``operators.encoder`` has them."""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, rms_norm, silu

from aftexport.operators.numerics import mask_keys, softmax


def _normed(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    epsilon: float,
    norm: str = "layer",
) -> Tensor:
    """Return the norm of ``x [B, T, D]``; ``epsilon`` is added to variance or mean square."""
    if norm_weight is None:
        return x
    if norm == "layer":
        return layer_norm(x, x.shape[-1:], norm_weight, norm_bias, epsilon)
    normed = rms_norm(x, x.shape[-1:], norm_weight, epsilon)
    return normed if norm_bias is None else normed + norm_bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else x @ weight + bias


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    epsilon: float,
    norm: str,
) -> Tensor:
    """Compute the definition; ``weight`` is ``[D, E]``, ``bias`` ``[E]``."""
    return _linear(_normed(x, norm_weight, norm_bias, epsilon, norm), weight, bias)


def layer_norm_query_key_value(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *weights_and_biases: Tensor | None,
    epsilon: float,
    norm: str,
) -> tuple[Tensor, ...]:
    """Compute query, key and value; each has a weight ``[D, E]`` and then a bias ``[E]``."""
    normed = _normed(x, norm_weight, norm_bias, epsilon, norm)
    pairs = zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True)
    return tuple(_linear(normed, weight, bias) for weight, bias in pairs if weight is not None)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
    "silu": silu,
}


def layer_norm_feed_forward(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight_in: Tensor,
    bias_in: Tensor | None,
    weight_out: Tensor,
    bias_out: Tensor | None,
    weight_up: Tensor | None,
    bias_up: Tensor | None,
    *,
    epsilon: float,
    norm: str,
    activation: str,
) -> Tensor:
    """Compute the definition; ``weight_in`` and ``weight_up`` are ``[D, F]``."""
    normed = _normed(x, norm_weight, norm_bias, epsilon, norm)
    hidden = _ACTIVATIONS[activation](_linear(normed, weight_in, bias_in))
    if weight_up is not None:
        hidden = hidden * _linear(normed, weight_up, bias_up)
    return x + _linear(hidden, weight_out, bias_out)


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Compute the definition; ``x`` is ``[B, T, E]``, ``weight`` ``[E, D]``."""
    return residual + _linear(x, weight, bias)


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
