"""The loading of a serialized engine, with the plugin library where the engine lacks it."""

import os
from typing import Any

import aftplugins
from aftexport.engines.tensorrt.plugin_library import hold_plugins
from aftexport.engines.tensorrt.runtimes import TensorRt
from aftexport.errors import EngineError

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

    Args:
        trt: the runtime that built the engine.
        serialized: the bytes of the engine.
        uses_plugins: whether an operator of the engine runs by a plugin.

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
