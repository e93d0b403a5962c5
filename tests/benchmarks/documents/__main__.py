"""``python -m benchmarks.documents``: whole documents against windows and truncation."""

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.documents import contenders, run
from benchmarks.documents.texts import FAMILIES
from benchmarks.record import RecordError, Row

TASKS = ("contains", "dominant", "conflict")
QUICK = {"task": ["contains"], "seeds": 1, "tokens": [512, 8_192], "seconds": 40.0, "families": 8,
         "texts": 6_000, "model": [contenders.LOCAL, contenders.WINDOWS]}  # fmt: skip
"""The options of ``--quick``."""
LEAST_GAIN = 0.2
"""By how much F1 of whole documents must exceed that of their first 512 tokens in ``--quick``."""
MOST_LOSS = 0.1
"""By how much F1 of windows may exceed that of whole documents there."""


def main() -> None:
    """Run the benchmark; write its rows as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="three minutes; fails if the recipe gains nothing")
    add("--task", nargs="+", choices=TASKS, default=list(TASKS))
    add("--model", nargs="+", choices=contenders.KNOWN, default=list(contenders.MODELS),
        help="layers by the recipe, windows, or bag_of_words")  # fmt: skip
    add("--pooling", help="of all tokens (default: by the task)")
    add("--tokens", type=int, nargs="+", default=list(run.LENGTHS), help="of the test documents")
    add("--seconds", type=float, default=120.0,
        help="processor time of a training (default: %(default)s)")  # fmt: skip
    add("--seeds", type=int, default=2, help="(default: %(default)s)")
    add("--families", type=int, default=FAMILIES, help="(default: %(default)s)")
    add("--texts", type=int, help="of the package, by chance (default: all)")
    add("--processes", type=int, default=2, help="of trainings (default: %(default)s)")
    add("--threads", type=int, default=2, help="of the served bundles (default: %(default)s)")
    add("--package", type=Path, help="a wheel of the package (default: download it)")
    add("--out", type=Path, help="for the rows (default: build/bench_documents.json)")
    add("--record", action="store_true", help="write this processor's record")
    add("--replace", action="store_true", help="with --record, drop the rows of another setting")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    try:
        rows = run.run(options, Console(width=180))
    except RecordError as error:
        parser.error(str(error))
    if options.quick:
        parser.exit(*verdict(rows))


def verdict(rows: list[Row]) -> tuple[int, str]:
    """Return the exit status and the sentence of ``--quick``."""
    found = {row["contender"]: row["f1"] for row in rows
             if (row["mechanism"], row["tokens"]) == ("contains", 8_192)}  # fmt: skip
    whole, windows, first = (found[n] for n in (contenders.LOCAL, "window_max", "first"))
    has_gained = whole >= first + LEAST_GAIN and whole >= windows - MOST_LOSS
    sentence = f"F1 at 8,192 tokens: whole {whole:.2f}, windows {windows:.2f}, first {first:.2f}.\n"
    return int(not has_gained), sentence


if __name__ == "__main__":
    main()
