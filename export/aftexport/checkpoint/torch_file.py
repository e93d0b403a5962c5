"""What torch.save wrote, read without running code of it unless the user allows that."""

import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aftexport.checkpoint.factory import import_from_here
from aftexport.checkpoint.stand_ins import StandIn, reading_stand_ins
from aftexport.errors import CheckpointError, UsageError

_GLOBAL = re.compile(r"GLOBAL (\S+)")
_MAX_NAMED = 4


@dataclass(frozen=True)
class TorchFile:
    """The contents of a file.

    Attributes:
        content: the object that was saved.
        unpickled: whether classes of the file were imported and run.
        plain: whether torch.load reads the file without stand-ins for what is beside the weights.
    """

    content: Any
    unpickled: bool = False
    plain: bool = True


def read_torch_file(path: Path, *, factory: str | None, allow_pickle: bool) -> TorchFile:
    """Read a file that torch.save wrote.

    Args:
        path: the file.
        factory: the name of the module's factory, if the file holds weights alone.
        allow_pickle: permission to import and run classes that neither torch nor the stand-ins
            know.

    Raises:
        CheckpointError: if the file is damaged, or holds such objects; they are named.
        UsageError: if there is a factory, and the file is one such object, as a module is.
    """
    try:
        with reading_stand_ins():
            content = _load(path)
        return TorchFile(content, plain=not _names(path))
    except pickle.UnpicklingError as error:
        if "DTensor" in str(error):
            raise CheckpointError(
                path,
                "it holds DTensors, each a part of a weight",
                "Save torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)).",
            ) from error
        what, save = _refused(path, str(error), factory)
        if not what:
            raise CheckpointError(
                path, "neither a PyTorch file nor any other kind known", "Give a model file."
            ) from error
        if allow_pickle:
            if factory and _is_one_object(path):
                raise UsageError(
                    "A pickled module needs no factory.", f"Leave {factory} out."
                ) from error
            return TorchFile(_unpickle(path), unpickled=True)
        raise CheckpointError(
            path,
            f"it holds pickled Python objects, which run code when loaded: {what}",
            f"{save}; or, only if you trust whoever made the file, add --allow-pickle.",
        ) from error
    except Exception as error:  # damaged bytes lead the reader to any exception there is
        raise damaged(path) from error


def damaged(path: Path) -> CheckpointError:
    """Return the error of a file whose bytes torch cannot make sense of."""
    return CheckpointError(
        path, "truncated, damaged, or not a PyTorch file", "Copy or save it again."
    )


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a pickle protocol, which an error names if it matters
        return torch.load(path, map_location="cpu", weights_only=True)


def _names(path: Path) -> list[str]:
    """The classes and functions that a file names and torch.load refuses; as far as they can be
    told without reading it, which they cannot in an old format."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (ValueError, RuntimeError, pickle.UnpicklingError):
        return []


def _refused(path: Path, message: str, factory: str | None) -> tuple[str, str]:
    """What in a file is not read without running it, and what to save instead; or nothing."""
    save = "Save its state_dict"
    save += " and give --factory package.module:factory" if factory is None else " alone"
    with reading_stand_ins():
        names = _names(path) or _GLOBAL.findall(message)
    if names:
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return ", ".join(names[:_MAX_NAMED]) + more, save
    if "Unsupported operand" in message and zipfile.is_zipfile(path):
        return "its pickle protocol is above 2", f"{save}, by torch.save without pickle_protocol"
    return ("some of them of no name", save) if "global" in message.lower() else ("", "")


def _is_one_object(path: Path) -> bool:
    """Tell whether a file holds something other than a container, without running it."""
    try:
        with reading_stand_ins(_names(path)):
            return isinstance(_load(path), StandIn)
    except Exception:  # blocked names, an old format, or other opcodes
        return False


def _unpickle(path: Path) -> Any:
    warnings.warn(
        f"{path}: loading pickled objects runs whatever code the file holds.",
        UserWarning,
        stacklevel=2,
    )
    import_from_here()
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(
            path,
            f"unpickling raised {type(error).__name__}: {error}",
            "Run where the module's code can be imported.",
        ) from error
