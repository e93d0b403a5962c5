"""A plain ONNX file becomes a bundle that answers as the file does."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_texts
import pytest
import torch
import transformers_folders
from commands import assert_refused, listing, run_here, run_python
from onnx import TensorProto, helper
from onnx_texts import ALL_INPUTS, LABELS, VOCABULARY, Builder, bundle_of, saved, text_model
from tokenizers import Tokenizer, models, pre_tokenizers

from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError, TraceError, UsageError
from aftexport.parity.run_cases import verify
from aftexport.pipeline import onnx_trace
from aftexport.pipeline.export import export
from aftexport.verify.reference_model import load_source

ROOT = Path(__file__).parents[3]
DOCUMENTS: Sequence[Sequence[int]] = ([3, 1, 4, 1, 5, 9], [2], [6, 5, 3])


def run(bundle: Bundle, documents: Sequence[Sequence[int]], output: str = "logits") -> Any:
    """Run documents in one run, padded to the longest."""
    lengths = np.array([len(ids) for ids in documents])
    ids = np.zeros((len(documents), lengths.max()), np.int64)
    for row, given in zip(ids, documents, strict=True):
        row[: len(given)] = given
    inputs = {"input_ids": ids, "lengths": lengths}
    engine = OnnxRuntimeEngine(bundle.model_path)
    return engine.run({name: inputs[name] for name in bundle.manifest.inputs})[output]


@pytest.mark.parametrize(
    "types",
    [
        {},
        {"attention_mask": TensorProto.BOOL},
        {"attention_mask": TensorProto.FLOAT, "token_type_ids": TensorProto.INT32},
        dict.fromkeys(ALL_INPUTS, TensorProto.INT32),
    ],
)
def test_answers_are_those_of_the_file(types: dict[str, int], tmp_path: Path) -> None:
    """Masks, segments and positions are made of the lengths, in the types of the file."""
    bundle = bundle_of(tmp_path, text_model(ALL_INPUTS, types=types))
    assert bundle.manifest.inputs == ("input_ids", "lengths")
    assert (bundle.manifest.vocab_size, bundle.manifest.max_tokens) == (VOCABULARY, 16)
    assert bundle.manifest.source["kind"] == "ONNX file"
    assert bundle.manifest.reference == "float64"
    found = run(bundle, DOCUMENTS)
    for ids, logits in zip(DOCUMENTS, found, strict=True):
        expected = onnx_texts.answers(tmp_path / "model.onnx", ids)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_file_without_mask_takes_only_ids(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, text_model(("input_ids",)))
    assert bundle.manifest.inputs == ("input_ids",)
    for ids in DOCUMENTS:
        expected = onnx_texts.answers(tmp_path / "model.onnx", ids)
        np.testing.assert_allclose(run(bundle, [ids])[0], expected, rtol=1e-5, atol=1e-6)


def test_report_says_there_is_no_pytorch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, text_model())
    words = [path, "--to", "onnx", "--labels", ",".join(LABELS), "--out", tmp_path / "out"]
    outcome = run_here(words, capsys)
    assert outcome.code == 0, outcome.err
    said = " ".join(outcome.out.split())
    assert "There is no PyTorch to compare with" in said
    page = (tmp_path / "out" / "parity.html").read_text("utf-8")
    assert "The reference is the ONNX file in float64" in page
    outcome = run_here(["verify", tmp_path / "out"], capsys)
    assert outcome.code == 0, outcome.err
    assert "with the ONNX file are within tolerance" in " ".join(outcome.out.split())
    with pytest.raises(UsageError, match="there is no PyTorch to compare with"):
        load_source(Bundle.open(tmp_path / "out"), path)


def test_type_that_cannot_be_widened_stays(tmp_path: Path) -> None:
    """A quantized weight has a scale in float32: the reference is the file in float32."""

    def quantized(build: Builder, pooled: str) -> str:
        whole = build.constant(np.arange(64, dtype=np.int8).reshape(8, 8) - 30)
        weight = build.node("DequantizeLinear", whole, build.constant(np.float32(0.02)))
        return build.node("MatMul", pooled, weight)

    bundle = bundle_of(tmp_path, text_model(extend=quantized))
    assert bundle.manifest.reference == "float32"
    (first,) = run(bundle, DOCUMENTS[:1])
    expected = onnx_texts.answers(tmp_path / "model.onnx", DOCUMENTS[0])
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)


def test_file_of_16_bits_has_their_tolerance(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, text_model(dtype=np.float16))
    assert (bundle.manifest.precision, bundle.manifest.reference) == ("fp16", "float64")
    assert all(result.passed for result in verify(bundle))


def test_names_of_outputs_are_made_plain(tmp_path: Path) -> None:
    """Names with other characters change, and outputs of integers are left out."""
    model = text_model(output="head/logits:0")
    model.graph.node.append(helper.make_node("ArgMax", ["head/logits:0"], ["label"], axis=1))
    model.graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, None))
    bundle = bundle_of(tmp_path, model)
    assert list(bundle.manifest.heads) == ["head_logits_0"]
    expected = onnx_texts.answers(tmp_path / "model.onnx", DOCUMENTS[0])
    found = run(bundle, DOCUMENTS[:1], "head_logits_0")[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def renamed(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    """Return the model with another name of an inner value or a constant."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    for tensor in model.graph.initializer:
        tensor.name = new if tensor.name == old else tensor.name
    return model


