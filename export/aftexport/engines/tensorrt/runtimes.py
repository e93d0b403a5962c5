"""The two TensorRTs as Python modules: importing them, their log, their element types."""

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from aftexport.engines.tensorrt.settings import RuntimeName
from aftexport.errors import EngineError

TITLES: dict[RuntimeName, str] = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
EXTRAS: dict[RuntimeName, str] = {"tensorrt": "trt", "tensorrt_rtx": "trt-rtx"}
OLDEST: dict[RuntimeName, tuple[int, int]] = {"tensorrt": (10, 1), "tensorrt_rtx": (1, 4)}

_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64"}
RTX_ALIAS = "libtensorrt_rtx.so"
"""Built beside the plugins (``plugins/tensorrt/rtx_alias.cmake``)."""
LOGIT_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Precision to the type of an engine's logits."""


@dataclass(frozen=True, eq=False)
class TensorRt:
    """One of the two, imported.

    Attributes:
        name: tensorrt or tensorrt_rtx.
        module: what was imported; both have the same classes.
        logger: an ILogger that keeps the errors.
    """

    name: RuntimeName
    module: Any
    logger: Any

    @property
    def version(self) -> str:
        """As the wheel has it."""
        return str(self.module.__version__)

    @property
    def title(self) -> str:
        """Name and version, for people."""
        return f"{TITLES[self.name]} {self.version}"

    def reason(self) -> str:
        """The first error since the last ``attempt``; the later ones follow from it."""
        errors = self.logger.errors
        return str(errors[0]).strip().rstrip(".") if errors else "it gave no reason"

    def attempt(self, call: Callable[[], Any], what: str, remedy: str) -> Any:
        """Calls TensorRT, which says by None or False that it failed, and why in its log.

        Raises:
            EngineError: ``what`` with the reason from the log.
        """
        self.logger.errors.clear()
        try:
            result = call()
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            raise EngineError(f"{self.title} {what}: {error}.", remedy) from error
        if result is None or result is False:
            raise EngineError(f"{self.title} {what}: {self.reason()}.", remedy)
        return result


@cache
def load(name: RuntimeName) -> TensorRt:
    """Imports one of the two.

    Raises:
        EngineError: where it is not installed, or too old; with the command that installs it.
    """
    command = f"Run: pip install 'aftexport[{EXTRAS[name]}]'"
    try:
        module = importlib.import_module(name)
        if module.__spec__ is None or module.__spec__.origin is None:
            # A folder of that name, such as our plugins/tensorrt, is no package.
            raise ModuleNotFoundError(name=name)
    except (ImportError, OSError, RuntimeError) as error:  # its libraries may be absent
        detail = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        raise EngineError(f"{TITLES[name]} is not installed{detail}.", command) from error
    found = tuple(int(part) for part in module.__version__.split(".")[:2])
    if found < OLDEST[name]:
        oldest = ".".join(map(str, OLDEST[name]))
        raise EngineError(f"{TITLES[name]} {module.__version__} is older than {oldest}.", command)
    return TensorRt(name, module, _logger(module))


def _logger(module: Any) -> Any:
    class Log(module.ILogger):  # type: ignore[misc]  # known only once it is imported
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= module.ILogger.ERROR:
                self.errors.append(message)

    return Log()


def element(data_type: Any) -> str:
    """numpy's name of a TensorRT type; bfloat16, which numpy lacks, by that name."""
    name = str(data_type.name)
    return _TYPES.get(name, name.lower())


@contextmanager
def plugins_loaded(trt: TensorRt, library: Path | None) -> Iterator[None]:
    """Registers the plugin library for the block; None registers nothing.

    Raises:
        EngineError: where the runtime refuses the library.
    """
    if library is None:
        yield
        return
    remedy = "Install aftexport again, so that they are built for this machine."
    try:
        # Networks outlive the block and call the plugins they hold when they are freed:
        # the library's code must stay.
        ctypes.CDLL(str(library))
        if trt.name == "tensorrt_rtx":
            # Its parser looks plugins up through a library of this name, which the wheel
            # lacks, and ends the process where there is none.
            ctypes.CDLL(str(library.with_name(RTX_ALIAS)))
    except OSError as error:
        raise EngineError(f"{trt.title} cannot use the plugins: {error}.", remedy) from error
    registry = trt.module.get_plugin_registry()
    handle = trt.attempt(
        lambda: registry.load_library(str(library)), f"cannot load the plugins of {library}", remedy
    )
    try:
        yield
    finally:
        registry.deregister_library(handle)
