"""What was measured, and whether it is within its bound."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.setup import cpu_name
from rich.console import Console

from aftexport.console import plain_table


@dataclass(frozen=True)
class Row:
    """One property.

    Attributes:
        name: what it is, for people.
        value: as measured.
        unit: of it.
        bound: as people read it; empty where the property is shown for itself.
        within: whether it is; None where there is no bound.
    """

    name: str
    value: float
    unit: str
    bound: str = ""
    within: bool | None = None


@dataclass
class Report:
    """The rows of one run, and its conditions."""

    conditions: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every bound is kept."""
        return all(row.within is not False for row in self.rows)

    def shown(self, name: str, value: float, unit: str) -> None:
        """Adds a property that has no bound."""
        self.rows.append(Row(name, value, unit))

    def at_most(self, name: str, value: float, bound: float, unit: str) -> None:
        """Adds a property that must not be larger."""
        self.rows.append(Row(name, value, unit, f"at most {bound:g}", value <= bound))

    def at_least(self, name: str, value: float, bound: float, unit: str) -> None:
        """Adds a property that must not be smaller."""
        self.rows.append(Row(name, value, unit, f"at least {bound:g}", value >= bound))

    def write(self, path: Path) -> None:
        """Writes conditions and rows as JSON."""
        machine = {"cpu": cpu_name(), "cores": os.cpu_count()}
        content = {"conditions": machine | self.conditions, "rows": [asdict(r) for r in self.rows]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")

    def show(self, console: Console) -> None:
        """Prints the table."""
        table = plain_table("property", "measured", "", "bound", "")
        verdicts = {None: "", True: "[green]within[/]", False: "[red]outside[/]"}
        for row in self.rows:
            table.add_row(row.name, f"{row.value:,.4g}", row.unit, row.bound, verdicts[row.within])
        console.print(table)
