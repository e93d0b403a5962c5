"""``aftexport bench``."""

from pathlib import Path

from rich.console import Console

from aftexport.cli.options import add_reference_options
from aftexport.system.arguments import lengths, make_parser, positive

_EPILOG = """\
Each length is timed with one document of random tokens. The contenders take turns,
A B C A B C, and the median of each is shown:
  onnxruntime  the bundle as aftserve runs it, with the fused kernels built here
  portable     the same file by the portable bodies alone, in standard operators
  torch        the PyTorch module the bundle was exported from: it needs --model, or
               --factory where there was no file, because a bundle does not hold it

The peak is the memory a call takes over what the process held before it (Linux only).

  aftexport bench model.bundle
  aftexport bench model.bundle --model model.pt --lengths 1024,8192 --threads 2
  aftexport bench model.bundle --against none --json bench.json

Exit status: 0 done; 1 an engine failed at some length, which is named; 2 bad input,
or nothing ran at any length.
"""


def run(words: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(
        "aftexport bench",
        "Time a bundle on this machine: milliseconds, tokens a second and peak memory by the "
        "length of the document, and which operators take the time.",
        _EPILOG,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a folder that aftexport wrote")
    add("--lengths", type=lengths, metavar="N,N,...",
        help="tokens of the documents (default: 1024,4096,16384, or fewer)")  # fmt: skip
    add("--engine", default="onnxruntime", choices=["onnxruntime"], help="what runs the bundle")
    add("--threads", type=positive, default=0, metavar="N",
        help="threads of every contender (default: one for each core it may use)")  # fmt: skip
    add("--rounds", type=positive, default=5, metavar="N",
        help="timed calls of each; 3 where one takes over 0.1 s (default: 5)")  # fmt: skip
    add("--against", metavar="portable,torch",
        help="or none (default: portable, and torch where the model is given)")  # fmt: skip
    add_reference_options(parser)
    add("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args(words)

    from aftexport.bench.benchmark import show
    from aftexport.bundle.output_path import check_reports

    check_reports({"--json": options.json}, (options.bundle, options.model))
    result = show(
        options.bundle,
        lengths=options.lengths,
        threads=options.threads,
        rounds=options.rounds,
        against=options.against.split(",") if options.against is not None else None,
        model=options.model,
        factory=options.factory,
        allow_pickle=options.allow_pickle,
        json_file=options.json,
        console=Console(emoji=False),
    )
    return 1 if result.failures else 0
