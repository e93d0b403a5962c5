"""The command ``aftexport verify``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from aftexport.cli.options import add_json_options, add_source_options, read_source
from aftexport.system.arguments import lengths, make_parser, positive
from aftexport.system.console import escape, print_json, stage

if TYPE_CHECKING:
    from aftexport.parity.report import Report

_EPILOG = """\
Without --model, the reference is the float64 outputs of PyTorch that the bundle contains, and
torch is not needed. With --model, PyTorch runs in float64 on the cases of the bundle and on yours:

  aftexport verify model.bundle --report parity.html
  aftexport verify model.bundle --model model.pt --data documents.jsonl --lengths 100,5000
  aftexport verify model.bundle --model model.pt --search 500 --layers --report parity.html

documents.jsonl has one JSON object per line: {"text": "..."}, {"input_ids": [...]} or
{"input_features": [[...], ...]}. A .npy file has one document of token ids or of features.

Exit status:
  0  every comparison is within tolerance
  1  a comparison is outside tolerance
  2  the comparison could not run
"""


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(words)

    from aftexport.bundle.bundle import Bundle
    from aftexport.bundle.output_path import check_reports
    from aftexport.verify.check import Request, check

    check_reports(
        {"--report": options.report, "--output": options.output},
        (options.bundle, options.model, options.data),
    )
    console = Console(emoji=False, quiet=options.json)
    with stage(console, f"Checking {options.bundle}"):
        bundle = Bundle.open(options.bundle)
    request = Request(
        against=options.against,
        source=read_source(options),
        data=options.data,
        lengths=options.lengths,
        search=options.search,
        layers=options.layers,
        fused=not options.portable,
        provider=options.provider,
    )
    report = check(bundle, request, console)
    _print_report(console, report, bundle.manifest.reference)
    _write_files(report, page=options.report, record=options.output)
    if options.json:
        print_json(report.to_dict())
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "aftexport verify",
        "Compare a bundle with PyTorch, on every engine of the bundle that runs on this machine.",
        _EPILOG,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a bundle folder written by aftexport")
    add_source_options(parser)
    add("--against", choices=["torch", "golden"],
        help="reference: torch runs PyTorch, golden uses its stored outputs (default: torch with "
        "--model, else golden)")  # fmt: skip
    add("--data", type=Path, metavar="FILE",
        help="file of your documents, see below; needs --model")  # fmt: skip
    add("--lengths", type=lengths, default=[], metavar="N,N,...",
        help="lengths of documents of random tokens; needs --model")  # fmt: skip
    add("--search", type=positive, default=0, metavar="N",
        help="number of inputs to try in a search for the largest error; needs "
        "--model")  # fmt: skip
    add("--layers", action="store_true",
        help="compare every intermediate tensor, name the first one outside tolerance, and find "
        "the cause: kernel, precision or export; needs --model")  # fmt: skip
    add("--portable", action="store_true",
        help="use the fallbacks instead of the fused kernels")  # fmt: skip
    add("--provider", choices=["cpu", "cuda"], default="cpu",
        help="execution provider of ONNX Runtime (default: cpu)")  # fmt: skip
    add("--report", type=Path, metavar="FILE", help="write a self-contained HTML page to FILE")
    add_json_options(parser)
    return parser


def _print_report(console: Console, report: "Report", reference: str) -> None:
    from aftexport.parity.report import parity_table, print_meanings

    name = report.manifest.reference_name
    console.print(parity_table(report.comparisons, reference, name=name))
    for note in report.notes:
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    print_meanings(console, report.manifest.heads)
    color = "green" if report.passed else "bold red"
    console.print(f"[{color}]{report.verdict}.[/] {escape(report.reason)}", soft_wrap=True)
    if report.blame is not None:
        console.print(escape(report.blame), soft_wrap=True)


def _write_files(report: "Report", *, page: Path | None, record: Path | None) -> None:
    """Write the report as a page and in JSON, each if a path is given."""
    from aftexport.parity.page import write_page
    from aftexport.system.files import replacing_file, write_json

    if record is not None:
        with replacing_file(record) as aside:
            write_json(aside, report.to_dict())
    if page is not None:
        with replacing_file(page) as aside:
            write_page(aside, report)
