"""The execution providers of ONNX Runtime that run a model."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx

import aftplugins
from aftexport.engines.cuda import missing_gpu
from aftexport.engines.onnxruntime.encoder_products import narrow_products
from aftexport.engines.onnxruntime.package import VERSION, onnxruntime
from aftexport.errors import EngineError
from aftexport.operators.domain import operator_name
from aftexport.operators.encoder import ARITHMETIC_OPERATORS
from aftexport.operators.mechanisms import RECURRENT_OPERATORS
from aftexport.system.installation import install_command

Provider = Literal["cpu", "cuda"]
"""An execution provider. Operators that it does not support run on the CPU."""

_CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class ExecutionProvider:
    """An execution provider.

    Attributes:
        name: its name in ONNX Runtime.
        library: the library of its fused kernels, see ``aftplugins.RUNTIMES``.
        options: its options.
        arenas: the memory arenas of its sessions, as the run option that shrinks them takes them.
        rewrite: the function that gives a model bodies for this provider, in place, and returns
            whether it did; None if the bodies of the file serve it best.
        needs_gpu: whether it runs on an NVIDIA GPU.
    """

    name: str
    library: str
    options: Mapping[str, str] = field(default_factory=dict)
    arenas: str = "cpu:0"
    rewrite: Callable[[onnx.ModelProto], bool] | None = None
    needs_gpu: bool = False

    @property
    def entries(self) -> list[tuple[str, dict[str, str]]]:
        """The providers of a session, in the order in which they may take a node."""
        own = (self.name, dict(self.options))
        return [own] if self.name == _CPU else [own, (_CPU, {})]

    @property
    def kernels(self) -> Path | None:
        """The path of its kernel library; None if it is not built or is switched off."""
        return aftplugins.library(self.library)

    def check(self) -> None:
        """Check that it can run on this machine.

        Raises:
            EngineError: if ONNX Runtime lacks it, or there is no GPU.
        """
        available = onnxruntime.get_available_providers()
        if self.name not in available:
            raise EngineError(
                f"Expected {self.name}, got ONNX Runtime {VERSION} with {' and '.join(available)}.",
                f"Run: pip uninstall --yes onnxruntime; then {install_command('cuda')}.",
            )
        if self.needs_gpu and (problem := missing_gpu()):
            raise EngineError(
                f"Expected a GPU for {self.name}, got none: {problem}.",
                "Check nvidia-smi; start a container with --gpus all.",
            )

    def check_kernels(self, operators: Iterable[str]) -> None:
        """Check that a GPU has kernels for operators, unless the user switched them off.

        Args:
            operators: the types of custom nodes.

        Raises:
            EngineError: if the kernel library is missing.
        """
        if not self.needs_gpu or self.kernels or _are_kernels_off():
            return
        without = {*ARITHMETIC_OPERATORS, *RECURRENT_OPERATORS}
        if needed := sorted({operator_name(name) for name in operators} - without):
            raise EngineError(
                f"Expected CUDA kernels for {' and '.join(needed)}, got none: "
                f"libaftplugins_{self.library}.so is not installed.",
                "Run make cuda-wheel in aftexport's source folder and install "
                f"dist/aftexport_cuda-*.whl, or set {aftplugins.DISABLE_VARIABLE}=1 to run every "
                "operator by its portable body.",
            )

    def adapt(self, model: onnx.ModelProto) -> bool:
        """Give a model bodies for this provider, in place; return whether it changed."""
        # The variable that switches kernels off asks for the bodies of the file.
        return self.rewrite is not None and not _are_kernels_off() and self.rewrite(model)

    def rewritten(self, operators: Iterable[str], precision: str) -> list[str]:
        """Return the operators of a bundle that run by bodies for this provider.

        Args:
            operators: the types of the bundle's custom nodes.
            precision: the precision of the bundle.
        """
        if self.rewrite is None or _are_kernels_off() or precision == "fp32":
            return []
        return sorted({operator_name(name) for name in operators} & ARITHMETIC_OPERATORS.keys())


def _are_kernels_off() -> bool:
    return os.environ.get(aftplugins.DISABLE_VARIABLE) == "1"


PROVIDERS: dict[Provider, ExecutionProvider] = {
    "cpu": ExecutionProvider(_CPU, "onnxruntime"),
    "cuda": ExecutionProvider(
        "CUDAExecutionProvider",
        "onnxruntime_cuda",
        {
            # TF32, the provider's default, would exceed the tolerance of fp32.
            "use_tf32": "0",
            # Powers of two, the default, would double the memory of a long document.
            "arena_extend_strategy": "kSameAsRequested",
        },
        arenas="cpu:0;gpu:0",
        rewrite=narrow_products,
        needs_gpu=True,
    ),
}
