"""All interfaces of one server at once, while its bundles, models and API keys change."""

import asyncio
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from servers import serving

from load import memory
from load.accounts import Metrics, log_faults, metric_faults, read_log, request_faults
from load.administrator import Administrator
from load.changes import Changes, Place
from load.documents import BOUND
from load.every_head import Document, bare_answers
from load.generations import ServedModel
from load.health_probe import Delays, probing
from load.key_rotation import KeyRotation
from load.storm_clients import Outcome, StormClients

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
