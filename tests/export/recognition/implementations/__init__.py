"""The mechanisms as other people write them: every style is the same function as its operator."""

import torch
from torch import nn

from . import (
    aft,
    aft_conv,
    efficient_attention,
    fastformer,
    feature_products,
    linear_attention,
    outside_factors,
)


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    torch.manual_seed(0)
    found: dict[str, tuple[str, nn.Module]] = {}
    for mechanism in (
        aft, aft_conv, efficient_attention, linear_attention, fastformer, outside_factors,
        feature_products,
    ):  # fmt: skip
        found |= mechanism.layers()
    return found
