"""The parts of ``make load`` and ``make soak``, and their bounds."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from benchmarks.setup import cpu_name
from commands import run_python
from rich.console import Console
from servers import serving

from aftexport.system.console import plain_table
from load import every_head, memory, speed
from load import storm as storms
from load.documents import BOUND, Document, bare_engine, make_documents
from load.health_probe import quantile
from load.traffic import Request, Results, make_requests, send


@dataclass(frozen=True)
class Row:
    """A measured property."""

    name: str
    value: float
    unit: str
    bound: str = ""
    within: bool | None = None  # None without a bound


@dataclass
class Report:
    """The conditions and the measured properties of a run."""

    conditions: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all values are within their bounds."""
        return all(row.within is not False for row in self.rows)

    def shown(self, name: str, value: float, unit: str) -> None:
        """Add a property without a bound."""
        self.rows.append(Row(name, value, unit))

    def at_most(self, name: str, value: float, bound: float, unit: str) -> None:
        """Add a property with an upper bound."""
        self.rows.append(Row(name, value, unit, f"at most {bound:g}", value <= bound))

    def at_least(self, name: str, value: float, bound: float, unit: str) -> None:
        """Add a property with a lower bound."""
        self.rows.append(Row(name, value, unit, f"at least {bound:g}", value >= bound))

    def write(self, path: Path) -> None:
        """Write conditions and rows as JSON."""
        machine = {"cpu": cpu_name(), "cores": os.cpu_count()}
        content = {"conditions": machine | self.conditions, "rows": [asdict(r) for r in self.rows]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")

    def show(self, console: Console) -> None:
        """Print the table."""
        table = plain_table("property", "measured", "", "bound", "")
        verdicts = {None: "", True: "[green]within[/]", False: "[red]outside[/]"}
        for row in self.rows:
            table.add_row(row.name, f"{row.value:,.4g}", row.unit, row.bound, verdicts[row.within])
        console.print(table)


@dataclass(frozen=True)
class Stopped:
    """The end of a server after SIGTERM."""

    exit_status: int
    results: Results
    lost: list[str]  # names of logged requests whose clients did not get the right answer
    answered_after: int  # requests answered after the signal


def stop_under_load(
    bundle: Path,
    documents: Sequence[Document],
    log: Path,
    *,
    after: int,
    connections: int,
    options: Sequence[str] = (),
) -> Stopped:
    """Send SIGTERM to a server once its clients have begun ``after`` requests.

    All clients wait for their answers, with a long deadline.
    """
    words = ("--log-format", "json", "--drain-seconds", "0.2", *options)
    with serving(bundle, log, *words) as (address, process):
        before = 0

        def requests() -> Iterator[Request]:
            nonlocal before
            for number, request in enumerate(make_requests(documents, 1 << 30)):
                if number == after:
                    before = len(_taken(log))
                    process.send_signal(signal.SIGTERM)
                yield request

        results = send(address, requests(), connections=connections)
        exit_status = process.wait(60)
    right = {o.request.name for o in results.outcomes if o.state == "right"}
    taken = _taken(log)
    lost = [name for name in taken if name not in right]
    return Stopped(exit_status, results, lost, len(taken) - before)


def _taken(log: Path) -> list[str]:
    lines = (line for line in log.read_text("utf-8").splitlines() if line.startswith("{"))
    events = [event for event in map(json.loads, lines) if event["logger"] == "aftserve.request"]
    return [event["request_id"] for event in events if "POST /infer" in event["message"]]


@dataclass(frozen=True)
class Answers:
    """The answers to all documents."""

    seconds: float
    answers: list[dict[str, Any]]  # label and scores of each document, in order

    def count_differences(self, other: "Answers") -> int:
        """Count the documents whose label differs, or whose scores differ over the bound."""
        return sum(
            a["label"] != b["label"]
            or any(abs(a["scores"][label] - b["scores"][label]) > BOUND for label in b["scores"])
            for a, b in zip(self.answers, other.answers, strict=True)
        )


def write_documents(texts: Sequence[str], folder: Path) -> None:
    """Write each text to a file; the names keep the order."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for number, text in enumerate(texts):
        (folder / f"{number:06}.txt").write_text(text, "utf-8")


def by_loop(bundle: Path, folder: Path, log: Path, threads: int) -> Answers:
    """Send documents one by one to a server; its start is not measured."""
    with (
        serving(bundle, log, "--threads", str(threads), measured=True) as (address, _),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        started = time.monotonic()
        answers = []
        for path in sorted(folder.iterdir()):
            response = client.post("/infer", json={"text": path.read_text("utf-8")})
            answers.append(response.raise_for_status().json())
        return Answers(time.monotonic() - started, answers)


def by_batch(bundle: Path, folder: Path, out: Path, threads: int) -> Answers:
    """Run the command, and measure it with its start and that of Ray."""
    started = time.monotonic()
    words = ("batch", bundle.resolve(), folder.resolve(), "--output", out.resolve())
    outcome = run_python("-m", "aftserve", *words, "--threads", str(threads), cwd=folder.parent)
    seconds = time.monotonic() - started
    if outcome.code != 0:
        raise RuntimeError(outcome.err)
    return Answers(seconds, [json.loads(line) for line in out.read_text("utf-8").splitlines()])


_BATCH_LONGEST = 2048
_BATCH_ROUNDS = 2
_STOPS = 3
_STOP_REQUESTS = 200
_STORM_DOCUMENTS = 60
_STORM_LONGEST = 8192
_STORM_REQUESTS = 1000
_STORM_CONNECTIONS = 16
_STORM_GROWTH_MIB = 2.0
_HEALTH_MS = 100.0
_SHOWN_FAULTS = 10
_OVERHEAD_BLOCKS = 20
_CONTENDERS_DOCUMENTS = 60
"""Documents in a round of the contenders: with all of them the run would take an hour."""


@dataclass(frozen=True)
class Setting:
    """The setting of all parts."""

    checkpoint: Path
    bundle: Path
    documents: list[Document]
    requests: int  # of the mixed traffic
    connections: int
    rounds: int  # of each contender, and half the rounds of growth
    threads: int  # of every engine
    folder: Path  # of the logs

    @property
    def words(self) -> tuple[str, str]:
        """The command-line options of every server."""
        return "--threads", str(self.threads)

    def log(self, name: str) -> Path:
        """Return the path of a server's log."""
        return self.folder / f"{name}.log"


def mixed(setting: Setting, report: Report) -> None:
    """Send mixed traffic: a fifth of the clients disconnect, a tenth set short deadlines."""
    with serving(setting.bundle, setting.log("mixed"), *setting.words, measured=True) as (
        address,
        _,
    ):
        requests = make_requests(setting.documents, setting.requests, leaving=0.2, hurried=0.1)
        results = send(address, requests, connections=setting.connections)
    for state, count in results.states.most_common():
        report.shown(f"mixed: {state}", count, "requests")
    report.at_most("mixed: wrong answers", results.states["wrong"], 0, "requests")
    report.at_most("mixed: ended against the contract", len(results.undefined), 0, "requests")
    report.at_most("mixed: later than deadline + 1 s", len(results.late), 0, "requests")
    report.shown("mixed: p99 of an answer", results.seconds(0.99), "s")
    report.at_most("mixed: p99 of actual over predicted time", results.ratio(0.99), 2, "")


def overhead(setting: Setting, report: Report) -> None:
    """Send one short document many times from one client."""
    engine = bare_engine(setting.bundle, setting.threads)
    short = min(setting.documents, key=lambda document: len(document.ids))
    with serving(setting.bundle, setting.log("overhead"), *setting.words, measured=True) as (
        address,
        _,
    ):
        served, bare = speed.overhead_seconds(address, engine, short, blocks=_OVERHEAD_BLOCKS)
    report.shown("one short document: bare engine", bare * 1000, "ms")
    report.at_most("one short document: over it", (served - bare) * 1000, 2, "ms")


def saturation(setting: Setting, report: Report) -> None:
    """Compare the throughput of a saturated server with the bare engine in a loop."""
    engine = bare_engine(setting.bundle, setting.threads)
    with serving(setting.bundle, setting.log("saturation"), *setting.words, measured=True) as (
        address,
        _,
    ):
        served = speed.over_http(address, setting.connections)
        ways = {"bare engine": speed.by_engine(engine), "aftserve": served}
        speeds = speed.compare(ways, setting.documents * 2, setting.rounds)
    _show("saturation", speeds, report)
    ratio = speeds["aftserve"].over(speeds["bare engine"])
    report.at_least("saturation: throughput over the bare engine's", ratio, 0.9, "")


def contenders(setting: Setting, report: Report) -> None:
    """Compare the server with LitServe and plain FastAPI, which run the PyTorch model."""
    with ExitStack() as stack:
        address, _ = stack.enter_context(
            serving(setting.bundle, setting.log("aftserve"), *setting.words, measured=True)
        )
        ways = {"aftserve": speed.over_http(address, setting.connections)}
        for name, program in speed.CONTENDERS.items():
            log = setting.log(name)
            other = speed.contender(program, setting.checkpoint, setting.threads, log)
            ways[name] = speed.over_http(stack.enter_context(other), setting.connections)
        speeds = speed.compare(ways, setting.documents[:_CONTENDERS_DOCUMENTS], setting.rounds)
    _show("contenders", speeds, report)
    ours = speeds["aftserve"]
    for name in speed.CONTENDERS:
        throughput = ours.over(speeds[name])
        report.at_least(f"contenders: throughput over that of {name}", throughput, 1.5, "")
        latency = ours.p99_seconds / speeds[name].p99_seconds
        report.at_most(f"contenders: p99 over that of {name}", latency, 1, "")


def batch(setting: Setting, report: Report) -> None:
    """Compare ``aftserve batch`` with one client that posts single documents."""
    engine, folder = bare_engine(setting.bundle, setting.threads), setting.folder / "documents"
    documents = make_documents(engine, setting.requests, shortest=64, longest=_BATCH_LONGEST)
    write_documents([document.text for document in documents], folder)
    ratios = []
    for _ in range(_BATCH_ROUNDS):
        loop = by_loop(setting.bundle, folder, setting.log("loop"), setting.threads)
        out = setting.folder / "answers.jsonl"
        together = by_batch(setting.bundle, folder, out, setting.threads)
        ratios.append(loop.seconds / together.seconds)
        report.shown("batch: a loop over /infer", loop.seconds, "s")
        report.shown("batch: aftserve batch", together.seconds, "s")
        differences = together.count_differences(loop)
        report.at_most("batch: answers that differ from /infer", differences, 0, "")
    report.at_least("batch: speed over the loop", min(ratios), 1, "")


def growth(setting: Setting, report: Report) -> None:
    """Measure the growth of memory, with and without a leak."""
    for name, leak in {"memory": 0, "a leak of 2 KiB": 2048}.items():
        grown, resident = memory.growth(
            setting.bundle,
            setting.documents,
            setting.log(name),
            rounds=2 * setting.rounds,
            requests=1000,
            connections=setting.connections,
            options=setting.words,
            leak=leak,
        )
        report.shown(f"{name}: resident at the end", resident[-1], "MiB")
        judge = report.at_least if leak else report.at_most
        judge(f"{name}: growth per 1000 requests", grown, memory.MAX_GROWTH_MIB, "MiB")


def stops(setting: Setting, report: Report) -> None:
    """Stop servers under load, after different numbers of requests."""
    for number in range(1, _STOPS + 1):
        stopped = stop_under_load(
            setting.bundle,
            setting.documents,
            setting.log("stopped"),
            after=number * _STOP_REQUESTS,
            connections=setting.connections,
            options=setting.words,
        )
        name = f"SIGTERM {number}"
        report.shown(f"{name}: answered after the signal", stopped.answered_after, "requests")
        report.at_most(f"{name}: accepted and lost", len(stopped.lost), 0, "requests")
        report.at_most(f"{name}: exit status", stopped.exit_status, 0, "")


def storm(setting: Setting, report: Report) -> None:
    """Use all interfaces at once, while the bundle and the API keys change and clients leave."""
    folder = setting.folder / "storm"
    bundles = every_head.export_bundles(folder)
    documents = every_head.make_documents(_STORM_DOCUMENTS, longest=_STORM_LONGEST)
    plan = storms.Plan(
        setting.rounds // 2 + setting.rounds, _STORM_REQUESTS, _STORM_CONNECTIONS,
        options=setting.words,
    )  # fmt: skip
    found = storms.run(bundles, documents, folder, plan, is_measured=True)
    _show_storm("storm", found, report)
    measured = slice(-setting.rounds, None)
    grown = memory.slope(found.resident[measured]) * 1000 / _STORM_REQUESTS
    report.shown("storm: resident at the end", found.resident[-1], "MiB")
    report.at_most("storm: growth per 1000 requests", grown, _STORM_GROWTH_MIB, "MiB")
    opened = found.open_files[measured]
    report.at_most("storm: growth of open files", opened[-1] - opened[0], 1, "")
    several = replace(plan, rounds=2, shares_runs=True, several_models=True)
    found = storms.run(bundles, documents, folder, several, is_measured=True)
    _show_storm("storm of two models with shared runs", found, report)
    report.at_least("storm of two models: loads", found.returns, 1, "")


PARTS: dict[str, Callable[[Setting, Report], None]] = {
    part.__name__: part
    for part in (mixed, overhead, saturation, contenders, batch, growth, stops, storm)
}
LOAD = ("mixed", "overhead", "saturation", "contenders", "batch")
SOAK = ("growth", "stops", "storm")


def _show_storm(title: str, found: storms.Storm, report: Report) -> None:
    for status, number in found.statuses.most_common():
        report.shown(f"{title}: {status}", number, "requests")
    for interface, number in found.answered.items():
        report.at_least(f"{title}: answered by {interface}", number, 1, "requests")
    report.at_least(f"{title}: reloads", found.reloads, 1, "")
    report.at_least(f"{title}: replaced API keys", found.rotations, 1, "")
    report.at_most(f"{title}: faults", len(found.faults), 0, "")
    for fault in found.faults[:_SHOWN_FAULTS]:
        report.at_most(f"{title}: {fault}", 1, 0, "")
    delays = found.delays
    assert delays is not None  # every storm of a part is measured
    for name, values in {"/healthz": delays.health, "a bare responder": delays.bare}.items():
        report.shown(f"{title}: {name}: p99.9", quantile(values, 0.999), "ms")
        report.shown(f"{title}: {name}: maximum", max(values), "ms")
    # The delay of an idle responder comes on top of the server's own.
    bound = _HEALTH_MS + max(delays.bare)
    name = f"{title}: /healthz without waits for a core: maximum"
    report.at_most(name, max(delays.own), bound, "ms")


def _show(title: str, speeds: dict[str, speed.Speed], report: Report) -> None:
    for name, found in speeds.items():
        report.at_most(f"{title}: {name}: wrong or missing answers", found.wrong, 0, "")
        report.shown(f"{title}: {name}: throughput", found.documents_per_second, "documents/s")
        report.shown(f"{title}: {name}: p99", found.p99_seconds, "s")
