"""Contenders are found by themselves, and a refusal is recorded with its reason."""

from contextlib import ExitStack, closing
from typing import Any

import pytest

from benchmarks import contenders, model
from benchmarks.contenders.contender import CannotReadError, ModelContender, Prepared
from benchmarks.record import Refusals, read_registry
from benchmarks.task import Task, build, logits
from benchmarks.turns import ContenderProcess
from benchmarks.workloads import Workload

TURNS = model.Turns(threads=1, rounds=1, neighbour=True, longest=40)


def relative_error(task: Task, contender: ModelContender) -> float:
    output, expected = contender.prepare(task, 1).run(), logits(task.model.module, task)
    return model.relative_error(output, expected)


class Refusing(ModelContender):
    def prepare(self, task: Task, threads: int) -> Prepared:
        raise CannotReadError("no Scan")


class Failing(ModelContender):
    def prepare(self, task: Task, threads: int) -> Prepared:
        def run() -> Any:
            raise ValueError("first line\nshape mismatch")

        return Prepared(run)


@pytest.fixture(scope="module")
def task() -> Task:
    return build(Workload("aft_simple", 1, 40, 32))


def test_registry_has_every_contender() -> None:
    """If it fails, run ``python -m benchmarks.tables`` with all peers installed."""
    known = {name: contender.facts for name, contender in contenders.MODELS.items()}
    registry = read_registry()
    assert {name: registry.get(name) for name in known} == known
    assert contenders.MISSING or registry.keys() == known.keys()


def test_refusals_are_recorded(task: Task) -> None:
    refusals = Refusals()
    eager = contenders.MODELS["torch_eager"]
    contestants = [Refusing("refusing", "Refusing"), Failing("failing", "Failing"), eager]
    with ExitStack() as stack:
        processes = {
            each: stack.enter_context(closing(ContenderProcess(1))) for each in contestants
        }
        rows = model.measure(task, processes, TURNS, {}, refusals)
    (row,) = rows
    assert row["contender"] == "torch_eager"
    for times in (row, row["beside_neighbour"]):
        assert 0 < times["seconds_p5"] <= times["seconds"] <= times["seconds_p95"]
    assert [(row["contender"], row["reason"]) for row in refusals.rows] == [
        ("refusing", "cannot read: no Scan"),
        ("failing", "cannot run: ValueError: shape mismatch"),
    ]


def test_own_failure_stops_run(task: Task) -> None:
    ours = Failing("ours", "Ours", is_ours=True)
    with closing(ContenderProcess(1)) as process, pytest.raises(ValueError, match="shape mismatch"):
        model.measure(task, {ours: process}, TURNS, {}, Refusals())


@pytest.mark.parametrize("name", ["aftexport_fp32", "ort_portable"])
def test_contender_computes_model(task: Task, name: str) -> None:
    assert relative_error(task, contenders.MODELS[name]) < 1e-5


@pytest.mark.parametrize(
    ("name", "bound"), [("openvino_fp32", 1e-5), ("openvino_dynamic_int8", 5e-2)]
)
def test_openvino_computes_model(task: Task, name: str, bound: float) -> None:
    if name not in contenders.MODELS:
        pytest.skip(f"the peers of the benchmark: {contenders.MISSING['openvino_onnx']}")
    assert relative_error(task, contenders.MODELS[name]) < bound


def test_slow_peer_gets_no_long_document() -> None:
    chosen = list(contenders.MODELS.values())
    seconds = {"torch_eager": 9.0, "ort_portable": 1.0, "torch_compile": 1.9, "aftexport_fp32": 5.0}
    rows = [
        {"mechanism": "aft_conv", "tokens": 4_096, "contender": name, "seconds": each}
        for name, each in seconds.items()
    ]
    refusals = Refusals()
    allowed = model.allowed(Workload("aft_conv", 1, 16_384, 256), chosen, rows, refusals)
    assert {c.name for c in chosen} - {c.name for c in allowed} == {"torch_eager"}
    assert [(row["contender"], row["reason"]) for row in refusals.rows] == [
        ("torch_eager", "left out: 9.0 times the best peer's time at 4,096 tokens")
    ]
