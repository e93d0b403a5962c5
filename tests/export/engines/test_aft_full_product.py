"""The rewrite of graphs: AFT-full by a matrix product of the runtime."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny_models
import torch
from aft_full_product import DTYPES, aft_full_model, open_session

import aftplugins
from aftexport.capture.capture import capture
from aftexport.engines import aft_full_product
from aftexport.engines.aft_full_product import MIN_TOKENS, use_products
from aftexport.engines.onnxruntime import sessions
from aftexport.engines.onnxruntime.providers import PROVIDERS
from aftexport.engines.onnxruntime.sessions import Adaptation
from aftexport.lowering.finish import finish
from aftexport.lowering.position_bias import choose_precisions
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.operators.domain import operators_in
from aftexport.parity import TOLERANCES

TOKENS = 40
LIBRARY = "onnxruntime_cuda"
EPS = {"fp16": 2.0**-10, "bf16": 2.0**-7}


@pytest.fixture(autouse=True)
def rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the product begin at 40 tokens."""
    monkeypatch.setattr(aft_full_product, "MIN_TOKENS", TOKENS)


def test_default_is_that_of_kernels() -> None:
    header = Path(__file__).parents[3] / "plugins" / "cuda" / "kernels.h"
    assert f"AFT_CUDA_AFT_FULL_GEMM_TOKENS = {MIN_TOKENS} " in header.read_text("utf-8")


def random_bias(reach: float = 1.0, tokens: int = TOKENS) -> np.ndarray:
    bias = np.random.default_rng(0).uniform(0, reach, (tokens, tokens))
    bias[0, :2] = 0, reach
    return bias


def exported() -> onnx.ModelProto:
    torch.manual_seed(0)
    config = {"mechanism": "aft_full", "max_length": TOKENS, "depth": 2}
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | config)).eval()
    return finish(lower(capture(model, dtype=torch.float16, max_tokens=TOKENS)), precision="fp16")


def test_model_keeps_its_answers() -> None:
    model = exported()
    before = open_session(model, None)
    assert use_products(model, LIBRARY)
    onnx.checker.check_model(model, full_check=True)
    counts = operators_in(model)
    assert (counts["AftFull"], counts["AftFullPrepare"], counts["AftFullFinish"]) == (0, 2, 2)
    after = open_session(model, None)
    ids = np.random.default_rng(0).integers(0, tiny_models.VOCABULARY, (3, 33))
    inputs = {"input_ids": ids, "lengths": np.array([33, 20, 1])}
    first, second = (s.run(None, inputs)[0].astype(np.float64) for s in (before, after))
    assert np.abs(first - second).max() <= TOLERANCES["fp16"].bound * max(1, np.abs(first).max())


@pytest.mark.parametrize("precision", EPS)
def test_runtime_folds_weights(precision: str, tmp_path: Path) -> None:
    """The product reads a constant: the part of it that the document needs is cut at each run."""
    bias = random_bias()
    model = aft_full_model(precision, bias)
    assert use_products(model, LIBRARY)
    (product,) = [node for node in model.graph.node if node.op_type == "MatMul"]
    (cut,) = [node for node in model.graph.node if product.input[0] in node.output]
    del model.graph.node[list(model.graph.node).index(cut) + 1 :]
    model.graph.ClearField("output")
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(
            cut.output[0], model.graph.initializer[0].data_type, ["rows", "columns"]
        )
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    optimized = onnx.load(options.optimized_model_filepath).graph
    assert Counter(node.op_type for node in optimized.node) == {"Shape": 1, "Concat": 1, "Slice": 1}
    (slice_node,) = [node for node in optimized.node if node.op_type == "Slice"]
    (weights,) = [t for t in optimized.initializer if t.name == slice_node.input[0]]
    numbers = onnx.numpy_helper.to_array(weights)
    exact = bias.astype(DTYPES[precision]).astype(np.float64)
    exact = np.exp(exact - exact.max(1, keepdims=True)).astype(DTYPES[precision])
    assert numbers.dtype == DTYPES[precision]
    np.testing.assert_allclose(
        numbers.astype(np.float64), exact.astype(np.float64), rtol=2 * EPS[precision]
    )


@pytest.mark.parametrize(
    ("tensors", "attributes", "replaced"),
    [
        ("fp16", {"precision": "fp16"}, True),
        ("bf16", {"precision": "bf16"}, True),
        ("bf16", {"precision": "int8"}, True),
        ("fp32", {"precision": "fp32"}, False),
        ("fp32", {"precision": "fp16"}, False),
        ("fp16", {"precision": "bf16"}, False),
        ("fp16", {"precision": "fp32"}, False),
        ("bf16", {"precision": "fp32"}, False),
        ("fp16", {"gate": "relu"}, False),
        ("fp16", {"eps": 0.5}, False),
        ("fp16", {"op_type": "CausalAftFull"}, False),
    ],
)
def test_node_decides(tensors: str, attributes: dict[str, Any], replaced: bool) -> None:
    model = aft_full_model(tensors, random_bias(), **attributes)
    before = model.SerializeToString()
    assert use_products(model, LIBRARY) == replaced
    assert replaced or model.SerializeToString() == before


