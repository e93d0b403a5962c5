import ast
import gc
import inspect
import operator
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_models
import torch
from onnxscript import rewriter
from sampling import any_case
from torch import Tensor, nn
from torch._export import utils
from torch.export import ExportedProgram

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import TraceError, UsageError
from aftexport.lowering.file_format import OPSETS
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import _table, lower, shared_table
from aftexport.nn import LAYERS, ClassifierConfig, DocumentClassifier
from aftexport.nn.config import RECURRENT_LAYERS
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, operator_name, operators_in
from aftexport.operators.portable_bodies import attach_bodies
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.parity import TOLERANCES
from aftexport.system.internals.torch_composites import list_composites_once
from aftexport.system.internals.torch_translation import ONNXRegistry


@pytest.fixture(scope="module")
def program(classifier: DocumentClassifier) -> ExportedProgram:
    return capture(classifier)


@pytest.fixture(scope="module")
def mixed() -> onnx.ModelProto:
    return finish(lower(capture(tiny_models.MixedSettings())))


def test_no_collection_while_sources_are_parsed(
    program: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CPython 3.11, a collection in ``ast.parse`` can fail it if another thread parses."""
    parse, states = ast.parse, list[bool]()

    def watched(*arguments: Any, **options: Any) -> ast.AST:
        states.append(gc.isenabled())
        return parse(*arguments, **options)

    monkeypatch.setattr(ast, "parse", watched)
    assert gc.isenabled()
    _table.cache_clear()  # the table is read once for each process
    lower(program)
    assert gc.isenabled()
    assert len(states) > 100
    assert not any(states)


def custom(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == DOMAIN]


def assert_as_torch(module: torch.nn.Module, model: onnx.ModelProto) -> None:
    engine = OnnxRuntimeEngine(model.SerializeToString())
    generator = np.random.default_rng(0)
    module = module.eval().double()
    for batch, tokens in ((1, 1), (2, 7), (3, 100)):
        ids = generator.integers(0, 300, (batch, tokens))
        lengths = generator.integers(1, tokens + 1, batch)
        with torch.inference_mode():
            expected = module(torch.from_numpy(ids), torch.from_numpy(lengths)).numpy()
        logits = engine.run({"input_ids": ids, "lengths": lengths})["logits"]
        bound = TOLERANCES["fp32"].bound * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=bound)


@pytest.mark.table(keep=0.25, by=any_case)
@pytest.mark.parametrize("opset", OPSETS)
def test_requested_opset_is_used(
    opset: int, program: ExportedProgram, classifier: DocumentClassifier
) -> None:
    model = finish(lower(program, opset=opset))
    versions = {o.domain: o.version for o in model.opset_import}
    assert versions == {"": opset, DOMAIN: 1}
    assert all(o.version == opset for f in model.functions for o in f.opset_import if not o.domain)
    onnx.checker.check_model(model, full_check=True)
    assert_as_torch(tiny_models.classifier(), model)


@pytest.mark.parametrize("opset", [-1, 0, 17, 26, 99])
def test_opset_outside_range_is_refused(opset: int, program: ExportedProgram) -> None:
    with pytest.raises(UsageError, match="18 to 25"):
        lower(program, opset=opset)


def test_axes_keep_names(mixed: onnx.ModelProto) -> None:
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*mixed.graph.input, *mixed.graph.output)
    }
    assert shapes == {
        "input_ids": ["batch", "tokens"],
        "lengths": ["batch"],
        "logits": ["batch", 3],
    }


def test_file_describes_no_machine(mixed: onnx.ModelProto) -> None:
    content = mixed.SerializeToString()
    source = inspect.getfile(tiny_models).encode()
    for secret in (b"pkg.torch", b"site-packages", b".py", source, source.rpartition(b"/")[0]):
        assert secret not in content
    assert not mixed.metadata_props


def test_custom_nodes_have_plugin_and_body(mixed: onnx.ModelProto) -> None:
    """Every custom node names its plugin and has one body."""
    nodes = custom(mixed)
    assert nodes
    for node in nodes:
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for name, value in PLUGIN_ATTRIBUTES.items():
            assert given[name] == value.encode()
    bodies = Counter((function.domain, function.name) for function in mixed.functions)
    assert bodies == {(DOMAIN, op_type): 1 for op_type in operators_in(mixed)}
    assert all(operator_name(name) in ALL_OPERATORS for _, name in bodies)


@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.parametrize(
    ("precision", "causal", "of_attention"),
    [
        ("fp32", False, "fp32"),
        ("bf16", False, "bf16"),
        ("bf16", True, "bf16"),
        ("int8", False, "int8"),
        ("int8", True, "bf16"),
    ],
)
def test_precision_of_products_is_in_nodes(precision: str, causal: bool, of_attention: str) -> None:
    config = tiny_models.CONFIG | {"mechanism": "aft_full", "max_length": 20, "causal": causal}
    classifier = DocumentClassifier(ClassifierConfig(**config))
    model = finish(lower(capture(classifier, max_tokens=20)), precision=precision)
    given = {
        node.op_type: {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for node in custom(model)
    }
    name = "CausalAftFull" if causal else "AftFull"
    assert set(given) == {name, "LayerNormQueryKeyValue", "LayerNormFeedForward", "LinearResidual"}
    assert given.pop(name)["precision"] == of_attention.encode()
    assert {attributes["precision"] for attributes in given.values()} == {precision.encode()}


@pytest.mark.table(keep=0.25, by=lambda mechanism, causal: causal)
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("mechanism", sorted(set(LAYERS) - set(RECURRENT_LAYERS)))
def test_layer_has_one_norm_without_split(mechanism: str, causal: bool) -> None:
    """A layer has one norm, and no split before its attention."""
    config = tiny_models.CONFIG | {"mechanism": mechanism, "max_length": 20, "causal": causal}
    model = finish(lower(capture(DocumentClassifier(ClassifierConfig(**config)), max_tokens=20)))
    expected = {"LayerNormQueryKeyValue": 1}
    if mechanism == "fastformer":  # whose query and value are one
        expected = {"LayerNormLinear": 2} if causal else {"LayerNormFastformer": 1}
    found = operators_in(model)
    assert {n: c for n, c in found.items() if n.startswith("LayerNorm")} == {
        "LayerNormFeedForward": 1,
        **expected,
    }
    assert not [n for n in model.graph.node if n.op_type == "Split"]


def test_most_common_setting_keeps_name(mixed: onnx.ModelProto) -> None:
    operators = operators_in(mixed)
    assert {n: c for n, c in operators.items() if not n.startswith("L")} == {
        "AftSimple": 2,
        "AftSimple_none": 1,
        "EfficientAttention": 1,
        "EfficientAttention_scaling": 1,
    }
    gates = [
        onnx.helper.get_attribute_value(a)
        for node in custom(mixed)
        for a in node.attribute
        if node.op_type == "AftSimple" and a.name == "gate"
    ]
    assert gates == [b"sigmoid", b"sigmoid"]


def test_settings_of_one_operator_can_mix(
    mixed: onnx.ModelProto,
) -> None:
    """The nodes of one operator have different settings, and the result is right."""
    onnx.checker.check_model(mixed, full_check=True)
    assert_as_torch(tiny_models.MixedSettings(), mixed)


def test_tracing_twice_gives_the_same_bytes(mixed: onnx.ModelProto) -> None:
    again = finish(lower(capture(tiny_models.MixedSettings())))
    assert again.SerializeToString() == mixed.SerializeToString()


def test_bodies_are_attached_once_per_operator() -> None:
    node = onnx.helper.make_node("AftSimple", ["q", "k", "v", "n"], ["y"], domain=DOMAIN)
    graph = onnx.helper.make_graph([node, node], "g", [], [])
    opset = onnx.helper.make_opsetid("", 20)
    model = attach_bodies(onnx.helper.make_model(graph, opset_imports=[opset]))
    assert [function.name for function in model.functions] == ["AftSimple"]


class PaddedByZeros(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        zeros = x.new_zeros(x.shape[0], max(0, 8 - x.shape[1]), 16)
        return self.head(torch.cat([x, zeros], 1).sum(1))


def test_size_error_omits_unknown_line() -> None:
    """A size without a known line is refused without speaking of one."""
    with pytest.raises(TraceError, match=r"only for sizes where .*8 - tokens.*\.") as refused:
        lower(capture(PaddedByZeros()))
    assert "line" not in refused.value.remedy
    assert "padding" in refused.value.remedy


@pytest.mark.parametrize(
    "fill",
    [
        lambda k, mask: k.masked_fill_(mask, 0.5),
        lambda k, mask: k.masked_fill_(mask, torch.tensor(0.5).to(k)),
        lambda k, mask: k.masked_scatter_(mask, torch.full_like(k, 0.5)),
    ],
    ids=["number", "tensor", "scatter"],
)
def test_heads_are_filled_in_place(fill: Any) -> None:
    """The tensors that hold the heads are filled in place as well."""
    assert_as_torch(module := tiny_models.FilledHeads(fill), finish(lower(capture(module))))


class Guarded(nn.Module):
    """Apply a formula to rows of zeros and to other rows."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.formula = formula
        with torch.no_grad():
            self.embedding.weight[0] = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.formula(self.embedding(input_ids)).sum(1)


TINY = {
    "an epsilon of a quotient": lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-9),
    "the smallest epsilon": lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-30),
    "an epsilon that is taken away": lambda x: x / (-x.square().sum(-1, keepdim=True) - 1e-9),
    "a logarithm's": lambda x: torch.log(x.square() + 1e-10),
    "a factor close to 1": lambda x: (x * (1 + 5e-6) - x) * 1e5,
    "a divisor close to 1": lambda x: (x / (1 + 5e-6) - x) * 1e5,
}


