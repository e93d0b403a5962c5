"""The state dict in a checkpoint of a training script, which also holds other objects."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from aftexport.checkpoint.torch_file import StandIn
from aftexport.checkpoint.weights import listed
from aftexport.errors import CheckpointError

_STATE_DICTS = ("state_dict", "model_state_dict", "model", "net", "module")
"""Usual names of the model's state dict, or of the dict around it."""
_OTHER_STATE_DICTS = ("network", "params", "weights", "model_state", "net_state_dict")
"""Names that may also belong to other objects; used if none of the usual names is present."""
_AVERAGES = (
    "state_dict_ema", "model_ema", "ema", "ema_model", "ema_state_dict", "model_ema_state_dict",
    "params_ema", "shadow", "averaged_model",
)  # fmt: skip
"""Names of a moving average; used, with a warning, if there are no other weights."""
_WRAPPERS = ("checkpoint", "state", "app")
_MAX_DEPTH = 4
_SAVE_TENSORS = (
    "Save its arrays as tensors: torch.save({name: torch.as_tensor(value) for name, value in "
    "state.items()}, 'model.pt'), and give that file with --factory."
)
_GIVE_WEIGHTS = "Give a checkpoint written by aftexport.save, or a state dict with --factory."


def state_dict_in(path: Path, content: object, *, is_plain: bool = True) -> Mapping[str, Tensor]:
    """Return the state dict of the model in a checkpoint.

    A warning names other weights beside it, such as their moving average, and how to export them.
    ``is_plain``: torch.load reads the file without options.

    Raises:
        CheckpointError: if there are no weights, or weights of several models.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(
            path, f"expected a model, got a {type(content).__name__}", _GIVE_WEIGHTS
        )
    place = _place_of_weights(path, content)
    if not place and not _is_mostly_tensors(content):
        _refuse_other_names(path, list(_named_weights(content)), is_plain=is_plain)
    if place is None:
        if not content or any(content.get(name) == {} for name in _STATE_DICTS):
            raise CheckpointError(path, "the state dict is empty", "Save the trained model's.")
        keys = listed([repr(key) for key in content])
        remedy = _SAVE_TENSORS if all(map(_is_array, content.values())) else _GIVE_WEIGHTS
        raise CheckpointError(path, f"expected weights, got a dict of {keys}", remedy)
    state = _at(content, place)
    if place:
        _warn_of_others(path, content, place, is_plain=is_plain)
    return state.state_dict() if isinstance(state, nn.Module) else state


def _is_array(value: object) -> bool:
    """Return whether a value is a list, or an array of NumPy that was read without its code."""
    return isinstance(value, list | StandIn)


def module_in(path: Path, content: object) -> nn.Module:
    """Return the module of an unpickled file: the object itself, or the one under a usual name.

    Raises:
        CheckpointError: if there is no module, or several; names the contents.
    """
    if isinstance(content, nn.Module):
        return content
    if isinstance(content, Mapping):
        for names in (_STATE_DICTS, _OTHER_STATE_DICTS, _AVERAGES):
            held = [name for name in names if isinstance(content.get(name), nn.Module)]
            if len(held) > 1:
                raise CheckpointError(
                    path, f"it holds modules under {listed(held)}", "Save the one to export."
                )
            if held:
                _warn_of_others(path, content, (held[0],), is_plain=False)
                return content[held[0]]  # type: ignore[no-any-return]
    if isinstance(content, Mapping):
        modules = [
            place for place in _named_weights(content) if isinstance(_at(content, place), nn.Module)
        ]
        _refuse_other_names(path, modules, is_plain=False)
        kind = f"dict with {listed([repr(key) for key in content])}"
        if _place_of_weights(path, content) is not None:
            raise CheckpointError(
                path,
                f"expected a module, got a {kind}",
                "Add --factory package.module:factory, a callable that returns the module.",
            )
    else:
        kind = type(content).__name__
    raise CheckpointError(path, f"expected a module, got a {kind}", "Give a pickled nn.Module.")


def _place_of_weights(
    path: Path, content: Mapping[Any, Any], depth: int = 0
) -> tuple[str, ...] | None:
    """Return the keys that lead to the weights; empty for the dict itself, None for no weights."""
    if (place := _held(path, content, _STATE_DICTS, depth)) is not None:
        return place
    if _is_mostly_tensors(content):
        return ()
    for names in (_OTHER_STATE_DICTS, _AVERAGES, _WRAPPERS):
        if (place := _held(path, content, names, depth)) is not None:
            return place
    return () if _has_weights(content) else None


def _is_mostly_tensors(content: Mapping[Any, Any]) -> bool:
    return sum(isinstance(value, Tensor) for value in content.values()) * 2 > len(content)


def _named_weights(content: Mapping[Any, Any], depth: int = 0) -> Iterator[tuple[str, ...]]:
    """Yield the places of modules and state dicts of any name, except those of optimizers."""
    for name, held in content.items():
        if isinstance(held, nn.Module):
            yield (name,)
        elif not isinstance(name, str) or not isinstance(held, Mapping):
            continue
        elif held and _is_mostly_tensors(held) and all(isinstance(key, str) for key in held):
            yield (name,)
        elif depth < _MAX_DEPTH and "param_groups" not in held:
            yield from ((name, *place) for place in _named_weights(held, depth + 1))


def _refuse_other_names(path: Path, places: Sequence[tuple[str, ...]], *, is_plain: bool) -> None:
    """Refuse weights under names that do not identify the model's."""
    if not places:
        return
    names = listed([".".join(place) for place in places])
    keys = "".join(f"[{key!r}]" for key in places[0])
    options = "" if is_plain else ", weights_only=False"
    save = f"torch.save(torch.load({str(path)!r}{options}){keys}, 'one.pt')"
    if len(places) == 1:
        reason = f"it holds weights under {names}, which is not a usual name of the model's weights"
        raise CheckpointError(
            path, reason, f"If they are the model's, save them and give that file: {save}."
        )
    raise CheckpointError(
        path,
        f"it holds the weights of several models, under {names}",
        f"Save the one to export, and give that file: {save}. If they are parts of one model, load "
        "them into it, and save its state_dict().",
    )


