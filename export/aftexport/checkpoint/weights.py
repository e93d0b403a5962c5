"""Trained weights into a module: all of them, and nothing else."""

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from aftexport.errors import CheckpointError

_HOLDERS = ("state_dict", "model_state_dict", "model", "net", "module")
"""What training scripts call the state dict of the model in a file that has more."""
_COUNT = "n_averaged"
"""What AveragedModel has beside the module it averages."""
_COMPILED = "_orig_mod"
"""What torch.compile calls the module it is given."""
_IN_PARTS = (
    (r"(.*?)\.?\bparametrizations\.(\w+)\.\w+", "parametrize.remove_parametrizations({}, {!r})"),
    (r"(.*?)\.?\b(\w+)_g", "remove_weight_norm({}, {!r})"),
    (r"(.*?)\.?\b(\w+)_mask", "prune.remove({}, {!r})"),
    (r"(.*?)\.?\b(\w+)_u", "remove_spectral_norm({}, {!r})"),
)
"""What torch.nn.utils calls a part it keeps of a weight, and what makes the weight of the parts."""
_GIVE_WEIGHTS = "Give a checkpoint written by aftexport.save, or a state dict with --factory."


def state_dict_in(path: Path, content: object) -> Mapping[str, Tensor]:
    """The weights in what ``torch.load`` made of the file at ``path``.

    Warns of others beside them, as the moving average of the same.

    Raises:
        CheckpointError: where there are none, or those of several models.
    """
    if not isinstance(content, dict):
        raise CheckpointError(
            path, f"it holds a {type(content).__name__}, not a model", _GIVE_WEIGHTS
        )
    holders = {name: content[name] for name in _HOLDERS if isinstance(content.get(name), dict)}
    held = [name for name, state in holders.items() if _has_weights(state)]
    if len(held) > 1:
        raise CheckpointError(
            path, f"it holds weights under {_names(held)}", "Save those of the model alone."
        )
    if held:
        for name, state in content.items():
            if name != held[0] and isinstance(state, dict) and _has_weights(state):
                warnings.warn(
                    f"{path}: the weights under {held[0]} are taken, those under {name} not. To "
                    f"export those: torch.save(torch.load({str(path)!r})[{name!r}], 'other.pt').",
                    UserWarning,
                    stacklevel=2,
                )
        return content[held[0]]  # type: ignore[no-any-return]
    if not content or {} in holders.values():
        raise CheckpointError(path, "the state dict is empty", "Save the trained model's.")
    if not _has_weights(content):
        keys = _names([repr(key) for key in content])
        raise CheckpointError(path, f"a dict without weights; it has {keys}", _GIVE_WEIGHTS)
    return content


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile, DataParallel or AveragedModel were given."""
    while True:
        if isinstance(module, nn.DataParallel | DistributedDataParallel | AveragedModel):
            module = module.module
        elif (compiled := dict(module._modules.items()).get(_COMPILED)) is not None:
            module = compiled  # asked for by getattr, it may be that of a module within
        else:
            return module


def load_weights(path: Path, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state dict that was read from ``path``.

    What DistributedDataParallel or a trainer put before every name is left out, what torch.compile
    put into any, and, with a warning, what is beside the module in what holds it, as a trainer's
    loss. A weight may be missing where the module shares it with one that is there; entries may be
    infinite where the module's own are, as in the buffer of a mask.

    Raises:
        CheckpointError: where weights are missing, unexpected, of another shape,
            integers where the module has none, no dense real tensors, or not finite; each is named.
            Where there are those of several such modules.
    """
    own_state = module.state_dict()
    own_names = {_uncompiled(name): name for name in own_state}
    expected = {name: own_state[own_name] for name, own_name in own_names.items()}
    given = {_uncompiled(str(name)): value for name, value in state.items()}
    prefix = _prefix(path, expected, given)
    left_out = [n for n in given if not n.startswith(prefix) and n.split(".")[-1] != _COUNT]
    given = {n.removeprefix(prefix): value for n, value in given.items() if n.startswith(prefix)}
    given = _shared(expected, given) | given
    problems = []
    if missing := sorted(set(expected) - set(given)):
        problems.append(f"missing weights: {_names(missing)}")
    if unexpected := sorted(set(given) - set(expected)):
        problems.append(f"unexpected weights: {_names(unexpected)}")
    shared = sorted(set(given) & set(expected))
    if strange := [name for name in shared if not _is_plain(given[name])]:
        problems.append(f"no dense real tensors: {_names(strange)}")
    wrong = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in shared
        if name not in strange and given[name].shape != expected[name].shape
    ]
    if wrong:
        problems.append(f"wrong shapes: {_names(wrong)}")
    if other := [
        f"{name} {str(given[name].dtype).removeprefix('torch.')}"
        for name in shared
        if name not in strange
        and expected[name].is_floating_point() > given[name].is_floating_point()
    ]:
        problems.append(f"integers in place of weights: {_names(other)}")
    if problems:
        raise CheckpointError(
            path,
            f"the weights do not fit the module; {'; '.join(problems)}",
            _remedy(missing, unexpected),
        )
    weights = {name: given[name].to(tensor.dtype) for name, tensor in expected.items()}
    own = {name: tensor for name, tensor in expected.items() if not tensor.is_meta}
    if bad := [n for n, t in weights.items() if not _is_finite(t, own.get(n))]:
        raise CheckpointError(
            path,
            f"NaN, infinity, or a number beyond float32 in {_names(bad)}",
            "Give a checkpoint from before the training diverged.",
        )
    loaded = {own_names[name]: weight for name, weight in weights.items()}
    if left_out:
        warnings.warn(
            f"{path}: the weights under {prefix} are taken, and left out: {_names(left_out)}.",
            UserWarning,
            stacklevel=2,
        )
    module.load_state_dict(loaded, assign=True)


