"""Options that several subcommands share."""

import argparse
from pathlib import Path


def add_loading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that reads a model file."""
    parser.add_argument(
        "--factory",
        metavar="PACKAGE.MODULE:FACTORY",
        help="callable without arguments that returns the module; needed for a state dict and for "
        "a model without a file",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load a pickled module, or with --factory pickled weights; loading runs code from the "
        "file, so use it only for files you trust",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="load a transformers folder whose model class is code in the folder, which runs; use "
        "it only for folders you trust",
    )


def add_reference_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that runs PyTorch for a bundle."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="MODEL",
        help="model file or folder from which the bundle was exported",
    )
    add_loading_options(parser)
