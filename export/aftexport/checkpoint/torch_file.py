"""Files of torch.save, read without running the code in them unless the user allows it.

torch.load refuses a file that names classes other than those of tensors, as those of objects that
training scripts save beside weights. For the names listed here it receives a stand-in, which stores
no data and calls no code. Only containers keep their contents, because these may include weights.
The named classes are not imported and need not be installed.
"""

import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aftexport.errors import CheckpointError, UsageError
from aftexport.system.arguments import import_from_here

_GLOBAL = re.compile(r"GLOBAL (\S+)")
_MAX_NAMED = 4


@dataclass(frozen=True)
class TorchFile:
    """The object in a file, whether its classes ran, and whether it needs no stand-ins."""

    content: Any
    is_unpickled: bool = False
    is_plain: bool = True


def read_torch_file(path: Path, *, factory: str, allow_pickle: bool) -> TorchFile:
    """Read a file of torch.save.

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
            remedy = "Give a model file."
            if path.suffix == ".py":
                remedy = f"For a module in code, write --factory {path.stem}:NAME in its place."
            raise CheckpointError(
                path, "not a PyTorch file, nor of another known kind", remedy
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
    """Return the classes and functions that torch.load refuses; empty for an old format."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (ValueError, RuntimeError, pickle.UnpicklingError):
        return []


def _refused(path: Path, message: str, factory: str) -> tuple[str, str]:
    """Return the objects that need code to be read, and the remedy; empty texts without such."""
    save = "Save only its state_dict"
    save += " and give --factory package.module:factory" if not factory else ""
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


class StandIn:
    """An object from a file, without its contents."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _Sequence:
    """A list in place of a deque."""

    def __new__(cls, *arguments: object) -> list[Any]:  # type: ignore[misc]
        return []


class _Mapping:
    """A dict, which may have attributes, in place of a subclass of dict."""

    def __new__(cls, *arguments: object) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


_NUMPY = tuple(
    f"numpy.{core}.multiarray.{name}"
    for core in ("core", "_core")
    for name in ("scalar", "_reconstruct")
) + tuple(
    f"numpy.{name}" for name in (
        "dtype", "ndarray", "bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16",
        "uint32", "uint64", "float16", "float32", "float64", "longdouble", "complex64",
        "complex128", "str_", "bytes_", "datetime64", "timedelta64",
        "random.__RandomState_ctor", "random._pickle.__randomstate_ctor",
        "random._pickle.__generator_ctor", "random._pickle.__bit_generator_ctor",
        "random._mt19937.MT19937", "random._pcg64.PCG64", "random._philox.Philox",
        "random.bit_generator.SeedSequence",
        "random.bit_generator.__pyx_unpickle_SeedSequence")
)  # fmt: skip
_PATHS = tuple(
    f"{module}.{name}"
    for module in ("pathlib", "pathlib._local")
    for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
)
_PYTHON = (
    "argparse.Namespace", "types.SimpleNamespace", "copyreg._reconstructor", "builtins.object",
    "builtins.list", "builtins.dict", "builtins.tuple", "builtins.frozenset", "builtins.int",
    "builtins.float", "builtins.bool", "builtins.str", "builtins.bytes", "builtins.range",
    "builtins.slice", "datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta",
    "datetime.timezone", "zoneinfo.ZoneInfo._unpickle", "decimal.Decimal", "fractions.Fraction",
    "uuid.UUID", "uuid.SafeUUID", "typing.Any",
)  # fmt: skip
_TORCH = (
    "torch.amp.grad_scaler.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler", "torch.amp.grad_scaler.OptState",
    "torch.amp.grad_scaler._refresh_per_optimizer_state",
    "torch.cuda.amp.grad_scaler._refresh_per_optimizer_state",
)  # fmt: skip
_LIBRARIES = (
    "omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig",
    "omegaconf.base.ContainerMetadata", "omegaconf.base.Metadata", "omegaconf.nodes.AnyNode",
    "omegaconf.nodes.StringNode", "omegaconf.nodes.IntegerNode", "omegaconf.nodes.FloatNode",
    "omegaconf.nodes.BooleanNode", "omegaconf.nodes.BytesNode", "omegaconf.nodes.PathNode",
    "omegaconf.nodes.EnumNode", "transformers.training_args.OptimizerNames",
    "transformers.trainer_utils.HubStrategy", "transformers.trainer_utils.IntervalStrategy",
    "transformers.trainer_utils.SaveStrategy", "transformers.trainer_utils.SchedulerType",
    "transformers.trainer_pt_utils.AcceleratorConfig",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)  # fmt: skip
_MAPPINGS = (
    "collections.defaultdict", "lightning_fabric.utilities.data.AttributeDict",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict", "easydict.EasyDict",
    "addict.addict.Dict", "munch.Munch", "box.box.Box", "yacs.config.CfgNode",
    "fvcore.common.config.CfgNode", "ml_collections.config_dict.config_dict.ConfigDict",
)  # fmt: skip


def reading_stand_ins(names: Sequence[str] = ()) -> AbstractContextManager[Any]:
    """Make torch.load read objects of this module's lists, and of ``names``, as stand-ins."""
    pairs: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        *((StandIn, n) for n in (*_NUMPY, *_PATHS, *_PYTHON, *_TORCH, *_LIBRARIES, *names)),
        *((StandIn, name) for name in _classes_in(torch.optim, torch.optim.lr_scheduler)),
        *((_Mapping, name) for name in _MAPPINGS),
        (_Sequence, "collections.deque"),
    ]
    return torch.serialization.safe_globals(pairs)


def _classes_in(*modules: Any) -> Iterable[str]:
    """Yield the pickled names of the optimizers and schedules of torch."""
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__.startswith("torch.optim."):
                yield f"{value.__module__}.{value.__qualname__}"
