"""Linear attention of images ``[B, C, H, W]``, as diffusion models write it."""

import torch
from torch import Tensor, nn


class DiffusionAttention(nn.Module):
    """A convolution makes query, key and value of heads; the output is a convolution, too.

    Attributes:
        of_queries: whether the query has a softmax over its channels.
        of_keys: whether the key has a softmax over the positions.
        is_einsum: whether the products are einsum, and matrix products otherwise.
    """

    def __init__(self, *, of_queries: bool, of_keys: bool, is_einsum: bool) -> None:
        super().__init__()
        self.of_queries, self.of_keys, self.is_einsum = of_queries, of_keys, is_einsum
        self.heads, self.width = 2, 6
        self.qkv = nn.Conv2d(8, 3 * self.heads * self.width, 1, bias=False)
        self.output = nn.Conv2d(self.heads * self.width, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        q, k, v = (
            part.reshape(batch, self.heads, self.width, height * width)
            for part in self.qkv(x).chunk(3, dim=1)
        )
        q = q.softmax(dim=-2) * self.width**-0.5 if self.of_queries else q
        k = k.softmax(dim=-1) if self.of_keys else k
        if self.is_einsum:
            context = torch.einsum("bhdn,bhen->bhde", k, v)
            out = torch.einsum("bhde,bhdn->bhen", context, q)
        else:
            out = (k @ v.transpose(-1, -2)).transpose(-1, -2) @ q
        return x + self.output(out.reshape(batch, -1, height, width))


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer of images ``[B, 8, H, W]`` by name."""
    torch.manual_seed(0)
    found: dict[str, tuple[str, nn.Module]] = {}
    for is_einsum, style in ((True, "einsum"), (False, "matmul")):
        for of_queries, of_keys, name in (
            (False, True, "keys"), (True, True, "both"), (False, False, "neither"),
        ):  # fmt: skip
            module = DiffusionAttention(of_queries=of_queries, of_keys=of_keys, is_einsum=is_einsum)
            operator = "EfficientAttention" if of_queries else "NormalizedLinearAttention"
            found[f"softmax_of_{name}_{style}"] = operator, module
    return found
