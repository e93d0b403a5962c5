"""The mechanisms as other people write them: every style is the same function as its operator."""

import torch
from torch import nn

from . import (
    aft_conv,
    aft_full,
    aft_local,
    aft_simple,
    cross_attention,
    efficient_attention,
    fastformer,
    feature_maps,
    feature_products,
    linear_attention,
    no_ops,
    outside_factors,
    separable,
    shared_keys,
)


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    torch.manual_seed(0)
    found: dict[str, tuple[str, nn.Module]] = {}
    for mechanism in (
        aft_full, aft_local, aft_simple, aft_conv, efficient_attention, linear_attention,
        fastformer, no_ops, outside_factors, shared_keys, feature_maps, feature_products,
        cross_attention, separable,
    ):  # fmt: skip
        found |= mechanism.layers()
    return found
