"""The command ``aftexport inspect``."""

from pathlib import Path

from rich.console import Console

from aftexport.cli.options import add_options, read_options
from aftexport.options import ModelSource
from aftexport.system.arguments import make_parser
from aftexport.system.console import print_json

_CONFIGS = ("config.json", "modules.json")
"""Files by which a folder is a model."""


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = make_parser(
        "aftexport inspect", "Show the contents of a bundle or a model file. No file is changed."
    )
    parser.add_argument(
        "path", type=Path, metavar="BUNDLE|MODEL", help="a bundle folder, a model file or folder"
    )
    parser.add_argument("--json", action="store_true", help="print the contents as JSON")
    add_options(parser, ModelSource, without="path")
    options = parser.parse_args(words)
    source = read_options(ModelSource, options, path=options.path)

    from aftexport.bundle.bundle import MANIFEST, Bundle, is_bundle
    from aftexport.deploy.inspection import describe_checkpoint, show_bundle, show_checkpoint
    from aftexport.deploy.summary import to_dict
    from aftexport.errors import BundleError, UsageError

    console = Console(emoji=False)
    if is_bundle(options.path):
        given = [*(["--factory"] if source.factory else []), *source.permissions]
        if given:
            raise UsageError(
                f"{given[0]} is for a model, got the bundle {options.path}.",
                f"Leave {given[0]} out.",
            )
        bundle = Bundle.open(options.path)
        if options.json:
            print_json(to_dict(bundle))
        else:
            show_bundle(bundle, console)
    elif options.path.is_dir() and not any((options.path / name).exists() for name in _CONFIGS):
        raise BundleError(
            options.path,
            f"expected a folder with {MANIFEST} (a bundle), or {' or '.join(_CONFIGS)} (a model), "
            "got none of them",
            "Give a bundle, a model folder or a model file.",
        )
    else:
        described = describe_checkpoint(source)
        if options.json:
            print_json(described)
        else:
            show_checkpoint(described, console)
    return 0
