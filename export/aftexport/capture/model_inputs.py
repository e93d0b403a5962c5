"""The inputs of a module, and the parameters of its forward for them."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from aftexport.errors import TraceError, UsageError
from aftexport.extra_inputs import KINDS, ExtraInput
from aftexport.system.contract import AXES, FEATURES, IDS, LENGTHS, MAX_FEATURES, main_input


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a module."""

    names: tuple[str, ...]  # names of the inputs, one of ``contract.INPUTS`` and the extra inputs
    num_features: int | None = None  # number of features of a token; None for a model of token ids
    extras: tuple[ExtraInput, ...] = ()

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """The names of the dynamic axes of each input."""
        axes = AXES | {extra.name: extra.axes for extra in self.extras}
        return {name: axes[name] for name in self.names}

    def examples(self, tokens: int) -> dict[str, Tensor]:
        """Return the inputs for two documents of ``tokens`` tokens."""
        inputs = {
            IDS: torch.zeros(2, tokens, dtype=torch.int64),
            FEATURES: torch.zeros(2, tokens, self.num_features or 0),
            LENGTHS: torch.full((2,), tokens, dtype=torch.int64),
            **{extra.name: torch.from_numpy(extra.zeros(2, tokens)) for extra in self.extras},
        }
        return {name: inputs[name] for name in self.names}


def features_of(module: nn.Module, asked: int | None = None) -> int | None:
    """Return the declared number of features of a token; None for a model of token ids.

    The module declares it by its own ``num_features`` or that of its config, unless its forward
    takes ``input_ids``. ``asked`` is the number by ``--features`` or ``--feature-file``.

    Raises:
        UsageError: if the number is outside the bounds, or differs from the module's own.
    """
    declared = _declared(module)
    if asked is not None and declared is not None and asked != declared:
        raise UsageError(
            f"The number of features must be {declared}, the num_features of the model, got "
            f"{asked}.",
            "Correct --features or --feature-file, or leave it out.",
        )
    number = declared if asked is None else asked
    if number is not None and not 1 <= number <= MAX_FEATURES:
        raise UsageError(
            f"The number of features must be from 1 to {MAX_FEATURES}, got {number}.",
            "Give such a number by --features.",
        )
    return number


def _declared(module: nn.Module) -> int | None:
    parameters = inspect.signature(module.forward).parameters
    if IDS in parameters and FEATURES not in parameters:
        return None
    for owner in (module, getattr(module, "config", None)):
        number = getattr(owner, "num_features", None)
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    return None


