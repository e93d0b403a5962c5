"""The result of a parity check and of a comparison by layer, its verdict and its terminal table."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from aftexport.bundle.golden import Array, Case
from aftexport.bundle.manifest import Manifest
from aftexport.heads import Head
from aftexport.parity.comparison import TOLERANCES, Comparison, Tolerance, worst
from aftexport.system.console import escape, plain_table, shape_text
from aftexport.system.contract import LOGITS

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Blame:
    """The origin of an error."""

    # first tensor out of tolerance, or an earlier one whose operator has a larger own error
    tensor: str
    modules: Sequence[str]  # paths of the PyTorch modules that the operator computes, in order
    operator: str
    path: str  # `fused kernel`, `fallback` or `standard operator`
    cause: str  # `kernel`, `precision` or `export`
    error: float  # operator's own error against PyTorch in float64 on the same inputs
    steps: Mapping[str, float]  # difference between each form of the operator and the next
    findings: Sequence[str]  # sentences with further details

    @property
    def sentence(self) -> str:
        """The place and the cause of the error, in a sentence."""
        inner = [m for m in self.modules if not any(o.startswith(f"{m}.") for o in self.modules)]
        return (
            f"{self.operator} ({self.path}) in {', '.join(inner)}: {_WHY[self.cause]}; "
            f"its own error is {self.error:.1e}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            **vars(self),
            "modules": list(self.modules),
            "error": _plain(self.error),
            "steps": {name: _plain(step) for name, step in self.steps.items()},
            "findings": list(self.findings),
        }


_WHY = {
    "kernel": "the fused kernel differs from the operator's fallback",
    "precision": "its number type has too few digits",
    "export": "the exported formula or weights differ from PyTorch's",
}


@dataclass(frozen=True)
class Layer:
    """The comparison of one tensor of the served graph with PyTorch."""

    tensor: str
    module: str  # path of the PyTorch module that computes the tensor
    operator: str
    path: str  # `fused kernel`, `fallback` or `standard operator`
    error: float
    outside: bool

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {**vars(self), "error": _plain(self.error)}


@dataclass(frozen=True)
class Layers:
    """The result of a comparison layer by layer."""

    case: str
    bound: float
    layers: Sequence[Layer]  # tensors in the order of the graph
    # tensors whose observation changes how ONNX Runtime fuses the served graph
    altered: Sequence[str]
    unmatched: Sequence[str]  # tensors of the graph that PyTorch's program lacks
    # origin of the error; None if there is none to explain
    blame: Blame | None

    @property
    def first(self) -> Layer | None:
        """The first layer out of tolerance."""
        return next((layer for layer in self.layers if layer.outside), None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "case": self.case,
            "bound": self.bound,
            "layers": [layer.to_dict() for layer in self.layers],
            "first": self.first.tensor if self.first else None,
            "altered": list(self.altered),
            "unmatched": list(self.unmatched),
            "blame": self.blame.to_dict() if self.blame else None,
        }


def _plain(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


_SHOWN_TOKENS = 64


@dataclass(frozen=True)
class Report:
    """The result of a parity check and its verdict."""

    manifest: Manifest
    comparisons: Sequence[Comparison]
    against: str = ""  # reference in words; empty for PyTorch's outputs stored in the bundle
    notes: Sequence[str] = ()
    # inputs of each case of the model, by name of the case
    inputs: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    # software versions and hardware of the machine; empty if they do not matter
    environment: Mapping[str, str] = field(default_factory=dict)
    # comparison of every intermediate tensor; None if it was not requested
    layers: Layers | None = None
    # content of the bundle's `calibration.json`; None if it has none
    calibration: Mapping[str, Any] | None = None

    @property
    def compared_with(self) -> str:
        """The reference, in words."""
        stored = f"{self.manifest.reference_title}, by its outputs stored in the bundle"
        return self.against or stored

    @property
    def passed(self) -> bool:
        """Whether there are comparisons and all are within tolerance."""
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)

    @property
    def verdict(self) -> str:
        """``Ship``, ``Do not ship`` or ``Not checked``."""
        if not self.comparisons:
            return "Not checked"
        return "Ship" if self.passed else "Do not ship"

    @property
    def worst(self) -> Comparison | None:
        """The comparison with the largest error relative to its bound."""
        return worst(self.comparisons) if self.comparisons else None

    @property
    def reason(self) -> str:
        """The reason of the verdict, in a sentence."""
        furthest, name = self.worst, self.manifest.reference_name
        if furthest is None:
            return f"The comparison with {name} was turned off in the export."
        count = len(self.comparisons)
        outside = sum(not c.passed for c in self.comparisons)
        place = f"{_subject(furthest)}, case {furthest.case!r}, {furthest.engine}"
        if not outside:
            return (
                f"All {count} comparisons with {name} are within tolerance; the largest error is "
                f"{_percent(furthest.largest_error / furthest.bound)} of the tolerance ({place})."
            )
        of_scores = " in its scores or values" if furthest.error < furthest.largest_error else ""
        fault = (
            f"has an error of {furthest.largest_error:.1e}{of_scores}, more than "
            f"{furthest.bound:.0e}"
            if np.isfinite(furthest.error)
            else "gives numbers that are not finite, or another shape"
        )
        return f"{outside} of {count} comparisons are outside tolerance: {place} {fault}."

    @property
    def blame(self) -> str | None:
        """The result of the comparison by layer in a few sentences; None without a comparison."""
        if self.layers is None:
            return None
        first, blame, case = self.layers.first, self.layers.blame, self.layers.case
        if first is None:
            count = len(self.layers.layers)
            place = f"All {count} intermediate tensors are within tolerance in the case {case!r}"
            if blame is None:
                return f"{place}." + (self._other_run if not self.passed else "")
            place += f"; the error of the output grows first at {blame.tensor}"
        else:
            module = first.module or "the model itself"
            place = f"The first tensor out of tolerance, in the case {case!r}, is {first.tensor}"
            place += f" in {module}"
        assert blame is not None  # of the first tensor
        return " ".join(
            [f"{place}. The cause is the {blame.cause}: {blame.sentence}", *blame.findings]
        )

    @property
    def _other_run(self) -> str:
        """The failed comparison that the tensors do not explain, in a sentence."""
        failed = worst([c for c in self.comparisons if not c.passed])
        return f" The error is in another run: {_subject(failed)}, case {failed.case!r}."

    def worst_tokens(self) -> list[int] | None:
        """Return the first token ids of the model's worst case, from its first row.

        None without cases, and for a model of features.
        """
        if self.manifest.features is not None:
            return None
        cases = [c for c in self.comparisons if c.subject.startswith("model")]
        cases = [c for c in cases if c.case in self.inputs]
        if not cases:
            return None
        row = np.asarray(self.inputs[worst(cases).case]["input_ids"])[0]
        return [int(token) for token in row[:_SHOWN_TOKENS]]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        tolerance = tolerance_of(self.manifest)
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "passed": self.passed,
            "reason": self.reason,
            "against": self.compared_with,
            "scores": meanings_of(self.manifest.heads),
            "precision": self.manifest.precision,
            "node_precisions": [node.model_dump() for node in self.manifest.node_precisions],
            "tolerance": {"bound": tolerance.bound, "reason": tolerance.reason},
            "comparisons": [c.to_dict() for c in self.comparisons],
            "worst_tokens": self.worst_tokens(),
            "layers": self.layers.to_dict() if self.layers else None,
            "calibration": self.calibration,
            "notes": list(self.notes),
            "environment": dict(self.environment),
            "made_with": dict(self.manifest.versions),
        }


def tolerance_of(manifest: Manifest) -> Tolerance:
    """Return the tolerance of a bundle's model: its own, or else that of its precision."""
    if manifest.tolerance is not None:
        return Tolerance(manifest.tolerance, "it was given as --tolerance")
    return TOLERANCES[manifest.precision]


