"""The differences between an output and its reference, and the table of their bounds."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.golden import Array, Case

if TYPE_CHECKING:  # the check of a GPU compares without pydantic
    from aftexport.heads import Head

Double = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The differences between an output and its reference; infinite if they are not comparable."""

    # `max |output - reference| / max(1, max |reference|)`, the bounded quantity of the tolerance
    # table
    error: float
    max_absolute: float  # maximum and mean of `|output - reference|`
    mean_absolute: float
    # maximum and mean of `|output - reference| / |reference|`, over references that are normal
    # numbers of the output's type
    max_relative: float
    mean_relative: float
    # in units of the last place, in the output's type, of the larger of output and reference
    max_ulps: float
    # cosine of the angle between output and reference as vectors; NaN if they are not comparable
    cosine: float

    @classmethod
    def between(cls, output: Array, expected: Array, rows: NDArray[np.bool_] | None = None) -> Self:
        """Measure ``output`` against ``expected``."""
        actual, wanted = np.asarray(output), np.asarray(expected, np.float64)
        kinds: dict[int, type[np.floating[Any]]] = {2: np.float16, 4: np.float32}
        kind = kinds.get(actual.dtype.itemsize, np.float64)
        wide = actual.astype(np.float64)
        # Kernels may write any number into rows of padding, also infinities.
        if rows is not None and wide.shape == wanted.shape:
            mask = rows.reshape(rows.shape + (1,) * (wide.ndim - rows.ndim))
            mask = np.broadcast_to(mask, wide.shape)
            wide, wanted = wide[mask], wanted[mask]
        if wide.shape != wanted.shape or not wide.size or not _is_finite(wide, wanted):
            lost = dict.fromkeys((one.name for one in fields(Differences)), float("inf"))
            return cls(**lost | {"cosine": float("nan")})
        difference, magnitude = np.abs(wide - wanted), np.abs(wanted)
        smallest, largest = float(np.finfo(kind).tiny), np.nextafter(np.finfo(kind).max, kind(0))
        is_normal = magnitude >= smallest
        with np.errstate(over="ignore"):  # overflow of a quotient by a tiny reference
            relative = difference[is_normal] / magnitude[is_normal]
        larger = np.clip(np.maximum(magnitude, np.abs(wide)), smallest, largest)
        step = np.spacing(larger.astype(kind))
        return cls(
            error=float(difference.max()) / max(1.0, float(magnitude.max())),
            max_absolute=float(difference.max()),
            mean_absolute=float(difference.mean()),
            max_relative=float(relative.max(initial=0)),
            mean_relative=float(relative.mean()) if relative.size else 0.0,
            max_ulps=float((difference / step.astype(np.float64)).max()),
            cosine=_cosine(wide, wanted),
        )


def _is_finite(*arrays: Double) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _cosine(a: Double, b: Double) -> float:
    norms = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if not all(norms):
        return 1.0 if norms == (0.0, 0.0) else 0.0
    return float(np.vdot(a / norms[0], b / norms[1]))


@dataclass(frozen=True, kw_only=True)
class Comparison(Differences):
    """The differences between an output and its reference, with their bound."""

    case: str  # name and subject of the `Case`
    subject: str
    output: str
    shape: tuple[int, ...]  # shape of the case, see `Case.shape`
    bound: float
    # error of the numbers that a head makes of the logits, by the same bound; see
    # `Head.score_error`. None for operators
    score_error: float | None = None
    label_flips: int  # documents or tokens with another decision of the head
    # smallest distance of a document or token from another decision, in logits; negative for a
    # flip. None for operators, and for heads that decide nothing
    closest_margin: float | None
    engine: str = "onnxruntime"

    @property
    def largest_error(self) -> float:
        """The larger of the errors of the output and of the numbers made of it."""
        return max(self.error, self.score_error or 0.0)

    @property
    def passed(self) -> bool:
        """True if the output, and the numbers made of it, are within the bound."""
        return self.largest_error <= self.bound

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the comparison of which ``to_dict`` gave the values."""
        own = {one.name: values[one.name] for one in fields(cls)}
        read = {
            name: float(value) if name in _NUMBERS and value is not None else value
            for name, value in own.items()
        }
        return cls(**read | {"shape": tuple(own["shape"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON; numbers that are not finite become text, such as ``inf``."""
        values = {
            name: str(value) if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in asdict(self).items()
        }
        return values | {"shape": list(self.shape), "passed": self.passed}


