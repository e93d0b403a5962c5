"""A file with the recurrent operators of ONNX or ONNX Runtime becomes a bundle."""

from pathlib import Path

import naive_linear_attention as naive
import numpy as np
import onnx
import onnxruntime
import pytest
from commands import run_here
from naive_linear_attention import check_bundle
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from recurrent_graphs import MICROSOFT
from sampling import any_case

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.chunked.runner import ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.operators.domain import operators_in
from aftexport.pipeline.export import export
from aftexport.recognition.standard_file import unfuse_file

VOCABULARY, CHANNELS, HEADS = 40, 8, 2
DOCUMENTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7])


def classifier(domain: str, dtype: type = np.float32) -> onnx.ModelProto:
    """Return a short convolution, a gated delta rule and a mean by the mask."""
    random = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def weight(*shape: int) -> str:
        name = f"weight_{len(constants)}"
        numbers = random.standard_normal(shape) / 2
        constants.append(numpy_helper.from_array(numbers.astype(dtype), name))
        return name

    def add(op_type: str, inputs: list[str], *outputs: str, **attributes: object) -> str:
        names = outputs or (f"value_{len(nodes)}",)
        nodes.append(helper.make_node(op_type, inputs, names, **attributes))
        return names[0]

    for name, axes in (("one", [1]), ("two", [2])):
        constants.append(numpy_helper.from_array(np.array(axes), name))
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = add("Gather", [weight(VOCABULARY, CHANNELS), "input_ids"])
    turned = add("Transpose", [x], perm=[0, 2, 1])
    inputs, of_domain = [turned, weight(CHANNELS, 1, 3)], {"domain": domain}
    short = add("CausalConvWithState", inputs, "short", "kept", activation="silu", **of_domain)
    x = add("Transpose", [short], perm=[0, 2, 1])
    tensors = [add("MatMul", [x, weight(CHANNELS, CHANNELS)]) for _ in range(3)]
    decay = add("Neg", [add("Softplus", [add("MatMul", [x, weight(CHANNELS, HEADS)])])])
    beta = add("Sigmoid", [add("MatMul", [x, weight(CHANNELS, HEADS)])])
    counts = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    inputs = [*tensors, "", decay, beta]
    y = add("LinearAttention", inputs, "attended", "state", **counts, **of_domain)
    mask = add("Cast", ["attention_mask"], to=element)
    rows = add("Mul", [y, add("Unsqueeze", [mask, "two"])])
    total = add("ReduceSum", [rows, "one"], keepdims=0)
    mean = add("Div", [total, add("ReduceSum", [mask, "one"], keepdims=1)])
    add("MatMul", [mean, weight(CHANNELS, 3)], "logits")
    graph = helper.make_graph(
        nodes,
        "text",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "T"])
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("logits", element, ["B", 3])],
        constants,
    )
    imports = [helper.make_opsetid("", 20 if domain else 27)]
    imports += [helper.make_opsetid(domain, 1)] if domain else []
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def answer(model: onnx.ModelProto, ids: list[int]) -> np.ndarray:
    inputs = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    if model.opset_import[0].version >= 27:
        return np.asarray(ReferenceEvaluator(model).run(None, inputs)[0])
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
    return np.asarray(session.run(None, inputs)[0])


@pytest.mark.parametrize("domain", ["", MICROSOFT], ids=["onnx", "microsoft"])
def test_bundle_answers_as_the_file(domain: str, tmp_path: Path) -> None:
    model = classifier(domain)
    onnx.save(model, tmp_path / "text.onnx")
    bundle = export(tmp_path / "text.onnx", out=tmp_path / "text.bundle")
    written = onnx.load(bundle.model_path)
    assert operators_in(written) == {"CausalDepthwiseConv": 1, "RecurrentLinearAttention": 1}
    assert {imported.domain for imported in written.opset_import} == {"", "ai.aftexport"}
    lengths = np.array([len(ids) for ids in DOCUMENTS])
    padded = np.zeros((len(DOCUMENTS), lengths.max()), np.int64)
    for row, ids in zip(padded, DOCUMENTS, strict=True):
        row[: len(ids)] = ids
    found = OnnxRuntimeEngine(bundle.model_path).run({"input_ids": padded, "lengths": lengths})
    for logits, ids in zip(found["logits"], DOCUMENTS, strict=True):
        np.testing.assert_allclose(logits[None], answer(model, ids), atol=1e-5)
    unfuse_file(bundle.path, tmp_path / "back.onnx", 27)
    back = {node.op_type for node in onnx.load(tmp_path / "back.onnx").graph.node}
    assert {"LinearAttention", "CausalConvWithState"} < back


def test_float16_file_keeps_its_type(tmp_path: Path) -> None:
    """The shapes after the operators are known, so that the mean is summed in float32."""
    model = classifier("", np.float16)
    onnx.save(model, tmp_path / "text.onnx")
    bundle = export(tmp_path / "text.onnx", out=tmp_path / "text.bundle")
    assert bundle.manifest.precision == "fp16"
    written = onnx.load(bundle.model_path)
    assert operators_in(written)["RecurrentLinearAttention"] == 1
    del written.graph.value_info[:]
    described = onnx.shape_inference.infer_shapes(written).graph.value_info
    types = {value.name: value.type.tensor_type.elem_type for value in described}
    sums = [node.output[0] for node in written.graph.node if node.op_type == "ReduceSum"]
    assert {types[name] for name in sums} == {TensorProto.FLOAT}


@pytest.mark.slow
@pytest.mark.table(keep=0.25, by=any_case)
@pytest.mark.parametrize("name", ["lightning", "delta_rule", "gated_delta_rule"])
def test_factory_is_exported(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = "from naive_linear_attention import build as build_by_name\n\n\n"
    code = f"{source}def build():\n    return build_by_name({name!r})\n"
    (tmp_path / f"factory_of_{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    bundle = export(factory=f"factory_of_{name}:build", out=tmp_path / "out", max_length=512)
    check_bundle(bundle, naive.build(name), masked=False)
    assert run_here(["verify", bundle.path], capsys).code == 0
    check_chunks(bundle)


def check_chunks(bundle: Bundle) -> None:
    """Compare a document in chunks with the whole one: all layers of the model are recurrent."""
    plan = bundle.manifest.chunked
    assert plan is not None
    assert all(stage.recurrence for stage in plan.stages)
    ids = np.random.default_rng(0).integers(1, naive.VOCABULARY, (1, 300))
    inputs = {"input_ids": ids, "lengths": np.array([300])}
    whole = OnnxRuntimeEngine(bundle.model_path, threads=1).run(inputs)["logits"]
    chunked = ChunkedModel(bundle.path / CHUNKED, plan, threads=1, chunk_tokens=37)
    np.testing.assert_allclose(chunked.run(ids[0])["logits"], whole, atol=1e-5, rtol=1e-5)
