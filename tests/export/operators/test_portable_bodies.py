"""The forms of a model's nodes: a body for each, and the kernels that replace bodies."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import pytest
import torch
from one_node import OneNode
from onnx_runtimes import RUNTIMES
from sampling import any_case
from torch import Tensor, nn

import aftplugins
from aftexport.bundle.golden import join_outputs
from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, operator_paths
from aftexport.engines.onnxruntime.engine import operator_shares
from aftexport.errors import EngineError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.operators.domain import DOMAIN, operators_in
from aftexport.operators.portable_bodies import attach_bodies, choose_kernels, takes_form
from aftexport.parity.run_cases import operator_model
from aftexport.pipeline.golden_cases import operator_cases
from aftexport.recognition.standard_file import standard_form

from .mechanisms import recurrent_cases
from .mechanisms.wide_forms import Form, error, formula, make_inputs, one_node

ATTENTION = recurrent_cases.ATTENTION
needs_kernels = pytest.mark.skipif(
    aftplugins.library("onnxruntime") is None, reason="the CPU kernels are not built"
)


FIRST = Form("NormalizedLinearAttention")
WIDE = [
    Form("NormalizedLinearAttention", (("normalizer", "clamp"),)),
    Form("NormalizedLinearAttention", (("feature_map", "identity"),)),
    Form("CausalEfficientAttention", heads=4, groups=2),
    Form("EfficientAttention", keys=9),
    Form("AftSimple", (("num_heads", 2),)),
    Form("AftSimple", (("gate", "relu"),)),
    Form("AftConv", (("gate", "relu"),)),
    *(Form(op_type, (("eps", 0.5),)) for op_type in ("AftFull", "CausalAftLocal", "AftConv")),
]


class TwoAttentions(nn.Module):
    """A key and a value that four heads share, and an attention to fewer keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.key, self.value = nn.Linear(16, 4), nn.Linear(16, 3)
        self.head = nn.Linear(12, 2)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        key, value = self.key(x).abs(), self.value(x)
        ops = torch.ops.aftexport
        own = ops.normalized_linear_attention(
            x.abs(), key, value, lengths, 4, "identity", 1e-3, "clamp", 1
        )
        other = ops.normalized_linear_attention(
            x.abs(), key, value, lengths, 4, "relu", 1e-3, kv_num_heads=1, key_lengths=lengths - 1
        )
        first = ops.normalized_linear_attention(x, x, x, lengths, 4, "elu", 1e-3)
        return self.head((own + other + first[..., :12])[:, 0])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    module = TwoAttentions().eval()
    path = tmp_path_factory.mktemp("forms") / "model.onnx"
    onnx.save(finish(lower(capture(module))), path)
    return module, path


@pytest.mark.parametrize("library", aftplugins.RUNTIMES)
def test_every_library_takes_common_forms(library: str) -> None:
    node = one_node(Form("AftLocal")).node()
    assert takes_form(library, node)
    del node.attribute[:]
    assert takes_form(library, node)


@pytest.mark.parametrize("form", WIDE, ids=str)
def test_gpu_libraries_lack_wide_forms(form: Form) -> None:
    assert takes_form("onnxruntime", one_node(form).node())
    for library in ("onnxruntime_cuda", "tensorrt"):
        assert not takes_form(library, one_node(form).node())
        model = one_node(form).model()
        assert choose_kernels(model, library)
        onnx.checker.check_model(model)
        assert {f.name for f in model.functions} == {form.op_type, f"{form.op_type}Portable"}
        assert [node.op_type for node in model.graph.node] == [f"{form.op_type}Portable"]


@pytest.mark.parametrize("form", WIDE, ids=str)
def test_engine_runs_forms_by_kernel_or_body(form: Form, tmp_path: Path) -> None:
    """A node that is renamed has no kernel in any library."""
    path = tmp_path / "model.onnx"
    onnx.save(one_node(form).model(), path)
    renamed = one_node(form).model()
    choose_kernels(renamed, "tensorrt")
    inputs = make_inputs(form, 40, (40, 7))
    for model in (path, path.read_bytes(), renamed.SerializeToString()):
        found = OnnxRuntimeEngine(model, threads=1).run(inputs)["output"]
        assert error(found, formula(form, inputs), inputs["lengths"]) < 2e-5
    if aftplugins.library("onnxruntime") is not None:
        assert operator_paths(path) == {form.op_type: "fused"}


