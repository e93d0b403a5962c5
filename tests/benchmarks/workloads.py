"""The core operator of each mechanism at one size: its inputs, its work, its graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from numpy.typing import NDArray

from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.torch_ops import OPERATORS, Operator, aft_conv, aft_full, aft_local

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
    make = onnx.helper
    node = make.make_node(
        operator.op_type, list(operator.required_inputs), ["output"], domain=DOMAIN,
        **attributes, **PLUGIN_ATTRIBUTES,
    )  # fmt: skip
    types = {"lengths": onnx.TensorProto.INT64}
    inputs = [
        make.make_tensor_value_info(
            name, types.get(name, onnx.TensorProto.FLOAT), [None] * len(axes)
        )
        for name, axes in workload.shapes.items()
        if name not in constants
    ]
    output = make.make_tensor_value_info("output", onnx.TensorProto.FLOAT, [None, None, None])
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    settings = {a.name: str(attributes[a.name]) for a in operator.settings}
    model = make.make_model(
        make.make_graph([node], "operator", inputs, [output], initializers),
        functions=[operator.function(settings, OPSET)],
        opset_imports=[make.make_opsetid("", OPSET), make.make_opsetid(DOMAIN, VERSION)],
        ir_version=10,
    )
    return model, feeds
