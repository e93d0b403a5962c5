"""Parsers for the command line, and the types of their options."""

import argparse
from pathlib import Path


def make_parser(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return a parser that keeps the line breaks of its texts."""
    return argparse.ArgumentParser(
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