@needs_kernels
@pytest.mark.parametrize("order", [(0.0, 0.5), (0.5, 0.0), (0.0, 0.0)], ids=str)
def test_form_with_portable_node_is_portable(
    order: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number such as eps decides about the kernel, but is not part of the form's name."""

    def choose(model: onnx.ModelProto, _: str) -> bool:
        return choose_kernels(model, "onnxruntime_cuda")

    for module in ("engine", "sessions"):
        monkeypatch.setattr(f"aftexport.engines.onnxruntime.{module}.choose_kernels", choose)
    model = one_node(Form("AftFull", (("eps", order[0]),))).model()
    second = one_node(Form("AftFull", (("eps", order[1]),))).node()
    second.output[0] = "second"
    model.graph.node.append(second)
    output = model.graph.output.add()
    output.CopyFrom(model.graph.output[0])
    output.name = "second"
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert operator_paths(path) == {"AftFull": "portable" if any(order) else "fused"}


def test_exported_forms_equal_pytorch(exported: tuple[nn.Module, Path]) -> None:
    module, path = exported
    ids = np.random.default_rng(0).integers(0, 50, (3, 20))
    inputs = {"input_ids": ids, "lengths": np.array([20, 7, 2])}
    with torch.no_grad():
        expected = module(*map(torch.from_numpy, inputs.values())).numpy()
    for fused in (False, True):
        engine = OnnxRuntimeEngine(path, threads=1, fused=fused)
        np.testing.assert_allclose(engine.run(inputs)["logits"], expected, rtol=1e-5, atol=1e-6)


def test_nodes_without_attributes_get_defaults() -> None:
    """onnx's inliner has no defaults for the attributes that a body reads."""
    model = one_node(FIRST).model()
    del model.functions[:], model.graph.node[0].attribute[:]
    written = {a.name: a for a in attach_bodies(model).graph.node[0].attribute}
    assert written["normalizer"].s == b"add"
    assert written["kv_num_heads"].i == 0
    inlined = onnx.inliner.inline_local_functions(model)
    inputs = make_inputs(replace(FIRST, heads=1, groups=1), 9, (9, 4))
    found = OnnxRuntimeEngine(inlined.SerializeToString(), threads=1).run(inputs)["output"]
    expected = formula(replace(FIRST, heads=1, groups=1), inputs)
    assert error(found, expected, inputs["lengths"]) < 2e-5


@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.parametrize("form", WIDE, ids=str)
def test_parity_cases_of_forms_are_exact(form: Form) -> None:
    """The cases draw features of one sign, so that no divisor cancels."""
    model = one_node(form).model()
    cases = operator_cases(model, np.dtype(np.float32))
    engine = OnnxRuntimeEngine(model.SerializeToString(), threads=1)
    assert len(cases) == 2
    for case in cases:
        (expected,) = case.outputs.values()
        found = engine.run(case.inputs)["output"]
        counted = np.arange(found.shape[1]) < case.inputs["lengths"][:, None]
        scale = max(1.0, np.abs(expected).max())
        assert np.abs(found - expected)[counted].max() / scale < 2e-5


FORMS = {
    "NormalizedLinearAttention": 2,
    "NormalizedLinearAttention_relu_add_key_lengths": 1,
    "RecurrentLinearAttention": 2,
    "RecurrentLinearAttention_delta_forward_none_head_beta": 1,
    "RecurrentLinearAttention_linear_forward_sum_head": 1,
}
"""The number of nodes by operator and form."""
IDS = np.random.default_rng(0).integers(0, 50, (3, 70))
INPUTS = {"input_ids": IDS, "lengths": np.array([70, 33, 1])}


class Hybrid(nn.Module):
    """Three update rules, and linear attention with and without lengths of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for rule in ("gated", "linear", "gated", "delta"):
            x = torch.tanh(x + recur(x, lengths, rule))
        attend = torch.ops.aftexport.normalized_linear_attention
        for _ in range(2):
            x = x + attend(x, x, x, lengths, 2, "elu", 1e-3)
        x = x + attend(x, x, x, lengths, 2, "relu", 1e-3, key_lengths=lengths.clamp(max=9))
        return self.head(x[:, 0])


def recur(x: Tensor, lengths: Tensor, rule: str) -> Tensor:
    """Run the recurrent operator; the rule ``linear`` has a normalizer."""
    decay = -x[..., :2].abs() if rule == "gated" else None
    beta = x[..., :1].sigmoid() if rule == "delta" else None
    if rule == "linear":
        query, key, normalizer = x.sigmoid(), x.sigmoid(), "sum"
    else:
        query, key, normalizer = x, nn.functional.normalize(x, dim=2), "none"
    settings = (rule, "forward", normalizer, "head", 2, 2, 0.0, 1e-6)
    y, _ = torch.ops.aftexport.recurrent_linear_attention(
        query, key, x, None, decay, beta, lengths, *settings
    )
    return y


@pytest.fixture(scope="module")
def hybrid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mixed") / "model.onnx"
    onnx.save(finish(lower(capture(hybrid()))), file)
    return file


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    with torch.no_grad():
        return hybrid().double()(*map(torch.from_numpy, INPUTS.values())).numpy()


def hybrid() -> nn.Module:
    torch.manual_seed(0)
    return Hybrid().eval()


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_file_names_forms(hybrid_file: Path) -> None:
    model = onnx.load(hybrid_file)
    onnx.checker.check_model(model, full_check=True)
    assert operators_in(model) == FORMS
    assert Counter(f.name for f in model.functions) == dict.fromkeys(FORMS, 1)


def test_parity_cases_of_mixed_forms_are_exact(hybrid_file: Path) -> None:
    model = onnx.load(hybrid_file)
    cases = operator_cases(model, np.dtype(np.float32))
    assert {case.subject for case in cases} == FORMS.keys()
    for case in cases:
        single = operator_model(model, case).SerializeToString()
        found = join_outputs(OnnxRuntimeEngine(single, threads=1).run(case.inputs))
        (expected,) = case.outputs.values()
        counted = np.arange(found.shape[1]) < case.inputs["lengths"][:, None]
        assert relative_error(found[counted], expected[counted]) < 2e-6, case.subject


def test_parity_cases_keep_signs_of_state() -> None:
    """Only the last column of a state enters the divisor."""
    form = recurrent_cases.Form("linear", normalizer="sum", has_past=True)
    drawn = recurrent_cases.draw(form, 4, (4,))
    model = recurrent_cases.one_node(recurrent_cases.ATTENTION, drawn, form.attributes).model()
    (case,) = operator_cases(model, np.dtype(np.float32))
    state = case.inputs["past_state"]
    assert state[..., :-1].min() < -0.5
    assert state[..., -1].min() >= 0
    assert case.inputs["query"].min() >= 0


@needs_kernels
def test_kernels_run_every_form(hybrid_file: Path, truth: np.ndarray) -> None:
    assert operator_paths(hybrid_file) == dict.fromkeys(FORMS, "fused")
    for model in (hybrid_file, hybrid_file.read_bytes()):
        shares = operator_shares(model, INPUTS, threads=1)
        assert {"NormalizedLinearAttention", "RecurrentLinearAttention"} <= shares.keys()
        assert "Loop" not in shares
        found = OnnxRuntimeEngine(model, threads=1).run(INPUTS)["logits"]
        assert relative_error(found, truth) < 1e-5


def test_engine_without_kernels_runs_bodies(hybrid_file: Path, truth: np.ndarray) -> None:
    found = OnnxRuntimeEngine(hybrid_file, threads=1, fused=False).run(INPUTS)["logits"]
    assert relative_error(found, truth) < 1e-5
    assert "Loop" in operator_shares(hybrid_file, INPUTS, threads=1, fused=False)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_other_runtimes_run_every_form(runtime: str, hybrid_file: Path, truth: np.ndarray) -> None:
    found = RUNTIMES[runtime](onnx.load(hybrid_file))(INPUTS)["logits"]
    assert relative_error(found, truth) < 1e-5


def test_missing_kernel_runs_no_other_body(hybrid_file: Path) -> None:
    """A node that took the name of its operator cannot run the body of the most common form."""
    model = onnx.load(hybrid_file)
    assert choose_kernels(model, "onnxruntime")
    assert operators_in(model) == {"NormalizedLinearAttention": 3, "RecurrentLinearAttention": 4}
    with pytest.raises(EngineError, match=r"Attention.* is not a registered"):
        OnnxRuntimeEngine(model.SerializeToString(), threads=1, fused=False)


@pytest.mark.parametrize("library", ["onnxruntime_cuda", "tensorrt"])
def test_gpu_libraries_leave_other_forms(library: str, hybrid_file: Path) -> None:
    """They take neither lengths of keys nor recurrent operators."""
    model = onnx.load(hybrid_file)
    choose_kernels(model, library)
    kept = {name: count for name, count in FORMS.items() if "_" in name}
    assert operators_in(model) == kept | {
        "NormalizedLinearAttention": 2,
        "RecurrentLinearAttentionPortable": 2,
    }
    assert {node.op_type for node in model.graph.node if node.domain == DOMAIN} <= {
        "NormalizedLinearAttention",
        *(function.name for function in model.functions),
    }


def test_every_form_becomes_standard(hybrid_file: Path, truth: np.ndarray) -> None:
    form = standard_form(onnx.load(hybrid_file), None)
    assert number_by_operator(form.bodies) == {
        "NormalizedLinearAttention": 3,
        "RecurrentLinearAttention": 4,
    }
    assert not form.model.functions
    session = onnxruntime.InferenceSession(form.model.SerializeToString())
    assert relative_error(session.run(None, INPUTS)[0], truth) < 1e-5


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 27, reason="onnx has no opset 27")
def test_every_form_becomes_recurrent_operator_of_onnx(hybrid_file: Path) -> None:
    form = standard_form(onnx.load(hybrid_file), 27)
    assert form.standard == {("RecurrentLinearAttention", "LinearAttention"): 3}
    assert number_by_operator(form.bodies) == {
        "NormalizedLinearAttention": 3,
        "RecurrentLinearAttention": 1,
    }


def number_by_operator(counts: Counter[tuple[str, str]]) -> Counter[str]:
    numbers = Counter[str]()
    for (name, _), count in counts.items():
        numbers[name] += count
    return numbers


class Layers(nn.Module):
    """A convolution, a gated delta rule, and a linear one that goes on from its state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, input_features: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        operators = torch.ops.aftexport
        x, _ = operators.causal_depthwise_conv(
            input_features, self.weight, None, None, lengths, "silu"
        )
        key = nn.functional.normalize(x, dim=2)
        gates = -x[..., :2].abs(), x[..., :1].sigmoid()
        settings = ("forward", "none", "head", 2, 2, 0.0, 1e-6)
        y, state = operators.recurrent_linear_attention(
            x, key, x, None, *gates, lengths, "gated_delta", *settings
        )
        z, last = operators.recurrent_linear_attention(
            y, key, x, state, None, None, lengths, "linear", *settings
        )
        return {"rows": z, "last": last}


def test_exported_nodes_leave_absent_inputs_out() -> None:
    torch.manual_seed(0)
    model, lengths = Layers(), torch.tensor([7, 3])
    example = (torch.randn(2, 7, 8), lengths)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    program = torch.export.export(model, example, dynamic_shapes=(axes, {0: axes[0]}))
    proto = lower(program, opset=20)
    inputs = {
        node.op_type: [bool(name) for name in node.input]
        for node in reversed(proto.graph.node)
        if node.domain == DOMAIN
    }
    assert inputs == {
        "CausalDepthwiseConv": [True, True, False, False, True],
        "RecurrentLinearAttention": [True, True, True, False, True, True, True],
    }
    bare = attach_bodies(proto)
    session = onnxruntime.InferenceSession(bare.SerializeToString())
    for tokens in (1, 7, 70):
        x = torch.randn(2, tokens, 8)
        results = session.run(
            ["rows", "last"], {"input_features": x.numpy(), "lengths": lengths.numpy()}
        )
        with torch.no_grad():
            expected = model(x, lengths)
        for result, reference in zip(results, expected.values(), strict=True):
            np.testing.assert_allclose(result, reference.numpy(), rtol=1e-5, atol=1e-5)


def recurrent_graph(*forms: recurrent_cases.Form) -> onnx.ModelProto:
    """Return a graph of one node for each form."""
    nodes = []
    for form in forms:
        present = set(ATTENTION.inputs) - recurrent_cases.absent_inputs(form)
        nodes.append(OneNode.of(ATTENTION.op_type, form.attributes, present).node())
    graph = onnx.helper.make_graph(nodes, "graph", [], [])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])


