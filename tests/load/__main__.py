"""``python -m load``: answers, times and speed under load, or memory and stops by ``--soak``."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from aftexport.system.console import stage
from load.documents import bare_engine, count_ambiguous_pairs, export_model, make_documents
from load.parts import LOAD, PARTS, SOAK, Report, Setting

_SHORTEST = 64


def main() -> int:
    """Measure, write the numbers as JSON and print them; return 1 if one is outside its bound."""
    parser = argparse.ArgumentParser(prog="python -m load", description=__doc__)
    add = parser.add_argument
    add("--soak", action="store_true", help=f"run {', '.join(SOAK)}, not {', '.join(LOAD)}")
    add("--parts", nargs="+", choices=list(PARTS), help="run only these parts")
    add("--requests", type=int, default=10_000, help="number of requests of the mixed traffic")
    add("--connections", type=int, default=50, help="number of concurrent connections")
    add("--documents", type=int, default=200, help="number of different documents")
    add("--longest", type=int, default=16_384, help="length of the longest document in tokens")
    add("--rounds", type=int, default=5, help="rounds per contender; --soak runs twice as many")
    add("--mechanism", default="aft_simple")
    add("--dim", type=int, default=128)
    add("--depth", type=int, default=2)
    add("--threads", type=int, default=1, help="threads of every engine; clients need a core too")
    add("--folder", type=Path, default=Path("build/load"), help="folder of the model and the logs")
    add("--out", type=Path, help="report file, by default build/load.json or build/soak.json")
    options = parser.parse_args()
    console = Console(width=120)
    checkpoint, bundle = export_model(
        options.folder, mechanism=options.mechanism, dim=options.dim, depth=options.depth
    )
    with stage(console, "Running every document alone"):
        engine = bare_engine(bundle, options.threads)
        longest, count = options.longest, options.documents
        documents = make_documents(engine, count, shortest=_SHORTEST, longest=longest)
    names = [name for name, value in vars(options).items() if isinstance(value, int | str)]
    report = Report({name: getattr(options, name) for name in names})
    report.at_most("documents with equal scores", count_ambiguous_pairs(documents), 0, "pairs")
    setting = Setting(
        checkpoint, bundle, documents, options.requests, options.connections, options.rounds,
        options.threads, options.folder,
    )  # fmt: skip
    for name in options.parts or (SOAK if options.soak else LOAD):
        with stage(console, (PARTS[name].__doc__ or name).rstrip(".")):
            PARTS[name](setting, report)
    report.write(options.out or Path("build") / ("soak.json" if options.soak else "load.json"))
    report.show(console)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
