"""The update rule of a recurrence, by the tensors that it has."""

from torch import Tensor

_RULES = {
    (False, False): "linear",
    (True, False): "gated",
    (False, True): "delta",
    (True, True): "gated_delta",
}
"""Whether decay and beta are given, to the update rule."""


def update_rule(decay: Tensor | None, beta: Tensor | None) -> str:
    """Return the attribute ``update_rule`` of the operator for these inputs."""
    return _RULES[decay is not None, beta is not None]
