import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from bundles import resealed
from commands import Capture, run_here
from layer_faults import (
    DIM,
    EXPORT,
    KERNEL,
    LABELS,
    PRECISION,
    VOCABULARY,
    Fault,
    Mixed,
    config,
    rewrite,
)
from sampling import any_case
from torch import Tensor, nn

import aftplugins
from aftexport.bundle.golden import Case
from aftexport.capture.capture import capture
from aftexport.engines import onnxruntime as ort
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import EncoderLayer
from aftexport.parity import TOLERANCES
from aftexport.parity.report import Layers
from aftexport.verify import layer_comparison as compare
from aftexport.verify.layer_comparison import Steps, Verdict, compare_layers, judge
from aftexport.verify.torch_program import Program

needs_kernels = pytest.mark.skipif(
    aftplugins.library("onnxruntime") is None, reason="the fused kernels are not built"
)


@dataclass(frozen=True)
class Exported:
    """A model, and PyTorch's side of it."""

    model: onnx.ModelProto
    program: Program
    case: Case
    precision: str = "fp32"

    def compare(
        self, model: onnx.ModelProto, folder: Path, *, fused: bool = True, **options: Any
    ) -> Layers:
        onnx.save(model, folder / "model.onnx")
        options = {"bound": TOLERANCES[self.precision].bound, "fused": fused} | options
        return compare_layers(folder / "model.onnx", self.program, self.case, **options)

    def copy(self) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        return model


def exported(module: nn.Module, precision: str = "fp32") -> Exported:
    dtype = torch.float16 if precision == "fp16" else torch.float32
    model = finish(lower(capture(module, dtype=dtype)), precision=precision)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (3, 21))
    inputs = {"input_ids": ids, "lengths": np.array([21, 9, 1])}
    program = Program.captured(module, dtype)
    expected = program.run(["logits"], inputs)["logits"]
    return Exported(
        model, program, Case("padded", "model", inputs, {"logits": expected}), precision
    )


@pytest.fixture(scope="module")
def mixed() -> Exported:
    return exported(Mixed())


def check(found: Layers, fault: Fault) -> None:
    blame = found.blame
    assert blame is not None
    assert fault.module in blame.modules, blame
    assert blame.cause == fault.cause, blame
    assert fault.finding in " ".join(blame.findings)


@pytest.mark.slow
def test_faultless_model_is_within_everywhere(mixed: Exported, tmp_path: Path) -> None:
    found = mixed.compare(mixed.copy(), tmp_path)
    assert (found.first, found.blame) == (None, None)
    assert not found.unmatched
    modules = {layer.module for layer in found.layers}
    assert {"embedding", "layers.0.attention", "layers.3", "pooling", "head"} <= modules
    assert len(found.layers) > 30


def test_pytorchs_side_is_the_module_itself(mixed: Exported) -> None:
    inputs = {name: torch.from_numpy(array) for name, array in mixed.case.inputs.items()}
    with torch.inference_mode():
        expected = Mixed().double()(**inputs).numpy()
    np.testing.assert_allclose(mixed.case.outputs["logits"], expected, rtol=0, atol=1e-12)


@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.parametrize("fault", EXPORT, ids=lambda fault: fault.name)
def test_export_fault_is_found(fault: Fault, mixed: Exported, tmp_path: Path) -> None:
    model = mixed.copy()
    fault.plant(model)
    check(mixed.compare(model, tmp_path, fused=fault.fused), fault)


@needs_kernels
@pytest.mark.parametrize("fault", PRECISION, ids=lambda fault: fault.name)
def test_a_precision_too_narrow_is_found(fault: Fault, mixed: Exported, tmp_path: Path) -> None:
    model = mixed.copy()
    fault.plant(model)
    check(mixed.compare(model, tmp_path), fault)


@pytest.mark.parametrize("fault", KERNEL, ids=lambda fault: fault.name)
def test_a_broken_kernel_is_found(
    fault: Fault, mixed: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernel(fault, monkeypatch)
    check(mixed.compare(mixed.copy(), tmp_path), fault)


def break_kernel(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the fused kernels by bodies, one of them wrong."""
    load = ort.session

    def session(model: Path | bytes, *options: Any, fused: bool, **others: Any) -> Any:
        changed = onnx.load(model) if isinstance(model, Path) else onnx.load_from_string(model)
        if fused and any(node.op_type == fault.name for node in changed.graph.node):
            fault.plant(changed)
        return load(changed.SerializeToString(), *options, fused=False, **others)

    monkeypatch.setattr("aftexport.engines.onnxruntime.engine.session", session)
    monkeypatch.setattr(compare, "operator_paths", lambda *_, **__: {fault.name: "fused"})


class Overflowing(nn.Module):
    """A norm makes what is too large for float16 small again: float64 minds nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layer = EncoderLayer(config("aft_simple"))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, LABELS)
        with torch.no_grad():
            if kind == "weights":
                self.layer.attention.value.weight[3, 3] = 1e5
            else:
                self.layer.ffn[0].weight *= 200
                self.layer.ffn[2].weight *= 2000

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.layer(self.embedding(input_ids), lengths)
        return self.head(self.norm(x)[:, 0])


@pytest.mark.parametrize(
    ("kind", "module"), [("weights", "layer.attention.value"), ("sums", "layer.ffn.2")]
)
def test_an_overflow_of_float16_is_found(kind: str, module: str, tmp_path: Path) -> None:
    broken = exported(Overflowing(kind), "fp16")
    fault = Fault(kind, lambda _: None, module, "precision", "overflows")
    for fused in (True, False):
        check(broken.compare(broken.copy(), tmp_path, fused=fused), fault)


def test_marks_changing_fusion_are_reported(mixed: Exported, tmp_path: Path) -> None:
    """A tensor that becomes an output changes the graph; the report says by how much."""
    real = compare._Probe._run

    def run(self: Any, marked: Any) -> Any:
        found = real(self, marked)
        if "add_99" in marked:
            found["logits"] = found["logits"] + np.float32(1e-6)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare._Probe, "_run", run)
        found = mixed.compare(mixed.copy(), tmp_path)
    assert found.altered == ["add_99"]
    assert found.blame is None
    assert [layer.tensor for layer in found.layers if layer.tensor == "add_99"]


