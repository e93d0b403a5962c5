"""A provider is checked before a session, and multiplies in the bits of the model's precision."""

import ctypes
import platform
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import pytest
import tiny_models
import torch

import aftplugins
from aftexport.capture.capture import PRECISIONS, capture
from aftexport.engines import cuda
from aftexport.engines.onnxruntime import PROVIDERS, OnnxRuntimeEngine, providers
from aftexport.engines.onnxruntime.package import native
from aftexport.engines.onnxruntime.providers import narrow_products
from aftexport.errors import EngineError
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.operators.domain import DOMAIN
from aftexport.operators.encoder import ARITHMETIC_OPERATORS
from aftexport.parity import TOLERANCES
from aftexport.system.contract import DEFAULT_OPSET

CUDA = PROVIDERS["cuda"]


@pytest.fixture
def has_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ONNX Runtime name the provider, as the package for GPUs does."""
    names = [CUDA.name, "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)


def test_session_asks_provider_before_cpu() -> None:
    (name, options), (rest, _) = CUDA.entries
    assert (name, rest) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options["use_tf32"] == "0"
    assert [entry for entry, _ in PROVIDERS["cpu"].entries] == ["CPUExecutionProvider"]


def test_missing_driver_is_named(has_provider: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_DRIVER", "libabsent-driver.so.1")
    with pytest.raises(
        EngineError, match=r"Expected a GPU.*libabsent-driver\.so\.1 is missing"
    ) as refusal:
        CUDA.check()
    assert "nvidia-smi" in refusal.value.remedy


@pytest.mark.skipif(platform.system() != "Linux", reason="the C library has another name")
@pytest.mark.parametrize(
    ("status", "count", "problem"),
    [
        (100, 0, "no device is visible"),
        (999, 0, "error 999, unknown error"),
        (7, 0, "reports error 7"),
        (0, 0, "finds no device"),
        (0, 1, None),
    ],
)
def test_driver_tells_number_of_devices(
    status: int, count: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def __init__(self, _: str) -> None: ...

        def cuInit(self, _: int) -> int:  # noqa: N802  # the driver's name
            return status

        def cuGetErrorString(self, code: int, text: object) -> int:  # noqa: N802
            if code == 7:  # the driver does not know it
                return 1
            text._obj.value = b"unknown error"  # type: ignore[attr-defined]  # of a reference
            return 0

        def cuDeviceGetCount(self, found: object) -> int:  # noqa: N802
            found._obj.value = count  # type: ignore[attr-defined]  # of a reference
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    found = cuda.missing_gpu()
    assert found is None if problem is None else problem in str(found)


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for operators that have kernels on a GPU, and unless they are switched off."""
    monkeypatch.setattr(aftplugins, "library", lambda runtime: None)
    with pytest.raises(
        EngineError, match=r"kernels for AftLocal and AftSimple, got none: lib"
    ) as refusal:
        CUDA.check_kernels(["AftSimple", "AftLocal_sigmoid", "LayerNormFeedForward"])
    assert "make cuda-wheel" in refusal.value.remedy
    CUDA.check_kernels(["LayerNormFeedForward", "RecurrentLinearAttention"])
    PROVIDERS["cpu"].check_kernels(["AftSimple"])
    monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, "1")
    CUDA.check_kernels(["AftSimple"])


