"""The generated parts of the reference pages, from the code and the record of tested versions.

``make reference`` writes them between ``<!-- reference: KIND WORDS -->`` and the comment that ends
them. The kinds are the functions of ``KINDS``.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import onnx
from benchmarks.table_parts import row_of
from onnx.defs import OpSchema
from versions.suite import read_record

import aftexport.nn  # noqa: F401  (registers the operators of the domain)
from aftserve.setting_sources import ONLY_IN_FILE
from aftserve.settings import Settings
from docs.pages import PAGES, REPOSITORY
from docs.python_names import plain, python_names

Row = dict[str, Any]
MARKED = re.compile(
    r"(<!-- reference: (\w+) ?(.*?) -->\n)(.*?)(<!-- end of reference -->)", re.DOTALL
)
"""A mark, its kind, its words, what is generated, and the end."""
_DOMAIN = "ai.aftexport"
_NO_SUBCOMMAND = {"aftexport": "aftexport.cli.export"}
"""The module that runs a program without a subcommand."""
_SHOWN = {"bundles": "BUNDLE ...", "models": "[models.NAME]"}
"""The settings without a flag: words of the command line, and sections of the file."""
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
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


def parser_of(run: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    """Return the parser that a command builds."""
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
    raise ValueError(f"expected {run.__module__} to print a parser's help, got none")


def commands(program: str) -> str:
    """Return a section for each command of a program: usage, options and notes."""
    runs = dict(import_module(f"{program}.cli").COMMANDS)
    if program in _NO_SUBCOMMAND:
        runs = {"": import_module(_NO_SUBCOMMAND[program]).run} | runs
    return "\n\n".join("\n\n".join(_command(parser_of(run))) for run in runs.values())


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {parser.prog}"
    yield _fence(_usage(parser))
    yield plain(parser.description or "")
    rows = [
        [f"`{_invocation(parser, action)}`", plain(_help(parser, action))]
        for group in parser._action_groups
        for action in group._group_actions
        if not isinstance(action, argparse._HelpAction | argparse._VersionAction)
    ]
    if rows:
        yield _table(["argument", "meaning"], rows)
    if parser.epilog:
        yield _fence(parser.epilog.rstrip())


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return a usage with the arguments that are not optional."""
    if parser.usage:
        return parser.usage % {"prog": parser.prog}
    formatter = parser._get_formatter()
    words = [formatter._format_args(a, a.dest) for a in parser._actions if not a.option_strings]
    words += [_invocation(parser, a) for a in parser._actions if a.option_strings and a.required]
    return " ".join([parser.prog, *words, "[OPTION ...]"])


def _invocation(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the names of an argument and its value, which Python's versions write differently."""
    formatter = parser._get_formatter()
    if not action.option_strings:
        return str(action.metavar or action.dest)
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    return f"{names} {formatter._format_args(action, action.dest.upper())}"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def operator(name: str) -> str:
    """Return the table of the inputs, attributes and outputs of an operator."""
    schema = onnx.defs.get_schema(name, domain=_DOMAIN)
    attributes = {
        attribute_name: attribute
        for attribute_name, attribute in sorted(schema.attributes.items())
        if not attribute_name.startswith("plugin_")  # the same on every node
    }
    rows = [[v.name, "input", f"{_type_of(v)} {v.description}".strip()] for v in schema.inputs]
    rows += [
        [attribute_name, "attribute", f"{attribute.description} Default: {_default(attribute)}."]
        for attribute_name, attribute in attributes.items()
    ]
    rows += [[v.name, "output", _type_of(v)] for v in schema.outputs]
    cells = [[f"`{first}`", kind, plain(meaning)] for first, kind, meaning in rows]
    return _table(["name", "kind", "type, or meaning"], cells)


def _type_of(value: OpSchema.FormalParameter) -> str:
    return "int64" if value.type_str == "tensor(int64)" else "float"


def _default(attribute: OpSchema.Attribute) -> str:
    value = onnx.helper.get_attribute_value(attribute.default_value)
    return value.decode() if isinstance(value, bytes) else f"{value:g}"


def settings() -> str:
    """Return the table of the server's settings."""
    properties = Settings.model_json_schema()["properties"]
    rows = []
    for name, schema in properties.items():
        default = schema.get("default")
        if isinstance(default, list):
            default = ", ".join(default)
        kind = describe_type(schema)
        rows.append(
            [
                f"`{_SHOWN.get(name, '--' + name.replace('_', '-'))}`",
                f"{kind}; only in the file" if name in ONLY_IN_FILE else kind,
                "none" if default in (None, "", ".", {}) else f"`{default}`",
                plain(schema.get("description", "")),
            ]
        )
    return _table(["setting", "type", "default", "meaning"], rows)


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


def versions() -> str:
    """Return the table of the tried environments, and the reasons of failing tests."""
    rows: list[Row] = read_record()
    cells = [
        [
            row["python"],
            *(row["versions"][name].partition("+")[0] for name in _LIBRARIES),
            f"{row['passed']} pass" + (f", {len(row['failed'])} fail" if row["failed"] else ""),
            row["date"],
        ]
        for row in rows
    ]
    limits = [
        f"- torch {row['versions']['torch'].partition('+')[0]}: {plain(reason)}"
        for row in rows
        for reason in row["limits"]
    ]
    table = _table(["Python", *_LIBRARIES.values(), "tests", "date"], cells)
    return "\n\n".join([table, *(["\n".join(limits)] if limits else [])])


KINDS: dict[str, Callable[..., str]] = {
    "commands": commands,
    "operator": operator,
    "python": python_names,
    "settings": settings,
    "versions": versions,
}


def _fence(text: str) -> str:
    return f"```text\n{text}\n```"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(row_of(row) for row in [head, ["---"] * len(head), *escaped])


def filled(text: str) -> str:
    """Return a page with its generated parts written again."""
    return MARKED.sub(lambda m: f"{m[1]}\n{KINDS[m[2]](*m[3].split())}\n\n{m[5]}", text)


if __name__ == "__main__":
    for page, text in PAGES.items():
        if (current := filled(text)) != text:
            (REPOSITORY / page).write_text(current, "utf-8")
            print(f"Wrote {page}.")
