"""The torch op of an operator of a mechanism."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from aftexport.operators.mechanisms import OPERATORS, SINGLE_OPERATORS, MechanismOperator
from aftexport.operators.numerics import (
    Sums,
    apply_gate,
    check_heads,
    check_lengths,
    guarded_mean,
)
from aftexport.operators.schema import INTEGER_INPUTS, LOG_SUM_OUTPUT, Attribute
from aftexport.system.internals.torch_operators import OpOverload

_TORCH_TYPES = {int: "int", float: "float", str: "str"}
Shapes = Sequence[Sequence[int | torch.SymInt]]


@dataclass(frozen=True, kw_only=True)
class Operator(MechanismOperator):
    """An operator of a mechanism, which PyTorch models call."""

    # Definition and fast form return a tensor, or a tuple if there are several outputs.

    reference: Callable[..., Any]  # the definition; in float64 the reference of every other form
    # the fast form of the torch op: differentiable, exact for every finite input
    compute: Callable[..., Any]
    torch_op: OpOverload  # the overload that torch.export records: inputs, then attributes


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The inputs and attributes of one call of an operator, and its formulas."""

    # A mechanism's subclass has fields named as inputs and attributes. Absent inputs are None.

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
    """A call with query, key and value."""

    # The output has the shape of the query if the subclass does not say otherwise.

    query: Tensor  # [B, T, D], as are key and value
    key: Tensor
    value: Tensor
    lengths: Tensor  # int64 [B]

    def shapes(self) -> Shapes:
        """Return the shape of each output."""
        return (self.query.shape,)

    def empty(self) -> Any:
        """Return the outputs for inputs without numbers."""
        (shape,) = self.shapes()
        return self.query.new_zeros(shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class TwinCall(SequenceCall):
    """A call of a mechanism that has a causal twin."""

    causal: bool  # whether a row sees only the keys up to its own position


@dataclass(frozen=True, kw_only=True, eq=False)
class BiasedCall(TwinCall):
    """A call of an attention-free mechanism, whose keys have biases."""

    gate: str
    eps: float  # added to each sum of weights

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the masked keys, the values and the biases."""
        raise NotImplementedError

    def means(self, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """Return the definition's means, row by row."""
        raise NotImplementedError

    def sums(self, key: Tensor, value: Tensor, bias: Tensor) -> Sums:
        """Return the sums of a fast form, in which keys and biases have maxima of their own."""
        raise NotImplementedError

    def reference(self) -> Tensor:
        """Compute the definition, row by row."""
        return apply_gate(self.gate, self.query, self.means(*self.operands()).flatten(2))

    def compute(self) -> Tensor:
        """Compute ``reference`` by the sums, or by the means if the sums lose terms."""
        mean = guarded_mean(self.sums, self.means, *self.operands())
        return apply_gate(self.gate, self.query, mean.flatten(2))


def register_pair(op_type: str, call: type[TwinCall]) -> tuple[Operator, Operator]:
    """Register a mechanism and its causal twin in torch, and return them."""

    def register(name: str, *, causal: bool) -> Operator:
        return _register(OPERATORS[name], partial(call, op_type=name, causal=causal))

    return register(op_type, causal=False), register(f"Causal{op_type}", causal=True)


def register_single(op_type: str, call: type[Call]) -> Operator:
    """Register an operator without a causal twin in torch, and return it."""
    # call.compute returns no tensor that shares memory with an input.
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
    return call.empty()


class _TorchOp:
    """The torch op of an operator:

    inputs, attributes, and optional inputs after the required ones.
    """

    # These inputs, and the attributes that only the CPU kernels take, have defaults.

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
        types = self._types(narrow)
        return tuple(r.to(t).contiguous() for r, t in zip(results, types, strict=True))

    def _types(self, narrow: torch.dtype) -> list[torch.dtype]:
        """Return the type of each output: that of the query, or at least float32."""
        wide = torch.promote_types(narrow, torch.float32)
        return [wide if name == LOG_SUM_OUTPUT else narrow for name in self._operator.outputs]

    def _fake(self, *arguments: Any) -> Any:
        tensors, named = self._split(arguments)
        call = self._call(*tensors, **named)
        call.check()
        types = self._types(arguments[0].dtype)
        results = [
            arguments[0].new_empty(shape, dtype=dtype)
            for shape, dtype in zip(call.shapes(), types, strict=True)
        ]
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
    """Return the gradient of each leaf, or None; if ``again``, they have gradients."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedHeadsCall(SequenceCall):
    """A call with H heads of the query ``[B, T, H * d]`` and G heads of key and value."""

    # key is [B, S, G * d], and value [B, S, G * e]; e is d if kv_num_heads is 0.

    key_lengths: Tensor | None = None  # int64 [B], the counted keys; None for lengths, and S is T
    num_heads: int
    kv_num_heads: int  # G; 0 for H

    @property
    def kv_heads(self) -> int:
        """The number of heads of key and value."""
        return self.kv_num_heads or self.num_heads

    @property
    def counted(self) -> Tensor:
        """The number of keys of each document."""
        return self.lengths if self.key_lengths is None else self.key_lengths

    def shapes(self) -> Shapes:
        """Return the shape of the output, which has ``num_heads`` heads of the value's width."""
        width = self.value.shape[2] // self.kv_heads
        return ((*self.query.shape[:2], width * self.num_heads),)

    def check(self) -> None:
        """Check the shapes; see ``Call``."""
        op_type, query, key, value = self.op_type, self.query, self.key, self.value
        if query.dim() != 3:
            raise ValueError(
                f"{op_type}: query must be [batch, tokens, channels], "
                f"got shape {tuple(query.shape)}"
            )
        check_heads(op_type, query, self.num_heads)
        groups = self.kv_heads
        if groups < 1 or self.num_heads % groups:
            raise ValueError(
                f"{op_type}: kv_num_heads must divide num_heads {self.num_heads}, "
                f"got {self.kv_num_heads}"
            )
        batch, tokens, channels = query.shape
        if self.key_lengths is not None:
            check_lengths(op_type, query, self.key_lengths, "key_lengths")
            tokens = key.shape[1] if key.dim() == 3 else tokens
        width = channels // self.num_heads * groups
        if key.shape != (batch, tokens, width):
            raise ValueError(
                f"{op_type}: key must be [{batch}, {tokens}, {width}] for the query's shape "
                f"{tuple(query.shape)}, got shape {tuple(key.shape)}"
            )
        if value.dim() != 3 or value.shape[:2] != key.shape[:2] or value.shape[2] % groups:
            raise ValueError(
                f"{op_type}: value must be [{batch}, {tokens}, a multiple of {groups}], "
                f"got shape {tuple(value.shape)}"
            )
        if not self.kv_num_heads and value.shape[2] != width:
            raise ValueError(
                f"{op_type}: value must have the {width} channels of key, got {value.shape[2]}; "
                f"give kv_num_heads {self.num_heads} for values of another width"
            )
        check_lengths(op_type, query, self.lengths)
