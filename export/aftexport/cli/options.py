"""What the subcommands' options share."""

import argparse
from pathlib import Path


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
