"""The type of a state: float32 for narrower tensors."""

import torch
from torch import Tensor


def to_state_type(x: Tensor) -> Tensor:
    """Return a tensor in float32 or float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
