"""``aftexport inspect``."""

from pathlib import Path

from rich.console import Console

from aftexport.cli.options import add_loading_options, make_parser


def run(words: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(
        "aftexport inspect", "Show what a bundle or a model file holds; nothing is changed."
    )
    parser.add_argument("path", type=Path, metavar="BUNDLE|MODEL")
    add_loading_options(parser)
    options = parser.parse_args(words)

    from aftexport.bundle import is_bundle
    from aftexport.inspection import show_bundle, show_checkpoint

    if is_bundle(options.path):
        show_bundle(options.path, Console(emoji=False))
    else:
        show_checkpoint(
            options.path,
            Console(emoji=False),
            factory=options.factory,
            allow_pickle=options.allow_pickle,
        )
    return 0
