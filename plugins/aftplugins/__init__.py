"""Finds the fused kernels that were built, when the package was installed or by ``make cuda``."""

import os
import sys
from pathlib import Path

_REMEDIES = {
    "onnxruntime": "install a C++ compiler and install aftexport again",
    "onnxruntime_cuda": "run `make cuda` in aftexport's source folder",
    "tensorrt": "run `make cuda` in aftexport's source folder",
}
RUNTIMES = tuple(_REMEDIES)
"""ONNX Runtime on the CPU, its CUDA execution provider, and TensorRT."""
DISABLE_VARIABLE = "AFTEXPORT_PORTABLE"
"""Set to 1 to run every operator by its portable body, for comparison."""


def library(runtime: str) -> Path | None:
    """The kernel library for a runtime, or None where it was not built or is switched off.

    Raises:
        ValueError: for a runtime that has no kernel library.
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"no kernels for {runtime!r}; known are {', '.join(RUNTIMES)}")
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return None
    name = f"libaftplugins_{runtime}.so"
    # An editable install keeps what was built apart from the sources; both are on __path__.
    found = (Path(folder) / name for folder in __path__)
    return next((path for path in found if path.is_file()), None)


def missing(runtime: str) -> str | None:
    """Why a runtime has no fused kernels here, as a sentence; None where it has them.

    Raises:
        ValueError: for a runtime that has no kernel library.
    """
    if library(runtime) is not None:
        return None
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return f"The fused kernels are switched off by {DISABLE_VARIABLE}=1."
    if sys.platform != "linux":
        return "The fused kernels are for Linux: every operator runs by its portable body."
    return (
        "The fused kernels were not built, so every operator runs by its portable body: "
        f"{_REMEDIES[runtime]}."
    )
