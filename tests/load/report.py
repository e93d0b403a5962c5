"""The report of a run: measured values and their bounds."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.setup import cpu_name
from rich.console import Console

from aftexport.system.console import plain_table


@dataclass(frozen=True)
class Row:
    """A measured property."""

    name: str
    value: float
    unit: str
    bound: str = ""
    within: bool | None = None  # None without a bound


@dataclass
class Report:
    """The conditions and the measured properties of a run."""

    conditions: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all values are within their bounds."""
        return all(row.within is not False for row in self.rows)

    def shown(self, name: str, value: float, unit: str) -> None:
        """Add a property without a bound."""
        self.rows.append(Row(name, value, unit))

    def at_most(self, name: str, value: float, bound: float, unit: str) -> None:
        """Add a property with an upper bound."""
        self.rows.append(Row(name, value, unit, f"at most {bound:g}", value <= bound))

    def at_least(self, name: str, value: float, bound: float, unit: str) -> None:
        """Add a property with a lower bound."""
        self.rows.append(Row(name, value, unit, f"at least {bound:g}", value >= bound))

    def write(self, path: Path) -> None:
        """Write conditions and rows as JSON."""
        machine = {"cpu": cpu_name(), "cores": os.cpu_count()}
        content = {"conditions": machine | self.conditions, "rows": [asdict(r) for r in self.rows]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")

    def show(self, console: Console) -> None:
        """Print the table."""
        table = plain_table("property", "measured", "", "bound", "")
        verdicts = {None: "", True: "[green]within[/]", False: "[red]outside[/]"}
        for row in self.rows:
            table.add_row(row.name, f"{row.value:,.4g}", row.unit, row.bound, verdicts[row.within])
        console.print(table)
