"""The command ``aftexport calibrate``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from aftexport.errors import UsageError
from aftexport.system.arguments import make_parser, path
from aftexport.system.console import escape, stage

if TYPE_CHECKING:
    from aftexport.calibration.calibrate import CalibratedHead

_EPILOG = """\
The documents must be new to the model: its own training documents would make it too certain.
labelled.jsonl has one JSON object per line, with text or input_ids and the true label:

  {"text": "...", "label": "invoice"}              labels that exclude each other
  {"text": "...", "labels": ["urgent", "legal"]}   independent labels, possibly none
  {"text": "...", "labels": {"kind": "invoice", "flags": ["urgent"]}}   heads by their names

Single-label and binary heads get one temperature, independent labels a temperature and a bias
each. A temperature depends on the length if a likelihood-ratio test finds a trend.

  aftexport calibrate model.bundle --data labelled.jsonl --dry-run
  aftexport calibrate model.bundle --data labelled.jsonl
  aftexport calibrate model.bundle --data labelled.jsonl --error-budget 0.01 --out new.bundle

The probabilities are fitted on all documents. With --error-budget, a third of them also fits the
confidence of a threshold, and the others test it. The bundle gets the smallest confidence with
which the rate of wrong answers is at most the budget, with 95 % probability. The server marks
documents below it with "abstain": true.

Exit status:
  0  the calibration was written, or printed with --dry-run
  1  no threshold keeps the error budget; nothing was written
  2  the documents or the bundle cannot be used
"""


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(words)

    from aftexport.bundle.bundle import Bundle
    from aftexport.calibration.calibrate import calibrate
    from aftexport.calibration.calibrated_bundle import check_target, report_of, write_calibrated
    from aftexport.calibration.data import (
        notes_on,
        read_labelled_documents,
        run_documents,
        truths_by_head,
    )
    from aftexport.calibration.fit import check_truths

    if options.force and options.out is None:
        raise UsageError("--force needs --out, got none.", "Leave --force out: BUNDLE is replaced.")
    if options.dry_run and options.out is not None:
        raise UsageError("--dry-run writes nothing, got --out.", "Leave one of the two out.")
    console = Console(emoji=False)
    with stage(console, f"Checking {options.bundle}"):
        bundle = Bundle.open(options.bundle)
    if not options.dry_run:
        check_target(options.bundle, options.out, force=options.force)
    with stage(console, f"Reading {options.data}"):
        documents = read_labelled_documents(options.data, bundle.manifest, bundle.tokenizer())
    for name, truths in truths_by_head(documents).items():
        check_truths(name, bundle.manifest.heads[name], truths, options.error_budget)
    for note in notes_on(documents, bundle.manifest):
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    with stage(console, f"Running {len(documents):,} documents") as progress:
        samples = run_documents(bundle, documents, progress=progress)
    with stage(console, "Fitting"):
        heads = {
            name: calibrate(name, sample, options.error_budget) for name, sample in samples.items()
        }
    for name, head in heads.items():
        _print_head(console, name, head)
    if options.dry_run:
        console.print("Nothing was written, because of --dry-run.")
        return 0
    calibration = {name: head.calibration for name, head in heads.items()}
    written = write_calibrated(bundle, options.out, calibration, report_of(options.data, heads))
    console.print(f"Bundle: [bold]{escape(str(written.path))}[/]", soft_wrap=True)
    console.print(f"Digest: {written.digest}", soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "aftexport calibrate",
        "Fit the probabilities of a bundle on labelled documents, so that answers with a "
        "probability of 0.9 are right nine times out of ten, and choose when to abstain.",
        _EPILOG,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a bundle folder written by aftexport")
    add("--data", type=Path, metavar="FILE", required=True,
        help="file of labelled documents, see below")  # fmt: skip
    add("--error-budget", type=budget, metavar="RATE",
        help="maximum rate of wrong answers among the documents that are answered, such as "
        "0.01; default: no threshold")  # fmt: skip
    add("--out", type=path, metavar="FOLDER",
        help="folder of the calibrated bundle; default: replace BUNDLE")  # fmt: skip
    add("--force", action="store_true", help="replace an existing bundle at --out")
    add("--dry-run", action="store_true", help="print the results and write nothing")
    return parser


def budget(text: str) -> float:
    """Parse an option with a rate between 0 and 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a rate between 0 and 1, got {text}")
    return value


def _print_head(console: Console, name: str, head: "CalibratedHead") -> None:
    from aftexport.calibration.calibrated_bundle import sentences
    from aftexport.parity.calibration import error_table

    console.print(f"\n[bold]{escape(name)}[/] ({head.sample.head.task})")
    console.print(error_table(head.calibration))
    for sentence in sentences(head):
        console.print(escape(sentence), soft_wrap=True)
