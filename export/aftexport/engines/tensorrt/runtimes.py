"""The Python modules of TensorRT and TensorRT-RTX: import, log and element types."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from aftexport.engines.tensorrt.settings import RuntimeName
from aftexport.errors import EngineError
from aftexport.system.installation import install_command

TITLES: dict[RuntimeName, str] = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
EXTRAS: dict[RuntimeName, str] = {"tensorrt": "trt", "tensorrt_rtx": "trt-rtx"}
MIN_VERSIONS: dict[RuntimeName, tuple[int, int]] = {"tensorrt": (10, 1), "tensorrt_rtx": (1, 4)}

_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64"}
LOGIT_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""The type of an engine's logits for each precision."""


@dataclass(frozen=True, eq=False)
class TensorRt:
    """An imported TensorRT or TensorRT-RTX."""

    name: RuntimeName
    module: Any
    logger: Any

    @property
    def version(self) -> str:
        """The version of the wheel."""
        return str(self.module.__version__)

    @property
    def title(self) -> str:
        """Name and version, for people."""
        return f"{TITLES[self.name]} {self.version}"

    def reason(self) -> str:
        """Return the first error since the last ``attempt``, the cause of the later ones."""
        errors = self.logger.errors
        return str(errors[0]).strip().rstrip(".") if errors else "it gave no reason"

    def attempt(self, call: Callable[[], Any], failure: str, remedy: str) -> Any:
        """Call TensorRT, which returns None or False on failure and logs the reason.

        Raises:
            EngineError: if the call fails; the message is ``failure`` with the logged reason.
        """
        self.logger.errors.clear()
        try:
            result = call()
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            raise EngineError(f"{self.title} {failure}: {error}.", remedy) from error
        if result is None or result is False:
            raise EngineError(f"{self.title} {failure}: {self.reason()}.", remedy)
        return result


@cache
def load(name: RuntimeName) -> TensorRt:
    """Import TensorRT or TensorRT-RTX.

    Raises:
        EngineError: if it is not installed or too old; the remedy is the command to install it.
    """
    command = f"Run: {install_command(EXTRAS[name])}"
    try:
        module = importlib.import_module(name)
        if module.__spec__ is None or module.__spec__.origin is None:
            # A folder of that name, such as plugins/tensorrt, is not the package.
            raise ModuleNotFoundError(name=name)
    except (ImportError, OSError, RuntimeError) as error:  # shared libraries may be absent
        detail = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        raise EngineError(f"{TITLES[name]} is not installed{detail}.", command) from error
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if version < MIN_VERSIONS[name]:
        oldest = ".".join(map(str, MIN_VERSIONS[name]))
        raise EngineError(
            f"Expected {TITLES[name]} {oldest} or newer, got {module.__version__}.", command
        )
    return TensorRt(name, module, _logger(module))


def _logger(module: Any) -> Any:
    class Log(module.ILogger):  # type: ignore[misc]  # the base is known only after the import
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= module.ILogger.ERROR:
                self.errors.append(message)

    return Log()


def element(data_type: Any) -> str:
    """Return numpy's name of a TensorRT type, or ``bfloat16``, which numpy lacks."""
    name = str(data_type.name)
    return _TYPES.get(name, name.lower())
