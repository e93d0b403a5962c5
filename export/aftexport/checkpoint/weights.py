"""Trained weights into a module: all of them, and nothing else."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from aftexport.checkpoint.names import COMPILED, listed, match, unwrapped_name
from aftexport.errors import CheckpointError

_COUNT = "n_averaged"
"""What AveragedModel has beside the module it averages."""
_IN_PARTS = (
    (r"(.*?)\.?\bparametrizations\.(\w+)\.\w+", "parametrize.remove_parametrizations({}, {!r})"),
    (r"(.*?)\.?\b(\w+)_g", "remove_weight_norm({}, {!r})"),
    (r"(.*?)\.?\b(\w+)_mask", "prune.remove({}, {!r})"),
    (r"(.*?)\.?\b(\w+)_u", "remove_spectral_norm({}, {!r})"),
)
"""What torch.nn.utils calls a part it keeps of a weight, and what makes the weight of the parts."""
_LOW_RANK = re.compile(r"(^|\.)(lora_\w+|base_layer|original_module|modules_to_save)(\.|$)")
"""Names that peft and loralib give the parts of a fine-tuned weight."""
_FLAT = re.compile(r"(^|\.)_?flat_param(_\d+)?$")
"""Those of FullyShardedDataParallel for the weights of one process in one piece."""
_UNUSED = re.compile(r"(^|\.)(num_batches_tracked|_extra_state)$")
"""State that training keeps and no output depends on."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile, DataParallel or AveragedModel were given."""
    while True:
        if isinstance(module, nn.DataParallel | DistributedDataParallel | AveragedModel):
            module = module.module
        elif (compiled := dict(module._modules.items()).get(COMPILED)) is not None:
            module = compiled  # asked for by getattr, it may be that of a module within
        else:
            return module


def load_weights(path: Path, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state dict that was read from ``path``.

    Names may have what wrappers put into them, as torch.compile, DistributedDataParallel, FSDP and
    trainers do. A weight may be missing where the module shares it with one that is there. Left
    out, with a warning, are weights beside the module in what holds it, as a trainer's loss, and
    buffers that the module makes itself. Entries may be infinite where the module's own are, as in
    the buffer of a mask. A module on the device meta gets the weights of the file.

    Raises:
        CheckpointError: where weights are missing, unexpected, of another shape,
            integers where the module has none, no dense real tensors, or not finite; each is named.
            Where there are those of several such modules, or a tensor stays on the device meta.
    """
    own_state = {n: t for n, t in module.state_dict().items() if isinstance(t, Tensor)}
    found = match(path, own_state, {str(name): value for name, value in state.items()})
    expected = {name: own_state[own_name] for name, own_name in found.wanted.items()}
    given, made = _without_made(module, expected, found.given)
    given = _shared(module, found.wanted, expected, given) | given
    _check_fit(path, expected, given, list(state))
    weights = {name: given[name].to(tensor.dtype) for name, tensor in expected.items()}
    own = {name: tensor for name, tensor in expected.items() if not tensor.is_meta}
    if bad := [n for n, t in weights.items() if not _is_finite(t, own.get(n))]:
        raise CheckpointError(
            path,
            f"NaN, infinity, or a number beyond float32 in {listed(bad)}",
            "Give a checkpoint from before the training diverged.",
        )
    left_out = [name for name in found.left_out if name.split(".")[-1] != _COUNT]
    if left_out:
        _warn(path, f"weights under {found.prefix} are taken, and left out: {listed(left_out)}")
    if made:
        _warn(path, f"module makes these buffers itself, those in it are left out: {listed(made)}")
    own_names = {found.wanted[name]: weight for name, weight in weights.items()}
    module.load_state_dict(own_names, assign=True, strict=False)
    _refuse_meta(
        path,
        module,
        "Make them in the factory with torch.device('cpu'), as the file does not hold them.",
    )


def _warn(path: Path, what: str) -> None:
    warnings.warn(f"{path}: the {what}.", UserWarning, stacklevel=3)


def _without_made(
    module: nn.Module, expected: Mapping[str, Tensor], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The weights without buffers that the module does not read, and the names of those."""
    buffers = {unwrapped_name(name) for name, _ in module.named_buffers()}
    spare = [name for name in given if name not in expected]
    made = [name for name in spare if name in buffers or _UNUSED.search(name)]
    kept = {name: value for name, value in given.items() if name not in made}
    kept |= {
        name: tensor
        for name, tensor in expected.items()
        if name not in kept and _UNUSED.search(name) and not tensor.is_meta
    }
    return kept, made


def _check_fit(
    path: Path, expected: Mapping[str, Tensor], given: Mapping[str, Any], names: Sequence[Any]
) -> None:
    """Refuses weights that are not those of a module; ``names`` are those in the file."""
    problems = []
    if missing := sorted(set(expected) - set(given)):
        problems.append(f"missing weights: {listed(missing)}")
    if unexpected := sorted(set(given) - set(expected)):
        problems.append(f"unexpected weights: {listed(unexpected)}")
    shared = sorted(set(given) & set(expected))
    if strange := [name for name in shared if not _is_plain(given[name])]:
        problems.append(f"no dense real tensors: {listed(strange)}")
    wrong = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in shared
        if name not in strange and given[name].shape != expected[name].shape
    ]
    if wrong:
        problems.append(f"wrong shapes: {listed(wrong)}")
    if other := [
        f"{name} {str(given[name].dtype).removeprefix('torch.')}"
        for name in shared
        if name not in strange
        and expected[name].is_floating_point() > given[name].is_floating_point()
    ]:
        problems.append(f"integers in place of weights: {listed(other)}")
    if problems:
        raise CheckpointError(
            path,
            f"the weights do not fit the module; {'; '.join(problems)}",
            _of_low_rank(expected, names) or _remedy(missing, unexpected),
        )


