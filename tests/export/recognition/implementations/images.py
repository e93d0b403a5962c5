"""Linear attention of images ``[B, C, H, W]``, as diffusion models write it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

COSTLY = frozenset(("softmax_of_keys_einsum", "softmax_of_keys_matmul", "relu_of_both_depthwise"))
"""The layers whose transposes cost more than the operator saves, unless the heads are wide."""


@dataclass(frozen=True)
class Size:
    """The channels of an image, and the heads with the channels of each."""

    channels: int = 8
    heads: int = 2
    width: int = 6


class DiffusionAttention(nn.Module):
    """A convolution makes query, key and value of heads; the output is a convolution, too."""

    def __init__(
        self,
        size: Size,
        *,
        of_queries: bool = False,  # a softmax over the channels of the query
        of_keys: bool = False,  # a softmax over the positions of the key
        is_einsum: bool = False,
        has_depthwise: bool = False,  # a convolution of each channel follows the first one
    ) -> None:
        super().__init__()
        self.of_queries, self.of_keys, self.is_einsum = of_queries, of_keys, is_einsum
        self.heads, self.width = size.heads, size.width
        inner = 3 * size.heads * size.width
        self.qkv = nn.Conv2d(size.channels, inner, 1, bias=False)
        depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.near = depthwise if has_depthwise else nn.Identity()
        self.output = nn.Conv2d(size.heads * size.width, size.channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        q, k, v = (
            part.reshape(batch, self.heads, self.width, height * width)
            for part in self.near(self.qkv(x)).chunk(3, dim=1)
        )
        out = self.attend(q, k, v)
        return x + self.output(out.reshape(batch, -1, height, width))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All are ``[B, H, d, T]``."""
        q = q.softmax(dim=-2) * self.width**-0.5 if self.of_queries else q
        k = k.softmax(dim=-1) if self.of_keys else k
        if self.is_einsum:
            context = torch.einsum("bhdn,bhen->bhde", k, v)
            return torch.einsum("bhde,bhdn->bhen", context, q)
        return (k @ v.transpose(-1, -2)).transpose(-1, -2) @ q


class ReluAttention(DiffusionAttention):
    """Relu features, with a row of ones for the normalizer, as in EfficientViT and SANA."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All are ``[B, H, d, T]``."""
        values = nn.functional.pad(v, (0, 0, 0, 1), value=1.0)
        out = values @ k.relu().transpose(-1, -2) @ q.relu()
        return out[:, :, :-1] / (out[:, :, -1:] + 1e-6)


def layers(size: Size = Size()) -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer of images ``[B, C, H, W]`` by name."""
    torch.manual_seed(0)
    found: dict[str, tuple[str, nn.Module]] = {}
    for is_einsum, style in ((True, "einsum"), (False, "matmul")):
        for of_queries, of_keys, name in (
            (False, True, "keys"), (True, True, "both"), (False, False, "neither"),
        ):  # fmt: skip
            module = DiffusionAttention(
                size, of_queries=of_queries, of_keys=of_keys, is_einsum=is_einsum
            )
            operator = "EfficientAttention" if of_queries else "NormalizedLinearAttention"
            found[f"softmax_of_{name}_{style}"] = operator, module
    operator = "NormalizedLinearAttention"
    found["relu_of_both"] = operator, ReluAttention(size)
    found["relu_of_both_depthwise"] = operator, ReluAttention(size, has_depthwise=True)
    softmax = DiffusionAttention(size, of_queries=True, of_keys=True, has_depthwise=True)
    found["softmax_of_both_depthwise"] = "EfficientAttention", softmax
    return found
