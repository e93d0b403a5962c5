"""The directive ``command-line``: a command's options, read from its own argparse parser."""

import argparse
from collections.abc import Callable
from importlib import import_module

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

_DEFAULT_COMMANDS = {"aftexport": "aftexport.cli.export"}
"""The module that runs a command without a subcommand."""


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


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