def _of_low_rank(expected: Mapping[str, Tensor], names: Sequence[Any]) -> str | None:
    """What to do about parts of weights that fine-tuning or sharding keeps apart."""
    parts = [name for name in map(str, names) if _LOW_RANK.search(name)]
    if parts and not any(_LOW_RANK.search(name) for name in expected):
        return (
            f"The file has parts of low rank, as {parts[0]}: load them into the model with peft, "
            "call model = model.merge_and_unload(), and save its state_dict."
        )
    if any(_FLAT.search(str(name)) for name in names):
        return (
            "The file has the flat weights of FSDP: save the state_dict under "
            "FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)."
        )
    return None


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
    _refuse_meta(
        path, module, "Give a module that was made on the cpu, or loaded with its weights."
    )
    state = {n: value for n, value in module.state_dict().items() if not _UNUSED.search(n)}
    if strange := [name for name, value in state.items() if not _is_plain(value)]:
        raise CheckpointError(
            path,
            f"no dense real tensors on the cpu: {listed(strange)}",
            "Give it as it was trained, moved to the cpu.",
        )
    if bad := [name for name, tensor in state.items() if bool(tensor.isnan().any())]:
        raise CheckpointError(
            path, f"NaN in {listed(bad)}", "Give a model from before the training diverged."
        )


def _refuse_meta(path: Path, module: nn.Module, remedy: str) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise CheckpointError(
            path, f"weights on the device meta, which has no numbers: {listed(empty)}", remedy
        )


def _shared(
    module: nn.Module,
    wanted: Mapping[str, str],
    expected: Mapping[str, Tensor],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Weights that are not given, by others that are the same tensor in the module."""
    kept = module.state_dict(keep_vars=True)
    places = {name: _place(kept[wanted[name]]) for name in expected}
    names = {place: name for name, place in places.items() if name in given}
    return {
        name: given[names[place]]
        for name, place in places.items()
        if name not in given and place in names
    }


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """The memory of a tensor; on the device meta, where there is none, the tensor itself."""
    where = id(tensor) if tensor.is_meta else tensor.data_ptr()
    return where, tensor.is_meta, tensor.shape, tensor.stride()


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
