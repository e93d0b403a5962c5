"""The result of a search for mechanisms in a graph, and its reports as a table and as JSON."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.standard_recurrence.translation import Replacement
from aftexport.system.console import escape, plain_table
from aftexport.system.files import replacing_file, write_json


@dataclass(frozen=True)
class Match:
    """A rewrite that was made."""

    mechanism: str  # the stem of the mechanism's file
    operator: str
    value: str
    attributes: dict[str, int | float | str]
    cases: int  # the number of inputs on which both were compared
    difference: float  # the largest ratio of a difference to the tolerance
    note: str = ""  # the reason and the effect, if attributes differ from those of the graph


POOLING = "pooling"
"""The name for sums over tokens outside of attention, such as the mean of a document."""


@dataclass(frozen=True)
class NearMiss:
    """A value that was not replaced."""

    mechanism: str  # the mechanism that it resembles
    value: str
    reason: str
    remedy: str = ""  # a sentence for the author of the model, if there is one

    @property
    def advice(self) -> str:
        """The reason, and the remedy if there is one."""
        return f"{self.reason}. {self.remedy}".rstrip()


@dataclass
class Recognition:
    """The result of a search in a graph."""

    matches: list[Match] = field(default_factory=list)  # the rewrites, in the order of the graph
    # Values that resemble a mechanism and were not replaced.
    near_misses: list[NearMiss] = field(default_factory=list)
    unexamined: str = ""  # the reason why the graph could not be searched, if there is one
    absence: str = ""  # the reason why there is neither a match nor a near miss
    unread: list[str] = field(default_factory=list)  # the names of values without a formula
    # Values of the original graph, None if no node can be part of a mechanism.
    probed: ProbedGraph | None = None
    # Recurrent nodes of other domains, which were replaced before the search.
    translated: list[Replacement] = field(default_factory=list)

    @property
    def has_changes(self) -> bool:
        """Return whether the graph differs from that of the file."""
        return bool(self.matches or self.translated)


def show_findings(recognition: Recognition, console: Console) -> None:
    """Print what a user may want to change: a graph that was not read, notes and near misses."""
    if recognition.unexamined:
        console.print(f"[yellow]The graph was not examined:[/] {escape(recognition.unexamined)}")
    for match in recognition.matches:
        if match.note:
            _print_note(match, console)
    grouped: dict[tuple[str, str], list[str]] = {}
    for miss in recognition.near_misses:
        if miss.mechanism != POOLING:
            grouped.setdefault((miss.mechanism, miss.advice), []).append(miss.value)
    for (mechanism, advice), values in grouped.items():
        more = f" and {len(values) - 1} more" if len(values) > 1 else ""
        console.print(
            f"[yellow]Not replaced: {mechanism} at {escape(values[0])}{more}:[/] {escape(advice)}",
            soft_wrap=True,
        )
    if not (recognition.has_changes or grouped or recognition.unexamined):
        reason = recognition.absence or (
            "the only sums over tokens are pooling, such as a mean, which standard operators run"
        )
        console.print(f"No mechanism was recognized: {escape(reason)}.", soft_wrap=True)


def show_recognition(recognition: Recognition, console: Console) -> None:
    """Print translated nodes, matches and near misses."""
    if recognition.translated:
        table = plain_table("operator", "computes", "replaces")
        for replaced in recognition.translated:
            table.add_row(replaced.operator, escape(replaced.value), escape(replaced.source))
        console.print(table)
    if recognition.unexamined:
        console.print(f"[yellow]The graph was not examined:[/] {escape(recognition.unexamined)}")
        return
    if recognition.matches:
        table = plain_table("operator", "computes", "attributes", "equal in float64")
        for match in recognition.matches:
            attributes = ", ".join(f"{k} {_short(v)}" for k, v in match.attributes.items())
            cases = f"in {match.cases} cases"
            table.add_row(match.operator, escape(match.value), attributes, cases)
        console.print(table)
        for match in recognition.matches:
            if match.note:
                _print_note(match, console)
    elif recognition.translated:
        console.print("No other mechanism was recognized.")
    else:
        console.print("No mechanism was recognized; the model is unchanged.")
        if recognition.absence:
            console.print(f"The reason: {escape(recognition.absence)}.", soft_wrap=True)
    if recognition.near_misses:
        table = plain_table("not replaced", "computes", "reason")
        for miss in recognition.near_misses:
            table.add_row(miss.mechanism, escape(miss.value), escape(miss.advice))
        console.print(table)
    if any(miss.mechanism == POOLING for miss in recognition.near_misses):
        console.print(
            "A pooling, such as the mean of a document, needs no operator: standard ones run it.",
            soft_wrap=True,
        )


def _print_note(match: Match, console: Console) -> None:
    console.print(f"[yellow]{escape(match.value)}:[/] {escape(match.note)}.", soft_wrap=True)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def to_dict(recognition: Recognition) -> dict[str, Any]:
    """Return a recognition as plain data."""
    return {
        "translated": [asdict(replaced) for replaced in recognition.translated],
        "matches": [asdict(match) for match in recognition.matches],
        "near_misses": [asdict(miss) for miss in recognition.near_misses],
        "unexamined": recognition.unexamined or None,
        "absence": recognition.absence or None,
    }


def write_report(path: Path, recognition: Recognition) -> None:
    """Write a recognition as JSON."""
    with replacing_file(path) as aside:
        write_json(aside, to_dict(recognition))
