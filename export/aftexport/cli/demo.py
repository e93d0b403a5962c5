"""The command ``aftexport demo``."""

from pathlib import Path

from rich.console import Console

from aftexport.system.arguments import make_parser

TASKS = ("single-label", "multi-label", "regression", "token-classification", "series")
_EPILOG = """\
Tasks, on Python source files of this machine or made series; nothing is downloaded:
  single-label            the package of a file, without the names of packages in it;
                          with --data your own documents and labels
  multi-label             the constructs that a file uses anywhere, such as generators
  regression              the percentage of lines that are comments or docstrings
  token-classification    the kind of each token: comment, string, name and so on
  series                  the faulty one of four machines, from 16 sensors; needs a mechanism
                          with a window, such as aft_local
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
    add("--task", default="single-label", choices=TASKS,
        help="task of the model, see below (default: single-label)")  # fmt: skip
    add("--mechanism", default="aft_local",
        help="attention mechanism, such as aft_full or fastformer "
        "(default: aft_local)")  # fmt: skip
    add("--data", type=Path, metavar="FILE",
        help="your documents for single-label, .csv or .jsonl with the fields text and label "
        "(default: source files of installed packages)")  # fmt: skip
    add("--out", type=Path, default=Path("build/demo"), metavar="DIR",
        help="folder for the results (default: build/demo)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N",
        help="seed of the split, the initial weights and the training (default: 0)")  # fmt: skip
    options = parser.parse_args(words)

    from aftexport.demo import DemoOptions, run

    run(
        DemoOptions(
            task=options.task,
            mechanism=options.mechanism,
            data=options.data,
            out=options.out,
            seed=options.seed,
        ),
        Console(emoji=False),
    )
    return 0