@pytest.mark.skipif(
    CUDA.name in onnxruntime.get_available_providers(), reason="the provider is here"
)
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_provider_that_cannot_start_is_named(
    bundle_folder: Path, has_provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime itself only warns, and runs the model on the CPU."""
    monkeypatch.setattr(providers, "missing_gpu", lambda: None)
    with pytest.raises(EngineError, match=f"{CUDA.name}.*Install the NVIDIA driver, CUDA"):
        OnnxRuntimeEngine(bundle_folder / "model.onnx", provider="cuda")


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        (native.InvalidGraph, "Export it again"),
        (native.NotImplemented, "Export it again"),
        (native.InvalidProtobuf, "Export it again"),
        (native.Fail, "Install the NVIDIA driver"),
    ],
)
def test_remedy_follows_cause_of_failed_load(
    failure: type[Exception],
    remedy: str,
    bundle_folder: Path,
    has_provider: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise failure("no Op registered for Gelu")

    monkeypatch.setattr(providers, "missing_gpu", lambda: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(EngineError, match="on CUDAExecutionProvider: no Op") as refusal:
        OnnxRuntimeEngine(bundle_folder / "model.onnx", provider="cuda", fused=False)
    assert refusal.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("Failed to allocate memory for requested buffer of size 1024", "Send shorter documents"),
        ("CUDA failure 2: out of memory", "Send shorter documents"),
        ("Invalid rank for input", "Check the shapes"),
    ],
)
def test_remedy_follows_cause_of_failed_run(
    message: str, remedy: str, bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise native.RuntimeException(message)

    engine = OnnxRuntimeEngine(bundle_folder / "model.onnx", threads=1)
    monkeypatch.setattr(engine, "_session", SimpleNamespace(run=fail))
    with pytest.raises(EngineError, match=message) as failed:
        engine.run({})
    assert failed.value.remedy.startswith(remedy)


MECHANISMS = ("aft_full", "aft_local", "aft_conv", "aft_simple", "efficient_attention",
              "linear_attention", "fastformer")  # fmt: skip
PRODUCTS = ("MatMul", "Gemm")
CASTS = ("Cast", "CastLike")
TYPE = onnx.TensorProto.DataType

every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


@cache
def classifier(mechanism: str) -> DocumentClassifier:
    torch.manual_seed(1)
    settings = {"mechanism": mechanism, "depth": 2, "window": 4, "max_length": 64}
    return DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | settings)).eval()


@cache
def exported(mechanism: str, precision: str, opset: int = DEFAULT_OPSET) -> bytes:
    program = capture(classifier(mechanism), dtype=PRECISIONS[precision], max_tokens=64)
    return finish(lower(program, opset=opset), precision=precision).SerializeToString()


def rewritten(mechanism: str, precision: str) -> onnx.ModelProto:
    model = onnx.load_from_string(exported(mechanism, precision))
    assert narrow_products(model)
    return model


def around_kernels(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the nodes that run beside the CUDA kernels, whose results are passed through."""
    bodies = [(f.domain, f.name) for f in model.functions if is_encoder(f.name)]
    inlined = onnx.inliner.inline_selected_functions(model, bodies)
    for node in inlined.graph.node:
        if node.domain == DOMAIN:
            query = node.input[0]
            node.CopyFrom(onnx.helper.make_node("Identity", [query], node.output[:1]))
    del inlined.functions[:]
    return onnx.shape_inference.infer_shapes(inlined, strict_mode=True)


def is_encoder(op_type: str) -> bool:
    return op_type.partition("_")[0] in ARITHMETIC_OPERATORS


def types_of(model: onnx.ModelProto, op_types: tuple[str, ...]) -> Counter[str]:
    """Return the number of nodes by the type of their first input."""
    graph = model.graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    types |= {value.name: value.type.tensor_type.elem_type for value in graph.input}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return Counter(TYPE.Name(types[n.input[0]]) for n in graph.node if n.op_type in op_types)


def statistics_of(model: onnx.ModelProto) -> set[int]:
    """Return the types in which norms compute mean and variance, if it is not the default."""
    norms = [n for n in model.graph.node if n.op_type == "LayerNormalization"]
    return {a.i for n in norms for a in n.attribute if a.name == "stash_type"}


@every_mechanism
def test_float16_model_multiplies_in_float16(mechanism: str) -> None:
    """Three casts stay: two for the mean over tokens in float32, one of the lengths."""
    before = around_kernels(onnx.load_from_string(exported(mechanism, "fp16")))
    after = around_kernels(rewritten(mechanism, "fp16"))
    assert types_of(before, PRODUCTS)["FLOAT"] > 0
    assert types_of(after, PRODUCTS) == {"FLOAT16": types_of(before, PRODUCTS).total()}
    assert types_of(after, ("LayerNormalization", "Gelu")).keys() == {"FLOAT16"}
    assert statistics_of(after) <= {TYPE.Value("FLOAT")}
    assert types_of(after, CASTS) == {"FLOAT16": 1, "FLOAT": 1, "INT64": 1}


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@every_mechanism
def test_reduced_precision_multiplies_in_bfloat16(mechanism: str, precision: str) -> None:
    """The sums and everything between the products stay in float32; so does the head."""
    before = around_kernels(onnx.load_from_string(exported(mechanism, precision)))
    after = around_kernels(rewritten(mechanism, precision))
    products = types_of(before, ("MatMul",))["FLOAT"]
    assert types_of(after, ("MatMul",)) == {"BFLOAT16": products}
    assert types_of(after, ("Gemm",)) == {"FLOAT": 1}
    assert types_of(after, ("LayerNormalization", "Gelu")).keys() == {"FLOAT"}
    assert statistics_of(after) <= {TYPE.Value("FLOAT")}


@every_mechanism
def test_float32_model_stays_as_it_is(mechanism: str) -> None:
    model = onnx.load_from_string(exported(mechanism, "fp32"))
    assert not narrow_products(model)
    assert model.SerializeToString() == exported(mechanism, "fp32")


def test_each_node_has_its_own_precision() -> None:
    """In an export with --precision auto, some products stay in float32."""
    model = onnx.load_from_string(exported("aft_simple", "bf16"))
    layers = [node for node in model.graph.node if node.op_type == "LayerNormFeedForward"]
    (precision,) = (a for a in layers[0].attribute if a.name == "precision")
    precision.s = b"fp32"
    assert narrow_products(model)
    names = [n.op_type for n in model.graph.node if "FeedForward" in n.op_type]
    assert names == ["LayerNormFeedForward", "LayerNormFeedForward_bfloat16"]
    assert {"LayerNormFeedForward", "LayerNormFeedForward_bfloat16"} <= {
        function.name for function in model.functions
    }


def test_replaced_bodies_are_removed() -> None:
    names = {function.name for function in rewritten("aft_simple", "fp16").functions}
    assert names == {"AftSimple", "LayerNormQueryKeyValue_tensors", "LinearResidual_tensors",
                     "LayerNormFeedForward_tensors"}  # fmt: skip


def equals_pytorch(model: onnx.ModelProto, mechanism: str, precision: str) -> None:
    if precision != "fp16":
        bodies = [f.name for f in model.functions if f.name.endswith("_bfloat16")]
        model = with_float32_sums(model, *bodies)
    ids, lengths = np.arange(120).reshape(2, 60), np.array([60, 13])
    with torch.inference_mode():
        expected = classifier(mechanism).double()(torch.from_numpy(ids), torch.from_numpy(lengths))
        classifier(mechanism).float()
    engine = OnnxRuntimeEngine(model.SerializeToString(), threads=1, fused=False)
    logits = engine.run({"input_ids": ids, "lengths": lengths})["logits"]
    error = np.abs(logits.astype(np.float64) - expected.numpy()).max()
    assert error <= TOLERANCES[precision].bound * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
@every_mechanism
def test_rewritten_model_equals_pytorch(mechanism: str, precision: str) -> None:
    equals_pytorch(rewritten(mechanism, precision), mechanism, precision)


def test_variable_keeps_bodies_of_file(monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.load_from_string(exported("aft_simple", "fp16"))
    assert not PROVIDERS["cpu"].adapt(model)
    monkeypatch.setenv("AFTEXPORT_PORTABLE", "1")
    assert not PROVIDERS["cuda"].adapt(model)
    monkeypatch.delenv("AFTEXPORT_PORTABLE")
    assert PROVIDERS["cuda"].adapt(model)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_opset_without_gelu_loads(precision: str) -> None:
    """Gelu exists from opset 20 on; before, its parts run, in float32 in a float16 model too."""
    model = onnx.load_from_string(exported("aft_simple", precision, 18))
    assert narrow_products(model)
    assert "Gelu" not in {node.op_type for f in model.functions for node in f.node}
    equals_pytorch(model, "aft_simple", precision)


_FLOAT, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16


def with_float32_sums(model: onnx.ModelProto, *bodies: str) -> onnx.ModelProto:
    """Return a model with float32 products of rounded operands, whose results are rounded too.

    A GPU's product of bfloat16 also sums exact products in float32 and rounds the sum.

    Args:
        model: a model whose products of bfloat16 have two operands that were just cast.
        bodies: the names of the functions with such products.
    """
    inlined = onnx.inliner.inline_selected_functions(model, [(DOMAIN, name) for name in bodies])
    casts = {
        node.output[0]
        for node in inlined.graph.node
        if node.op_type == "Cast" and node.attribute[0].i == _BFLOAT16
    }
    nodes: list[onnx.NodeProto] = []
    for node in inlined.graph.node:
        if node.op_type != "MatMul" or not casts.issuperset(node.input):
            nodes.append(node)
            continue
        result = node.output[0]
        wide = [f"{name}_of_{result}" for name in node.input]
        for name, operand in zip(node.input, wide, strict=True):
            nodes.append(onnx.helper.make_node("Cast", [name], [operand], to=_FLOAT))
        nodes.append(onnx.helper.make_node("MatMul", wide, [f"{result}_sum"]))
        nodes.append(onnx.helper.make_node("Cast", [f"{result}_sum"], [result], to=_BFLOAT16))
    del inlined.graph.node[:]
    inlined.graph.node.extend(nodes)
    return inlined
