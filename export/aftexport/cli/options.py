"""What the subcommands' options share."""

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


def add_loading_options(parser: argparse.ArgumentParser) -> None:
    """What every command needs that reads a model file."""
    parser.add_argument(
        "--factory",
        metavar="PACKAGE.MODULE:FACTORY",
        help="a callable without arguments that returns the module: a state dict needs one, and a "
        "model that is in no file",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load pickled objects, which run whatever code they hold: the module, or with "
        "--factory its weights; only for files you trust",
    )


def add_reference_options(parser: argparse.ArgumentParser) -> None:
    """What every command needs that runs PyTorch beside a bundle."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="MODEL",
        help="the model file or folder the bundle was exported from",
    )
    add_loading_options(parser)


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
