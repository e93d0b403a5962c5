"""The torch op of an operator of a mechanism."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from aftexport.operators.mechanisms import OPERATORS, SINGLE_OPERATORS, MechanismOperator
from aftexport.operators.schema import INTEGER_INPUTS, Attribute
from aftexport.system.internals.torch_operators import OpOverload

_TORCH_TYPES = {int: "int", float: "float", str: "str"}
Shapes = Sequence[Sequence[int | torch.SymInt]]


@dataclass(frozen=True, kw_only=True)
class Operator(MechanismOperator):
    """An operator of a mechanism, which PyTorch models call.

    The definition and the fast form return a tensor, or a tuple if there are several outputs.

    Attributes:
        reference: the definition in plain PyTorch. In float64 it is the reference for every other
            form.
        compute: the fast form that the torch op runs; differentiable, and exact
            for every finite input.
        torch_op: the overload that ``torch.export`` records. Its arguments are the inputs
            and then the attributes.
    """

    reference: Callable[..., Any]
    compute: Callable[..., Any]
    torch_op: OpOverload


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The inputs and attributes of one call of an operator, and its formulas.

    A mechanism has a subclass, whose fields are named as the inputs and attributes of the operator.
    Absent inputs are None.
    """

    op_type: str

    def check(self) -> None:
        """Raise ValueError for bad shapes or attributes; it runs on symbolic shapes too."""
        raise NotImplementedError

    def shapes(self) -> Shapes:
        """Return the shape of each output."""
        raise NotImplementedError

    def compute(self) -> Any:
        """Compute the fast form: differentiable, and exact for every finite input."""
        raise NotImplementedError

    def reference(self) -> Any:
        """Compute the definition."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceCall(Call):
    """A call with query, key and value.

    Attributes:
        query: ``[B, T, D]``, like key, value and output if the subclass does not say otherwise.
        lengths: int64 ``[B]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    lengths: Tensor

    def shapes(self) -> Shapes:
        """Return the shape of each output."""
        return (self.query.shape,)


@dataclass(frozen=True, kw_only=True, eq=False)
class TwinCall(SequenceCall):
    """A call of a mechanism that has a causal twin, whose rows see the keys up to their own."""

    causal: bool


def register_pair(op_type: str, call: type[TwinCall]) -> tuple[Operator, Operator]:
    """Register a mechanism and its causal twin in torch, and return them.

    Args:
        op_type: the name of the ONNX operator that is not causal.
        call: the record of a call.
    """

    def register(name: str, *, causal: bool) -> Operator:
        return _register(OPERATORS[name], partial(call, op_type=name, causal=causal))

    return register(op_type, causal=False), register(f"Causal{op_type}", causal=True)


def register_single(op_type: str, call: type[Call]) -> Operator:
    """Register an operator without a causal twin in torch, and return it.

    ``call.compute`` returns no tensor that shares memory with an input.
    """
    return _register(SINGLE_OPERATORS[op_type], partial(call, op_type=op_type))


def _register(operator: MechanismOperator, call: Callable[..., Call]) -> Operator:
    def made(*tensors: Tensor | None, **named: Any) -> Call:
        return call(**dict(zip(operator.inputs, tensors, strict=False)), **named)

    def reference(*tensors: Tensor | None, **named: Any) -> Any:
        return made(*tensors, **named).reference()

    def compute(*tensors: Tensor | None, **named: Any) -> Any:
        return _computed(made(*tensors, **named))

    return Operator(
        **{field.name: getattr(operator, field.name) for field in fields(operator)},
        reference=reference,
        compute=compute,
        torch_op=_TorchOp(operator, made).register(),
    )


def _computed(call: Call) -> Any:
    """Compute ``call``, or zeros for empty inputs: an empty tensor has no maximum."""
    if not isinstance(call, SequenceCall):  # those with states take tensors without tokens
        return call.compute()
    if call.query.numel() and call.key.numel() and call.value.numel():
        return call.compute()
    (shape,) = call.shapes()
    return call.query.new_zeros(shape)