def _held(
    path: Path, content: Mapping[Any, Any], names: tuple[str, ...], depth: int
) -> tuple[str, ...] | None:
    places: list[tuple[str, ...]] = []
    for name in names:
        held = content.get(name)
        if isinstance(held, nn.Module):
            places.append((name,))
        elif isinstance(held, Mapping) and depth < _MAX_DEPTH:
            within = _place_of_weights(path, held, depth + 1)
            places += [] if within is None else [(name, *within)]
    if len(places) > 1:
        raise CheckpointError(
            path,
            f"it holds weights under {listed([place[0] for place in places])}",
            "Save those of the average to export."
            if names is _AVERAGES
            else "Save only those of the model.",
        )
    return places[0] if places else None


def _at(content: Any, place: tuple[str, ...]) -> Any:
    for name in place:
        content = content[name]
    return content


def _has_weights(state: object) -> bool:
    return isinstance(state, nn.Module) or (
        isinstance(state, Mapping) and any(isinstance(value, Tensor) for value in state.values())
    )


def _warn_of_others(
    path: Path, content: Mapping[Any, Any], place: tuple[str, ...], *, is_plain: bool
) -> None:
    name = ".".join(place)
    for other in _others(content, place):
        other_name = ".".join(map(str, other))
        keys = "".join(f"[{key!r}]" for key in other)
        condition, options = (
            ("", "") if is_plain else (", if you trust the file", ", weights_only=False")
        )
        warnings.warn(
            f"{path}: aftexport exports the weights under {name}, not those under {other_name}. To "
            f"export the latter{condition}: "
            f"torch.save(torch.load({str(path)!r}{options}){keys}, 'other.pt').",
            UserWarning,
            stacklevel=4,
        )
    if place[-1] in _AVERAGES or place[0] in _AVERAGES:
        warnings.warn(
            f"{path}: aftexport exports the weights under {name}, which are a moving average.",
            UserWarning,
            stacklevel=4,
        )


def _others(content: Mapping[Any, Any], place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the places of other weights: beside ``place`` at each level, and within an average."""
    for depth, key_of_place in enumerate(place):
        level = _at(content, place[:depth])
        for name, held in level.items():
            if name == key_of_place or not isinstance(name, str):
                continue
            if _has_weights(held) or (name in _AVERAGES and _has_list_of_weights(held)):
                yield (*place[:depth], name)
            elif isinstance(held, Mapping) and name in _AVERAGES:
                for key, value in held.items():
                    if _has_weights(value) or _has_list_of_weights(value):
                        yield (*place[:depth], name, key)


def _has_list_of_weights(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, Tensor) for item in value)
