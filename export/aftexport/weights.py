"""Trained weights into a module: all of them, and nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from aftexport.errors import CheckpointError


def load_weights(path: Path, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads a state dict that was read from ``path``.

    Raises:
        CheckpointError: where weights are missing, unexpected, of another shape,
            or not finite; each is named.
    """
    expected = module.state_dict()
    problems = []
    if missing := sorted(set(expected) - set(state)):
        problems.append(f"missing weights: {_names(missing)}")
    if unexpected := sorted(set(state) - set(expected)):
        problems.append(f"unexpected weights: {_names(unexpected)}")
    wrong = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in sorted(set(state) & set(expected))
        if state[name].shape != expected[name].shape
    ]
    if wrong:
        problems.append(f"wrong shapes: {_names(wrong)}")
    if problems:
        raise CheckpointError(
            path,
            f"the weights do not fit the module; {'; '.join(problems)}",
            "Give the configuration or the factory that the weights were trained with.",
        )
    bad = [n for n, t in state.items() if t.is_floating_point() and not bool(t.isfinite().all())]
    if bad:
        raise CheckpointError(
            path, f"NaN or infinity in {_names(bad)}", "Give a checkpoint from before it diverged."
        )
    module.load_state_dict(dict(state))


def _names(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
