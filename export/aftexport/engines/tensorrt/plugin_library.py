"""The plugin library in the registry of a runtime.

A process has one registry for each runtime. It refuses a library that it has already, and forgets
the plugins of a deregistered one, so this module counts the holders of each library.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aftplugins
from aftexport.engines.tensorrt.runtimes import TensorRt
from aftexport.engines.tensorrt.settings import RuntimeName
from aftexport.errors import EngineError

RTX_ALIAS = "libtensorrt_rtx.so"
"""A library that is built with the plugins (``plugins/tensorrt/rtx_alias.cmake``)."""
_REMEDY = "Install aftexport again to build the plugins for this machine."


@dataclass
class _Registration:
    """A library in a registry: its handle and the number of its holders."""

    handle: Any
    holders: int = 0


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
