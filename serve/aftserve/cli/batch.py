"""``aftserve batch``."""

from argparse import Namespace
from collections.abc import Sequence

from aftexport.system.arguments import make_parser, path
from aftexport.system.process import exit_status, interruptible

_EPILOG = """\
INPUT is a folder in which each file is a document in UTF-8, or a Parquet file or folder. The
output has a row for each document, in order: its path from INPUT, its id or its number, and the
server's answer or an error. The output is complete or not written. Extra inputs of a model are
columns of the same names, and so is text_pair, the second text of a model of pairs.

  aftserve batch model.bundle mails/ --output mails.jsonl
  aftserve batch model.bundle mails.parquet --text body --id number --output labels.parquet

Set other settings of the server as AFTSERVE_* variables or in FILE.

Exit status: 0 if every document has an answer, 3 if some have an error. Otherwise nothing is
written: 1 if the run failed, 2 if it could not begin, 130 if it was interrupted, and 143 if it was
terminated by SIGTERM.
"""


def _parse(words: Sequence[str]) -> Namespace:
    parser = make_parser(
        "aftserve batch",
        "Classify a folder or a Parquet file of documents with Ray Data.",
        _EPILOG,
    )
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="a folder written by aftexport")
    add("input", type=path, metavar="INPUT", help="a folder of texts, or Parquet")
    add("-o", "--output", type=path, required=True, metavar="OUT", help="a .parquet or .jsonl file")
    add("--text", metavar="COLUMN", help="column of texts (default: text)")
    add("--id", metavar="COLUMN", help="column of ids (default: id, or the number of the row)")
    add("--long-documents", metavar="POLICY",
        help="exact, reject, head or tail; see aftserve --help")  # fmt: skip
    add("--actors", type=int, default=1, metavar="N",
        help="processes that hold the model (default: 1)")  # fmt: skip
    add("--threads", metavar="N",
        help="threads of each process (default: a share of the cores; 1 on a cluster)")  # fmt: skip
    add("--config", metavar="FILE", help="a TOML file of the server's settings")
    add("--address", help="address of a Ray cluster (default: RAY_ADDRESS, or a local Ray)")
    options = parser.parse_args(words)
    if options.actors < 1:
        parser.error(f"argument --actors: must be at least 1, got {options.actors}")
    return options


def run(words: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options = _parse(words)

    from rich.console import Console

    from aftexport.system.installation import check_installed
    from aftexport.system.process import usable_cores

    check_installed("ray")  # before the import of pyarrow, which another extra brings too

    from aftserve.batch import documents
    from aftserve.batch.output_file import check_output
    from aftserve.batch.run import run as classify
    from aftserve.ray.cluster import resolve
    from aftserve.settings import Settings

    given = {
        "--long-documents": options.long_documents,
        "--threads": options.threads,
        "--config": options.config,
    }
    flags = [word for name, value in given.items() if value is not None for word in (name, value)]
    settings = Settings.read([options.bundle, *flags])
    address = resolve(options.address)
    if settings.threads is None and address is None:
        threads = max(1, usable_cores() // options.actors)
        settings = settings.model_copy(update={"threads": threads})
    check_output(options.output, [options.input], (".parquet", ".jsonl"))
    found = documents.find(options.input, text=options.text, id=options.id)
    console = Console(stderr=True, emoji=False)
    try:
        with interruptible() as interruption:
            failed = classify(
                settings,
                found,
                options.output,
                actors=options.actors,
                address=address,
                console=console,
                interruption=interruption,
            )
    except KeyboardInterrupt as end:
        console.print("interrupted: nothing was written")
        return exit_status(end)
    return 3 if failed else 0
