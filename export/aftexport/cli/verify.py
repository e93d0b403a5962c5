"""``aftexport verify``."""

from pathlib import Path

from rich.console import Console

from aftexport.cli._options import make_parser


def run(words: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(
        "aftexport verify",
        "Compare a bundle with the PyTorch outputs stored in it. Needs no torch.",
        "Exit status: 0 within tolerance; 1 outside; 2 could not run.",
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--portable", action="store_true", help="use the portable bodies, not the fused kernels"
    )
    parser.add_argument(
        "--provider",
        choices=["cpu", "cuda"],
        default="cpu",
        help="ONNX Runtime's execution provider",
    )
    options = parser.parse_args(words)

    from aftexport.bundle import Bundle
    from aftexport.report import parity_table, stage
    from aftexport.verification import verify

    console = Console()
    bundle = Bundle.open(options.bundle)
    with stage(console, f"Checking {options.bundle}"):
        results = verify(bundle, fused=not options.portable, provider=options.provider)
    console.print(parity_table(results))
    return 0 if all(r.passed for r in results) else 1
