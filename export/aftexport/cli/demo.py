"""The command ``aftexport demo``."""

from pathlib import Path

from rich.console import Console

from aftexport.system.arguments import make_parser

_EPILOG = """\
The model learns the package of a Python source file of this machine, without the names of packages
in it, or with --data your own documents and labels. Nothing is downloaded.
"""


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = make_parser(
        "aftexport demo",
        "Train a small model of documents, export it, check parity, serve it, and ask it about "
        "a held-out document of more than 10,000 tokens over HTTP.",
        _EPILOG,
    )
    add = parser.add_argument
    add("--mechanism", default="aft_local",
        help="attention mechanism, such as aft_full or fastformer "
        "(default: aft_local)")  # fmt: skip
    add("--data", type=Path, metavar="FILE",
        help="your documents, .csv or .jsonl with the fields text and label "
        "(default: source files of installed packages)")  # fmt: skip
    add("--out", type=Path, default=Path("build/demo"), metavar="DIR",
        help="folder for the results (default: build/demo)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N",
        help="seed of the split, the initial weights and the training (default: 0)")  # fmt: skip
    options = parser.parse_args(words)

    from aftexport.demo import DemoOptions, run

    run(
        DemoOptions(
            mechanism=options.mechanism,
            data=options.data,
            out=options.out,
            seed=options.seed,
        ),
        Console(emoji=False),
    )
    return 0
