"""Loading of trained weights into a module, complete and without others.

The weights of a folder are one safetensors file, or several that an index lists.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from aftexport.errors import CheckpointError
from aftexport.system.files import read_json

_COUNT = "n_averaged"
"""The counter of AveragedModel, beside the averaged module."""
_IN_PARTS = (
    (r"(.*?)\.?\bparametrizations\.(\w+)\.\w+", "parametrize.remove_parametrizations({}, {!r})"),
    (r"(.*?)\.?\b(\w+)_g", "remove_weight_norm({}, {!r})"),
    (r"(.*?)\.?\b(\w+)_mask", "prune.remove({}, {!r})"),
    (r"(.*?)\.?\b(\w+)_u", "remove_spectral_norm({}, {!r})"),
)
"""Names of parts of a weight in torch.nn.utils, each with the call that joins the parts."""
_LOW_RANK = re.compile(r"(^|\.)(lora_\w+|base_layer|original_module|modules_to_save)(\.|$)")
"""Names of the parts of a fine-tuned weight in peft and loralib."""
_FLAT = re.compile(r"(^|\.)_?flat_param(_\d+)?$")
"""Names in FullyShardedDataParallel of all weights of one process as one tensor."""
_UNUSED = re.compile(r"(^|\.)(num_batches_tracked|_extra_state)$")
"""State of the training that does not affect outputs."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DataParallel or AveragedModel."""
    while True:
        if isinstance(module, nn.DataParallel | DistributedDataParallel | AveragedModel):
            module = module.module
        elif (compiled := dict(module._modules.items()).get(COMPILED)) is not None:
            module = compiled  # getattr could return that of a module within
        else:
            return module


def load_weights(path: Path, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state dict from the file ``path`` into a module.

    - Names may contain the parts that torch.compile, DistributedDataParallel, FSDP and trainers
      add.
    - A weight may be missing if the module shares it with another weight in the file.
    - Weights beside the module in a trainer, such as its loss, and buffers that the module
      computes itself are left out, with a warning.
    - Entries may be infinite if the module's own are, as in the buffer of a mask.
    - A module on the device meta receives the weights of the file.

    Raises:
        CheckpointError: if weights are missing, unexpected, of another shape, integers in place of
            floats, not dense real tensors, or not finite; the error names each. Also if there are
            weights of several such modules, or a tensor stays on the device meta.
    """
    own_state = {n: t for n, t in module.state_dict().items() if isinstance(t, Tensor)}
    matched = match(path, own_state, {str(name): value for name, value in state.items()})
    expected = {name: own_state[own_name] for name, own_name in matched.own_names.items()}
    tensors, made = _without_made(module, expected, matched.weights)
    tensors = _shared(module, matched.own_names, expected, tensors) | tensors
    _check_fit(path, expected, tensors, list(state))
    weights = {name: tensors[name].to(tensor.dtype) for name, tensor in expected.items()}
    own = {name: tensor for name, tensor in expected.items() if not tensor.is_meta}
    if bad := [n for n, t in weights.items() if not _is_finite(t, own.get(n))]:
        raise CheckpointError(
            path,
            f"NaN, infinity, or a number beyond float32 in {listed(bad)}",
            "Give a checkpoint from before the training diverged.",
        )
    left_out = [name for name in matched.left_out if name.split(".")[-1] != _COUNT]
    if left_out:
        _warn(
            path,
            f"only the weights under {matched.prefix} are loaded, without {listed(left_out)}",
        )
    if made:
        _warn(
            path,
            "the module computes these buffers itself, those in the file are not loaded: "
            f"{listed(made)}",
        )
    own_names = {matched.own_names[name]: weight for name, weight in weights.items()}
    module.load_state_dict(own_names, assign=True, strict=False)
    _refuse_meta(
        path,
        module,
        "Make them in the factory with torch.device('cpu'): the file does not hold them.",
    )


def _warn(path: Path, message: str) -> None:
    warnings.warn(f"{path}: {message}.", UserWarning, stacklevel=3)


def _without_made(
    module: nn.Module, expected: Mapping[str, Tensor], weights: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the weights without buffers that the module computes, and the buffers' names."""
    buffers = {unwrapped_name(name) for name, _ in module.named_buffers()}
    spare = [name for name in weights if name not in expected]
    made = [name for name in spare if name in buffers or _UNUSED.search(name)]
    kept = {name: value for name, value in weights.items() if name not in made}
    kept |= {
        name: tensor
        for name, tensor in expected.items()
        if name not in kept and _UNUSED.search(name) and not tensor.is_meta
    }
    return kept, made


def _check_fit(
    path: Path, expected: Mapping[str, Tensor], weights: Mapping[str, Any], names: Sequence[Any]
) -> None:
    """Refuse weights that do not fit a module; ``names`` are the names in the file."""
    problems = []
    if missing := sorted(set(expected) - set(weights)):
        problems.append(f"missing weights: {listed(missing)}")
    if unexpected := sorted(set(weights) - set(expected)):
        problems.append(f"unexpected weights: {listed(unexpected)}")
    shared = sorted(set(weights) & set(expected))
    if strange := [name for name in shared if not _is_plain(weights[name])]:
        problems.append(f"not dense real tensors: {listed(strange)}")
    wrong = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in shared
        if name not in strange and weights[name].shape != expected[name].shape
    ]
    if wrong:
        problems.append(f"wrong shapes: {listed(wrong)}")
    if other := [
        f"{name} {str(weights[name].dtype).removeprefix('torch.')}"
        for name in shared
        if name not in strange
        and expected[name].is_floating_point() > weights[name].is_floating_point()
    ]:
        problems.append(f"integers in place of weights: {listed(other)}")
    if problems:
        raise CheckpointError(
            path,
            f"the weights do not fit the module; {'; '.join(problems)}",
            _of_low_rank(expected, names)
            or (_of_kind(weights, expected) if (strange or other) and not wrong else None)
            or _remedy(missing, unexpected),
        )


