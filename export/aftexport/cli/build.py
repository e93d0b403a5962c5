"""The command ``aftexport build``."""

from pathlib import Path

from rich.console import Console

from aftexport.system.arguments import make_parser


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = make_parser(
        "aftexport build",
        "Build a bundle's TensorRT engine for this machine, unless a matching engine exists. "
        "The engine is stored in the cache; the bundle does not change.",
        "The cache is AFTEXPORT_CACHE, or else aftexport in XDG_CACHE_HOME or ~/.cache.\n\n"
        "Exit status:\n"
        "  0  the engine is available\n"
        "  1  parity is outside tolerance\n"
        "  2  the engine cannot be built here",
    )
    parser.add_argument(
        "bundle", type=Path, metavar="BUNDLE", help="a bundle folder written by aftexport"
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="build the engine even if a matching one exists"
    )
    parser.add_argument(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="file of TensorRT kernel timings, read if it exists and written back",
    )
    options = parser.parse_args(words)

    from aftexport.bundle.bundle import Bundle
    from aftexport.deploy.build_engine import build, engine_table
    from aftexport.system.console import escape, stage

    console = Console(emoji=False)
    with stage(console, f"Checking {options.bundle}"):
        bundle = Bundle.open(options.bundle)
    file = build(
        bundle, rebuild=options.rebuild, timing_cache=options.timing_cache, console=console
    )
    console.print(engine_table(file.read_record()))
    console.print(f"Engine: [bold]{escape(str(file.engine))}[/]", soft_wrap=True)
    return 0
