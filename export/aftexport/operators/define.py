"""What makes a mechanism an operator: its torch op beside its ONNX schema and body."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import torch
from torch import Tensor

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
    """The operator of a mechanism, which PyTorch models call.

    Attributes:
        stem: the mechanism's file name, for example ``aft_local``.
        compute: what the torch op runs: the fast form, differentiable, exact
            for every finite input.
        torch_op: the overload that ``torch.export`` records; takes the inputs
            and then the attributes.
    """

    stem: str
    reference: Callable[..., Tensor]
    compute: Callable[..., Tensor]
    torch_op: torch._ops.OpOverload


def define(
    op_type: str,
    *,
    stem: str,
    inputs: tuple[str, ...],
    shapes: tuple[str, ...],
    exponents: tuple[str, ...],
    attributes: tuple[Attribute, ...],
    check: Callable[..., None],
    compute: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    body: Callable[..., str],
    doc: str,
    kernel_attributes: tuple[Attribute, ...] = (),
) -> tuple[Operator, Operator]:
    """Defines a mechanism's operator and its causal twin, in torch and in ONNX.

    ``check``, ``compute`` and ``reference`` take the inputs in order and the
    attributes by name; ``compute``, ``reference`` and ``body`` take ``causal``
    as well. ``check`` raises ``ValueError`` for shapes that do not fit; it runs
    on real and on symbolic shapes. The ONNX operator has the ``kernel_attributes``,
    the torch op has not.
    """
    one = partial(
        _define_one, op_type, stem, inputs, shapes, exponents, attributes, kernel_attributes, check
    )
    return (
        one(compute, reference, body, doc, causal=False),
        one(compute, reference, body, doc, causal=True),
    )


def _define_one(
    op_type: str,
    stem: str,
    inputs: tuple[str, ...],
    shapes: tuple[str, ...],
    exponents: tuple[str, ...],
    attributes: tuple[Attribute, ...],
    kernel_attributes: tuple[Attribute, ...],
    check: Callable[..., None],
    compute: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    body: Callable[..., str],
    doc: str,
    *,
    causal: bool,
) -> Operator:
    if causal:
        op_type = f"Causal{op_type}"
        doc += " Causal: only keys up to the query's own position count."
    num_inputs = len(inputs)

    def split(arguments: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        for tensor_name, tensor in zip(inputs[:-1], arguments, strict=False):
            if not tensor.is_floating_point():  # the result is of the query's type
                raise ValueError(
                    f"{op_type}: {tensor_name} is of type {tensor.dtype}; it must be floating-point"
                )
        named = {a.name: v for a, v in zip(attributes, arguments[num_inputs:], strict=True)}
        for attribute in attributes:
            value = named[attribute.name]
            if attribute.choices and value not in attribute.choices:
                raise ValueError(
                    f"{op_type}: {attribute.name} is {value!r}; "
                    f"it must be one of {', '.join(attribute.choices)}"
                )
        return arguments[:num_inputs], named

    def forward(*arguments: Any) -> Tensor:
        tensors, named = split(arguments)
        check(op_type, causal, *tensors, **named)
        query = tensors[0]
        if not query.numel():  # there is no maximum of no tokens
            return query.clone(memory_format=torch.contiguous_format)
        # Sums over tokens in 16 bits lose the result: everything inside is float32 or better.
        wide = torch.promote_types(query.dtype, torch.float32)
        *floats, lengths = tensors
        result = compute(*(t.to(wide) for t in floats), lengths, causal=causal, **named)
        return result.to(query.dtype).contiguous()

    def fake(*arguments: Any) -> Tensor:
        tensors, named = split(arguments)
        check(op_type, causal, *tensors, **named)
        return torch.empty_like(tensors[0], memory_format=torch.contiguous_format)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:num_inputs])
        ctx.attributes = inputs[num_inputs:]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Recomputing costs a forward pass and keeps no activation of the op alive.
        *floats, lengths = ctx.saved_tensors
        again = torch.is_grad_enabled()  # the gradients are to have gradients, by create_graph
        with torch.enable_grad():
            leaves = [
                t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_()
                for t in floats
            ]
            output = forward(*leaves, lengths, *ctx.attributes)
        gradients = torch.autograd.grad(
            output, leaves, gradient, allow_unused=True, create_graph=again
        )
        return (*gradients, None, *(None for _ in attributes))

    name = _snake_case(op_type)
    parameters = [f"Tensor {i}" for i in inputs]
    parameters += [f"{_TORCH_TYPES[type(a.default)]} {a.name}" for a in attributes]
    custom_op = torch.library.custom_op(
        f"aftexport::{name}",
        forward,
        mutates_args=(),
        schema=f"({', '.join(parameters)}) -> Tensor",
    )
    custom_op.register_fake(fake)
    custom_op.register_autograd(backward, setup_context=setup_context)

    operator = Operator(
        op_type=op_type,
        inputs=inputs,
        shapes=shapes,
        exponents=exponents,
        attributes=attributes,
        kernel_attributes=kernel_attributes,
        reference=partial(reference, causal=causal),
        body=partial(body, causal=causal),
        doc=doc,
        stem=stem,
        compute=partial(compute, causal=causal),
        torch_op=getattr(torch.ops.aftexport, name).default,
    )
    onnx.defs.register_schema(operator.schema())
    return operator


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
