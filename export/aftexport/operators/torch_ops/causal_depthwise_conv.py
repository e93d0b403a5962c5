"""A causal convolution of each channel in PyTorch; see ``mechanisms.causal_depthwise_conv``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aftexport.operators.numerics import check_lengths, valid_keys
from aftexport.operators.torch_ops.torch_op import Call, Shapes, register_single


@dataclass(frozen=True, kw_only=True, eq=False)
class _CausalDepthwiseConv(Call):
    """A call; absent inputs count as 0."""

    input: Tensor  # [B, T, C]
    weight: Tensor  # [C, K]
    bias: Tensor | None  # [C]
    past_state: Tensor | None  # [B, K - 1, C], the inputs before the first token
    lengths: Tensor  # int64 [B]
    activation: str

    def check(self) -> None:
        op_type, shape = self.op_type, tuple(self.input.shape)
        if len(shape) != 3:
            raise ValueError(
                f"{op_type}: input must be [batch, tokens, channels], got shape {shape}"
            )
        batch, _, channels = shape
        weight = tuple(self.weight.shape)
        if len(weight) != 2 or weight[0] != channels or weight[1] < 1:
            raise ValueError(f"{op_type}: weight must be [{channels}, taps], got shape {weight}")
        expected = {"bias": (channels,), "past_state": (batch, weight[1] - 1, channels)}
        for name, sizes in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != sizes:
                raise ValueError(
                    f"{op_type}: {name} must be {list(sizes)}, got shape {tuple(tensor.shape)}"
                )
        check_lengths(op_type, self.input, self.lengths)

    def shapes(self) -> Shapes:
        """Return the shapes of the output, and of the last K - 1 inputs of each document."""
        batch, _, channels = self.input.shape
        return self.input.shape, (batch, self.weight.shape[1] - 1, channels)

    def reference(self) -> tuple[Tensor, Tensor]:
        """Compute the definition as a sum over the K taps; it is differentiable, linear in T."""
        batch, tokens, channels = self.input.shape
        taps = self.weight.shape[1]
        valid = valid_keys(self.lengths, tokens)[..., None]
        past_state, total = self.past_state, self.input.new_zeros(self.input.shape)
        if past_state is None:
            past_state = self.input.new_zeros(batch, taps - 1, channels)
        inputs = torch.cat((past_state, torch.where(valid, self.input, 0)), 1)
        if self.bias is not None:
            total = self.bias.expand_as(self.input)
        for tap in range(taps):
            total = total + inputs[:, tap : tap + tokens] * self.weight[:, tap]
        if self.activation == "silu":
            total = torch.nn.functional.silu(total)
        places = torch.arange(taps - 1, device=self.input.device)
        places = self.lengths.clamp(0, tokens)[:, None] + places
        state = inputs.gather(1, places[..., None].expand(-1, -1, channels))
        return torch.where(valid, total, 0), state

    def compute(self) -> tuple[Tensor, Tensor]:
        """Compute the definition."""
        return self.reference()


CAUSAL_DEPTHWISE_CONV = register_single("CausalDepthwiseConv", _CausalDepthwiseConv)
