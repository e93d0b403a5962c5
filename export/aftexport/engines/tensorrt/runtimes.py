"""The Python modules of TensorRT and TensorRT-RTX: import, log, element types and plugins."""

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aftplugins
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
        """Call TensorRT; raise EngineError with ``failure`` and the logged reason if it fails."""
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
    """Import TensorRT or TensorRT-RTX; raise EngineError if it is not installed or too old."""
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


RTX_ALIAS = "libtensorrt_rtx.so"
"""A library that is built with the plugins (``plugins/tensorrt/rtx_alias.cmake``)."""
_REMEDY = "Install aftexport again to build the plugins for this machine."


@dataclass
class _Registration:
    """A library in a registry: its handle and the number of its holders."""

    handle: Any
    holders: int = 0


# A process has one registry for each runtime. It refuses a library that it has already, and forgets
# the plugins of a deregistered one, so the holders of each library are counted.
_registrations: dict[tuple[RuntimeName, Path], _Registration] = {}
_lock = threading.Lock()


def hold_plugins(trt: TensorRt, library: Path) -> None:
    """Register the plugin library, and keep it until ``release_plugins``."""
    _open(trt, library)
    registry = trt.module.get_plugin_registry()
    with _lock:
        registration = _registrations.get((trt.name, library))
        if registration is None:
            handle = trt.attempt(
                lambda: registry.load_library(str(library)),
                f"cannot load the plugins of {library}",
                _REMEDY,
            )
            registration = _registrations[trt.name, library] = _Registration(handle)
        registration.holders += 1


def release_plugins(trt: TensorRt, library: Path) -> None:
    """End one ``hold_plugins``; the last one deregisters the library."""
    with _lock:
        registration = _registrations[trt.name, library]
        registration.holders -= 1
        if registration.holders == 0:
            trt.module.get_plugin_registry().deregister_library(registration.handle)
            del _registrations[trt.name, library]


@contextmanager
def plugins_loaded(trt: TensorRt, library: Path | None) -> Iterator[None]:
    """Register the plugin library for a build; None registers nothing."""
    if library is None:
        yield
        return
    if trt.name == "tensorrt_rtx":
        # The parser of TensorRT-RTX finds plugins through a library of this name, which
        # the wheel lacks. Without the library, the parser ends the process.
        _open(trt, library.with_name(RTX_ALIAS))
    hold_plugins(trt, library)
    try:
        yield
    finally:
        release_plugins(trt, library)


def _open(trt: TensorRt, library: Path) -> None:
    """Load a library for the rest of the process: networks and engines call it when freed."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise EngineError(f"{trt.title} cannot use the plugins: {error}.", _REMEDY) from error


REBUILD = "Run: aftexport build BUNDLE --rebuild"
_PLUGIN_REMEDY = (
    f"If a plugin is missing, unset {aftplugins.DISABLE_VARIABLE}, or run make cuda-wheel in "
    "aftexport's source folder and install dist/aftexport_cuda-*.whl. If not, build the engine "
    "again with aftexport build BUNDLE --rebuild."
)


def deserialize(trt: TensorRt, serialized: bytes, *, uses_plugins: bool) -> tuple[Any, Any]:
    """Return the runtime and the engine.

    An engine should contain its plugin library. TensorRT only documents this for engines of the
    version-compatible kind, so the installed library is registered if the runtime refuses the
    engine. It stays registered, because the engine calls its code.

    Raises:
        EngineError: if the runtime refuses the engine, with and without the library.
    """
    runtime = trt.module.Runtime(trt.logger)
    runtime.engine_host_code_allowed = True  # the code of the plugins

    def attempt() -> Any:
        return trt.attempt(
            lambda: runtime.deserialize_cuda_engine(serialized), "refuses the engine", REBUILD
        )

    try:
        return runtime, attempt()
    except EngineError as refusal:
        if not uses_plugins:
            raise
        library = aftplugins.library("tensorrt")
        if library is None:
            raise EngineError(
                f"{refusal.problem} The engine uses plugins, {_absence()}.", _PLUGIN_REMEDY
            ) from refusal
        hold_plugins(trt, library)
        try:
            return runtime, attempt()
        except EngineError as error:
            raise EngineError(
                f"{refusal.problem} With the plugins of {library}, {error.problem}", REBUILD
            ) from error


def _absence() -> str:
    if os.environ.get(aftplugins.DISABLE_VARIABLE) == "1":
        return f"which are switched off by {aftplugins.DISABLE_VARIABLE}=1"
    return "and libaftplugins_tensorrt.so is not installed"
