"""All interfaces of one server at once, while its bundles, models and API keys change."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients import http
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from servers import serving

from load import memory
from load.changes import Administrator, Changes, KeyRotation, Place, ServedModel
from load.documents import BOUND
from load.every_head import Document, bare_answers
from load.health_probe import Delays, probing
from load.interfaces import INTERFACES
from load.storm_clients import OK, Outcome, StormClients

_RESPONSES = "aftserve_responses_total"
_QUIET = ("debug", "info")
_UNLOADED = "The model was unloaded meanwhile."
"""The outcome of a reload by SIGHUP during which an administrator unloads the model."""


class Metrics:
    """The metrics of a server at one time."""

    def __init__(self, address: str, key: str) -> None:
        text = http.get(f"{address}/metrics", headers={"X-API-Key": key}).raise_for_status().text
        self._samples: list[Sample] = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all series of a name with these labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def responses(self, **labels: str) -> Counter[tuple[str, str]]:
        """Return the number of responses with these labels, by path and status."""
        counts = Counter[tuple[str, str]]()
        for one in self._samples:
            if one.name == _RESPONSES and labels.items() <= one.labels.items():
                counts[one.labels["path"], one.labels["status"]] += int(one.value)
        return counts


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return the events of a log in JSON; a line in another form has the field ``line``."""
    lines = log.read_text("utf-8").splitlines()
    return [json.loads(one) if one.startswith("{") else {"line": one} for one in lines]


def log_faults(events: Sequence[dict[str, Any]], refused_reloads: int) -> Iterable[str]:
    """Yield each event that a healthy server does not log."""
    # events: from the first of its requests on
    refused = 0
    for event in events:
        if event.get("logger") == "aftserve.reloading" and event["level"] == "error":
            refused += _UNLOADED not in event["message"]
        elif event.get("level") not in _QUIET or "exception" in event:
            yield f"log: {event}"
    if refused != refused_reloads:
        yield f"log: {refused} refused reloads, expected {refused_reloads}"


def request_faults(events: Iterable[dict[str, Any]], outcomes: Sequence[Outcome]) -> Iterable[str]:
    """Yield each difference between the log and the outcomes.

    The log has one line for each request whose client stayed, with the status that this client got,
    and at most one for others.
    """
    logged = _statuses(events)
    for one in outcomes:
        statuses = logged[one.name]
        if one.status is not None and statuses != [one.status]:
            yield f"{one.interface.name}: the log has {statuses}, the client got {one.status}"
        elif len(statuses) > 1:
            yield f"{one.interface.name}: the log has {statuses} for one request"


def metric_faults(
    events: Iterable[dict[str, Any]],
    metrics: Metrics,
    outcomes: Sequence[Outcome],
    model: str | None = None,  # None to compare all responses
) -> Iterable[str]:
    """Yield each difference between the metrics and the log."""
    logged, labels = _statuses(events), {} if model is None else {"model": model}
    asked = [one for one in outcomes if model in (None, one.model)]
    counts = Counter(
        (one.interface.counted_path, status)
        for one in asked
        for status in logged[one.name]
        if model is None or status in OK
    )
    counted = metrics.responses(**labels)
    paths = {one.counted_path for one in INTERFACES}
    for path, status in counts.keys() | counted.keys():
        expected, found = counts[path, status], counted[path, status]
        if path in paths and expected != found and (model is None or status in OK):
            yield f"metrics: {found} responses {status} at {path}, the log has {expected}"
    answered = metrics.sum("aftserve_document_tokens_count", **labels)
    # A line of newline-delimited JSON may be refused by itself.
    least = sum(
        one.documents for one in asked if one.is_answered and not one.interface.is_by_document
    )
    most = sum(one.documents for one in asked if one.is_answered or one.status is None)
    if not least <= answered <= most:
        yield f"metrics: {answered:g} answered documents, expected {least} to {most}"
    if lost := metrics.sum("aftserve_log_lines_dropped_total"):
        yield f"metrics: {lost:g} lines of the log were dropped"


def _statuses(events: Iterable[dict[str, Any]]) -> defaultdict[str, list[str]]:
    """Return the statuses of each request in the log, by its name."""
    logged = defaultdict[str, list[str]](list)
    for event in events:
        if event.get("logger") == "aftserve.request":
            logged[event["request_id"]].append(event["message"].split()[-1])
    return logged


# With this budget only documents of one token are measured, so that others seem to take minutes.
_ALONE = ("--budget-tokens", "1", "--max-queue-seconds", "3600", "--deadline-seconds", "3600")
_LOOKS = 20
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Plan:
    """The size of a storm."""

    rounds: int
    requests: int  # of a round
    connections: int
    # Then numbers may differ from the bare model's by rounding; otherwise every bit must be
    # equal.
    shares_runs: bool = False
    several_models: bool = False  # whether a second model comes and goes
    options: Sequence[str] = ("--threads", "1")
    program: Sequence[str] = memory.trimming_server()  # arguments of Python