MASK = "attention_mask"
"""The parameter with a mask, int64 ``[batch, tokens]``: 1 for a token, 0 for padding."""
_PADDING_NAME = re.compile(r"mask|(?<!max_)(?<!min_)len(s|gth|gths)?(_|$)")
"""Names of parameters that describe the padding of a batch."""
_FEATURE_NAMES = (FEATURES, "inputs_embeds")
"""Names of parameters that take features, never ids."""
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class ForwardSignature:
    """The arguments of a forward for the inputs of an exported model."""

    # ``input_ids`` or ``input_features`` and, if the forward takes them or a mask of padding,
    # ``lengths``; then the extra inputs
    inputs: tuple[str, ...]
    is_plain: bool  # whether these are its first parameters, by these names
    positional: tuple[Any, ...]  # the arguments by position, inputs or values of defaults
    keywords: dict[str, str]  # parameters that are passed by name, with the input of each
    left_out: tuple[str, ...]  # parameters of padding that stay at their defaults

    @classmethod
    def of(
        cls,
        forward: Callable[..., Any],
        *,
        features: bool = False,
        # Whether a forward without ``lengths`` gets a mask as ``attention_mask``.
        mask: bool = True,
        # The names of the extra inputs, which are parameters of the forward.
        extras: Sequence[str] = (),
    ) -> Self:
        """Read a forward's parameters: the tokens go to the parameter of that name, or the first.

        Raises:
            TraceError: if the forward needs other arguments.
        """
        parameters = [*inspect.signature(forward).parameters.values()]
        fixed = [p for p in parameters if p.kind not in _VARIABLE]
        main = FEATURES if features else IDS
        roles = _padding_roles(fixed, mask=mask) | _extra_roles(fixed, extras)
        remaining = [p for p in fixed if p.name not in extras]
        if (tokens := _main_parameter(remaining, features=features)) is not None:
            roles[tokens.name] = main
        others = [p for p in fixed if p.name not in roles]
        takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        if any(p.default is p.empty for p in others) or not (takes_any or main in roles.values()):
            raise _unusual(parameters, main)
        lengths = [LENGTHS] if {LENGTHS, MASK} & set(roles.values()) else []
        inputs = (main, *lengths, *extras)
        names = [p.name for p in fixed if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        return cls(
            inputs,
            tuple(names[: len(inputs)]) == inputs,
            _by_position(fixed, roles) if tokens is not None else (_Input(main),),
            {p.name: roles[p.name] for p in fixed if _is_named(p) and p.name in roles},
            (
                *(p.name for p in others if _PADDING_NAME.search(p.name)),
                # A forward may read lengths from its keywords, which are not passed.
                *(
                    f"**{p.name}"
                    for p in parameters
                    if p.kind is inspect.Parameter.VAR_KEYWORD and LENGTHS not in inputs
                ),
            ),
        )

    @classmethod
    def for_inputs(cls, forward: Callable[..., Any], inputs: Collection[str]) -> Self:
        """Return the signature with which a forward was exported for these inputs."""
        extras = [name for name in inputs if name not in AXES]
        return cls.of(forward, features=FEATURES in inputs, mask=LENGTHS in inputs, extras=extras)

    @property
    def has_mask(self) -> bool:
        """Whether the forward gets a mask of padding instead of lengths."""
        given = (*self.keywords.values(), *(a.name for a in self.positional if _is_input(a)))
        return MASK in given


@dataclass(frozen=True)
class _Input:
    """The place of an input among the arguments."""

    name: str


def _is_input(argument: Any) -> bool:
    return isinstance(argument, _Input)


def _padding_roles(fixed: list[inspect.Parameter], *, mask: bool) -> dict[str, str]:
    names = [p.name for p in fixed]
    if LENGTHS in names:
        return {LENGTHS: LENGTHS}
    return {MASK: MASK} if mask and MASK in names else {}


def _extra_roles(fixed: list[inspect.Parameter], extras: Sequence[str]) -> dict[str, str]:
    names = [p.name for p in fixed]
    for name in extras:
        if name not in names:
            raise TraceError(
                f"Expected a forward with the parameter {name!r} of --input, got parameters "
                f"({', '.join(names)}).",
                "Correct the name, or leave the option out.",
            )
    return {name: name for name in extras}


def _main_parameter(fixed: list[inspect.Parameter], *, features: bool) -> inspect.Parameter | None:
    """Return the parameter of the tokens; None for a forward that takes any arguments.

    Raises:
        TraceError: if the parameter takes features of an unknown number, or ids in their place.
    """
    by_name = {p.name: p for p in fixed}
    first = fixed[0] if fixed else None
    if features:
        named = (by_name[name] for name in _FEATURE_NAMES if name in by_name)
        chosen = next(named, first)
        if chosen is not None and chosen.name == IDS:
            raise TraceError(
                f"Expected a forward that takes features, got the parameter {IDS}.",
                "Leave --features out, or rename the parameter to input_features.",
            )
        return chosen
    chosen = by_name.get(IDS, first)
    if chosen is not None and chosen.name in _FEATURE_NAMES:
        raise TraceError(
            f"Expected the number of features of each token for the parameter {chosen.name}, got "
            "none.",
            "Add --features N, or set num_features in the module or in its config.",
        )
    return chosen


def _unusual(parameters: list[inspect.Parameter], main: str) -> TraceError:
    shape = "[batch, tokens, features]" if main == FEATURES else "[batch, tokens]"
    return TraceError(
        f"Expected a forward that takes {main} and optionally lengths, got parameters "
        f"({', '.join(p.name for p in parameters)}).",
        f"Wrap it in a module whose forward takes ({main} {shape}, lengths [batch]), or declare "
        f"each further input by --input NAME=KIND, where KIND is {KINDS}.",
    )


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


def _by_position(fixed: list[inspect.Parameter], roles: dict[str, str]) -> tuple[Any, ...]:
    """Return the arguments of the positional-only parameters."""
    nameless = [p for p in fixed if not _is_named(p)]
    while nameless and nameless[-1].name not in roles:
        nameless.pop()
    return tuple(_Input(roles[p.name]) if p.name in roles else p.default for p in nameless)


def with_plain_inputs(module: nn.Module, inputs: Collection[str]) -> nn.Module:
    """Return a module whose forward takes the inputs of an exported model, in their order.

    Raises:
        TraceError: if its forward needs other arguments.
    """
    signature = ForwardSignature.for_inputs(module.forward, inputs)
    # A wrapper converts floats, which are float32 in every model, to the type of the weights.
    if signature.is_plain and {IDS, LENGTHS}.issuperset(signature.inputs):
        return module
    return _wrapper(signature.inputs)(module, signature)


class _PlainInputs(nn.Module):
    """A wrapper of a module whose inputs have other names, another order or another type."""

    def __init__(self, module: nn.Module, signature: ForwardSignature) -> None:
        super().__init__()
        self.module = module
        self._signature = signature
        self._padding = _padding_id(module) if signature.has_mask else None

    def _call(self, inputs: dict[str, Tensor]) -> Any:
        signature = self._signature
        main = main_input(inputs)
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                inputs[name] = tensor.to(float_type(self.module))
        if signature.has_mask:
            positions = torch.arange(inputs[main].shape[1], device=inputs[main].device)
            inputs[MASK] = (positions < inputs[LENGTHS].unsqueeze(1)).to(torch.int64)
            if main == IDS and self._padding is not None:
                padding = torch.full_like(inputs[IDS], self._padding)
                inputs[IDS] = torch.where(inputs[MASK] > 0, inputs[IDS], padding)
        arguments = [inputs[a.name] if _is_input(a) else a for a in signature.positional]
        named = {name: inputs[role] for name, role in signature.keywords.items()}
        with _given_mask(inputs[MASK]) if signature.has_mask else nullcontext():
            return self.module(*arguments, **named)


def _padding_id(module: nn.Module) -> int | None:
    """Return the id of padding in the configuration of a model of transformers, None without one.

    Some of these models search for it, although they get a mask.
    """
    for part in module.modules():
        config = getattr(part, "config", None)
        padding, rows = (getattr(config, name, None) for name in ("pad_token_id", "vocab_size"))
        if isinstance(padding, int) and isinstance(rows, int) and 0 <= padding < rows:
            return padding
    return None


def float_type(module: nn.Module) -> torch.dtype:
    """Return the floating-point type of a module's weights; float32 without any."""
    types = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(types, torch.float32)


def _wrapper(names: tuple[str, ...]) -> type[_PlainInputs]:
    """Return a wrapper whose forward has parameters of these names, which torch.export reads."""

    def forward(self: _PlainInputs, *inputs: Tensor) -> Any:
        return self._call(dict(zip(names, inputs, strict=True)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type("PlainInputs", (_PlainInputs,), {"forward": forward})


_GIVEN = ContextVar[Tensor | None]("given_mask", default=None)
"""The mask of the running forward; each thread has its own."""


@contextmanager
def _given_mask(mask: Tensor) -> Iterator[None]:
    """Note the mask that a forward receives, during the block."""
    before = _GIVEN.set(mask)
    try:
        yield
    finally:
        _GIVEN.reset(before)


def is_given_mask(mask: Tensor) -> bool:
    """Return whether a tensor is the mask that the forward received, unchanged.

    It is then 1 for the first tokens of a document, and 0 for the padding after them.
    """
    return mask is _GIVEN.get()
