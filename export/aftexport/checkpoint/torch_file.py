"""Files of torch.save, read without running the code in them unless the user allows it."""

import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aftexport.checkpoint.stand_ins import StandIn, reading_stand_ins
from aftexport.errors import CheckpointError, UsageError
from aftexport.system.callables import import_from_here

_GLOBAL = re.compile(r"GLOBAL (\S+)")
_MAX_NAMED = 4


@dataclass(frozen=True)
class TorchFile:
    """The contents of a file.

    Attributes:
        content: the saved object.
        is_unpickled: whether classes of the file were imported and run.
        is_plain: whether torch.load reads the file without stand-ins for objects beside weights.
    """

    content: Any
    is_unpickled: bool = False
    is_plain: bool = True


def read_torch_file(path: Path, *, factory: str | None, allow_pickle: bool) -> TorchFile:
    """Read a file of torch.save.

    Args:
        path: the file.
        factory: the name of the module's factory, if the file holds only weights.
        allow_pickle: whether to import and run classes unknown to torch and the stand-ins.

    Raises:
        CheckpointError: if the file is damaged, or holds such objects; the error names them.
        UsageError: if there is a factory, and the file is one such object, for example a module.
    """
    try:
        with reading_stand_ins():
            content = _load(path)
        return TorchFile(content, is_plain=not _names(path))
    except pickle.UnpicklingError as error:
        if "DTensor" in str(error):
            raise CheckpointError(
                path,
                "it holds DTensors, each a part of a weight",
                "Save torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)).",
            ) from error
        refused, save = _refused(path, str(error), factory)
        if not refused:
            raise CheckpointError(
                path, "not a PyTorch file, nor of another known kind", "Give a model file."
            ) from error
        if allow_pickle:
            if factory and _is_one_object(path):
                raise UsageError(
                    "--factory is only for weights without a module, got "
                    f"--factory {factory} for a pickled module.",
                    "Omit --factory.",
                ) from error
            return TorchFile(_unpickle(path), is_unpickled=True)
        raise CheckpointError(
            path,
            f"it holds pickled Python objects, which run code when loaded: {refused}",
            f"{save}; or, only if you trust the author of the file, add --allow-pickle.",
        ) from error
    except Exception as error:  # damaged bytes can make the reader raise any exception
        raise damaged_error(path) from error


def damaged_error(path: Path) -> CheckpointError:
    """Return the error for a file whose bytes torch cannot read."""
    return CheckpointError(
        path, "truncated, damaged, or not a PyTorch file", "Copy or save it again."
    )


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the pickle protocol; an error names it if needed
        return torch.load(path, map_location="cpu", weights_only=True)


def _names(path: Path) -> list[str]:
    """Return the classes and functions in a file that torch.load refuses.

    The list is empty for an old format, whose names are unknown before the file is read.
    """
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (ValueError, RuntimeError, pickle.UnpicklingError):
        return []


def _refused(path: Path, message: str, factory: str | None) -> tuple[str, str]:
    """Return the objects that need code to be read, and the remedy; empty texts without such."""
    save = "Save only its state_dict"
    save += " and give --factory package.module:factory" if factory is None else ""
    with reading_stand_ins():
        names = _names(path) or _GLOBAL.findall(message)
    if names:
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return ", ".join(names[:_MAX_NAMED]) + more, save
    if "Unsupported operand" in message and zipfile.is_zipfile(path):
        return "its pickle protocol is above 2", f"{save}, by torch.save without pickle_protocol"
    return ("some of them without a name", save) if "global" in message.lower() else ("", "")


def _is_one_object(path: Path) -> bool:
    """Return whether a file holds a single object, not a container, without running its code."""
    try:
        with reading_stand_ins(_names(path)):
            return isinstance(_load(path), StandIn)
    except Exception:  # blocked names, an old format, or other opcodes
        return False


def _unpickle(path: Path) -> Any:
    warnings.warn(
        f"{path}: loading pickled objects runs the code in the file.",
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
            "Run the command in the folder from which the module's code can be imported.",
        ) from error