def test_command_names_layer_and_cause(
    bundle_copy: Path, checkpoint_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    model = onnx.load(bundle_copy / "model.onnx")
    rewrite(model, "head.bias", lambda array: array + 1)
    onnx.save(model, bundle_copy / "model.onnx")
    words = ["verify", resealed(bundle_copy), "--model", checkpoint_file, "--layers"]
    words += ["--output", tmp_path / "p.json", "--report", tmp_path / "p.html"]
    outcome = run_here(words, capsys)
    assert outcome.code == 1
    assert "first tensor out of tolerance" in outcome.out
    assert "is logits in head. The cause is the export" in outcome.out
    assert "head.bias: the graph's head.bias differs in 3 of 3" in outcome.out
    record = json.loads((tmp_path / "p.json").read_text("utf-8"))["layers"]
    assert (record["first"], record["blame"]["cause"]) == ("logits", "export")
    assert "Error by layer" in (tmp_path / "p.html").read_text("utf-8")


def test_command_reports_all_within(
    bundle_folder: Path, checkpoint_file: Path, capsys: Capture
) -> None:
    words = ["verify", bundle_folder, "--model", checkpoint_file, "--layers", "--portable"]
    outcome = run_here(words, capsys)
    assert outcome.code == 0, outcome.err
    assert "intermediate tensors" in outcome.out


class Activated(nn.Module):
    """Layers that differ from each other only in their weights."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(approximate)) for _ in range(3)
        )
        self.head = nn.Linear(DIM, LABELS)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x[:, 0])


@pytest.mark.parametrize("bound", [5e-3, 2e-4])
def test_other_activation_is_found_at_first_layer(bound: float, tmp_path: Path) -> None:
    """Also where each tensor is within tolerance, and only an output computed of them is not."""
    served, other = exported(Activated("none")), exported(Activated("tanh"))
    found = other.compare(served.copy(), tmp_path, bound=bound, is_outside=True)
    assert found.blame is not None
    assert list(found.blame.modules) == ["layers.0.1"], found.blame
    assert found.blame.cause == "export"
    assert "an activation" in " ".join(found.blame.findings)
    assert (found.first is None) == (bound == 5e-3)
    assert other.compare(served.copy(), tmp_path, bound=5e-3).blame is None


class LogGate(nn.Module):
    """A gate of a linear attention, whose logarithm torch has and a textbook formula loses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.gate = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, LABELS)
        with torch.no_grad():
            self.gate.bias.fill_(-16.0)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        return self.head(nn.functional.logsigmoid(self.gate(self.embedding(input_ids)))[:, 0])


def test_formula_losing_digits_is_export_fault(tmp_path: Path) -> None:
    good = exported(LogGate())
    assert good.compare(good.copy(), tmp_path).first is None
    model = good.copy()
    soft = next(node for node in model.graph.node if node.op_type == "Softplus")
    minus = next(node for node in model.graph.node if soft.input[0] in node.output)
    result = next(node for node in model.graph.node if soft.output[0] in node.input)
    minus.op_type, soft.op_type = "Identity", "Sigmoid"
    result.op_type = "Log"
    found = good.compare(model, tmp_path)
    check(found, Fault("formula", lambda _: None, "", "export", "The formula in the file"))


BOUND = 1e-5
CLEAN = Steps(
    served_again=0.0,
    kernel=1e-7,
    kernel_precision=0.0,
    body_precision=1e-7,
    body=1e-15,
    definition=1e-15,
    weight_precision=0.0,
    torch_in_same_types=1e-7,
)
CASES = {
    "a broken kernel": ({"kernel": 1e-2}, True, "kernel", False),
    "a kernel that varies": ({"served_again": 1e-3}, True, "kernel", False),
    "a kernel as far as its rounding": (
        {"kernel": 5e-2, "body_precision": 1e-2, "torch_in_same_types": 1e-2},
        True,
        "precision",
        False,
    ),
    "int8 products": ({"kernel_precision": 1e-2}, True, "precision", False),
    "float16 weights": ({"weight_precision": 1e-3}, False, "precision", False),
    "a wrong weight": ({"definition": 1e-2}, True, "export", False),
    "a wrong body": ({"body": 1e-2}, False, "export", False),
    "a wrong body beside a kernel": (
        {"body": 1e-2, "kernel_precision": 1e-3},
        True,
        "precision",
        False,
    ),
    "a formula that loses digits": ({"body_precision": 1e-2}, False, "export", True),
    "PyTorch loses them too": (
        {"body_precision": 1e-2, "torch_in_same_types": 1e-2},
        False,
        "precision",
        False,
    ),
    "PyTorch lacks the operator": (
        {"body_precision": 1e-2, "torch_in_same_types": np.inf},
        False,
        "precision",
        False,
    ),
}


@pytest.mark.parametrize(("changes", "fused", "cause", "loses"), CASES.values(), ids=CASES)
def test_largest_step_names_the_cause(
    changes: dict[str, float], fused: bool, cause: str, loses: bool
) -> None:
    assert judge(replace(CLEAN, **changes), BOUND, fused=fused) == Verdict(cause, loses)