_NUMBERS = {one.name for one in fields(Differences)} | {"bound", "score_error", "closest_margin"}


def compare(
    case: Case,
    outputs: Mapping[str, Array],
    precision: str,
    *,
    bound: float | None = None,  # bound to use instead of the table's; None for that of the table
    # in the order of the result; None to compare only the outputs
    heads: "Mapping[str, Head] | None" = None,
) -> list[Comparison]:
    """Measure every output against the case's reference, without rows of padding."""
    # An operator's output can have the name of one of the model's outputs.
    own = heads if heads is not None and case.subject == "model" else {}
    return [
        _compare(case, name, outputs[name], precision, bound, own.get(name))
        for name in _in_order(case.outputs, own)
    ]


def _in_order(names: Iterable[str], heads: "Mapping[str, Head]") -> list[str]:
    """Return names of outputs in the order of the heads; a bundle sorts its cases by name."""
    order = list(heads)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def _compare(
    case: Case, name: str, output: Array, precision: str, bound: float | None, head: "Head | None"
) -> Comparison:
    expected = np.asarray(case.outputs[name])
    # Only outputs of three axes, and those of operators, have rows of tokens.
    has_rows = case.subject != "model" or expected.ndim == 3
    rows = counting_rows(expected, case.inputs) if has_rows else None
    if case.subject != "model" and output.shape == expected.shape:
        # The logarithm of an empty sum is -inf on both sides.
        is_empty = (output == -np.inf) & (expected == -np.inf)
        output, expected = (np.where(is_empty, 0, x) for x in (output, expected))
    differences = Differences.between(output, expected, rows)
    score_error, flips, margin = None, 0, None
    if head is not None and np.isfinite(differences.error):
        wide, wanted = np.asarray(output, np.float64), expected.astype(np.float64)
        if rows is not None:
            wide, wanted = wide[rows], wanted[rows]
        score_error = head.score_error(wide, wanted)
        flips, margin = head.flips(wide, wanted)
    return Comparison(
        **asdict(differences),
        case=case.name,
        subject=case.subject,
        output=name,
        shape=case.shape,
        bound=TOLERANCES[precision].bound if bound is None else bound,
        score_error=score_error,
        label_flips=flips,
        closest_margin=margin,
    )


def counting_rows(tensor: Array, inputs: Mapping[str, Array]) -> NDArray[np.bool_] | None:
    """Return a mask of rows without padding for ``[B, T, ...]``, bool ``[B, T]``; None for all."""
    if "lengths" not in inputs or tensor.ndim < 2:
        return None
    lengths = np.asarray(inputs["lengths"], np.int64)
    if tensor.shape[0] != len(lengths):
        return None
    return np.arange(tensor.shape[1]) < lengths[:, None]


def worst(results: Iterable[Comparison]) -> Comparison:
    """Return the comparison with the largest ratio of error to bound."""
    return max(results, key=lambda result: result.largest_error / result.bound)


@dataclass(frozen=True)
class Tolerance:
    """The maximum error of equal outputs, with its reason.

    ``bound`` limits ``max |output - reference| / max(1, max |reference|)``.
    """

    bound: float
    reason: str


TOLERANCES = {
    "fp32": Tolerance(
        1e-4,
        "float32 rounds a logit of magnitude 1000 by 3e-5, and the exponential turns that "
        "into a relative error; sums over tokens and layers add less",
    ),
    "fp16": Tolerance(
        2e-2,
        "float16 weights and activations carry 11 bits, 5e-4 each; a few layers of them, "
        "with every sum over tokens in float32, stay within forty such steps",
    ),
    "bf16": Tolerance(
        2e-2,
        "bfloat16 operands carry 8 bits, 4e-3 each; a product of them has errors of "
        "either sign, which a float32 sum evens out",
    ),
    "int8": Tolerance(
        5e-2,
        "int8 steps are 1/127 of a column's or a row's largest value, 8e-3; their errors "
        "even out in a sum and add up over the layers",
    ),
}
"""Precision to tolerance, for every test and report."""