def _of_low_rank(expected: Mapping[str, Tensor], names: Sequence[Any]) -> str | None:
    """Return the remedy for weights in parts by fine-tuning or sharding; None for others."""
    parts = [name for name in map(str, names) if _LOW_RANK.search(name)]
    if parts and not any(_LOW_RANK.search(name) for name in expected):
        return (
            f"Load the low-rank parts, such as {parts[0]}, into the model with peft, call "
            "model = model.merge_and_unload(), and save its state_dict."
        )
    if any(_FLAT.search(str(name)) for name in names):
        return (
            "The file has the flat weights of FSDP: save the state_dict in "
            "FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)."
        )
    return None


def _of_kind(weights: Mapping[str, Any], expected: Mapping[str, Tensor]) -> str | None:
    """Return the remedy for weights that are other values than floats; None for others."""
    for name in sorted(set(weights) & set(expected)):
        value = weights[name]
        if not isinstance(value, Tensor):
            return "Save each weight as a tensor: torch.as_tensor(value)."
        is_integer = not (value.is_floating_point() or value.is_complex())
        if value.is_quantized or (is_integer and expected[name].is_floating_point()):
            return "Save the weights from before the quantization, and choose a --precision here."
        if value.layout != torch.strided:
            return f"Save dense weights: {name} by its method to_dense()."
        if value.is_complex():
            return f"Save the real and the imaginary part of {name} as two real weights."
    return None


