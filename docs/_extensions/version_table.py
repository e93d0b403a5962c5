"""The directive ``version-table``: the versions that were tried, from the record of their tests."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

RECORD = Path(__file__).parents[2] / "tests" / "versions" / "record.json"
Row = dict[str, Any]
_LIBRARIES = {
    "torch": "torch",
    "onnxscript": "onnxscript",
    "onnx": "onnx",
    "onnxruntime": "ONNX Runtime",
    "uvicorn": "uvicorn",
}


def table_of(rows: list[Row]) -> list[list[str]]:
    """Return the cells of the table: a row of titles, then a row for each environment."""
    titles = ["Python", *_LIBRARIES.values(), "Tests", "Date"]
    cells = [
        [
            row["python"],
            *(row["versions"][name].partition("+")[0] for name in _LIBRARIES),
            f"{row['passed']} pass" + (f", {len(row['failed'])} fail" if row["failed"] else ""),
            row["date"],
        ]
        for row in rows
    ]
    return [titles, *cells]


def limits_of(rows: list[Row]) -> list[str]:
    """Return a sentence for each known reason of failing tests."""
    return [
        f"torch {row['versions']['torch'].partition('+')[0]}: {reason}"
        for row in rows
        for reason in row["limits"]
    ]


class VersionTable(Directive):
    """Lists the environments of the record, and the reasons of failing tests."""

    def run(self) -> list[nodes.Node]:
        """Build the nodes."""
        rows: list[Row] = json.loads(RECORD.read_text("utf-8"))
        titles, *cells = table_of(rows)
        group = nodes.tgroup(cols=len(titles))
        group += [nodes.colspec(colwidth=1) for _ in titles]
        group += nodes.thead("", row_of(titles))
        group += nodes.tbody("", *map(row_of, cells))
        limits = [nodes.list_item("", nodes.paragraph(text=text)) for text in limits_of(rows)]
        listed = [nodes.bullet_list("", *limits)] if limits else []
        return [nodes.table("", group), *listed]


def row_of(cells: list[str]) -> nodes.row:
    """Return a row of a table."""
    return nodes.row("", *(nodes.entry("", nodes.paragraph(text=text)) for text in cells))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("version-table", VersionTable)
    return {"parallel_read_safe": True}
