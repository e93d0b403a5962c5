"""Extra inputs of a model beside the tokens: numbers of a document, or an integer of each token."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError, model_validator

from aftexport.errors import UsageError
from aftexport.system.contract import AXES, EVIDENCE, MAX_FEATURES, MAX_VOCABULARY
from aftexport.system.validation import problem

Array = NDArray[Any]
MAX_INPUTS = 16
"""The maximum number of extra inputs of a model."""
KINDS = "number, vector:K, category, categories:K or token_category"
"""The kinds of ``--input``; a category may end in ``:N``, for integers below N, and a number or
vector in ``:MIN..MAX``, either of which may be left out."""
_DECIMAL = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
_LIMITS = re.compile(rf"({_DECIMAL})?\.\.({_DECIMAL})?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
TOKEN_TYPES = "token_type_ids"
"""The input of each token that tells the second text of a pair from the first."""
TEXT_PAIR = "text_pair"
"""The second text of a pair, in requests and in tables."""
_RESERVED = (
    *(*AXES, "attention_mask", "text", "texts", TEXT_PAIR),
    *("other_keys", "other_values"),
)
"""Names of other inputs of the model, of requests, and of the graphs of a long document."""


class ExtraInput(BaseModel):
    """The description of one extra input.

    Attributes:
        name: the name of the forward's parameter, and of the input in ONNX.
        kind: whether the model takes values of each document, or of each token.
        dtype: the type of the values.
        width: the number of values ``K`` of ``[batch, K]``; None for one value of each document
            or token.
        maximum: the largest integer; None for floats, or if it is not known yet.
        lowest, highest: the limits of floats; None for any finite number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    kind: Literal["document", "token"]
    dtype: Literal["float32", "int64"]
    width: Annotated[int, Ge(1), Le(MAX_FEATURES)] | None = None
    maximum: Annotated[int, Ge(0), Le(MAX_VOCABULARY - 1)] | None = None
    lowest: FiniteFloat | None = None
    highest: FiniteFloat | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                "name: expected up to 64 ASCII letters, digits and '_', the first not a digit, got "
                f"{self.name[:80]!r}"
            )
        if self.name in _RESERVED or self.name.startswith((EVIDENCE, "chunk_")):
            raise ValueError(
                f"name: expected another name than {', '.join(_RESERVED)} and those that begin "
                f"with {EVIDENCE} or chunk_, got {self.name!r}"
            )
        if self.kind == "token" and (self.dtype != "int64" or self.width is not None):
            raise ValueError("kind: expected one int64 of each token, without a width")
        if self.dtype == "float32" and self.maximum is not None:
            raise ValueError("maximum: expected none for float32")
        if self.dtype == "int64" and not self.lowest is self.highest is None:
            raise ValueError("lowest, highest: expected none for int64")
        lowest, highest = self._limits()
        if not lowest < highest:
            raise ValueError(f"lowest: expected less than {self.highest}, got {self.lowest}")
        return self

    def _limits(self) -> tuple[float, float]:
        """Return the limits of floats, in float32."""
        most = float(np.finfo(np.float32).max)
        limits = (self.lowest, -most), (self.highest, most)
        with np.errstate(over="ignore"):
            low, high = (float(np.float32(most if n is None else n)) for n, most in limits)
        return low, high

    @property
    def axes(self) -> dict[int, str]:
        """The names of the dynamic axes."""
        return {0: "batch", 1: "tokens"} if self.kind == "token" else {0: "batch"}

    @property
    def range(self) -> str:
        """The limits of floats, for messages; empty without limits."""
        ends = (("from", self.lowest), ("to", self.highest))
        return " ".join(f"{word} {end:g}" for word, end in ends if end is not None)

    @property
    def layout(self) -> str:
        """The type and the axes, for messages."""
        last = "tokens" if self.kind == "token" else self.width
        return f"{self.dtype} [batch{'' if last is None else f', {last}'}]"

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape for one document of ``tokens`` tokens, without the batch."""
        if self.kind == "token":
            return (tokens,)
        return () if self.width is None else (self.width,)

    def zeros(self, documents: int, tokens: int) -> Array:
        """Return the input for documents whose values are all 0."""
        return np.zeros((documents, *self.shape(tokens)), np.dtype(self.dtype))

    def sample(self, generator: np.random.Generator, documents: int, tokens: int) -> Array:
        """Return random values: floats within the limits, or integers up to the maximum.

        Floats are standard normal without limits, and uniform between two limits.
        """
        shape = (documents, *self.shape(tokens))
        if self.dtype == "float32":
            if self.lowest is not None and self.highest is not None:
                return self.clipped(generator.uniform(self.lowest, self.highest, shape))
            values = generator.standard_normal(shape, np.float32)
            if self.lowest is not None:
                values = np.abs(values) + np.float32(self.lowest)
            if self.highest is not None:
                values = np.float32(self.highest) - np.abs(values)
            return self.clipped(values)
        return generator.integers(0, self.maximum or 0, shape, np.int64, endpoint=True)

    def clipped(self, values: Array) -> Array:
        """Return floats within the limits, in float32."""
        return np.clip(values, *self._limits()).astype(np.float32)

    def checked(self, value: object, tokens: int) -> Array:
        """Return the values for one document, from JSON or an array.

        Raises:
            ValueError: if they do not fit the input.
        """
        shape = self.shape(tokens)
        numbers = _numbers(value)
        if numbers is None or numbers.shape != shape:
            got = _kind(value) if numbers is None else _count(numbers.shape)
            raise ValueError(f"the input {self.name!r}: expected {_count(shape)}, got {got}")
        if self.dtype == "float32":
            with np.errstate(over="ignore"):
                floats = numbers.astype(np.float32)
            if not np.isfinite(floats).all():
                raise ValueError(f"the input {self.name!r}: expected finite float32 numbers")
            low, high = self._limits()
            if (outside := (floats < low) | (floats > high)).any():
                raise ValueError(
                    f"the input {self.name!r}: expected numbers {self.range}, got "
                    f"{_plain(numbers[outside].ravel()[0])}"
                )
            return floats
        most = self.maximum or 0
        # A comparison with NaN is false, so NaN is outside too.
        outside = ~((numbers >= 0) & (numbers <= most) & (numbers == np.floor(numbers)))
        if outside.any():
            bad = numbers[outside].ravel()[0]
            raise ValueError(
                f"the input {self.name!r}: expected integers from 0 to {most}, got {_plain(bad)}"
            )
        return numbers.astype(np.int64)


@dataclass(frozen=True)
class ExtraValues:
    """The extra inputs of one document, without the axis of the batch."""

    document: Mapping[str, Array] = field(default_factory=dict)
    tokens: Mapping[str, Array] = field(default_factory=dict)

    def part(self, start: int, end: int) -> Self:
        """Return the inputs for the tokens from ``start`` to ``end``."""
        return type(self)(self.document, {n: x[start:end] for n, x in self.tokens.items()})

    def batch(self) -> dict[str, Array]:
        """Return the inputs as a batch of one document."""
        return {name: values[None] for name, values in {**self.document, **self.tokens}.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the inputs as numbers and lists."""
        return {name: x.tolist() for name, x in {**self.document, **self.tokens}.items()}