def _remedy(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    if (undo := _undoing(unexpected, missing)) is not None:
        return (
            f"Call torch.nn.utils.{undo}, and so on, before you save the state_dict; or apply the "
            "same torch.nn.utils in the factory."
        )
    if (undo := _undoing(missing, unexpected)) is not None:
        return f"Call torch.nn.utils.{undo}, and so on, in the factory: the file has no parts."
    return "Give the configuration or the factory of the training."


def _undoing(parts: Sequence[str], whole: Sequence[str]) -> str | None:
    """Return the call that joins some of ``parts`` into a weight of ``whole``; None for none."""
    for name in parts:
        for pattern, call in _IN_PARTS:
            if part := re.fullmatch(pattern, name):
                module, weight = part.groups()
                if ".".join(filter(None, (module, weight))) in whole:
                    return call.format(".".join(filter(None, ("model", module))), weight)
    return None


def refuse_unusable(path: Path, module: nn.Module) -> None:
    """Refuse a module with weights that cannot be exported.

    Raises:
        CheckpointError: if weights are on the device meta, not dense real tensors, or NaN; the
            error names them.
    """
    _refuse_meta(path, module, "Create the module on the cpu, or load its weights.")
    state = {n: value for n, value in module.state_dict().items() if not _UNUSED.search(n)}
    if strange := [name for name, value in state.items() if not _is_plain(value)]:
        raise CheckpointError(
            path,
            f"not dense real tensors on the cpu: {listed(strange)}",
            "Keep the real and the imaginary part as two real parameters."
            if all(isinstance(v, Tensor) and v.is_complex() for v in map(state.get, strange))
            else "Give the module without quantization or sparsity, moved to the cpu.",
        )
    if bad := [name for name, tensor in state.items() if bool(tensor.isnan().any())]:
        raise CheckpointError(
            path, f"NaN in {listed(bad)}", "Give a model from before the training diverged."
        )


def _refuse_meta(path: Path, module: nn.Module, remedy: str) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise CheckpointError(
            path, f"weights on the device meta, which holds no numbers: {listed(empty)}", remedy
        )


def _shared(
    module: nn.Module,
    own_names: Mapping[str, str],
    expected: Mapping[str, Tensor],
    weights: Mapping[str, Any],
) -> dict[str, Any]:
    """Return missing weights, from weights that are the same tensor in the module."""
    own_tensors = module.state_dict(keep_vars=True)
    places = {name: _place(own_tensors[own_names[name]]) for name in expected}
    names = {place: name for name, place in places.items() if name in weights}
    return {
        name: weights[names[place]]
        for name, place in places.items()
        if name not in weights and place in names
    }


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return the memory of a tensor; on the device meta, which has none, the tensor itself."""
    address = id(tensor) if tensor.is_meta else tensor.data_ptr()
    return address, tensor.is_meta, tensor.shape, tensor.stride()


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


WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PICKLE = "pytorch_model.bin"
_PICKLES = (PICKLE, f"{PICKLE}.index.json")


@dataclass(frozen=True)
class WeightFiles:
    """The files with the weights of a folder."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def count(self) -> int:
        """The number of numbers in all weights."""
        return sum(map(prod, self.shapes.values()))


def find_weight_files(folder: Path) -> WeightFiles:
    """Return the weight files of a folder, with the shapes in their headers.

    Raises:
        CheckpointError: if there are none, or a file that the index lists is missing.
        SafetensorError: if a file is not complete.
    """
    if (folder / WEIGHTS).is_file():
        names: tuple[str, ...] = (WEIGHTS,)
    elif (folder / INDEX).is_file():
        names = _listed(folder)
    else:
        raise _missing(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        shapes |= read_shapes(folder / name)
    return WeightFiles(shapes)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight in the header of a file.

    Raises:
        SafetensorError: if the file is not complete.
    """
    with safe_open(path, "pt") as file:
        keys = file.keys()
        return {key: tuple(file.get_slice(key).get_shape()) for key in keys}


def _listed(folder: Path) -> tuple[str, ...]:
    path = folder / INDEX
    content = read_json(path)
    try:
        places = content["weight_map"]
        names = tuple(dict.fromkeys(places.values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            path,
            f"expected a JSON object with weight_map, a file for each weight ({error!r})",
            "Copy it again.",
        ) from error
    for name in names:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise CheckpointError(
                path,
                f"expected names of .safetensors files beside it, got {str(name)[:80]!r}",
                "Save the model again by save_pretrained.",
            )
        if not (folder / name).is_file():
            raise CheckpointError(
                folder, f"it lacks {name}, which {INDEX} lists", "Copy or download it again."
            )
    return names


def _missing(folder: Path) -> CheckpointError:
    pickled = next((name for name in _PICKLES if (folder / name).is_file()), None)
    if pickled is None:
        return CheckpointError(
            folder,
            f"the folder has no {WEIGHTS} and no {INDEX}",
            "Give a folder that save_pretrained wrote, or a model file.",
        )
    return CheckpointError(
        folder,
        f"its weights are in {pickled}, a pickle, which can run code when loaded",
        "Save them as safetensors with a transformers version that reads them: "
        "model.save_pretrained(folder).",
    )


COMPILED = "_orig_mod"
"""The name of the wrapped module in torch.compile."""
_WRAPPERS = frozenset(
    {COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"}
)
"""Names of the wrapped module in torch.compile, activation checkpointing and both kinds of FSDP."""
_PARALLEL = "module"
"""The name in DataParallel and DistributedDataParallel, which a model's own part may also have."""
_MAX_LISTED = 8
"""The maximum number of names in a sentence."""


def unwrapped_name(name: str) -> str:
    """Return a weight's name without the names of wrappers around the module or its parts."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class Match:
    """The weights of a file by name without ``prefix``, and the module's own name of each."""

    own_names: Mapping[str, str]
    weights: Mapping[str, Any]
    prefix: str
    left_out: Sequence[str]


def match(path: Path, own: Collection[str], state: Mapping[str, Any]) -> Match:
    """Match the names in a file with a module's, regardless of wrappers around either.

    Raises:
        CheckpointError: if the file has weights of several such modules.
    """
    matches = [_match_by(path, own, state, form) for form in (unwrapped_name, _without_parallel)]
    return max(
        (m for m in matches if m is not None), key=lambda m: len(m.own_names.keys() & m.weights)
    )


def _match_by(
    path: Path, own: Collection[str], state: Mapping[str, Any], form: Callable[[str], str]
) -> Match | None:
    """Return the match of names in a form; None if two names have one form."""
    own_names = {form(name): name for name in own}
    named = {form(name): value for name, value in state.items()}
    if form is _without_parallel and (len(own_names), len(named)) != (len(own), len(state)):
        return None
    prefix = _prefix(path, own_names, named)
    left_out = [name for name in named if not name.startswith(prefix)]
    kept = {n.removeprefix(prefix): value for n, value in named.items() if n.startswith(prefix)}
    return Match(own_names, kept, prefix, left_out)


def _without_parallel(name: str) -> str:
    """Return a name without DistributedDataParallel of a part; the prefix has that of the whole."""
    first, *parts = unwrapped_name(name).split(".")
    return ".".join((first, *(part for part in parts if part != _PARALLEL)))


def _prefix(path: Path, expected: Collection[str], names: Collection[str]) -> str:
    """Return the prefix of the module's own names in a file; empty without a prefix."""
    counts = Counter(
        name.removesuffix(own) for name in names for own in _endings(name) if own in expected
    )
    max_count = max(counts.values(), default=0)
    if "" in counts or max_count * 2 <= len(expected):
        return ""
    prefixes = [prefix for prefix, count in counts.items() if count == max_count]
    if len(prefixes) > 1:
        raise CheckpointError(
            path,
            f"expected one set of weights for the module, got several, under {listed(prefixes)}",
            "Save the state_dict() of only one of them.",
        )
    return prefixes[0]


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def listed(names: Sequence[str]) -> str:
    """Return the first names as a list in a sentence, with the number of others."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