@pytest.mark.parametrize("name", TINY)
def test_tiny_number_counts(name: str) -> None:
    module = Guarded(TINY[name]).eval()
    engine = OnnxRuntimeEngine(finish(lower(capture(module))).SerializeToString())
    ids = np.array([[0, 1], [0, 0]])
    with torch.inference_mode():
        expected = module(torch.from_numpy(ids)).numpy()
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(engine.run({"input_ids": ids})["logits"], expected, rtol=1e-4)


def test_identity_operators_are_left_out() -> None:
    def operators(step: Callable[[Tensor], Tensor]) -> list[str]:
        return [node.op_type for node in finish(lower(capture(Guarded(step)))).graph.node]

    assert operators(lambda x: (x + 0.0) * 1.0 / 1.0 - 0.0) == operators(lambda x: x)


def test_rules_of_others_stay_unchanged() -> None:
    before = rewriter._DEFAULT_REWRITE_RULES
    lower(capture(Guarded(TINY["a logarithm's"])))
    assert rewriter._DEFAULT_REWRITE_RULES is before


def test_second_export_parses_nothing(
    classifier: DocumentClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lower(capture(classifier))
    parsed: list[object] = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda *a, **k: (parsed.append(a), parse(*a, **k))[1])
    assert lower(capture(classifier)) == first
    assert len(parsed) < 20  # 500 without the shared table