def inputs_of(cases: Sequence[Case]) -> dict[str, Mapping[str, Array]]:
    """Return the inputs of the model's cases, by name."""
    return {case.name: case.inputs for case in cases if case.subject == "model"}


def environment(**versions: str) -> dict[str, str]:
    """Return a description of this machine with relevant software versions."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123, a device file
            lines = [line.split(":", 1) for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    return lines[0][1].strip() if lines else platform.processor() or platform.machine()


def _subject(comparison: Comparison) -> str:
    subject = subject_of(comparison)
    return f"the {subject}" if comparison.subject == "model" else subject


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"


def output_of(result: Comparison) -> str:
    """Return ``output NAME`` if the model names the output; else an empty text."""
    is_named = _is_of_model(result) and result.output != LOGITS
    return f"output {result.output}" if is_named else ""


def _is_of_model(result: Comparison) -> bool:
    """Return whether the model was run, rather than one operator, whose output has no name."""
    return result.subject.startswith("model")


def subject_of(result: Comparison) -> str:
    """Return the subject of a comparison, with the output if the model names it."""
    return ", ".join(filter(None, (result.subject, output_of(result))))


def meanings_of(heads: Mapping[str, Head]) -> str:
    """Return the meaning of the scores, with the names of several heads."""
    if len(heads) == 1:
        (head,) = heads.values()
        return head.meaning
    return "; ".join(f"{name}: {head.meaning}" for name, head in heads.items())


def print_meanings(console: Console, heads: Mapping[str, Head]) -> None:
    """Print the meaning of the scores of each head."""
    console.print(f"Scores: {escape(meanings_of(heads))}.")


def parity_table(results: Sequence[Comparison], reference: str, *, name: str = "PyTorch") -> Table:
    """Return a table of each case's error and bound."""
    outputs = {result.output for result in results if _is_of_model(result)}
    named = ["output"] if len(outputs) > 1 else []
    columns = ("input", "error", "bound", "ulps", "flips", "")
    table = plain_table(f"parity with {name}", *named, *columns)
    table.caption = (
        "The error is max |output - reference| / max(1, max |reference|), with a reference in "
        f"{reference}; or that of the scores, if it is larger."
    )
    table.caption_justify = "left"
    for result in results:
        verdict = "[green]within[/]" if result.passed else "[bold red]OUTSIDE[/]"
        subject = result.case if result.subject == "model" else f"{result.subject}, {result.case}"
        if result.engine != "onnxruntime":
            subject += f", {result.engine}"
        numbers = (f"{result.largest_error:.1e}", f"{result.bound:.0e}", f"{result.max_ulps:.0f}")
        flips = str(result.label_flips) if _is_of_model(result) else ""
        output = [result.output if _is_of_model(result) else ""] if named else []
        table.add_row(escape(subject), *output, shape_text(result.shape), *numbers, flips, verdict)
    return table
