"""A causal convolution of each channel in PyTorch; see ``mechanisms.causal_depthwise_conv``."""

import torch
from torch import Tensor

from aftexport.operators.numerics import check_lengths, valid_keys
from aftexport.operators.torch_ops.torch_op import register_recurrent


def _check(
    op_type: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past_state: Tensor | None,
    lengths: Tensor,
    activation: str,
) -> None:
    if input.dim() != 3:
        raise ValueError(
            f"{op_type}: input must be [batch, tokens, channels], got shape {tuple(input.shape)}"
        )
    batch, _, channels = input.shape
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(
            f"{op_type}: weight must be [{channels}, taps], got shape {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"{op_type}: bias must be [{channels}], got shape {tuple(bias.shape)}")
    state = (batch, weight.shape[1] - 1, channels)
    if past_state is not None and past_state.shape != state:
        raise ValueError(
            f"{op_type}: past_state must be {list(state)}, got shape {tuple(past_state.shape)}"
        )
    check_lengths(op_type, input, lengths)


def reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past_state: Tensor | None,
    lengths: Tensor,
    *,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Compute the definition as a sum over the K taps; it is differentiable and linear in T.

    Args:
        input: ``[B, T, C]``.
        weight: ``[C, K]``.
        bias: ``[C]``; None counts as 0.
        past_state: ``[B, K - 1, C]``, the inputs before the first token; None counts as 0.
        lengths: int64 ``[B]``.

    Returns:
        The output ``[B, T, C]``, and the last K - 1 inputs within each document's length.
    """
    batch, tokens, channels = input.shape
    taps = weight.shape[1]
    valid = valid_keys(lengths, tokens)[..., None]
    if past_state is None:
        past_state = input.new_zeros(batch, taps - 1, channels)
    inputs = torch.cat((past_state, torch.where(valid, input, 0)), 1)
    total = input.new_zeros(input.shape) if bias is None else bias.expand_as(input)
    for tap in range(taps):
        total = total + inputs[:, tap : tap + tokens] * weight[:, tap]
    if activation == "silu":
        total = torch.nn.functional.silu(total)
    places = lengths.clamp(0, tokens)[:, None] + torch.arange(taps - 1, device=input.device)
    state = inputs.gather(1, places[..., None].expand(-1, -1, channels))
    return torch.where(valid, total, 0), state


def _shapes(
    input: Tensor, weight: Tensor, *_: Tensor | None, **__: str
) -> tuple[tuple[int, ...], ...]:
    batch, tokens, channels = input.shape
    return (batch, tokens, channels), (batch, weight.shape[1] - 1, channels)


CAUSAL_DEPTHWISE_CONV = register_recurrent(
    "CausalDepthwiseConv", check=_check, compute=reference, reference=reference, shapes=_shapes
)
