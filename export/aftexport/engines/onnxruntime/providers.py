"""The execution providers of ONNX Runtime that run a model.

``narrow_products`` serves a provider without kernels for the encoder's operators. In a file, the
bodies of these operators compute in float32. The CUDA execution provider then multiplies in float32
without tensor cores, which takes several times as long as the products of float16 or bfloat16 that
the precision of the model allows.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx
from onnx import TensorProto

import aftplugins
from aftexport.engines.cuda import missing_gpu
from aftexport.engines.onnxruntime.package import VERSION, onnxruntime
from aftexport.engines.plain_attention import write_attention
from aftexport.errors import EngineError
from aftexport.operators.domain import DOMAIN, operator_name, opset_of
from aftexport.operators.encoder import ARITHMETIC_OPERATORS, LAYER_NORM_FEED_FORWARD, Arithmetic
from aftexport.operators.portable_bodies import remove_unused
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.operators.schema import OnnxOperator
from aftexport.system.installation import install_command

Provider = Literal["cpu", "cuda"]
"""An execution provider. Operators that it does not support run on the CPU."""


@dataclass(frozen=True)
class ExecutionProvider:
    """An execution provider."""

    name: str
    library: str  # library of its fused kernels, see `aftplugins.RUNTIMES`
    options: Mapping[str, str] = field(default_factory=dict)
    arenas: str = "cpu:0"  # memory arenas, as the run option that shrinks them takes them
    # function that gives a model bodies for this provider, in place, and returns whether it did;
    # None if the bodies of the file serve it best
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
        """Check that it can run on this machine."""
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
        """Check that a GPU has kernels for operators, unless the user switched them off."""
        if not self.needs_gpu or self.kernels or _are_kernels_off():
            return
        without = {name for name, o in ALL_OPERATORS.items() if self.library not in o.libraries}
        if needed := sorted({operator_name(name) for name in operators} - without):
            raise EngineError(
                f"Expected CUDA kernels for {' and '.join(needed)}, got none: "
                f"libaftplugins_{self.library}.so is not installed.",
                "Run make cuda-wheel in aftexport's source folder and install "
                f"dist/aftexport_cuda-*.whl, or set {aftplugins.DISABLE_VARIABLE}=1 to run every "
                "operator by its fallback.",
            )

    def adapt(self, model: onnx.ModelProto) -> bool:
        """Give a model bodies for this provider, in place; return whether it changed."""
        # The variable that switches kernels off asks for the bodies of the file.
        return self.rewrite is not None and not _are_kernels_off() and self.rewrite(model)

    def rewritten(self, operators: Iterable[str], precision: str) -> list[str]:
        """Return the operators of a bundle that run by bodies for this provider."""
        if self.rewrite is None or _are_kernels_off() or precision == "fp32":
            return []
        return sorted({operator_name(name) for name in operators} & ARITHMETIC_OPERATORS.keys())


def write_gpu_bodies(model: onnx.ModelProto) -> bool:
    """Give a model the bodies that serve a GPU best, in place; return whether it changed."""
    has_attention = write_attention(model)
    return narrow_products(model) or has_attention


_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


_GELU_OPSET = 20
"""The first opset with the operator Gelu."""


def narrow_products(model: onnx.ModelProto) -> bool:
    """Let nodes whose precision allows it call bodies with 16-bit products; return if any did."""
    types = _element_types(model.graph)
    bodies: dict[str, onnx.FunctionProto] = {}
    replaced: set[str] = set()
    for node in model.graph.node:
        is_own = node.domain == DOMAIN
        operator = ARITHMETIC_OPERATORS.get(operator_name(node.op_type)) if is_own else None
        arithmetic = _arithmetic(node, types) if operator is not None else None
        if operator is None or arithmetic is None:
            continue
        name = f"{node.op_type}_{arithmetic.value}"
        if name not in bodies:
            bodies[name] = _body(operator, node, arithmetic, opset_of(model))
            bodies[name].name = name
        replaced.add(node.op_type)
        node.op_type = name
    model.functions.extend(bodies.values())
    remove_unused(model, replaced)
    return bool(bodies)


def _element_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the types of the values that a file declares: weights, and inputs in their place."""
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _arithmetic(node: onnx.NodeProto, types: Mapping[str, int]) -> Arithmetic | None:
    """Return the arithmetic of a node's body; None for that of the file."""
    element = next((types[name] for name in node.input[1:] if name in types), None)
    if element in _NARROW:
        return Arithmetic.TENSORS
    precision = next((a.s for a in node.attribute if a.name == "precision"), b"fp32")
    # bfloat16 keeps the bound of int8 too, without a pass that quantizes the activations.
    if element == TensorProto.FLOAT and precision in (b"bf16", b"int8"):
        return Arithmetic.BFLOAT16
    return None


def _body(
    operator: OnnxOperator, node: onnx.NodeProto, arithmetic: Arithmetic, opset: int
) -> onnx.FunctionProto:
    form: dict[str, Any] = {"arithmetic": arithmetic}
    if operator is LAYER_NORM_FEED_FORWARD:
        form["has_gelu"] = opset >= _GELU_OPSET
    return operator.function(operator.settings_of(node), opset, operator.present_in(node), **form)


_CPU = "CPUExecutionProvider"


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
        rewrite=write_gpu_bodies,
        needs_gpu=True,
    ),
}