def test_most_common_form_keeps_operator() -> None:
    common, past = recurrent_cases.Form(has_past=False), recurrent_cases.Form(has_past=True)
    model = attach_bodies(
        recurrent_graph(past, common, common, recurrent_cases.Form("linear", has_past=False))
    )
    name = "RecurrentLinearAttention"
    linear_name = f"{name}_linear_forward_none_head"
    gated = f"{name}_gated_delta_forward_none_head_past_state_decay_beta"
    assert operators_in(model) == Counter({name: 2, linear_name: 1, gated: 1})
    reads = {}
    for function in model.functions:
        assert function.input == list(ATTENTION.inputs)
        reads[function.name] = {n for node in function.node for n in node.input}
    optional = {form: read & set(ATTENTION.optional) for form, read in reads.items()}
    assert optional == {
        name: {"decay", "beta"},
        linear_name: set(),
        gated: {"past_state", "decay", "beta"},
    }
    assert all("lengths" in read for read in reads.values())


def test_names_of_optional_inputs_are_in_schema() -> None:
    schema = onnx.defs.get_schema("RecurrentLinearAttention", 1, DOMAIN)
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    assert [i.name for i in schema.inputs if i.option == optional] == list(ATTENTION.optional)
    assert schema.inputs[-1].type_str == "tensor(int64)"
    assert [o.name for o in schema.outputs] == ["output", "present_state"]