@dataclass
class Storm:
    """The outcome of a storm."""

    answered: Counter[str] = field(default_factory=Counter)  # requests by interface
    statuses: Counter[str] = field(default_factory=Counter)  # left if the client left
    reloads: int = 0
    returns: int = 0  # of the second model
    rotations: int = 0  # of keys
    faults: list[str] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)  # MiB after each round
    open_files: list[float] = field(default_factory=list)  # after each round
    delays: Delays | None = None

    def count(self, outcomes: Sequence[Outcome]) -> None:
        """Count the outcomes of requests."""
        for one in outcomes:
            self.statuses[one.status or "left"] += 1
            self.answered[one.interface.name] += one.is_answered


def run(
    bundles: Sequence[Path],
    documents: Sequence[Document],
    folder: Path,
    plan: Plan,
    *,
    is_measured: bool = False,  # whether delays are measured, and memory is comparable
) -> Storm:
    """Run a storm."""
    deployed, log = folder / "deployed", folder / "storm.log"
    shutil.rmtree(deployed, ignore_errors=True)
    deployed.mkdir(parents=True)
    keys = KeyRotation(folder / "keys")
    places = _places(bundles, documents, deployed, plan)
    words = _words(places, folder / "keys", plan)
    # Python's own allocator keeps a MiB for each small object of it that stays.
    variables = {"PYTHONMALLOC": "malloc"} if is_measured else {}
    storm = Storm()
    with ExitStack() as stack:
        address, process = stack.enter_context(
            serving(places[0].folder, log, *words, program=plan.program, measured=True, **variables)
        )
        before = len(read_log(log))
        if is_measured:
            probe = probing(address, process, folder / "probe.log")
            storm.delays = stack.enter_context(probe)
        clients = StormClients(
            address, _grpc_address(log), [one.model for one in places], keys.ring, documents,
            bound=BOUND if plan.shares_runs else 0.0,
        )  # fmt: skip
        administrator = Administrator(address, process, keys.ring.admin)
        changes = Changes(address, administrator, keys, *places)
        for number in range(plan.rounds):
            asyncio.run(_round(clients, changes, plan, number))
            _measure(storm, address, process, keys.ring.admin)
        kept = places[0].model.name if plan.several_models else None
        for _ in range(_LOOKS):  # requests whose client has left may end a little later
            metrics, events = Metrics(address, keys.ring.admin), read_log(log)[before:]
            differences = [
                *request_faults(events, clients.outcomes),
                *metric_faults(events, metrics, clients.outcomes, kept),
            ]
            if not differences:
                break
            time.sleep(_LOOK_SECONDS)
    storm.faults = [
        *differences, *clients.faults, *changes.faults, *administrator.faults, *keys.faults,
        *log_faults(read_log(log)[before:], changes.refused),
    ]  # fmt: skip
    if process.returncode != 0:
        storm.faults.append(f"exit status {process.returncode}")
    storm.count(clients.outcomes)
    storm.reloads, storm.returns, storm.rotations = changes.reloads, changes.returns, keys.count
    return storm


def _words(places: Sequence[Place], keys: Path, plan: Plan) -> list[str]:
    """Return the arguments of the server after its first bundle."""
    return [
        *(str(one.folder.parent) for one in places[1:]),
        *("--grpc-port", "0", "--log-format", "json", "--idle-seconds", "0.5"),
        *("--api-keys", str(keys)),
        *(() if plan.shares_runs else _ALONE),
        *plan.options,
    ]


def _places(
    bundles: Sequence[Path], documents: Sequence[Document], deployed: Path, plan: Plan
) -> list[Place]:
    """Put the bundle of each model to its place."""
    answers = [bare_answers(one, documents, 1) for one in bundles]
    models = [ServedModel("a", answers, "/models/a" if plan.several_models else "")]
    folders = [deployed / "a.bundle"]
    if plan.several_models:
        models.append(ServedModel("b", answers[::-1], "/models/b", is_default=False))
        folders.append(deployed / "folder" / "b.bundle")
    places = []
    for model, folder, order in zip(models, folders, (bundles, bundles[::-1]), strict=False):
        folder.parent.mkdir(exist_ok=True)
        places.append(Place(model, folder, deployed / "attic", order))
        places[-1].put(0)
    return places


async def _round(clients: StormClients, changes: Changes, plan: Plan, number: int) -> None:
    """Send three quarters of the requests during changes, and the others after the last change."""
    changes.stopping = False
    names = [f"{number}-{request}" for request in range(plan.requests)]
    during = len(names) * 3 // 4
    changing = asyncio.create_task(changes.run(number))
    try:
        await clients.send(names[:during], connections=plan.connections, seed=2 * number)
    finally:
        changes.stopping = True
        await changing
    await clients.send(names[during:], connections=plan.connections, seed=2 * number + 1)


def _measure(storm: Storm, address: str, process: "subprocess.Popen[bytes]", key: str) -> None:
    """Measure the memory and the open files of a server whose clients have ended."""
    storm.resident.append(
        memory.resident_mib(address, process, lambda name: Metrics(address, key).sum(name))
    )
    storm.open_files.append(Metrics(address, key).sum("process_open_fds"))


def _grpc_address(log: Path) -> str:
    found = re.search(r'gRPC running on ([^\s"]+)', log.read_text("utf-8"))
    assert found is not None
    return found[1]
