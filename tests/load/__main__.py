"""``python -m load``: answers, times and speed under load; with ``--soak`` what lasts."""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from servers import COMMAND, serving

from aftexport.report import stage
from load import memory, speed
from load.documents import Document, bare_engine, export_model, make_documents, mixed_up
from load.report import Report
from load.stopping import stop_under_load
from load.traffic import make_requests, send

_SHORT_TOKENS = 64
_STOPS = 3


def main() -> int:
    """Measures, writes the numbers as JSON, prints them; 1 where one is outside its bound."""
    parser = argparse.ArgumentParser(prog="python -m load", description=__doc__)
    add = parser.add_argument
    add("--soak", action="store_true", help="memory from round to round, and stops under load")
    add("--requests", type=int, default=10_000, help="of the mixed traffic")
    add("--connections", type=int, default=50, help="at a time")
    add("--documents", type=int, default=200, help="different ones")
    add("--longest", type=int, default=16_384, help="tokens")
    add("--rounds", type=int, default=5, help="of each contender, or of a thousand requests")
    add("--mechanism", default="aft_simple")
    add("--dim", type=int, default=128)
    add("--depth", type=int, default=2)
    add("--threads", type=int, default=1, help="of every engine; clients need a core too")
    add("--folder", type=Path, default=Path("build/load"), help="for the model and the logs")
    add("--out", type=Path, help="default: build/load.json or build/soak.json")
    options = parser.parse_args()
    console = Console(width=120)
    checkpoint, bundle = export_model(
        options.folder, mechanism=options.mechanism, dim=options.dim, depth=options.depth
    )
    with stage(console, "Running every document alone"):
        documents = make_documents(
            bare_engine(bundle, options.threads),
            options.documents,
            shortest=_SHORT_TOKENS,
            longest=options.longest,
        )
    report = Report({k: v for k, v in vars(options).items() if not isinstance(v, Path | None)})
    report.at_most("documents that could be taken for another", mixed_up(documents), 0, "pairs")
    measure = soak if options.soak else load
    measure(report, console, options, checkpoint, bundle, documents)
    report.write(options.out or Path("build") / ("soak.json" if options.soak else "load.json"))
    report.show(console)
    return 0 if report.passed else 1


def load(
    report: Report,
    console: Console,
    options: argparse.Namespace,
    checkpoint: Path,
    bundle: Path,
    documents: list[Document],
) -> None:
    """Right answers, promised times, and speed."""
    words = ("--threads", str(options.threads))
    with ExitStack() as stack:
        enter, folder = stack.enter_context, options.folder
        address, _ = enter(serving(bundle, folder / "aftserve.log", *words))
        with stage(console, f"{options.requests} requests, {options.connections} at a time"):
            requests = make_requests(documents, options.requests, leaving=0.2, hurried=0.1)
            results = send(address, requests, connections=options.connections)
        for state, count in results.states.most_common():
            report.shown(f"requests: {state}", count, "")
        report.at_most("answers of another document", results.states["wrong"], 0, "")
        report.at_most("ended against the contract", len(results.undefined), 0, "")
        report.at_most("ended a second past the deadline", len(results.late), 0, "")
        report.shown("p99 of an answer", results.seconds(0.99), "s")
        report.at_most("p99 of actual over predicted time", results.ratio(0.99), 2, "")

        engine = bare_engine(bundle, options.threads)
        short = min(documents, key=lambda document: len(document.ids))
        with stage(console, "One short request after the other"):
            served, bare = speed.overhead_seconds(address, engine, short, blocks=20)
        report.shown("one short document, bare engine", bare * 1000, "ms")
        report.at_most("one short document, over it", (served - bare) * 1000, 2, "ms")

        ways = {"engine": speed.in_a_loop(engine)}
        ways["aftserve"] = speed.over_http(address, options.connections)
        for name in speed.CONTENDERS:
            other = enter(
                speed.contender(name, checkpoint, options.threads, folder / f"{name}.log")
            )
            ways[name] = speed.over_http(other, options.connections)
        with stage(console, f"{', '.join(ways)}, in turn"):
            speeds = speed.compare(ways, documents, options.rounds)
    ours = speeds["aftserve"]
    for name, one in speeds.items():
        report.at_most(f"{name}: wrong or no answers", one.wrong, 0, "")
        report.shown(f"{name}: throughput", one.documents_per_second, "documents/s")
        report.shown(f"{name}: p99", one.p99_seconds, "s")
    rate = ours.documents_per_second
    bare_rate = speeds["engine"].documents_per_second
    report.at_least("throughput over the bare engine's", rate / bare_rate, 0.9, "")
    for name in speed.CONTENDERS:
        other_rate = speeds[name].documents_per_second
        report.at_least(f"throughput over {name}'s", rate / other_rate, 1.5, "")
        report.at_most(f"p99 over {name}'s", ours.p99_seconds / speeds[name].p99_seconds, 1, "")


def soak(
    report: Report,
    console: Console,
    options: argparse.Namespace,
    checkpoint: Path,
    bundle: Path,
    documents: list[Document],
) -> None:
    """Memory that comes back, and stops that lose nothing."""
    words = ("--threads", str(options.threads))
    most = f"{memory.MOST_MIB:g}"
    for name, program in {"memory": COMMAND, "memory, with a leak": memory.leaking(2048)}.items():
        with stage(console, f"{name}: twice {options.rounds} rounds of 1000 requests"):
            grown, resident = memory.growth(
                bundle,
                documents,
                options.folder / "soak.log",
                rounds=options.rounds,
                requests=1000,
                connections=options.connections,
                options=words,
                program=program,
            )
        report.shown(f"{name}: resident at the end", resident[-1], "MiB")
        if program is COMMAND:
            report.at_most(f"{name}: growth", grown, memory.MOST_MIB, "MiB per 1000 requests")
        else:
            report.at_least(f"{name}: found over {most}", grown, memory.MOST_MIB, "MiB per 1000")
    for number in range(_STOPS):
        with stage(console, "SIGTERM under load"):
            stopped = stop_under_load(
                bundle,
                documents,
                options.folder / "stopped.log",
                seconds=2 + number,
                connections=options.connections,
                options=words,
            )
        report.shown("SIGTERM: answered after it", stopped.answered_after, "requests")
        report.at_most("SIGTERM: accepted and lost", len(stopped.lost), 0, "requests")
        report.at_most("SIGTERM: exit status", stopped.exit_status, 0, "")


if __name__ == "__main__":
    sys.exit(main())
