"""``aftexport demo``."""

from pathlib import Path

from rich.console import Console

from aftexport.system.arguments import make_parser


def run(words: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(
        "aftexport demo",
        "Train a small document classifier, export it, check parity, serve it, and classify "
        "a held-out document of more than 10,000 tokens over HTTP.",
    )
    add = parser.add_argument
    add("--mechanism", default="aft_local", help="one of the seven (default: aft_local)")
    add("--data", type=Path, metavar="FILE", help="your documents: .csv or .jsonl with text, label")
    add("--out", type=Path, default=Path("build/demo"), metavar="DIR",
        help="where the results go (default: build/demo)")  # fmt: skip
    add("--seed", type=int, default=0, help="of split, initial weights and training (default: 0)")
    options = parser.parse_args(words)

    from aftexport.demo import run

    run(
        mechanism=options.mechanism,
        data=options.data,
        out=options.out,
        seed=options.seed,
        console=Console(emoji=False),
    )
    return 0