class _TorchOp:
    """The torch op of an operator.

    It takes the inputs, then the attributes, and then the optional inputs after the last required
    one. These inputs, and the attributes that only the CPU kernels take, have defaults.
    """

    def __init__(self, operator: MechanismOperator, call: Callable[..., Call]) -> None:
        self._operator, self._call = operator, call
        self._op_type = operator.op_type
        required = [i for i, n in enumerate(operator.inputs) if n not in operator.optional]
        self._count = max(required) + 1
        self._trailing = operator.inputs[self._count :]

    def register(self) -> OpOverload:
        operator, name = self._operator, _snake_case(self._op_type)
        leading = operator.inputs[: self._count]
        parameters = [f"Tensor{'?' * (i in operator.optional)} {i}" for i in leading]
        parameters += [_parameter(a) for a in operator.attributes]
        parameters += [f"Tensor? {i}=None" for i in self._trailing]
        results = ", ".join("Tensor" for _ in operator.outputs)
        results = f"({results})" if len(operator.outputs) > 1 else results
        custom_op = torch.library.custom_op(
            f"aftexport::{name}",
            self._forward,
            mutates_args=(),
            schema=f"({', '.join(parameters)}) -> {results}",
        )
        custom_op.register_fake(self._fake)
        custom_op.register_autograd(self._backward, setup_context=self._setup_context)
        overload: OpOverload = getattr(torch.ops.aftexport, name).default
        return overload

    def _forward(self, *arguments: Any) -> Any:
        tensors, named = self._split(arguments)
        self._call(*tensors, **named).check()
        narrow = arguments[0].dtype
        # Compute in float32 or wider: sums over tokens in 16 bits lose the result.
        wide = torch.promote_types(narrow, torch.float32)
        widened = (t.to(wide) if _is_float(t) else t for t in tensors)
        results = _computed(self._call(*widened, **named))
        if isinstance(results, Tensor):
            return results.to(narrow).contiguous()
        return tuple(result.to(narrow).contiguous() for result in results)

    def _fake(self, *arguments: Any) -> Any:
        tensors, named = self._split(arguments)
        call = self._call(*tensors, **named)
        call.check()
        results = [arguments[0].new_empty(shape) for shape in call.shapes()]
        return tuple(results) if len(results) > 1 else results[0]

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        end = self._count + len(self._operator.attributes)
        ctx.save_for_backward(*inputs[: self._count], *inputs[end:])
        ctx.attributes = inputs[self._count : end]

    def _backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Recompute the output: this costs a forward pass, but keeps no activations alive.
        again = torch.is_grad_enabled()  # create_graph asks for gradients of the gradients
        with torch.enable_grad():
            tensors = [_leaf(t, again) if _is_float(t) else t for t in ctx.saved_tensors]
            leading, trailing = tensors[: self._count], tensors[self._count :]
            results = self._forward(*leading, *ctx.attributes, *trailing)
        outputs = (results,) if isinstance(results, Tensor) else results
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        leaves = [t for t in tensors if _is_float(t)]
        found = iter(_gradients(pairs, leaves, again))
        of_inputs = [next(found) if _is_float(t) else None for t in tensors]
        of_attributes = [None for _ in self._operator.attributes]
        return (*of_inputs[: self._count], *of_attributes, *of_inputs[self._count :])

    def _split(
        self, arguments: tuple[Any, ...]
    ) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """Return the inputs, and the attributes by name; raise ValueError if one is invalid."""
        operator = self._operator
        end = self._count + len(operator.attributes)
        defaults = (*(a.default for a in operator.attributes), *(None for _ in self._trailing))
        arguments += defaults[len(arguments) - self._count :]  # torch leaves defaults out
        tensors = (*arguments[: self._count], *arguments[end:])
        for name, tensor in zip(operator.inputs, tensors, strict=True):
            # The result has the query's type.
            if name not in INTEGER_INPUTS and tensor is not None and not _is_float(tensor):
                raise ValueError(
                    f"{self._op_type}: {name} must be floating-point, got type {tensor.dtype}"
                )
        values = arguments[self._count : end]
        named = {a.name: v for a, v in zip(operator.attributes, values, strict=True)}
        for attribute in operator.attributes:
            value = named[attribute.name]
            if attribute.choices and value not in attribute.choices:
                raise ValueError(
                    f"{self._op_type}: {attribute.name} must be one of "
                    f"{', '.join(attribute.choices)}, got {value!r}"
                )
        return tensors, named


def _parameter(attribute: Attribute) -> str:
    """Return the declaration of an attribute; one that only the CPU kernels take has a default."""
    declared = f"{_TORCH_TYPES[type(attribute.default)]} {attribute.name}"
    if not attribute.is_cpu_only:
        return declared
    value = attribute.default
    return f'{declared}="{value}"' if isinstance(value, str) else f"{declared}={value}"


def _is_float(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.is_floating_point()


def _gradients(
    pairs: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor], again: bool
) -> Sequence[Tensor | None]:
    """Return the gradient of each leaf; None if no output depends on it.

    Args:
        pairs: the outputs that depend on leaves, with their gradients.
        leaves: the inputs.
        again: whether the gradients have gradients.
    """
    if not pairs:  # the inputs are empty
        return [None for _ in leaves]
    outputs, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, create_graph=again)


def _leaf(tensor: Tensor, again: bool) -> Tensor:
    """Return ``tensor`` as an input of its own, whose gradient has a gradient if ``again``."""
    if again and tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
