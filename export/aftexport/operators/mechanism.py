"""The operators of a mechanism: a torch op, an ONNX schema and a portable body each."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import torch
from torch import Tensor

from aftexport.internals.torch_operators import OpOverload
from aftexport.operators.schema import Attribute, OnnxOperator

_TORCH_TYPES = {int: "int", float: "float", str: "str"}

GATE = Attribute(
    "gate",
    "sigmoid",
    "Function of the query that multiplies the result; none leaves the query out.",
    ("sigmoid", "tanh", "none"),
)
NUM_HEADS = Attribute("num_heads", 1, "Number of heads; divides the channels of query and value.")


@dataclass(frozen=True, kw_only=True)
class Operator(OnnxOperator):
    """An operator of a mechanism, which PyTorch models call.

    Attributes:
        stem: the mechanism's file name, for example ``aft_local``.
        compute: the fast form that the torch op runs; differentiable, and exact
            for every finite input.
        torch_op: the overload that ``torch.export`` records. Its arguments are the inputs
            and then the attributes.
    """

    stem: str
    reference: Callable[..., Tensor]
    compute: Callable[..., Tensor]
    torch_op: OpOverload


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism and its causal twin, each an operator in torch and in ONNX.

    ``check``, ``compute`` and ``reference`` take the inputs in order and the attributes by name;
    ``compute``, ``reference`` and ``body`` take ``causal`` as well.

    Attributes:
        op_type: the name of the ONNX operator that is not causal.
        stem: the mechanism's file name, for example ``aft_local``.
        inputs: the names of the inputs, ``lengths`` last.
        shapes: the shape of each input, as a word for each axis.
        exponents: the inputs to which an exponential is applied.
        attributes: the attributes of the torch op and of the ONNX operator.
        kernel_attributes: the attributes that only the ONNX operator has.
        check: the validation of shapes, which raises ``ValueError``; it runs on real and on
            symbolic shapes.
        compute: the fast form, differentiable, exact for every finite input.
        reference: the definition.
        body: the portable ONNX body, as text.
        doc: the documentation of the ONNX operator.
    """

    op_type: str
    stem: str
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]
    exponents: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    check: Callable[..., None]
    compute: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    body: Callable[..., str]
    doc: str
    kernel_attributes: tuple[Attribute, ...] = ()

    def register(self) -> tuple[Operator, Operator]:
        """Register both operators in torch and in onnx, and return them."""
        return self._register(causal=False), self._register(causal=True)

    def _register(self, *, causal: bool) -> Operator:
        op_type = f"Causal{self.op_type}" if causal else self.op_type
        twin = " Causal: only keys up to the query's own position count." if causal else ""
        operator = Operator(
            op_type=op_type,
            inputs=self.inputs,
            shapes=self.shapes,
            exponents=self.exponents,
            attributes=self.attributes,
            kernel_attributes=self.kernel_attributes,
            reference=partial(self.reference, causal=causal),
            body=partial(self.body, causal=causal),
            doc=self.doc + twin,
            stem=self.stem,
            compute=partial(self.compute, causal=causal),
            torch_op=_TorchOp(self, op_type, causal).register(),
        )
        onnx.defs.register_schema(operator.schema())
        return operator


class _TorchOp:
    """The torch op of a mechanism or of its causal twin; it takes inputs, then attributes."""

    def __init__(self, mechanism: Mechanism, op_type: str, causal: bool) -> None:
        self._mechanism = mechanism
        self._op_type = op_type
        self._check = partial(mechanism.check, op_type, causal)
        self._compute = partial(mechanism.compute, causal=causal)
        self._count = len(mechanism.inputs)

    def register(self) -> OpOverload:
        name = _snake_case(self._op_type)
        parameters = [f"Tensor {i}" for i in self._mechanism.inputs]
        parameters += [
            f"{_TORCH_TYPES[type(a.default)]} {a.name}" for a in self._mechanism.attributes
        ]
        custom_op = torch.library.custom_op(
            f"aftexport::{name}",
            self._forward,
            mutates_args=(),
            schema=f"({', '.join(parameters)}) -> Tensor",
        )
        custom_op.register_fake(self._fake)
        custom_op.register_autograd(self._backward, setup_context=self._setup_context)
        overload: OpOverload = getattr(torch.ops.aftexport, name).default
        return overload

    def _forward(self, *arguments: Any) -> Tensor:
        tensors, named = self._split(arguments)
        self._check(*tensors, **named)
        query = tensors[0]
        if not query.numel():  # an empty tensor has no maximum
            return query.clone(memory_format=torch.contiguous_format)
        # Compute in float32 or wider: sums over tokens in 16 bits lose the result.
        wide = torch.promote_types(query.dtype, torch.float32)
        *floats, lengths = tensors
        result = self._compute(*(t.to(wide) for t in floats), lengths, **named)
        return result.to(query.dtype).contiguous()

    def _fake(self, *arguments: Any) -> Tensor:
        tensors, named = self._split(arguments)
        self._check(*tensors, **named)
        return torch.empty_like(tensors[0], memory_format=torch.contiguous_format)

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[: self._count])
        ctx.attributes = inputs[self._count :]

    def _backward(self, ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Recompute the output: this costs a forward pass, but keeps no activations alive.
        *floats, lengths = ctx.saved_tensors
        again = torch.is_grad_enabled()  # create_graph asks for gradients of the gradients
        with torch.enable_grad():
            leaves = [
                t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_()
                for t in floats
            ]
            output = self._forward(*leaves, lengths, *ctx.attributes)
        gradients = torch.autograd.grad(
            output, leaves, gradient, allow_unused=True, create_graph=again
        )
        return (*gradients, None, *(None for _ in self._mechanism.attributes))

    def _split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return the inputs, and the attributes by name; raise ValueError if one is invalid."""
        mechanism = self._mechanism
        for name, tensor in zip(mechanism.inputs[:-1], arguments, strict=False):
            if not tensor.is_floating_point():  # the result has the query's type
                raise ValueError(
                    f"{self._op_type}: {name} must be floating-point, got type {tensor.dtype}"
                )
        values = arguments[self._count :]
        named = {a.name: v for a, v in zip(mechanism.attributes, values, strict=True)}
        for attribute in mechanism.attributes:
            value = named[attribute.name]
            if attribute.choices and value not in attribute.choices:
                raise ValueError(
                    f"{self._op_type}: {attribute.name} must be one of "
                    f"{', '.join(attribute.choices)}, got {value!r}"
                )
        return arguments[: self._count], named


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
