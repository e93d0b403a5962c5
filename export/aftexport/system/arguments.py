"""Parsers for the command line, and the types of their options."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from aftexport.system.suggestions import check_options

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest option for an unknown one."""

    def parse_args(  # type: ignore[override]  # the namespace of a caller is not supported
        self, args: Sequence[str]
    ) -> argparse.Namespace:
        check_options(args, set(_OPTION.findall(self.format_usage())), self.prog)
        return super().parse_args(args)


def make_parser(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return a parser that keeps the line breaks of its texts."""
    return _Parser(
        prog=name,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(text: str) -> int:
    """Parse an option with a count of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


def path(text: str) -> Path:
    """Parse an option with a file or folder; an empty text does not mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def lengths(text: str) -> list[int]:
    """Parse an option with several counts, ``N,N,...``."""
    return [positive(word) for word in text.split(",")]
