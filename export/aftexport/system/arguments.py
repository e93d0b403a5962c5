"""Parsers of the command line, and the types of their options."""

import argparse
from pathlib import Path


def make_parser(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """A parser that keeps the line breaks of its texts."""
    return argparse.ArgumentParser(
        prog=name,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(text: str) -> int:
    """The type of an option that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def path(text: str) -> Path:
    """The type of an option that names a file or folder: what is left empty is not the current."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def lengths(text: str) -> list[int]:
    """The type of an option of several counts, ``N,N,...``."""
    return [positive(word) for word in text.split(",")]
