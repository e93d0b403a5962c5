"""The installed package of ONNX Runtime, which this module checks before its import.

Several packages contain the module ``onnxruntime``, and each overwrites the files of the others.
"""

from importlib import metadata
from importlib.util import find_spec

from aftexport.errors import EngineError
from aftexport.system.installation import runtime_choice

PACKAGES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-migraphx",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "onnxruntime-windowsml",
    "ort-nightly",
    "ort-nightly-gpu",
)
"""The names under which ONNX Runtime is published."""


def check_package() -> None:
    """Check that exactly one package of ONNX Runtime is installed."""
    found = [name for name in PACKAGES if _is_installed(name)]
    choice = runtime_choice()
    if len(found) > 1:
        raise EngineError(
            f"Expected one package of ONNX Runtime, got {' and '.join(found)}, which overwrite "
            "each other's files.",
            f"Run: pip uninstall --yes {' '.join(found)}; then {choice}.",
        )
    spec = find_spec("onnxruntime")
    # A folder of that name, such as plugins/onnxruntime, is not the package.
    if spec is None or spec.origin is None:
        raise EngineError("ONNX Runtime is not installed.", f"Run: {choice}.")


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


check_package()

import onnxruntime  # noqa: E402  after the check: the import of mixed files may end the process
from onnxruntime.capi import onnxruntime_pybind11_state as native  # noqa: E402

__all__ = ["VERSION", "check_package", "native", "onnxruntime"]

VERSION: str = onnxruntime.__version__

# The environment variable has no effect if onnxruntime was imported before aftexport.
onnxruntime.disable_telemetry_events()
