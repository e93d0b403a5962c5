"""The command ``aftexport bench``."""

from pathlib import Path

from rich.console import Console

from aftexport.cli.options import add_json_options, add_source_options, read_source
from aftexport.system.arguments import lengths, make_parser, positive
from aftexport.system.console import print_json

_EPILOG = """\
Each length is timed with one document of random tokens. The contenders take turns,
A B C A B C. The table shows the median of each:
  onnxruntime  the bundle as aftserve runs it, with the fused kernels built here
  portable     the same file without fused kernels, in standard operators only
  torch        the PyTorch module of the bundle. It needs --model, or --factory if the
               bundle was exported without a file, because a bundle does not contain it.

The peak is the memory that a call adds to the memory of the process (Linux only).

  aftexport bench model.bundle
  aftexport bench model.bundle --model model.pt --lengths 1024,8192 --threads 2
  aftexport bench model.bundle --against none --output bench.json

Exit status:
  0  every engine ran
  1  an engine failed at a length, which is printed
  2  the input is invalid, or no engine ran at any length
"""


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = make_parser(
        "aftexport bench",
        "Time a bundle on this machine: milliseconds, tokens per second and peak memory by "
        "document length, and the share of each operator in the time.",
        _EPILOG,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a bundle folder written by aftexport")
    add("--lengths", type=lengths, metavar="N,N,...",
        help="document lengths in tokens (default: 1024,4096,16384, as far as the model "
        "allows)")  # fmt: skip
    add("--engine", default="onnxruntime", choices=["onnxruntime"],
        help="engine that runs the bundle (default: onnxruntime)")  # fmt: skip
    add("--threads", type=positive, default=0, metavar="N",
        help="threads of every contender (default: one per usable core)")  # fmt: skip
    add("--rounds", type=positive, default=5, metavar="N",
        help="timed calls of each contender; 3 if a call takes over 0.1 s "
        "(default: 5)")  # fmt: skip
    add("--against", metavar="portable,torch",
        help="contenders to compare with, or none (default: portable, and torch if the model "
        "is given)")  # fmt: skip
    add_source_options(parser)
    add_json_options(parser)
    options = parser.parse_args(words)

    from aftexport.bench.benchmark import show
    from aftexport.bundle.output_path import check_reports

    check_reports({"--output": options.output}, (options.bundle, options.model))
    result, record = show(
        options.bundle,
        lengths=options.lengths,
        threads=options.threads,
        rounds=options.rounds,
        against=options.against.split(",") if options.against is not None else None,
        source=read_source(options),
        output=options.output,
        console=Console(emoji=False, quiet=options.json),
    )
    if options.json:
        print_json(record)
    return 1 if result.failures else 0
