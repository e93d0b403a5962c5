"""``aftexport build``."""

from pathlib import Path

from rich.console import Console

from aftexport.system.arguments import make_parser


def run(words: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(
        "aftexport build",
        "Build a bundle's TensorRT engine for this machine, unless one is there that fits. "
        "The bundle is left as it is; the engine goes to the cache.",
        "The cache: AFTEXPORT_CACHE, or else aftexport below XDG_CACHE_HOME or ~/.cache.\n"
        "Exit status: 0 it is there; 1 parity outside tolerance; 2 it cannot be built here.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--rebuild", action="store_true", help="build it even so")
    parser.add_argument("--timing-cache", type=Path, metavar="FILE", help="see aftexport --help")
    options = parser.parse_args(words)

    from aftexport.bundle.bundle import Bundle
    from aftexport.console import escape, stage
    from aftexport.deploy.build_engine import build
    from aftexport.deploy.engine_table import engine_table

    console = Console(emoji=False)
    with stage(console, f"Checking {options.bundle}"):
        bundle = Bundle.open(options.bundle)
    file = build(
        bundle, rebuild=options.rebuild, timing_cache=options.timing_cache, console=console
    )
    console.print(engine_table(file.read_record()))
    console.print(f"Engine: [bold]{escape(str(file.engine))}[/]", soft_wrap=True)
    return 0
