"""The search for fused kernels, which wheels bring, or the installation or ``make cuda`` builds."""

import os
import sys
from pathlib import Path

_CUDA_REMEDY = (
    "run `make cuda-wheel` in aftexport's source folder and install the file that it builds, "
    "dist/aftexport_cuda-*.whl, or run `make cuda` there and install the folder by "
    "`pip install --editable`"
)
_REMEDIES = {
    "onnxruntime": (
        "install aftexport's wheel for this processor, or a C++ compiler and then the source folder"
    ),
    "onnxruntime_cuda": _CUDA_REMEDY,
    "tensorrt": _CUDA_REMEDY,
}
RUNTIMES = tuple(_REMEDIES)
"""ONNX Runtime on the CPU, its CUDA execution provider, and TensorRT."""
DISABLE_VARIABLE = "AFTEXPORT_PORTABLE"
"""A variable that disables the fused kernels if it is 1, for comparison with fallbacks."""


def library(runtime: str) -> Path | None:
    """Return the kernel library of a runtime, or None if it is not built or switched off.

    Raises:
        ValueError: if the runtime has no kernel library.
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"runtime must be one of {', '.join(RUNTIMES)}, got {runtime!r}")
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return None
    name = f"libaftplugins_{runtime}.so"
    # An editable install keeps built files apart from the sources; both folders are in __path__.
    candidates = (Path(folder) / name for folder in __path__)
    return next((path for path in candidates if path.is_file()), None)


def missing(runtime: str) -> str | None:
    """Return the reason why a runtime has no fused kernels here; None if it has fused kernels.

    Raises:
        ValueError: if the runtime has no kernel library.
    """
    if library(runtime) is not None:
        return None
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return f"The fused kernels are switched off by {DISABLE_VARIABLE}=1."
    if sys.platform != "linux":
        return "The fused kernels need Linux, so every operator runs by its fallback."
    return (
        "The fused kernels were not built, so every operator runs by its fallback: "
        f"{_REMEDIES[runtime]}."
    )
