"""``aftexport inspect``."""

from pathlib import Path

from rich.console import Console

from aftexport.cli.options import add_loading_options
from aftexport.system.arguments import make_parser


def run(words: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(
        "aftexport inspect", "Show what a bundle or a model file holds; nothing is changed."
    )
    parser.add_argument("path", type=Path, metavar="BUNDLE|MODEL")
    add_loading_options(parser)
    options = parser.parse_args(words)

    from aftexport.bundle.bundle import MANIFEST, is_bundle
    from aftexport.errors import BundleError
    from aftexport.report.inspection import show_bundle, show_checkpoint

    if is_bundle(options.path):
        show_bundle(options.path, Console(emoji=False))
    elif options.path.is_dir() and not (options.path / "config.json").exists():
        raise BundleError(
            options.path,
            f"no bundle, which has a {MANIFEST}, and no model's folder, which has a config.json",
            "Give one of the two, or a model file.",
        )
    else:
        show_checkpoint(
            options.path,
            Console(emoji=False),
            factory=options.factory,
            allow_pickle=options.allow_pickle,
        )
    return 0