def test_added_translation_stays_out_of_the_table() -> None:
    with shared_table():
        first = ONNXRegistry().from_torchlib(opset_version=20)
        first.register_op(operator.floordiv, lambda x, y: x)
        second = ONNXRegistry().from_torchlib(opset_version=20)
    assert len(first.functions[operator.floordiv]) > len(second.functions[operator.floordiv])
    assert second.opset_version == 20


def test_other_users_of_torch_onnx_get_their_own_table() -> None:
    original = vars(ONNXRegistry)["from_torchlib"]
    with pytest.raises(ValueError, match="in the block"), shared_table():
        raise ValueError("in the block")
    assert vars(ONNXRegistry)["from_torchlib"] is original


def test_operators_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, look_up = [], utils._materialize_cpp_cia_ops

    def count() -> None:
        calls.append(1)
        look_up()

    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", count)
    program = capture(tiny_models.Bag())
    calls.clear()
    lower(program)
    assert len(calls) == 1
    assert utils._materialize_cpp_cia_ops is count


def test_operator_of_the_block_is_listed() -> None:
    """The list has an operator that is registered after torch has listed the others."""
    with list_composites_once(), torch.library._scoped_library("aft_test_list", "DEF") as library:
        utils._collect_all_valid_cia_ops()
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
        assert torch.ops.aft_test_list.twice.default in utils._collect_all_valid_cia_ops()


