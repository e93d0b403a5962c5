"""Contenders are found by themselves, and a refusal is recorded with its reason."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import contenders, model
from benchmarks.contenders.contender import CannotReadError, ModelContender, Prepared
from benchmarks.record import Refusals
from benchmarks.task import Task, build, logits
from benchmarks.workloads import Workload

MODULE = """
from benchmarks.contenders.torch_eager import TorchEager

class Another(TorchEager):
    name = "another"

CONTENDERS = (Another(),)
"""


class Refusing(ModelContender):
    name, title, precision = "refusing", "Refusing", "fp32"

    def prepare(self, task: Task, threads: int) -> Prepared:
        raise CannotReadError("no Scan")


class Failing(ModelContender):
    name, title, precision = "failing", "Failing", "fp32"

    def prepare(self, task: Task, threads: int) -> Prepared:
        def run() -> Any:
            raise ValueError("first line\nshape mismatch")

        return Prepared(run)


class OurFailing(Failing):
    is_ours = True


@pytest.fixture(scope="module")
def task() -> Task:
    return build(Workload("aft_simple", 1, 40, 32))


def test_new_module_adds_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "another.py").write_text(MODULE, "utf-8")
    (tmp_path / "broken.py").write_text("import no_such_package", "utf-8")
    monkeypatch.setattr(contenders, "__path__", [*contenders.__path__, str(tmp_path)])
    found, missing = contenders.discover()
    for name in ("another", "broken"):
        sys.modules.pop(f"benchmarks.contenders.{name}", None)
    assert "another" in {contender.name for contender in found}
    assert "no_such_package" in missing["broken"]
    assert "make build/peers/installed" in missing["broken"]


def test_refusals_are_recorded(task: Task) -> None:
    refusals = Refusals()
    eager = contenders.MODELS["torch_eager"]
    rows = model.measure(task, [Refusing(), Failing(), eager], 1, 1, {}, refusals)
    assert [row["contender"] for row in rows] == ["torch_eager"]
    assert [(row["contender"], row["reason"]) for row in refusals.rows] == [
        ("refusing", "cannot read: no Scan"),
        ("failing", "cannot run: ValueError: shape mismatch"),
    ]


def test_own_failure_stops_run(task: Task) -> None:
    with pytest.raises(ValueError, match="shape mismatch"):
        model.measure(task, [OurFailing()], 1, 1, {}, Refusals())


@pytest.mark.parametrize("name", ["aftexport_fp32", "ort_portable", "openvino_fp32"])
def test_contender_computes_model(task: Task, name: str) -> None:
    if name not in contenders.MODELS:
        pytest.skip(contenders.MISSING["openvino_onnx"])
    output = contenders.MODELS[name].prepare(task, 1).run()
    expected = logits(task.model.module, task)
    assert np.abs(output - expected).max() <= 1e-4 * np.abs(expected).max()


def test_softmax_runs_long_in_fastest_peer_only() -> None:
    chosen = list(contenders.MODELS.values())
    tokens = 2 * model.SOFTMAX_MAX_TOKENS
    rows = [
        {"mechanism": "softmax", "contender": "torch_eager", "seconds": 2.0},
        {"mechanism": "softmax", "contender": "ort_portable", "seconds": 1.0},
    ]
    refusals = Refusals()
    allowed = model.allowed(Workload("softmax", 1, tokens, 256), chosen, rows, refusals)
    assert [contender.name for contender in allowed] == ["ort_portable"]
    assert "quadratic" in refusals.left_out[0]
