"""The directives of the reference pages, which read the code and the record of tested versions.

``command-line``: the options of a command, from its own argparse parser. ``onnx-operator``: inputs
and attributes of an operator, from its ONNX schema. ``server-settings``: every setting, from its
pydantic class. ``version-table``: the versions that were tried, from the record of their tests.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
from docutils import nodes
from docutils.parsers.rst import Directive
from onnx.defs import OpSchema
from sphinx.application import Sphinx

import aftexport.nn  # noqa: F401  (registers the operators of the domain)
from aftserve.setting_sources import ONLY_IN_FILE
from aftserve.settings import Settings

DOMAIN = "ai.aftexport"
RECORD = Path(__file__).parents[2] / "tests" / "versions" / "record.json"
Row = dict[str, Any]
_DEFAULT_COMMANDS = {"aftexport": "aftexport.cli.export"}
"""The module that runs a command without a subcommand."""
_SHOWN = {"bundles": "BUNDLE ...", "models": "[models.NAME]"}
"""The settings without a flag: words of the command line, and sections of the file."""
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
}
_LIBRARIES = {
    "torch": "torch",
    "onnxscript": "onnxscript",
    "onnx": "onnx",
    "onnxruntime": "ONNX Runtime",
    "uvicorn": "uvicorn",
}


class _ParserFoundError(Exception):
    """Carries a parser out of the command that built it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser that a command such as ``aftexport verify`` builds."""
    program, _, subcommand = command.partition(" ")
    run: Callable[[list[str]], int]
    if subcommand:
        run = import_module(f"{program}.cli").COMMANDS[subcommand]
    else:
        run = import_module(_DEFAULT_COMMANDS[program]).run
    print_help = argparse.ArgumentParser.print_help

    def stop(parser: argparse.ArgumentParser, file: object = None) -> None:
        raise _ParserFoundError(parser)

    argparse.ArgumentParser.print_help = stop  # type: ignore[assignment]
    try:
        run(["--help"])
    except _ParserFoundError as found:
        return found.parser
    finally:
        argparse.ArgumentParser.print_help = print_help  # type: ignore[method-assign]
    raise ValueError(f"expected {command} --help to print a parser's help, got none")


class CommandLine(Directive):
    """Shows usage, description, options and notes of one command."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Build the nodes."""
        parser = parser_of(self.arguments[0])
        usage = parser.format_usage().removeprefix("usage: ").rstrip()
        parts: list[nodes.Node] = [_literal(usage)]
        parts.append(nodes.paragraph(text=parser.description or ""))
        for group in parser._action_groups:
            actions = [a for a in group._group_actions if a.dest != "help"]
            if actions:
                title = nodes.paragraph()
                title += nodes.strong(text=(group.title or "").capitalize())
                parts += [title, _definitions(parser, actions)]
        if parser.epilog:
            parts.append(_literal(parser.epilog.rstrip()))
        return parts


def _literal(text: str) -> nodes.literal_block:
    block = nodes.literal_block(text, text)
    block["language"] = "text"
    return block


def _definitions(
    parser: argparse.ArgumentParser, actions: list[argparse.Action]
) -> nodes.definition_list:
    formatter = parser._get_formatter()
    definitions = nodes.definition_list()
    for action in actions:
        item = nodes.definition_list_item()
        term = nodes.term()
        term += nodes.literal(text=formatter._format_action_invocation(action))
        text = formatter._expand_help(action) if action.help else ""
        item += [term, nodes.definition("", nodes.paragraph(text=text))]
        definitions += item
    return definitions


class OnnxOperator(Directive):
    """Shows a table of the inputs, attributes and outputs of one operator."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Build the nodes."""
        schema = onnx.defs.get_schema(self.arguments[0], domain=DOMAIN)
        attributes = {
            name: attribute
            for name, attribute in sorted(schema.attributes.items())
            if not name.startswith("plugin_")  # the same on every node
        }
        rows = [(v.name, "input", f"{_type_of(v)} {v.description}") for v in schema.inputs]
        rows += [
            (name, "attribute", f"{attribute.description} Default: {_default(attribute)}.")
            for name, attribute in attributes.items()
        ]
        rows += [(v.name, "output", _type_of(v)) for v in schema.outputs]
        return [_table(("name", "kind", "type, or meaning"), rows, has_code=True)]


def _type_of(value: OpSchema.FormalParameter) -> str:
    return "int64" if value.type_str == "tensor(int64)" else "float"


def _default(attribute: OpSchema.Attribute) -> str:
    value = onnx.helper.get_attribute_value(attribute.default_value)
    return value.decode() if isinstance(value, bytes) else f"{value:g}"


def describe_type(schema: Row) -> str:
    """Return the type of a setting in words, from the JSON Schema of the property."""
    if "anyOf" in schema:
        return ", or ".join(describe_type(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if schema.get("type") == "array":
        return "list, with commas between"
    name = {"path": "path"}.get(schema.get("format", ""), schema.get("type", "any"))
    limits = [f"{words} {schema[key]:,}" for key, words in _LIMITS.items() if key in schema]
    return ", ".join([name, *limits])


class ServerSettings(Directive):
    """Lists flag, variable, type, default and meaning of every setting."""

    def run(self) -> list[nodes.Node]:
        """Build the nodes."""
        definitions = nodes.definition_list()
        properties = Settings.model_json_schema()["properties"]
        for name, schema in properties.items():
            term = nodes.term()
            flag = _SHOWN.get(name, "--" + name.replace("_", "-"))
            term += nodes.literal(text=flag)
            default = schema.get("default")
            if isinstance(default, list):
                default = ", ".join(default)
            default = "none" if default in (None, "", ".", {}) else str(default)
            facts = nodes.paragraph()
            if name in ONLY_IN_FILE:
                facts += nodes.Text("only in the file of --config")
            else:
                facts += nodes.literal(text=f"AFTSERVE_{name.upper()}")
            facts += nodes.Text(f" · {describe_type(schema)} · default: {default}")
            meaning = nodes.paragraph(text=schema.get("description", ""))
            item = nodes.definition_list_item()
            item += [term, nodes.definition("", facts, meaning)]
            definitions += item
        return [definitions]


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
        limits = [nodes.list_item("", nodes.paragraph(text=text)) for text in limits_of(rows)]
        listed = [nodes.bullet_list("", *limits)] if limits else []
        return [_table(titles, cells), *listed]


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, has_code: bool = False
) -> nodes.table:
    """Return a table, whose first column may be code."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in head), cols=len(head))
    group += nodes.thead("", _row(head, is_code=False))
    group += nodes.tbody("", *(_row(row, is_code=has_code) for row in rows))
    return nodes.table("", group)


def _row(cells: Sequence[str], *, is_code: bool) -> nodes.row:
    row = nodes.row()
    for column, text in enumerate(cells):
        content = nodes.literal(text=text) if is_code and column == 0 else nodes.Text(text)
        row += nodes.entry("", nodes.paragraph("", "", content))
    return row


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("command-line", CommandLine)
    app.add_directive("onnx-operator", OnnxOperator)
    app.add_directive("server-settings", ServerSettings)
    app.add_directive("version-table", VersionTable)
    return {"parallel_read_safe": True}
