"""Objects that training scripts save beside weights, read without running their code.

torch.load refuses a file that names classes other than those of tensors. For the names listed here
it receives a stand-in, which stores no data and calls no code. Only containers keep their contents,
because these may include weights. The named classes are not imported and need not be installed.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


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