@pytest.mark.parametrize("name", ["lengths", "input_features", "plain_input_0", "given_mask"])
@pytest.mark.parametrize("old", ["value_3", "constant_1"])
def test_inner_value_may_have_any_name(old: str, name: str, tmp_path: Path) -> None:
    """The names of the exporter itself are free in a file."""
    bundle = bundle_of(tmp_path, renamed(text_model(), old, name))
    assert bundle.manifest.inputs == ("input_ids", "lengths")
    expected = onnx_texts.answers(tmp_path / "model.onnx", DOCUMENTS[0])
    found = run(bundle, DOCUMENTS[:1])[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["evidence", "evidence_weight", "chunk_zero", "logits_tokens", "value_5_float32"]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_names_of_later_passes_are_free(dtype: Any, name: str, tmp_path: Path) -> None:
    """The bundle has evidence and runs in chunks, and the sums of 16 bits are in float32."""
    bundle = bundle_of(tmp_path, renamed(text_model(dtype=dtype), "value_3", name))
    assert bundle.manifest.evidence_heads is not None
    expected = onnx_texts.answers(tmp_path / "model.onnx", DOCUMENTS[0])
    np.testing.assert_allclose(run(bundle, DOCUMENTS[:1])[0], expected, rtol=1e-2, atol=1e-2)


def test_plain_constants_avoid_names_of_values(tmp_path: Path) -> None:
    model = text_model()
    for index, old in enumerate(("value_3", "value_4", "value_0"), len(model.graph.initializer)):
        renamed(model, old, f"plain_constant_{index}")
    expected = onnx_texts.answers(saved(tmp_path, model), DOCUMENTS[0])
    found = run(bundle_of(tmp_path, model), DOCUMENTS[:1])[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_plain_name_of_output_avoids_inner_values(tmp_path: Path) -> None:
    model = renamed(text_model(output="logits:0"), "value_3", "logits_0")
    bundle = bundle_of(tmp_path, model)
    assert list(bundle.manifest.heads) == ["logits_0_"]
    expected = onnx_texts.answers(tmp_path / "model.onnx", DOCUMENTS[0])
    found = run(bundle, DOCUMENTS[:1], "logits_0_")[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_output_left_out_may_be_named_as_input(tmp_path: Path) -> None:
    model = text_model()
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["lengths"], axis=1))
    model.graph.output.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, None))
    assert list(bundle_of(tmp_path, model).manifest.heads) == ["logits"]


def test_model_that_is_too_large_for_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered here to that of a model whose weights are twice as large."""
    size = text_model().ByteSize() * 3 // 2
    monkeypatch.setattr(onnx_trace, "MAX_MODEL_BYTES", size)
    monkeypatch.setattr(onnx_trace, "widen", None)  # it must not take the memory
    bundle = bundle_of(tmp_path, text_model())
    assert bundle.manifest.reference == "float32"


MEAN = """\
import torch
from torch import nn


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 16), nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].float()
        return self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))


