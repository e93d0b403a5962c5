"""What recognition found, for people and for programs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from aftexport.console import escape, plain_table
from aftexport.recognition.recognizer import Recognition
from aftexport.system.files import replacing_file, write_json


def show_recognition(found: Recognition, console: Console) -> None:
    """Prints what was made an operator, and what nearly was."""
    if found.unexamined:
        console.print(f"[yellow]The graph was not examined:[/] {escape(found.unexamined)}")
        return
    if found.matches:
        table = plain_table("operator", "computes", "attributes", "equal in float64")
        for match in found.matches:
            attributes = ", ".join(f"{k} {_short(v)}" for k, v in match.attributes.items())
            cases = f"in {match.cases} cases"
            table.add_row(match.operator, escape(match.value), attributes, cases)
        console.print(table)
        for match in found.matches:
            if match.note:
                console.print(f"[yellow]{escape(match.value)}:[/] {escape(match.note)}.")
    else:
        console.print("No mechanism was recognised; the model stays as it is.")
        if found.absence:
            console.print(f"The reason: {escape(found.absence)}.", soft_wrap=True)
    if found.near_misses:
        table = plain_table("left alone", "computes", "because")
        for miss in found.near_misses:
            table.add_row(miss.mechanism, escape(miss.value), escape(miss.reason))
        console.print(table)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def to_dict(found: Recognition) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "matches": [asdict(match) for match in found.matches],
        "near_misses": [asdict(miss) for miss in found.near_misses],
        "unexamined": found.unexamined or None,
        "absence": found.absence or None,
    }


def write_report(path: Path, found: Recognition) -> None:
    """Writes ``to_dict`` as JSON."""
    with replacing_file(path) as aside:
        write_json(aside, to_dict(found))