def _remedy(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    if (undo := _undoing(unexpected, missing)) is not None:
        return (
            f"Before its state_dict is saved, call torch.nn.utils.{undo}, and so on; or have the "
            "factory do to its module what training did."
        )
    if (undo := _undoing(missing, unexpected)) is not None:
        return f"Have the factory call torch.nn.utils.{undo}, and so on: the file has no parts."
    return "Give the configuration or the factory that the weights were trained with."


def _undoing(parts: Sequence[str], whole: Sequence[str]) -> str | None:
    """The call that makes a weight of ``whole`` of what is among ``parts``, if one does."""
    for name in parts:
        for pattern, call in _IN_PARTS:
            if found := re.fullmatch(pattern, name):
                module, weight = found.groups()
                if ".".join(filter(None, (module, weight))) in whole:
                    return call.format(".".join(filter(None, ("model", module))), weight)
    return None


def refuse_unusable(path: Path, module: nn.Module) -> None:
    """Refuses a module that was read with weights that are no numbers to export.

    Raises:
        CheckpointError: naming them.
    """
    state = module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise CheckpointError(
            path,
            f"weights on the device meta, which has no numbers: {_names(empty)}",
            "Give a module that was made on the cpu, or loaded with its weights.",
        )
    if strange := [name for name, value in state.items() if not _is_plain(value)]:
        raise CheckpointError(
            path,
            f"no dense real tensors on the cpu: {_names(strange)}",
            "Give it as it was trained, moved to the cpu.",
        )
    if bad := [name for name, tensor in state.items() if bool(tensor.isnan().any())]:
        raise CheckpointError(
            path, f"NaN in {_names(bad)}", "Give a model from before the training diverged."
        )


def _has_weights(state: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in state.values())


def _uncompiled(name: str) -> str:
    """The name of a weight without what torch.compile, of the module or of a part, puts into it."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _prefix(path: Path, expected: Mapping[str, Tensor], given: Mapping[str, Any]) -> str:
    """What is put before the module's own names in those of what holds it; empty for nothing."""
    found = Counter(
        name.removesuffix(own) for name in given for own in _endings(name) if own in expected
    )
    most = max(found.values(), default=0)
    if "" in found or most * 2 <= len(expected):
        return ""
    prefixes = [prefix for prefix, count in found.items() if count == most]
    if len(prefixes) > 1:
        raise CheckpointError(
            path,
            f"it holds weights for the module under {_names(prefixes)}",
            "Save the state_dict() of one of them alone.",
        )
    return prefixes[0]


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _shared(expected: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """Weights that are not given, by others that are the same tensor in the module."""
    names = {_place(tensor): name for name, tensor in expected.items() if name in given}
    return {
        name: given[names[_place(tensor)]]
        for name, tensor in expected.items()
        if name not in given and not tensor.is_meta and _place(tensor) in names
    }


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _is_finite(weight: Tensor, own: Tensor | None) -> bool:
    finite = weight.isfinite()
    if own is not None:
        finite |= weight.isinf() & (weight == own)
    return bool(finite.all())


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_complex()
        and not value.is_quantized
        and value.device.type == "cpu"
    )


def _names(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
