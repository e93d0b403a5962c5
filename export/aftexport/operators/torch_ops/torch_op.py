"""The torch op of an operator of a mechanism."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aftexport.internals.torch_operators import OpOverload
from aftexport.operators.mechanisms import OPERATORS, MechanismOperator

_TORCH_TYPES = {int: "int", float: "float", str: "str"}


@dataclass(frozen=True, kw_only=True)
class Operator(MechanismOperator):
    """An operator of a mechanism, which PyTorch models call.

    Attributes:
        reference: the definition in plain PyTorch. In float64 it is the reference for every other
            form.
        compute: the fast form that the torch op runs; differentiable, and exact
            for every finite input.
        torch_op: the overload that ``torch.export`` records. Its arguments are the inputs
            and then the attributes.
    """

    reference: Callable[..., Tensor]
    compute: Callable[..., Tensor]
    torch_op: OpOverload


def register_pair(
    op_type: str,
    *,
    check: Callable[..., None],
    compute: Callable[..., Tensor],
    reference: Callable[..., Tensor],
) -> tuple[Operator, Operator]:
    """Register a mechanism and its causal twin in torch, and return them.

    The functions take the inputs in order and the attributes by name; ``compute`` and ``reference``
    take ``causal`` as well.

    Args:
        op_type: the name of the ONNX operator that is not causal.
        check: the validation of shapes, which raises ``ValueError``; it runs on real and on
            symbolic shapes. Its first arguments are the name of the operator and ``causal``.
        compute: the fast form, differentiable, exact for every finite input.
        reference: the definition.
    """

    def register(name: str) -> Operator:
        operator = OPERATORS[name]
        causal = operator.is_causal
        ours = partial(compute, causal=causal)
        return Operator(
            **{field.name: getattr(operator, field.name) for field in fields(operator)},
            reference=partial(reference, causal=causal),
            compute=ours,
            torch_op=_TorchOp(operator, check, ours).register(),
        )

    return register(op_type), register(f"Causal{op_type}")


class _TorchOp:
    """The torch op of an operator; it takes inputs, then attributes."""

    def __init__(
        self,
        operator: MechanismOperator,
        check: Callable[..., None],
        compute: Callable[..., Tensor],
    ) -> None:
        self._operator = operator
        self._op_type = operator.op_type
        self._check = partial(check, operator.op_type, operator.is_causal)
        self._compute = compute
        self._count = len(operator.inputs)

    def register(self) -> OpOverload:
        name = _snake_case(self._op_type)
        parameters = [f"Tensor {i}" for i in self._operator.inputs]
        parameters += [
            f"{_TORCH_TYPES[type(a.default)]} {a.name}" for a in self._operator.attributes
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
        return (*gradients, None, *(None for _ in self._operator.attributes))

    def _split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return the inputs, and the attributes by name; raise ValueError if one is invalid."""
        operator = self._operator
        for name, tensor in zip(operator.inputs[:-1], arguments, strict=False):
            if not tensor.is_floating_point():  # the result has the query's type
                raise ValueError(
                    f"{self._op_type}: {name} must be floating-point, got type {tensor.dtype}"
                )
        values = arguments[self._count :]
        named = {a.name: v for a, v in zip(operator.attributes, values, strict=True)}
        for attribute in operator.attributes:
            value = named[attribute.name]
            if attribute.choices and value not in attribute.choices:
                raise ValueError(
                    f"{self._op_type}: {attribute.name} must be one of "
                    f"{', '.join(attribute.choices)}, got {value!r}"
                )
        return arguments[: self._count], named


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
