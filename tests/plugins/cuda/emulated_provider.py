"""The CUDA execution provider of ONNX Runtime on an emulated GPU, which is the CPU.

Its kernels are the emulated ones. Sessions load models as they do for CUDA.
"""

from pathlib import Path

import pytest

import aftplugins
from aftexport.engines.onnxruntime import providers
from aftexport.engines.onnxruntime.providers import write_gpu_bodies

LIBRARY = "libaftplugins_onnxruntime_emulated.so"
EMULATED = providers.ExecutionProvider(
    "CPUExecutionProvider", "onnxruntime_cuda", rewrite=write_gpu_bodies
)

_PROGRAM = """
import sys
from pathlib import Path

import pytest

from aftserve.cli import main

sys.path.insert(0, {tests!r})
from plugins.cuda.emulated_provider import use

with pytest.MonkeyPatch.context() as patch:
    use(Path({library!r}), patch)
    sys.exit(main())
"""


def server_program(library: Path) -> tuple[str, str]:
    """Return the arguments of Python that run ``aftserve``, whose provider cuda is emulated."""
    tests = str(Path(__file__).parents[2])
    return "-c", _PROGRAM.format(library=str(library), tests=tests)


def use(library: Path, patch: pytest.MonkeyPatch) -> None:
    """Let ``cuda`` be the emulated provider."""
    patch.setitem(providers.PROVIDERS, "cuda", EMULATED)
    patch.setattr(aftplugins, "library", lambda runtime: library)