ids = torch.randint(300, (2, 8))
axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
torch.onnx.export(
    Mean().eval(), (ids, torch.ones_like(ids)), "plain.onnx", output_names=["logits"],
    dynamic_shapes=(axes, axes),
)
"""


@pytest.mark.slow
def test_mean_over_mask_has_evidence(tmp_path: Path) -> None:
    """The exporter is PyTorch's own, whose warnings would fail the test in this process."""
    (tmp_path / "make_onnx.py").write_text(MEAN)
    outcome = run_python("make_onnx.py", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    bundle = export(tmp_path / "plain.onnx", labels=["letter", "invoice"])
    assert bundle.manifest.evidence_heads is not None


def test_weights_beside_the_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    beside = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 64}
    onnx.save(text_model(), path, **beside)
    bundle = export(path, labels=list(LABELS))
    expected = onnx_texts.answers(path, DOCUMENTS[0])
    np.testing.assert_allclose(run(bundle, DOCUMENTS[:1])[0], expected, rtol=1e-5, atol=1e-6)
    (tmp_path / "w.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="its weights cannot be read"):
        export(path, force=True)


def test_linear_attention_is_fused(tmp_path: Path) -> None:
    """A model of torch.onnx.export with linear attention gets the operator and equals PyTorch."""
    namespace: dict[str, Any] = {"__name__": "written"}
    exec(transformers_folders.LINEAR_CODE, namespace)
    torch.manual_seed(0)
    config = namespace["LinearConfig"](num_labels=3)
    module = transformers_folders.Logits(
        namespace["LinearForSequenceClassification"](config)
    ).eval()
    ids, path = torch.randint(300, (2, 9)), tmp_path / "model.onnx"
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own code
        program = torch.onnx.export(
            module,
            (ids, torch.ones_like(ids)),
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_shapes=(dynamic, dynamic),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(path)
    bundle = export(path)
    assert bundle.manifest.operators == {
        "LayerNormQueryKeyValue": 1,
        "NormalizedLinearAttention": 1,
    }
    documents = [[5, 200, 17, 33], [299], list(range(40))]
    for given, logits in zip(documents, run(bundle, documents), strict=True):
        with torch.inference_mode():
            expected = module(torch.tensor([given]), torch.ones(1, len(given)).long())[0]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_tokenizer_and_labels_are_in_the_bundle(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    bundle = bundle_of(tmp_path, text_model(), tokenizer=tmp_path / "tokenizer.json")
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("b a c").ids == [1, 0, 2]
    assert tuple(bundle.manifest.heads["logits"].names) == LABELS


def constants_as_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with Constant nodes in place of its initializers."""
    made = [
        helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in model.graph.initializer
    ]
    nodes = [*made, *model.graph.node]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    return model


def test_float16_in_nodes_has_its_tolerance(tmp_path: Path) -> None:
    """The weights may be in Constant nodes in place of initializers."""
    model = constants_as_nodes(text_model(dtype=np.float16, output="half"))
    model.graph.node.append(helper.make_node("Cast", ["half"], ["logits"], to=TensorProto.FLOAT))
    model.graph.output[0].name = "logits"
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    assert bundle_of(tmp_path, model).manifest.precision == "fp16"


_LARGE = """<ir_version: 9, opset_import: ["": 20]>
graph (int64[batch, tokens] input_ids) => (float[batch, 3] logits)
<int64 one = {1}, int64 block = {131072}, int64[1] axis = {1}> {
    x = Gather(table, input_ids)
    pooled = ReduceMean <keepdims = 0> (x, axis)
    count = Shape <start = 1, end = 2> (input_ids)
    square = Mul(count, count)
    cube = Mul(square, count)
    whole = Div(cube, block)
    side = Add(whole, one)
    shape = Concat <axis = 0> (side, side)
    large = ConstantOfShape(shape)
    most = ReduceMax <keepdims = 0> (large)
    logits = Add(pooled, most)
}"""
"""A model with (tokens cubed / 131,072) squared numbers: 1 million at 509 tokens, 2^38 at 4,096."""


def test_case_beyond_memory_names_max_length(tmp_path: Path) -> None:
    """The tensor of zeros has no type in the file, and the reference is still float64."""
    model = onnx.parser.parse_model(_LARGE)
    table = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(model, tmp_path / "large.onnx")
    with pytest.raises(EngineError, match="case 'long', 1 x 4,096 tokens") as caught:
        export(tmp_path / "large.onnx", out=tmp_path / "out")
    assert "--max-length 509" in caught.value.remedy
    bundle = export(tmp_path / "large.onnx", out=tmp_path / "out", max_length=509)
    assert bundle.manifest.reference == "float64"


def noise(build: Builder, pooled: str) -> str:
    return build.node("Add", pooled, build.node("RandomNormalLike", pooled))


def sum_of_batch(build: Builder, pooled: str) -> str:
    total = build.node("ReduceSum", pooled, build.constant(np.array([0])), keepdims=1)
    return build.node("Add", pooled, total)


def extra_input() -> onnx.ModelProto:
    model = text_model()
    extra = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["b", 3, "h", "w"])
    model.graph.input.append(extra)
    return model


def only_labels() -> onnx.ModelProto:
    model = text_model()
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["label"], axis=1))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, None))
    return model


def one_hot_ids() -> onnx.ModelProto:
    build = Builder()
    depth, values = build.constant(VOCABULARY), build.constant(np.array([0, 1], np.float32))
    x = build.node("OneHot", "input_ids", depth, values)
    pooled = build.node("ReduceMean", x, build.constant(np.array([1])), keepdims=0)
    build.node("MatMul", pooled, build.weight(VOCABULARY, 3), output="logits")
    given = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])]
    results = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 3])]
    graph = helper.make_graph(build.nodes, "text", given, results, build.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def sound_model() -> onnx.ModelProto:
    build = Builder()
    pooled = build.node("ReduceMean", "frames", build.constant(np.array([1])), keepdims=0)
    build.node("MatMul", pooled, build.weight(5, 3), output="logits")
    given = [helper.make_tensor_value_info("frames", TensorProto.FLOAT, ["b", "s", 5])]
    results = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 3])]
    graph = helper.make_graph(build.nodes, "sound", given, results, build.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def bfloat16_node() -> onnx.ModelProto:
    def with_offset(build: Builder, pooled: str) -> str:
        offset = helper.make_tensor("offset", TensorProto.BFLOAT16, [1], [0.5])
        build.nodes.append(helper.make_node("Constant", [], ["offset"], value=offset))
        narrow = build.node("Cast", pooled, to=TensorProto.BFLOAT16)
        return build.node("Cast", build.node("Add", narrow, "offset"), to=TensorProto.FLOAT)

    return text_model(extend=with_offset)


BAD: dict[str, tuple[onnx.ModelProto, dict[str, Any], str]] = {
    "fixed tokens": (text_model(axes=("b", 128)), {}, "tokens fixed at 128"),
    "fixed batch": (text_model(axes=(1, "s")), {}, "batch fixed at 1"),
    "another input": (extra_input(), {}, r"the inputs .*got .*pixel_values \[b, 3, h, w\]"),
    "no numbers": (only_labels(), {}, "output of floating-point numbers, got none"),
    "ids without a table": (one_hot_ids(), {}, "--vocab-size"),
    "too many ids": (text_model(), {"vocab_size": 41}, "at most 40, the rows of the table"),
    "too long": (text_model(ALL_INPUTS), {"max_length": 20}, "--max-length must be at most 16"),
    "random": (text_model(extend=noise), {}, "outputs are random"),
    "sum over the batch": (text_model(extend=sum_of_batch), {}, r"other documents.*--no-batching"),
    "float64": (text_model(dtype=np.float64), {}, "Expected float32 or float16 for the output"),
    "factory": (text_model(), {"factory": "a:b"}, "a PyTorch model with --factory a:b"),
    "usual opset": (text_model(), {"opset": 20}, "a PyTorch model with --opset 20"),
    "pickle": (text_model(), {"allow_pickle": True}, "a PyTorch model with --allow-pickle"),
    "opset": (text_model(), {"opset": 19}, "a PyTorch model with --opset 19"),
    "precision": (text_model(), {"precision": "fp16"}, "whose weights keep their types"),
    "int8 of 16 bits": (text_model(dtype=np.float16), {"precision": "int8"}, "float16, got int8"),
    "bf16 of 16 bits": (text_model(dtype=np.float16), {"precision": "bf16"}, "float16, got bf16"),
    "auto of 16 bits": (text_model(dtype=np.float16), {"precision": "auto"}, "float16, got auto"),
    "input": (text_model(), {"inputs": {"weight": "number"}}, "model with --input weight"),
    "features of ids": (text_model(), {"features": 9}, "file of token ids, got --features 9"),
    "ids of features": (
        sound_model(), {"vocab_size": 9}, "file of features, got --vocab-size 9"),
    "bfloat16 in a node": (bfloat16_node(), {}, "float32 or float16 in an ONNX file, got bfloat16"),
    "length": (text_model(), {"max_length": 0}, "--max-length must be from 1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_file_or_option_is_refused(kind: str, tmp_path: Path) -> None:
    model, options, message = BAD[kind]
    path = saved(tmp_path, model)
    before = listing(tmp_path)
    with pytest.raises((TraceError, UsageError), match=message):
        export(path, **options)
    assert listing(tmp_path) == before


def test_ids_without_a_table_need_their_number(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, one_hot_ids(), vocab_size=VOCABULARY)
    assert bundle.manifest.vocab_size == VOCABULARY


def test_sum_over_the_batch_runs_alone(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, text_model(extend=sum_of_batch), batching=False)
    assert not bundle.manifest.batching


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no model", b"\x08\x08" * 50])
def test_other_bytes_are_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    outcome = run_here([tmp_path / "model.onnx", "--to", "onnx"], capsys)
    assert_refused(outcome, "model.onnx")


def test_features_are_the_input(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, sound_model())
    assert bundle.manifest.inputs == ("input_features",)
    assert bundle.manifest.features is not None
    assert bundle.manifest.features.count == 5
    assert json.loads((bundle.path / "parity.json").read_text())["checked"]
