"""The parameters of a forward, and modules that take only ``input_ids`` and ``lengths``."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aftexport.errors import TraceError

_PADDING_NAME = re.compile(r"mask|(?<!max_)(?<!min_)len(s|gth|gths)?(_|$)")
"""Names of parameters that describe the padding of a batch."""
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class ForwardSignature:
    """The arguments of a forward for the inputs of an exported model.

    Attributes:
        inputs: ``input_ids`` and, if the forward takes them, ``lengths``.
        is_plain: whether these are its first parameters, by these names.
        positional: the arguments by position, inputs or values of defaults.
        keywords: parameters that are passed by name, with the input of each.
        left_out: parameters of padding that stay at their defaults.
    """

    inputs: tuple[str, ...]
    is_plain: bool
    positional: tuple[Any, ...]
    keywords: dict[str, str]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> "ForwardSignature":
        """Read a forward's parameters: the ids are ``input_ids``, or else the first parameter.

        Raises:
            TraceError: if the forward needs arguments other than ids and ``lengths``.
        """
        parameters = [*inspect.signature(forward).parameters.values()]
        fixed = [p for p in parameters if p.kind not in _VARIABLE]
        ids = next((p for p in fixed if p.name == "input_ids"), fixed[0] if fixed else None)
        roles = {"lengths": "lengths"} if any(p.name == "lengths" for p in fixed) else {}
        if ids is not None:
            roles[ids.name] = "input_ids"
        others = [p for p in fixed if p.name not in roles]
        takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        if any(p.default is p.empty for p in others) or not (
            takes_any or "input_ids" in roles.values()
        ):
            raise TraceError(
                "Expected a forward that takes input_ids and optionally lengths, got parameters "
                f"({', '.join(p.name for p in parameters)}).",
                "Wrap it in a module whose forward takes (input_ids [batch, tokens], "
                "lengths [batch]).",
            )
        inputs = ("input_ids", *(["lengths"] if "lengths" in roles.values() else []))
        names = [p.name for p in fixed if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        return cls(
            inputs,
            tuple(names[: len(inputs)]) == inputs,
            _by_position(fixed, roles) if ids is not None else (_Input("input_ids"),),
            {p.name: roles[p.name] for p in fixed if _is_named(p) and p.name in roles},
            (
                *(p.name for p in others if _PADDING_NAME.search(p.name)),
                # A forward may read lengths from its keywords, which are not passed.
                *(
                    f"**{p.name}"
                    for p in parameters
                    if p.kind is inspect.Parameter.VAR_KEYWORD and "lengths" not in inputs
                ),
            ),
        )


@dataclass(frozen=True)
class _Input:
    """The place of an input among the arguments."""

    name: str


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


def _by_position(fixed: list[inspect.Parameter], roles: dict[str, str]) -> tuple[Any, ...]:
    """Return the arguments of the positional-only parameters."""
    nameless = [p for p in fixed if not _is_named(p)]
    while nameless and nameless[-1].name not in roles:
        nameless.pop()
    return tuple(_Input(roles[p.name]) if p.name in roles else p.default for p in nameless)


def with_plain_inputs(module: nn.Module) -> nn.Module:
    """Return a module whose forward takes ``input_ids`` and ``lengths``, in this order.

    Args:
        module: a module in Python, which is returned itself if its forward is plain already.

    Raises:
        TraceError: if its forward needs other arguments.
    """
    signature = ForwardSignature.of(module.forward)
    if signature.is_plain:
        return module
    return (_IdsAndLengths if "lengths" in signature.inputs else _IdsOnly)(module, signature)


class _PlainInputs(nn.Module):
    """A wrapper of a module whose inputs have other names or another order."""

    def __init__(self, module: nn.Module, signature: ForwardSignature) -> None:
        super().__init__()
        self.module = module
        self._signature = signature

    def _call(self, **inputs: Tensor) -> Any:
        signature = self._signature
        arguments = [inputs[a.name] if isinstance(a, _Input) else a for a in signature.positional]
        named = {name: inputs[role] for name, role in signature.keywords.items()}
        return self.module(*arguments, **named)


class _IdsOnly(_PlainInputs):
    def forward(self, input_ids: Tensor) -> Any:
        return self._call(input_ids=input_ids)


class _IdsAndLengths(_PlainInputs):
    def forward(self, input_ids: Tensor, lengths: Tensor) -> Any:
        return self._call(input_ids=input_ids, lengths=lengths)
