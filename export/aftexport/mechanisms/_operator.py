"""What makes a mechanism an operator: its torch op, its ONNX schema, its portable body."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import onnx.parser
import torch
from onnx.defs import OpSchema
from torch import Tensor

from aftexport.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION

AttributeValue = int | float | str

_TORCH_TYPES = {int: "int", float: "float", str: "str"}
_TENSOR_TYPES = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]


@dataclass(frozen=True)
class Attribute:
    """An operator attribute.

    ``choices`` marks a setting: its value selects the body, because an ONNX
    function cannot branch on an attribute.
    """

    name: str
    default: AttributeValue
    doc: str
    choices: tuple[str, ...] = ()


GATE = Attribute(
    "gate",
    "sigmoid",
    "Function of the query that multiplies the result; none leaves the query out.",
    ("sigmoid", "tanh", "none"),
)
NUM_HEADS = Attribute("num_heads", 1, "Number of heads; divides the channels of query and value.")


@dataclass(frozen=True)
class Operator:
    """One operator of the ``ai.aftexport`` domain.

    Attributes:
        op_type: ONNX name, for example ``CausalAftLocal``.
        stem: the mechanism's file name, for example ``aft_local``.
        inputs: names in order; the last is ``lengths``, int64 ``[B]``.
        shapes: of each input, axis names separated by spaces.
        exponents: the inputs an exponential is taken of: their range is what strains the numerics.
        attributes: in the order of the torch op's arguments.
        compute: what the torch op runs: the fast form, differentiable, exact
            for every finite input.
        reference: the definition in plain PyTorch; in float64 it is the truth
            every other form is judged by.
        body: settings to the portable body, in ONNX textual syntax.
        torch_op: the overload that ``torch.export`` records.
    """

    op_type: str
    stem: str
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]
    exponents: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    compute: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    body: Callable[..., str]
    torch_op: torch._ops.OpOverload
    doc: str

    @property
    def settings(self) -> tuple[Attribute, ...]:
        """The attributes whose value selects the body."""
        return tuple(a for a in self.attributes if a.choices)

    def function(self, settings: Mapping[str, str], opset: int) -> onnx.FunctionProto:
        """Builds the portable body as a model-local function in standard ops of ``opset``."""
        declared = {a.name: a.default for a in self.attributes} | dict(settings) | PLUGIN_ATTRIBUTES
        attributes = ", ".join(_declaration(name, value) for name, value in declared.items())
        chosen = {a.name: settings[a.name] for a in self.settings}
        text = (
            f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n'
            f"{self.op_type} <{attributes}> ({', '.join(self.inputs)}) => (output)\n"
            f"{{{self.body(**chosen)}}}"
        )
        return onnx.parser.parse_function(text)

    def schema(self) -> OpSchema:
        """Builds the ONNX schema: names, types and documentation in one place."""
        parameter = OpSchema.FormalParameter
        attributes = [
            OpSchema.Attribute(a.name, onnx.helper.make_attribute(a.name, a.default), a.doc)
            for a in self.attributes
        ] + [
            OpSchema.Attribute(
                name, onnx.helper.make_attribute(name, value), "Where TensorRT finds the plugin."
            )
            for name, value in PLUGIN_ATTRIBUTES.items()
        ]
        return OpSchema(
            self.op_type,
            DOMAIN,
            VERSION,
            doc=self.doc,
            inputs=[
                parameter(name, "tensor(int64)" if name == "lengths" else "T", f"[{shape}]")
                for name, shape in zip(self.inputs, self.shapes, strict=True)
            ],
            outputs=[parameter("output", "T")],
            type_constraints=[("T", _TENSOR_TYPES, "Floating-point tensors of one type.")],
            attributes=attributes,
        )


def _declaration(name: str, value: AttributeValue) -> str:
    if isinstance(value, str):
        return f'{name}: string = "{value}"'
    return f"{name}: {'int' if isinstance(value, int) else 'float'} = {value}"


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
) -> tuple[Operator, Operator]:
    """Defines a mechanism's operator and its causal twin, in torch and in ONNX.

    ``check``, ``compute`` and ``reference`` take the inputs in order and the
    attributes by name; ``compute``, ``reference`` and ``body`` take ``causal``
    as well. ``check`` raises ``ValueError`` for shapes that do not fit; it runs
    on real and on symbolic shapes.
    """
    one = partial(_define_one, op_type, stem, inputs, shapes, exponents, attributes, check)
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
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in floats]
            output = forward(*leaves, lengths, *ctx.attributes)
        gradients = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
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
        op_type,
        stem,
        inputs,
        shapes,
        exponents,
        attributes,
        partial(compute, causal=causal),
        partial(reference, causal=causal),
        partial(body, causal=causal),
        getattr(torch.ops.aftexport, name).default,
        doc,
    )
    onnx.defs.register_schema(operator.schema())
    return operator


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