@pytest.mark.parametrize(("reach", "replaced"), [(7.9, True), (8.1, False), (80.0, False)])
def test_range_of_bias_decides(reach: float, replaced: bool) -> None:
    """The export chooses the precision of the exponentials by the range of the bias."""
    model = aft_full_model("fp16", random_bias(reach))
    choose_precisions(model, "fp16")
    assert use_products(model, LIBRARY) == replaced


def test_short_documents_keep_the_kernel() -> None:
    assert not use_products(aft_full_model("fp16", random_bias(tokens=39)), LIBRARY)
    model = aft_full_model("fp16", random_bias(tokens=90))
    assert not use_products(model, LIBRARY, max_tokens=39)
    assert use_products(model, LIBRARY, max_tokens=40)


def test_computed_bias_keeps_the_kernel() -> None:
    model = aft_full_model("fp16", random_bias())
    node = model.graph.node[0]
    model.graph.node.insert(0, onnx.helper.make_node("Identity", [node.input[3]], ["computed"]))
    model.graph.node[1].input[3] = "computed"
    assert not use_products(model, LIBRARY)


def test_gates_of_two_nodes_select_bodies() -> None:
    """Each node keeps its gate, and engines find it by its old name."""
    model = aft_full_model("fp16", random_bias(), gate="tanh")
    second = model.graph.node.add()
    second.CopyFrom(model.graph.node[0])
    second.name, second.output[0] = "second", "second"
    del second.attribute[[a.name for a in second.attribute].index("gate")]
    names = {node.name for node in model.graph.node}
    assert use_products(model, LIBRARY)
    finishes = [n for n in model.graph.node if n.op_type.startswith("AftFullFinish")]
    assert {n.name for n in finishes} == names
    gates = [a.s.decode() for n in finishes for a in n.attribute if a.name == "gate"]
    assert gates == ["tanh", "sigmoid"]
    assert len({n.op_type for n in finishes}) == 2
    open_session(model, None)


@pytest.mark.parametrize("library", [LIBRARY, "onnxruntime", None])
def test_sessions_with_cuda_kernels_use_products(library: str | None) -> None:
    adaptation = Adaptation(library=library, takes_choice=False, provider=None)
    model = aft_full_model("fp16", random_bias())
    options = sessions.session_options(1)
    assert adaptation.choose_bodies(model, options) == (library == LIBRARY)
    assert ("AftFullFinish" in operators_in(model)) == (library == LIBRARY)


def test_session_loads_weights_beside_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider of the CPU stands for that of CUDA, and the bodies for its kernels."""
    cpu = replace(PROVIDERS["cpu"], library=LIBRARY)
    monkeypatch.setitem(PROVIDERS, "cpu", cpu)
    monkeypatch.setattr(aftplugins, "library", lambda library: tmp_path)
    monkeypatch.setattr(sessions, "_register", lambda library, options: None)
    path = tmp_path / "model.onnx"
    weights = {"save_as_external_data": True, "location": "weights", "size_threshold": 1024}
    onnx.save(aft_full_model("fp16", random_bias()), path, **weights)
    sequence = np.zeros((1, 5, 16), np.float16)
    inputs = dict.fromkeys(("query", "key", "value"), sequence) | {"lengths": np.array([5])}
    options = sessions.session_options(1)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = sessions.session(path, options, fused=True)
    assert session.run(None, inputs)[0].shape == (1, 5, 16)
    inlined = onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    assert any("AftFullFinish" in value for node in inlined for value in node.output)


def test_large_weights_are_computed_at_load(tmp_path: Path) -> None:
    """A limit of 100 bytes stands for that of 1 GiB, which the session removes."""
    options = sessions.session_options(1)
    options.add_session_config_entry(
        "optimization.constant_folding_max_output_size_in_bytes", "100"
    )
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    model = aft_full_model("fp16", random_bias())
    adaptation = Adaptation(library=LIBRARY, takes_choice=False, provider=None)
    assert adaptation.choose_bodies(model, options)
    assert any(name.endswith("bias_exponentials") for n in model.graph.node for name in n.output)
    onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    loaded = onnx.load(options.optimized_model_filepath).graph.node
    assert not any(name.endswith("bias_exponentials") for n in loaded for name in n.output)
