"""Contenders are found by themselves, and a refusal is recorded with its reason."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import pytest

from benchmarks import contenders, model
from benchmarks.contenders.contender import CannotReadError, ModelContender, Prepared
from benchmarks.record import Refusals
from benchmarks.registry import read_registry
from benchmarks.task import Task, build, logits
from benchmarks.workloads import Workload

MODULE = """
from benchmarks.contenders.torch_eager import TorchEager

class Another(TorchEager):
    name = "another"

CONTENDERS = (Another(),)
"""


def relative_error(task: Task, contender: ModelContender) -> float:
    output, expected = contender.prepare(task, 1).run(), logits(task.model.module, task)
    return model.relative_error(output, expected)


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


def test_registry_has_every_contender() -> None:
    """If it fails, run the command in the docstring of ``benchmarks.registry``."""
    known = {name: contender.facts for name, contender in contenders.MODELS.items()}
    registry = read_registry()
    assert {name: registry.get(name) for name in known} == known
    assert contenders.MISSING or registry.keys() == known.keys()


def test_refusals_are_recorded(task: Task) -> None:
    refusals = Refusals()
    eager = contenders.MODELS["torch_eager"]
    rows = model.measure(task, [Refusing(), Failing(), eager], 1, 1, {}, refusals)
    assert [row["contender"] for row in rows] == ["torch_eager"]
    assert [(row["contender"], row["reason"]) for row in refusals.rows] == [
        ("refusing", "cannot read: no Scan"),
        ("failing", "cannot run: ValueError: shape mismatch"),
    ]


def test_register_rate_is_of_fp32_only() -> None:
    """A precision may run by another method than that of its name."""
    facts = {n: contenders.MODELS[n].facts for n in ("aftexport_fp32", "aftexport_int8")}
    row = {"mechanism": "aft_conv", "tokens": 64, "seconds": 1.0, "error_float32": 0.0,
           "error_float64": None, "peak_mib": None, "product_multiply_adds": 50e9,
           "limits": {"fp32": 100.0, "int8": 400.0}}  # fmt: skip
    shown = model.table([row | {"contender": name} for name in facts], facts)
    assert list(shown.columns[6].cells) == ["50%", ""]


def test_own_failure_stops_run(task: Task) -> None:
    with pytest.raises(ValueError, match="shape mismatch"):
        model.measure(task, [OurFailing()], 1, 1, {}, Refusals())


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


def test_openvino_reports_unreadable_graph() -> None:
    """A node of a domain that no runtime knows stands for any graph that OpenVINO refuses."""
    if "openvino_onnx" in contenders.MISSING:
        pytest.skip(f"the peers of the benchmark: {contenders.MISSING['openvino_onnx']}")
    make, float32 = onnx.helper, onnx.TensorProto.FLOAT
    values = [make.make_tensor_value_info(name, float32, [1]) for name in ("x", "y")]
    node = make.make_node("Unknown", ["x"], ["y"], domain="some.domain")
    unreadable = make.make_model(
        make.make_graph([node], "graph", values[:1], values[1:]),
        opset_imports=[make.make_opsetid("", 20), make.make_opsetid("some.domain", 1)],
    )
    openvino_onnx = import_module("benchmarks.contenders.openvino_onnx")
    with pytest.raises(CannotReadError, match=r"some\.domain\.Unknown"):
        openvino_onnx.read(unreadable)


def test_softmax_runs_in_peers_and_short_documents_only() -> None:
    chosen = list(contenders.MODELS.values())
    refusals = Refusals()
    longest = Workload("softmax", 1, model.SOFTMAX_MAX_TOKENS, 256)
    allowed = model.allowed(longest, chosen, [], refusals)
    assert allowed == [contender for contender in chosen if not contender.is_ours]
    assert not refusals.left_out
    longer = Workload("softmax", 1, 2 * model.SOFTMAX_MAX_TOKENS, 256)
    assert model.allowed(longer, chosen, [], refusals) == []
    assert "quadratic" in refusals.left_out[0]


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
    del seconds["torch_eager"]
    rows += [
        {"mechanism": "aft_conv", "tokens": 16_384, "contender": name, "seconds": each}
        for name, each in seconds.items()
    ]
    longer = model.allowed(Workload("aft_conv", 1, 65_536, 256), chosen, rows, refusals)
    assert longer == allowed
    assert [(row["contender"], row["tokens"]) for row in refusals.rows] == [
        ("torch_eager", 16_384), ("torch_eager", 65_536)
    ]  # fmt: skip
