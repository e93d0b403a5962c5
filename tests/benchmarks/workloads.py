"""The core operator of each mechanism at one size: its inputs, its work, its graph."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray

import aftplugins
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.torch_ops import OPERATORS, Operator, aft_conv, aft_full, aft_local
from aftexport.parity import TOLERANCES

HEADS = 8
TAPS = 31
WINDOW = 128
OPSET = 20

OP_TYPES = {
    "aft_full": "AftFull",
    "aft_local": "AftLocal",
    "aft_simple": "AftSimple",
    "aft_conv": "AftConv",
    "efficient_attention": "EfficientAttention",
    "fastformer": "Fastformer",
    "linear_attention": "NormalizedLinearAttention",
}

SOFTMAX = "softmax"
"""The mechanism of the encoder for scale: a model with ordinary attention."""
_ACTIVATIONS = ("query", "key", "value", "lengths")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """One operator at one size, that of query, key and value."""

    mechanism: str
    batch: int
    tokens: int
    dim: int

    @property
    def operator(self) -> Operator:
        """The non-causal operator."""
        return OPERATORS[OP_TYPES[self.mechanism]]

    @property
    def attributes(self) -> dict[str, int | float | str]:
        """Its attributes: the defaults, with ``HEADS`` heads."""
        attributes = self.operator.attributes
        heads = {a.name: HEADS for a in attributes if a.name == "num_heads" and not a.is_cpu_only}
        return {a.name: a.default for a in attributes} | heads

    @property
    def shapes(self) -> dict[str, list[str]]:
        """The names of the axes of each required input."""
        pairs = zip(self.operator.inputs, self.operator.shapes, strict=True)
        return {name: axes.split() for name, axes in pairs if name not in self.operator.optional}

    def inputs(self) -> Tensors:
        """Inputs by name, drawn from the standard normal distribution."""
        generator = torch.Generator().manual_seed(0)
        sizes = {
            "B": self.batch, "T": self.tokens, "D": self.dim, "H": HEADS,
            "Tmax": self.tokens, "W": 2 * WINDOW - 1, "s": TAPS, "S": self.tokens,
            "Q": self.dim, "K": self.dim, "V": self.dim,
        }  # fmt: skip
        tensors = {}
        for name, axes in self.shapes.items():
            size = [sizes[axis] for axis in axes]
            tensors[name] = torch.randn(*size, generator=generator)
        tensors["lengths"] = torch.full((self.batch,), self.tokens)
        return tensors

    def work(self) -> dict[str, float]:
        """Least bytes moved, multiply-add operations in products, and exponentials."""
        rows = self.batch * self.tokens
        elements = rows * self.dim
        moved = 4.0 * (3 * elements + elements)
        head = self.dim // HEADS
        flops, exps = {
            "aft_full": (4.0 * elements * self.tokens, 2.0 * elements),
            "aft_local": (4.0 * elements * (2 * WINDOW - 1), 2.0 * elements),
            "aft_simple": (0.0, 2.0 * elements),
            "aft_conv": (2.0 * elements * TAPS, elements + rows * HEADS),
            "efficient_attention": (4.0 * elements * head, 2.0 * elements),
            "fastformer": (4.0 * elements * HEADS, 2.0 * rows * HEADS),
            "linear_attention": (4.0 * elements * head, 2.0 * elements),
        }[self.mechanism]
        if self.mechanism == "aft_full":
            moved += 4.0 * self.tokens**2
        if self.mechanism == "aft_local":
            # Keys and values twice: no row can be written before all of them are summed.
            moved += 4.0 * (2 * elements + rows * (2 * WINDOW - 1))
        if self.mechanism == "aft_conv":
            # For the same reason the values twice; keys are one channel per head.
            moved += 4.0 * rows * HEADS
        return {"bytes_moved": moved, "flops": flops, "exps": exps}


def plain_form(workload: Workload) -> Callable[..., torch.Tensor]:
    """The mechanism in plain PyTorch without guards, for the compiler to fuse."""
    attributes = workload.attributes
    windowed = {"aft_full": aft_full, "aft_local": aft_local, "aft_conv": aft_conv}
    module = windowed.get(workload.mechanism)
    if module is None:
        compute = workload.operator.compute
        return lambda *tensors: compute(*tensors, **attributes)

    def form(query, key, value, bias, lengths):  # type: ignore[no-untyped-def]
        del lengths
        values = value
        if workload.mechanism == "aft_conv":
            values = value.reshape(*value.shape[:2], HEADS, -1)
        numerator, denominator = module._sums(key, values, bias, causal=False, eps=0.0)
        mean = (numerator / denominator).reshape(query.shape)
        return torch.sigmoid(query) * mean

    return form


def single_operator(
    workload: Workload, tensors: Tensors
) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """Return a model of the operator alone, and its feeds.

    Weights are initializers, as in an exported model.
    """
    feeds = {n: t.numpy() for n, t in tensors.items() if n in _ACTIVATIONS}
    constants = {n: t.numpy() for n, t in tensors.items() if n not in _ACTIVATIONS}
    operator, attributes = workload.operator, workload.attributes
    node = onnx.helper.make_node(
        operator.op_type, list(operator.required_inputs), ["output"], domain=DOMAIN,
        **attributes, **PLUGIN_ATTRIBUTES,
    )  # fmt: skip
    settings = {a.name: str(attributes[a.name]) for a in operator.settings}
    return single_node(node, feeds, constants, [operator.function(settings, OPSET)]), feeds


def single_node(
    node: onnx.NodeProto,
    feeds: Mapping[str, NDArray[Any]],
    constants: Mapping[str, NDArray[Any]] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """Return a model of one node with the float32 output ``output``, for inputs of any size."""
    make = onnx.helper
    inputs = [
        make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
        for name, x in feeds.items()
    ]
    outputs = [make.make_tensor_value_info("output", onnx.TensorProto.FLOAT, None)]
    weights = [onnx.numpy_helper.from_array(x, name) for name, x in (constants or {}).items()]
    own = [make.make_opsetid(node.domain, VERSION)] if node.domain else []
    return make.make_model(
        make.make_graph([node], "operator", inputs, outputs, weights),
        functions=functions,
        opset_imports=[make.make_opsetid("", OPSET), *own],
        ir_version=10,
    )


def open_session(
    model: onnx.ModelProto,
    threads: int,
    *,
    has_kernels: bool = False,
    has_arena: bool = True,
    spins: bool = True,
) -> onnxruntime.InferenceSession:
    """Return a session on the CPU, whose arena keeps freed memory and whose threads spin.

    Raises:
        RuntimeError: if it has our kernels, and they were not built.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_cpu_mem_arena = has_arena
    options.log_severity_level = 4
    if not spins:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if has_kernels:
        if why := aftplugins.missing("onnxruntime"):
            raise RuntimeError(why)
        options.register_custom_ops_library(str(aftplugins.library("onnxruntime")))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def check_agreement(subject: object, outputs: Mapping[str, NDArray[Any]]) -> None:
    """Compare the outputs of all contenders with the first.

    Raises:
        ArithmeticError: if a contender computes something else.
    """
    first, expected = next(iter(outputs.items()))
    scale = max(1.0, float(np.abs(expected).max()))
    for name, output in outputs.items():
        error = float(np.abs(output.reshape(expected.shape) - expected).max()) / scale
        if not error < TOLERANCES["fp32"].bound:
            raise ArithmeticError(f"{subject}: {name} is {error:.1e} off {first}")
