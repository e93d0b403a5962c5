"""Reports of a recognition, as tables and as JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from aftexport.recognition.result import Recognition
from aftexport.system.console import escape, plain_table
from aftexport.system.files import replacing_file, write_json


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
                console.print(f"[yellow]{escape(match.value)}:[/] {escape(match.note)}.")
    elif recognition.translated:
        console.print("No other mechanism was recognized.")
    else:
        console.print("No mechanism was recognized; the model is unchanged.")
        if recognition.absence:
            console.print(f"The reason: {escape(recognition.absence)}.", soft_wrap=True)
    if recognition.near_misses:
        table = plain_table("not replaced", "computes", "reason")
        for miss in recognition.near_misses:
            table.add_row(miss.mechanism, escape(miss.value), escape(miss.reason))
        console.print(table)


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
