"""The command ``aftexport MODEL --to TARGET``."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from aftexport._version import __version__
from aftexport.cli import triton
from aftexport.cli.options import add_options, read_options, read_source
from aftexport.options import ExportOptions, ModelSource
from aftexport.system.arguments import make_parser
from aftexport.system.console import print_json
from aftexport.system.process import collection_paused

if TYPE_CHECKING:
    from aftexport.bundle.bundle import Bundle

_EPILOG = """\
A model file is one of these:
  a checkpoint written by aftexport.save
  a state dict (.pt, .safetensors), bare or in a training checkpoint, with
    --factory package.module:factory
  a torch.export program (.pt2)
  a folder with config.json and model.safetensors
  a folder that save_pretrained of the transformers library wrote
  a folder of sentence-transformers, with modules.json
  a plain .onnx file, whose own outputs are the reference
  a pickled module, bare or under "model" in a dict, with --allow-pickle. Loading it
    runs code from the file.
Without a file, --factory exports the module that the factory returns.

Subcommands (see aftexport COMMAND --help):
  aftexport verify BUNDLE             compare a bundle with PyTorch again
  aftexport inspect BUNDLE|MODEL      show its contents and the path of each operator
  aftexport calibrate BUNDLE          fit its probabilities on labelled documents
  aftexport build BUNDLE              build its TensorRT engine for this machine
  aftexport bench BUNDLE              time it by length and operator, against PyTorch
  aftexport fuse IN.onnx OUT.onnx     replace linear attention in any model by operators
  aftexport unfuse BUNDLE OUT.onnx    write a bundle's model in standard operators only
  aftexport demo                      train, export, serve and query a small model

Exit status:
  0    the bundle or the repository was written
  1    parity is outside tolerance
  2    the input is invalid; nothing was written
  130  interrupted; nothing was written
  143  terminated; nothing was written
"""


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = make_export_parser()
    given = parser.parse_args(words)
    if given.model is None and given.factory is None:
        parser.error("a model file, or --factory PACKAGE.MODULE:FACTORY, is required")
    source, options = read_source(given), read_options(ExportOptions, given)
    console = Console(emoji=False, quiet=given.quiet or given.json)
    make = partial(_export, source, console=console, is_verbose=given.verbose)
    if given.to == triton.TARGET:
        if given.json:
            parser.error("--json needs a bundle, got --to triton")
        return triton.write(parser, given, options, make, console)
    triton.check_absent(parser, given)
    bundle = make(options)
    from aftexport.deploy.summary import to_dict
    from aftexport.pipeline.results import print_place

    if given.json:
        print_json(to_dict(bundle))
    print_place(console, bundle)
    return 0


def _export(
    source: ModelSource, options: ExportOptions, *, console: Console, is_verbose: bool
) -> "Bundle":
    with collection_paused():  # imports torch; a bundle needs no torch
        from aftexport.pipeline.export import run_export
        from aftexport.pipeline.request import checked_request

    return run_export(checked_request(source, options), console, is_verbose=is_verbose)


def make_export_parser() -> argparse.ArgumentParser:
    """Return the parser of a command line without a subcommand."""
    parser = make_parser(
        "aftexport",
        "Export a linear-attention model to a verified bundle.",
        _EPILOG,
        example="aftexport MODEL --to onnx",
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="model file or folder, see below")
    actions = add_options(parser, ExportOptions, required="to")
    add_options(parser, ModelSource, without="path")
    triton.add_options(parser, actions)
    output = parser.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("-v", "--verbose", action="store_true",
        help="print each step, each comparison and the size of each file")  # fmt: skip
    output.add_argument("-q", "--quiet", action="store_true", help="print only errors and warnings")
    output.add_argument("--json", action="store_true",
        help="print the result as JSON, like aftexport inspect --json")  # fmt: skip
    add("--version", action="version", version=f"aftexport {__version__}")
    return parser