def test_waiting_thread_restores_function() -> None:
    """The second thread waits for the first one, and both restore the function of torch."""
    original = utils._materialize_cpp_cia_ops
    is_first_in, is_second_there = threading.Event(), threading.Event()

    def first() -> None:
        with list_composites_once():
            is_first_in.set()
            is_second_there.wait(60)
            second_thread.join(0.2)  # it now waits for the lock

    def second() -> None:
        is_second_there.set()
        with list_composites_once():
            pass

    first_thread, second_thread = (threading.Thread(target=run) for run in (first, second))
    first_thread.start()
    assert is_first_in.wait(60)
    second_thread.start()
    first_thread.join()
    second_thread.join()
    assert utils._materialize_cpp_cia_ops is original


class Through(tiny_models.Bag):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = self.function(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.cumprod(1), "aten.cumprod"),
        (torch.lgamma, "aten.lgamma"),
        (torch.special.ndtri, "aten.special_ndtri"),
        (lambda x: x.cummax(1)[0], "aten.cummax"),
    ],
)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of 2.9
def test_error_names_user_operator_and_line(
    function: Callable[[Tensor], Tensor], operator: str, tmp_path: Path
) -> None:
    program = capture(Through(function))
    said = rf"cannot translate {operator} \(.*test_to_onnx.py, line \d+, in .*\): ONNX has no"
    with pytest.raises(TraceError, match=said) as refused:
        lower(program)
    assert "prims." not in str(refused.value)
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(TraceError, match=said):
        lower(torch.export.load(tmp_path / "model.pt2"))


def _shifted(x: Tensor) -> Tensor:
    return x + (x.long()[..., :1] >> torch.arange(16)).float()


def _scored(x: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    heads: Tensor = flex_attention(x[:, None], x[:, None], x[:, None])
    return heads[:, 0]


@pytest.mark.parametrize(
    ("function", "reason", "remedy"),
    [
        (lambda x: torch.exp(torch.complex(x, x)).real, "complex numbers", "two tensors of real"),
        (lambda x: torch.complex(x, x).cumsum(1).imag, "complex numbers", "two tensors of real"),
        (_shifted, "shifts by a constant", r"x // 2\*\*k"),
        (_scored, "flex_attention", "scaled_dot_product_attention"),
    ],
)
def test_error_names_cause_beyond_operator(
    function: Callable[[Tensor], Tensor], reason: str, remedy: str
) -> None:
    with pytest.raises(TraceError, match=f"{reason}.*{remedy}") as refused:
        lower(capture(Through(function)))
    assert "ONNX has no such operator" not in str(refused.value)


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.transpose(1, 2)).float().mean(2, keepdim=True) * x


@pytest.mark.parametrize(
    ("function", "operator"),
    [(in_autocast, "aten.matmul"), (lambda x: x.bfloat16().tanh().float(), "aten.tanh")],
)
def test_bfloat16_in_forward_is_refused(
    function: Callable[[Tensor], Tensor], operator: str
) -> None:
    with pytest.raises(TraceError, match=rf"got {operator} in bfloat16") as refused:
        lower(capture(Through(function)))
    assert "torch.autocast" in refused.value.remedy
    assert "--opset" not in refused.value.remedy


def test_rounding_to_bfloat16_is_kept() -> None:
    operators = [
        n.op_type for n in lower(capture(Through(lambda x: x.bfloat16().float()))).graph.node
    ]
    assert operators.count("Cast") == 2