NO_EXTRAS = ExtraValues()
"""The extra inputs of a document for a model without extra inputs."""


def check_values(
    extras: Sequence[ExtraInput], given: Mapping[str, Any] | None, tokens: int
) -> ExtraValues:
    """Return the extra inputs of one document.

    Raises:
        ValueError: if an input is missing, unknown, or does not fit.
    """
    given = given or {}
    if unknown := given.keys() - {extra.name for extra in extras}:
        known = ", ".join(extra.name for extra in extras) or "none"
        first = min(map(str, unknown))  # a name may have any type in Python
        raise ValueError(f"expected the inputs of the model, {known}, got {first[:80]!r}")
    arrays: dict[str, dict[str, Array]] = {"document": {}, "token": {}}
    for extra in extras:
        if given.get(extra.name) is None:
            expected = _count(extra.shape(tokens))
            raise ValueError(f"expected the input {extra.name!r}, {expected}, got none")
        arrays[extra.kind][extra.name] = extra.checked(given[extra.name], tokens)
    return ExtraValues(arrays["document"], arrays["token"])


def values_of(
    extras: Sequence[ExtraInput], inputs: Mapping[str, Array], row: int, tokens: int
) -> ExtraValues:
    """Return the extra inputs of one document of a batch, without the padding."""
    rows = {extra.name: inputs[extra.name][row, ...] for extra in extras}
    return ExtraValues(
        {extra.name: rows[extra.name] for extra in extras if extra.kind == "document"},
        {extra.name: rows[extra.name][:tokens] for extra in extras if extra.kind == "token"},
    )


