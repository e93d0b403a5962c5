"""``aftexport verify``."""

from pathlib import Path

from rich.console import Console

from aftexport.cli.options import add_reference_options
from aftexport.system.arguments import lengths, make_parser, positive

_EPILOG = """\
Without --model the reference is PyTorch's float64 outputs stored in the bundle, and no torch is
needed. With it PyTorch runs in float64 beside the bundle, on the bundle's own cases and on yours:

  aftexport verify model.bundle --report parity.html
  aftexport verify model.bundle --model model.pt --data documents.jsonl --lengths 100,5000
  aftexport verify model.bundle --model model.pt --search 500 --layers --report parity.html

documents.jsonl has one JSON object a line: {"text": "..."} or {"input_ids": [...]}.

Exit status: 0 within tolerance; 1 outside; 2 could not run.
"""


def run(words: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(
        "aftexport verify",
        "Compare a bundle with PyTorch, by every engine it has on this machine.",
        _EPILOG,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a folder that aftexport wrote")
    add_reference_options(parser)
    add("--against", choices=["torch", "golden"],
        help="PyTorch, or its stored outputs (default: torch where --model is given)")  # fmt: skip
    add("--data", type=Path, metavar="FILE", help="your documents, as below; needs --model")
    add("--lengths", type=lengths, default=[], metavar="N,N,...",
        help="documents of so many random tokens; needs --model")  # fmt: skip
    add("--search", type=positive, default=0, metavar="N",
        help="try so many inputs for the worst there is; needs --model")  # fmt: skip
    add("--layers", action="store_true",
        help="compare every tensor between, name the first outside tolerance, and say whether "
        "kernel, precision or export is to blame; needs --model")  # fmt: skip
    add("--portable", action="store_true", help="use the portable bodies, not the fused kernels")
    add("--provider", choices=["cpu", "cuda"], default="cpu",
        help="ONNX Runtime's execution provider")  # fmt: skip
    add("--report", type=Path, metavar="FILE", help="write one self-contained HTML page there")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(words)

    from aftexport.bundle.bundle import Bundle
    from aftexport.bundle.output_path import check_reports
    from aftexport.console import escape, stage
    from aftexport.contract import SCORES
    from aftexport.report.page import write_page
    from aftexport.report.tables import parity_table
    from aftexport.system.files import replacing_file, write_json
    from aftexport.verify.check import Request, check

    check_reports(
        {"--report": options.report, "--json": options.json},
        (options.bundle, options.model, options.data),
    )
    console = Console(emoji=False)
    with stage(console, f"Checking {options.bundle}"):
        bundle = Bundle.open(options.bundle)
    request = Request(
        against=options.against,
        model=options.model,
        factory=options.factory,
        allow_pickle=options.allow_pickle,
        data=options.data,
        lengths=options.lengths,
        search=options.search,
        layers=options.layers,
        fused=not options.portable,
        provider=options.provider,
    )
    report = check(bundle, request, console)
    console.print(parity_table(report.comparisons, bundle.manifest.reference))
    for note in report.notes:
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    console.print(f"Scores: {SCORES}.")
    colour = "green" if report.passed else "bold red"
    console.print(f"[{colour}]{report.verdict}.[/] {escape(report.reason)}", soft_wrap=True)
    if report.blame is not None:
        console.print(escape(report.blame), soft_wrap=True)
    if options.json is not None:
        with replacing_file(options.json) as aside:
            write_json(aside, report.to_dict())
    if options.report is not None:
        with replacing_file(options.report) as aside:
            write_page(aside, report)
    return 0 if report.passed else 1
