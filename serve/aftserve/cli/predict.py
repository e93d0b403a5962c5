"""``aftserve predict``."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from aftexport.errors import UsageError
from aftexport.system.arguments import make_parser, path
from aftexport.system.process import exit_status, interruptible

if TYPE_CHECKING:
    from aftexport.bundle.manifest import Manifest
    from aftserve.batch.rows import Rows
    from aftserve.settings import Settings

_EPILOG = """\
FILE is one of these. A folder stands for the files below it.
  .csv, .tsv     a table with the column text; semicolons and tabs may separate the columns. For a
                 model of features it is one document: a row for each token, a column for each
                 feature by its name
  .jsonl         an object on each line: {"text": "..."}, {"input_ids": [...]} or
                 {"input_features": [[...], ...]}, with "inputs" for a model of extra inputs
  .parquet       a table, see aftserve batch; it needs pyarrow
  .npy           one document of token ids or features
  -              standard input: one text, or the documents of --format
  any other      one text in UTF-8

The output has a line of JSON for each document, in order: its id and the server's answer, or an
error. The id is the path, or the column id, or the number of the document. A model's extra inputs
are columns of a table, in CSV as JSON, and so is text_pair, the second text of a model of pairs.

  aftserve predict model.bundle mail.txt
  aftserve predict model.bundle mails.csv --text body --id number --output labels.jsonl
  aftserve predict model.bundle - --format jsonl < documents.jsonl

Set other settings of the server as AFTSERVE_* variables or in the file of --config.

Exit status: 0 if every document has an answer, 3 if some have an error, 1 if the output cannot be
written, 2 if the run could not begin or ended by --strict, 130 if it was interrupted, and 143 if it
was terminated by SIGTERM.
"""


def _parse(words: Sequence[str]) -> Namespace:
    parser = make_parser(
        "aftserve predict",
        "Classify files in this process, without a server and without Ray.",
        _EPILOG,
    )
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="a folder written by aftexport")
    add("files", type=path, nargs="+", metavar="FILE", help="documents, see below")
    add("-o", "--output", type=path, metavar="OUT",
        help="a .jsonl file, complete or not written (default: standard output)")  # fmt: skip
    add("--format", choices=["text", "csv", "tsv", "jsonl"],
        help="format of standard input (default: text)")  # fmt: skip
    add("--text", metavar="COLUMN", help="column of texts (default: text)")
    add("--id", metavar="COLUMN", help="column of ids (default: id, or the number of the row)")
    add("--strict", action="store_true",
        help="end with the error of the first document without an answer")  # fmt: skip
    add("--long-documents", metavar="POLICY",
        help="exact, reject, head or tail; see aftserve --help")  # fmt: skip
    add("--threads", metavar="N", help="threads of the engine (default: one per usable core)")
    add("--config", metavar="FILE", help="a TOML file of the server's settings")
    return parser.parse_args(words)


def run(words: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options = _parse(words)

    from rich.console import Console

    from aftexport.bundle.bundle import Bundle
    from aftexport.system.console import document_bar
    from aftserve.batch.answering import OfflineClassifier
    from aftserve.batch.local_run import lines_of
    from aftserve.batch.output_file import check_output
    from aftserve.settings import Settings

    settings = Settings.read([options.bundle, *_flags(options)])
    rows = _find(options, settings, Bundle.open(settings.bundle).manifest)
    if options.output is not None:
        check_output(options.output, options.files, (".jsonl",))
    console = Console(stderr=True, emoji=False)
    # The lines would break a bar on the same terminal.
    shown = False if options.output is None and sys.stdout.isatty() else None
    start, count, failed = time.monotonic(), 0, 0
    try:
        with interruptible():
            loaded = OfflineClassifier(settings)
            with _output(options.output) as out, document_bar(rows.count, shown) as advance:
                lines = lines_of(loaded, rows, strict=options.strict, on_done=advance)
                for line, is_answered in lines:
                    out.write(line)
                    count += 1
                    failed += not is_answered
    except BrokenPipeError:  # the reader of standard output has enough
        return 1
    except KeyboardInterrupt as end:
        console.print("interrupted")
        return exit_status(end)
    console.print(
        f"{count:,} {'document' if count == 1 else 'documents'} in "
        f"{time.monotonic() - start:.1f} s, {failed:,} without an answer"
    )
    return 3 if failed else 0


def _flags(options: Namespace) -> Iterator[str]:
    for name in ("long_documents", "threads", "config"):
        if (value := getattr(options, name)) is not None:
            yield from (f"--{name.replace('_', '-')}", value)


def _find(options: Namespace, settings: "Settings", manifest: "Manifest") -> "Rows":
    """Find the documents of the options; refuse options that none of them needs."""
    from aftserve.batch.rows import STDIN, Columns, find

    if options.format is not None and STDIN not in options.files:
        raise UsageError(
            f"--format is for standard input, got {options.files[0]}.",
            "Name - for standard input, or leave --format out: the suffix of a file decides.",
        )
    features = () if manifest.features is None else manifest.features.names
    rows = find(
        options.files,
        Columns(options.text or "text", options.id, manifest.columns, features),
        stdin=options.format or "text",
        max_characters=settings.max_characters,
    )
    for name in ("text", "id"):
        if getattr(options, name) is not None and not rows.has_tables:
            raise UsageError(
                f"--{name} names a column of a table, got files of single documents.",
                f"Leave --{name} out.",
            )
    return rows


@contextmanager
def _output(target: Path | None) -> Iterator[TextIO]:
    """Open the output; a file is replaced at the end of the block, and only if it succeeds."""
    from aftserve.batch.output_file import OutputError, replacing

    if target is None:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # as JSON is
        try:
            yield sys.stdout
            sys.stdout.flush()
        except OSError as error:
            # Otherwise Python would write the rest at its end, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError("Standard output", error) from error
        return
    try:
        with replacing(target) as aside, aside.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise OutputError(f"--output {target}", error) from error