def blank_values(extras: Sequence[ExtraInput], tokens: int) -> ExtraValues:
    """Return extra inputs of 0 for one document of ``tokens`` tokens."""
    zeros = {extra.name: extra.zeros(1, tokens) for extra in extras}
    return values_of(extras, zeros, 0, tokens)


def sample_values(
    extras: Sequence[ExtraInput], generator: np.random.Generator, tokens: int
) -> ExtraValues:
    """Return random extra inputs for one document of ``tokens`` tokens."""
    drawn = {extra.name: extra.sample(generator, 1, tokens) for extra in extras}
    return values_of(extras, drawn, 0, tokens)


def stacked(
    extras: Sequence[ExtraInput], documents: Sequence[ExtraValues], tokens: int
) -> dict[str, Array]:
    """Return the inputs of a batch of ``tokens`` tokens, with 0 in the padding."""
    inputs = {extra.name: extra.zeros(len(documents), tokens) for extra in extras}
    for row, values in enumerate(documents):
        for extra in extras:
            if extra.kind == "token":
                array = values.tokens[extra.name]
                inputs[extra.name][row, : len(array)] = array
            else:
                inputs[extra.name][row] = values.document[extra.name]
    return inputs


def parse_inputs(kinds: Mapping[str, str]) -> tuple[ExtraInput, ...]:
    """Return the extra inputs that ``--input NAME=KIND`` declares, with the kind by name.

    Raises:
        UsageError: if a name or a kind is not valid, or there are too many.
    """
    if len(kinds) > MAX_INPUTS:
        raise UsageError(
            f"A model may have up to {MAX_INPUTS} extra inputs, got {len(kinds)}.",
            "Join vectors of a document to one.",
        )
    return tuple(_parsed(name, kind) for name, kind in kinds.items())


def _parsed(name: str, kind: str) -> ExtraInput:
    word, *sizes = kind.split(":")
    layouts: dict[str, dict[str, Any]] = {
        "number": {"kind": "document", "dtype": "float32"},
        "vector": {"kind": "document", "dtype": "float32"},
        "category": {"kind": "document", "dtype": "int64"},
        "categories": {"kind": "document", "dtype": "int64"},
        "token_category": {"kind": "token", "dtype": "int64"},
    }
    limits = None
    if word in ("number", "vector") and sizes and (limits := _LIMITS.fullmatch(sizes[-1])):
        sizes.pop()
    has_width = word in ("vector", "categories")
    most = has_width + ("categor" in word)
    is_known = word in layouts and has_width <= len(sizes) <= most
    if not is_known or not all(re.fullmatch("[1-9][0-9]{0,8}", size) for size in sizes):
        raise UsageError(
            f"--input {name} must be {KINDS}, where a category may end in :N for integers below "
            f"N, and a number or vector in :MIN..MAX, got {kind[:80]!r}.",
            "Give one of these kinds.",
        )
    width = int(sizes.pop(0)) if has_width else None
    maximum = int(sizes[0]) - 1 if sizes else None
    low, high = (limits and limits[1]), (limits and limits[2])
    try:
        return ExtraInput(
            **layouts[word],
            name=name,
            width=width,
            maximum=maximum,
            lowest=float(low) if low else None,
            highest=float(high) if high else None,
        )
    except ValidationError as error:
        raise UsageError(
            f"--input {name}={kind}: {problem(error)}.",
            "Correct the option, or rename the parameter of forward.",
        ) from error


def _numbers(value: object) -> Array | None:
    """Return numbers as an array; None if they are other values, or their lists are ragged."""
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "fiu" else None
    listed = value if isinstance(value, list) else [value]
    # bool is a subclass of int, and an array would convert it.
    if not {int, float}.issuperset(map(type, listed)):
        return None
    try:
        return np.array(value, np.float64)
    except OverflowError:  # an integer beyond float64
        return np.full(np.shape(listed) if isinstance(value, list) else (), np.inf)


def _plain(number: np.generic) -> str:
    """Return a number with all digits of an integer."""
    value = number.item()
    return str(int(value)) if np.isfinite(value) and value == int(value) else f"{value:g}"


def _kind(value: object) -> str:
    """Return the type of a value that is not one number or a list of numbers."""
    if not isinstance(value, list):
        return type(value).__name__
    other = next(one for one in value if type(one) not in (int, float))
    return f"a list with {type(other).__name__}"


def _count(shape: tuple[int, ...]) -> str:
    if len(shape) > 1:
        return f"an array {list(shape)}"
    return "one number" if not shape else f"a list of {shape[0]} numbers"
