"""The operators of the CUDA execution provider in ONNX Runtime, on an emulated GPU.

Their library is built as it is for CUDA, but over the emulated kernels and for the provider of
the CPU, whose memory the emulated GPU shares.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import tiny_models
import torch
from aft_full_product import aft_full_model, open_session, rounded, run_around_product, run_operator
from sampling import any_case

import aftplugins
from aftexport.capture.capture import capture
from aftexport.engines import aft_full_product
from aftexport.engines.aft_full_product import use_products
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, operator_paths
from aftexport.engines.onnxruntime.package import onnxruntime
from aftexport.lowering.finish import finish
from aftexport.lowering.position_bias import safe_precision
from aftexport.lowering.to_onnx import lower
from aftexport.parity import TOLERANCES

from .. import encoder_runner
from .. import test_layer_norm_fastformer as fastformer
from ..runner import INPUTS, OPS, attributes_of, check, definition, random_inputs, run
from . import emulated

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))

ELEMENTS = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def library() -> Path:
    return emulated.build() / "libaftplugins_onnxruntime_emulated.so"


def check_on_device(
    library: Path, op: str, inputs: list[np.ndarray], element: str, **attributes: Any
) -> np.ndarray:
    rounded = [x.astype(ELEMENTS[element]) if x.dtype == np.float32 else x for x in inputs]
    if element == "bf16":  # as float32, which is cast inside
        rounded = [x.astype(np.float32) if x.dtype == ELEMENTS["bf16"] else x for x in rounded]
    given = attributes | {"library": library, "bfloat16": element == "bf16"}
    return check(op, rounded, bound=TOLERANCES[element].bound, **given)


@pytest.mark.table(keep=0.34)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("batch", "tokens", "dim", "heads", "window"),
    [(1, 1, 1, 1, 1), (2, 33, 24, 2, 5), (1, 131, 20, 5, 40)],
)
def test_operator_equals_definition(
    library: Path, op: str, element: str, batch: int, tokens: int, dim: int, heads: int, window: int
) -> None:
    inputs = random_inputs(op, batch, tokens, dim, heads=heads, window=window)
    check_on_device(library, op, inputs, element, **attributes_of(op, heads))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("op", OPS)
def test_lengths_and_extreme_keys(library: Path, op: str, element: str) -> None:
    inputs = random_inputs(op, 4, 70, 16, heads=2, window=8, scale=100.0, lengths=[0, 1, 33, 70])
    check_on_device(library, op, inputs, element, **attributes_of(op, 2))


# Fewer tokens where the emulated tensor cores take many seconds.
LONG = {op: 2048 if "Full" in op else 8192 if op.endswith("Attention") else 65_536 for op in OPS}


@pytest.mark.table(keep=0.4, by=any_case)
@pytest.mark.parametrize(("op", "tokens"), LONG.items())
def test_rounding_of_equal_tokens_stays_small(library: Path, op: str, tokens: int) -> None:
    """The mean of equal values is the value, whatever the weights."""
    inputs = random_inputs(op, 1, tokens, 8, heads=2, window=3)
    for x in inputs[:3]:
        x[:] = x[:, :1]
    actual = run(op, inputs, library=library, **attributes_of(op, 2))
    short = [x[:, :1] if x.ndim == 3 else x for x in inputs[:-1]] + [np.array([1])]
    if "Full" in op:
        short[3] = short[3][:1, :1]
    if "Local" in op:
        short[3] = short[3][:1]
    expected = definition(op, short, **attributes_of(op, 2))
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


def error_of_equal_tokens(
    library: Path, op: str, tokens: int, dim: int, lost: bool = False
) -> float:
    """Return the relative error of the mean of equal values with equal weights.

    All its sums round to the same side. With `lost`, a key beyond the length has a bias beside
    which the weights underflow.
    """
    inputs = random_inputs(op, 1, tokens, dim)
    for x in inputs[:3]:
        x[:] = x[:, :1]
    inputs[3][:] = 0
    if lost:
        inputs[3][:, tokens - 1] = 200
        inputs[4][0] = tokens - 1
    counted = run(op, inputs, library=library, gate="none")[0, : inputs[4][0]]
    return (np.abs(counted - inputs[2][0, 0]) / np.abs(inputs[2][0, 0])).max()


@pytest.mark.parametrize(
    ("op", "dim", "lost"),
    [("AftFull", 4, False), ("AftFull", 1, True), ("CausalAftFull", 1, False)],
)
def test_aft_full_error_does_not_grow(library: Path, op: str, dim: int, lost: bool) -> None:
    """Three segments of keys err as one; a growing error would be 1.7e-4 at 16,384 tokens."""
    short, long = (error_of_equal_tokens(library, op, n, dim, lost) for n in (2048, 4200))
    assert long <= 1.1 * short <= 3e-5


@pytest.mark.parametrize("op", ["AftFull", "CausalAftFull"])
def test_segments_of_keys_equal_the_definition(library: Path, op: str) -> None:
    inputs = random_inputs(op, 2, 2100, 5, lengths=[2100, 2050])
    check_on_device(library, op, inputs, "fp32")


SETTINGS = [
    *((op, {"gate": gate}) for op in OPS if "Aft" in op for gate in ("tanh", "none")),
    *(
        (f"{prefix}EfficientAttention", {"normalization": "scaling", "scale": 0.5})
        for prefix in ("", "Causal")
    ),
    *(
        (f"{prefix}NormalizedLinearAttention", {"feature_map": "relu", "eps": 0.5})
        for prefix in ("", "Causal")
    ),
]


@pytest.mark.parametrize(("op", "settings"), SETTINGS)
def test_settings_reach_kernels(library: Path, op: str, settings: dict[str, Any]) -> None:
    inputs = random_inputs(op, 2, 75, 20, heads=2, window=4, lengths=[75, 20])
    check_on_device(library, op, inputs, "fp32", **settings, **attributes_of(op, 2))


@pytest.mark.parametrize("op", ["EfficientAttention", "CausalNormalizedLinearAttention"])
def test_heads_over_kernel_maximum_are_refused(library: Path, op: str) -> None:
    check_on_device(library, op, random_inputs(op, 1, 9, 256), "fp32", num_heads=1)
    with pytest.raises(Exception, match="heads of 257 channels, more than the 256 of the CUDA ker"):
        run(op, random_inputs(op, 1, 9, 257), library=library, num_heads=1)


@pytest.mark.parametrize(
    ("op", "attributes", "expected"),
    [
        ("AftSimple", {"gate": "relu"}, 'gate is "relu", expected sigmoid, tanh or none'),
        ("AftSimple", {"eps": 1e-8}, "eps is 1e-08, expected 0"),
        ("AftFull", {"eps": 0.5}, "eps is 0.5, expected 0"),
        ("CausalAftLocal", {"eps": 0.5}, "eps is 0.5, expected 0"),
        ("AftConv", {"eps": 0.5}, "eps is 0.5, expected 0"),
        ("NormalizedLinearAttention", {"normalizer": "clamp"}, 'normalizer is "clamp", expected'),
        ("NormalizedLinearAttention", {"feature_map": "identity"}, 'feature_map is "identity", ex'),
    ],
)
def test_forms_without_kernel_are_refused(
    library: Path, op: str, attributes: dict[str, Any], expected: str
) -> None:
    inputs = random_inputs(op, 1, 9, 8)
    with pytest.raises(Exception, match=expected):
        run(op, inputs, library=library, **attributes)


def test_one_band_row_serves_every_token(library: Path) -> None:
    inputs = random_inputs("AftLocal", 2, 40, 16, window=9)
    inputs[3] = inputs[3][:1]
    check_on_device(library, "AftLocal", inputs, "fp32")


def test_session_runs_changing_shapes(library: Path) -> None:
    """The workspace belongs to the run and may shrink and grow."""
    for tokens in (300, 1, 7, 600):
        for op in ("AftSimple", "CausalNormalizedLinearAttention"):
            inputs = random_inputs(op, 2, tokens, 16, heads=2)
            check_on_device(library, op, inputs, "fp32", **attributes_of(op, 2))


def test_no_tokens(library: Path) -> None:
    assert run("AftSimple", random_inputs("AftSimple", 1, 0, 8), library=library).shape == (1, 0, 8)


@pytest.mark.parametrize("op", ["AftFull", "CausalAftFull"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_exponential_precisions_support_every_element_type(
    library: Path, op: str, precision: str, element: str
) -> None:
    inputs = random_inputs(op, 1, 100, 16)
    check_on_device(library, op, inputs, element, precision=precision)


@pytest.mark.parametrize("op", ["AftFull", "CausalAftFull"])
def test_node_sets_exponential_precision(library: Path, op: str) -> None:
    inputs = [
        x.astype(np.float16) if x.dtype == np.float32 else x for x in random_inputs(op, 1, 100, 16)
    ]
    fp32, fp16, bf16 = (
        run(op, inputs, library=library, precision=p) for p in ("fp32", "fp16", "bf16")
    )
    assert (fp32 != fp16).any()
    assert (fp32 != bf16).any()
    assert (fp16 != bf16).any()


@pytest.mark.parametrize("op", ["AftFull", "CausalAftFull"])
@pytest.mark.parametrize("element", ["fp16", "bf16"])
@pytest.mark.parametrize("reach", [1.0, 7.9, 8.1, 20.0, 74.0, 76.0, 150.0])
def test_precision_chosen_by_range_is_safe(
    library: Path, op: str, element: str, reach: float
) -> None:
    """The largest keys meet the smallest biases of their rows, the case that loses most."""
    inputs = random_inputs(op, 1, 150, 16)
    inputs[3] = np.random.default_rng(1).uniform(-reach, 0, inputs[3].shape).astype(np.float32)
    inputs[3][:, 0] = 0.0
    inputs[3][:, 1::7] = -reach
    inputs[1][0, 1::7] += reach
    chosen = safe_precision(element, reach, causal=op.startswith("Causal"))
    check_on_device(library, op, inputs, element, precision=chosen)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(
    ("tokens", "dim", "lengths", "scale", "gate"),
    [
        (1, 1, [1], 1.0, "sigmoid"),
        (33, 20, [33, 20, 0], 1.0, "tanh"),
        (131, 16, [131, 70], 1.0, "none"),
        (70, 8, [70, 33], 30.0, "sigmoid"),
    ],
)
def test_operators_around_product_equal_definition(
    library: Path,
    element: str,
    tokens: int,
    dim: int,
    lengths: list[int],
    scale: float,
    gate: str,
) -> None:
    """Keys and biases of a range beyond the rule are right too, but slow."""
    drawn = random_inputs("AftFull", len(lengths), tokens, dim, scale=scale, lengths=lengths)
    inputs = [x if x.dtype == np.int64 else rounded(x, element) for x in drawn]
    names = dict(zip(INPUTS["AftFull"], inputs, strict=True))
    actual = run_around_product(names, element, gate, library)
    expected = definition("AftFull", inputs, gate=gate)
    counts = np.arange(tokens) < np.array(lengths)[:, None]
    assert np.isfinite(actual).all()
    error = np.abs(actual - expected)[counts].max() / np.abs(inputs[2]).max()
    assert error <= TOLERANCES[element].bound


def test_rewritten_graph_runs_by_kernels(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bodies, only kernels can run the two operators."""
    monkeypatch.setattr(aft_full_product, "MIN_TOKENS", 1)
    drawn = random_inputs("AftFull", 2, 60, 16, lengths=[60, 21], dtype=np.float16)
    names = dict(zip(INPUTS["AftFull"], drawn, strict=True))
    model = aft_full_model("fp16", names.pop("position_bias"), gate="tanh")
    assert use_products(model, "onnxruntime_cuda")
    del model.functions[:]
    actual = open_session(model, library).run(None, names)[0]
    expected = definition("AftFull", drawn, gate="tanh")
    for document, length in enumerate([60, 21]):
        error = np.abs(actual[document, :length] - expected[document, :length]).max()
        assert error <= TOLERANCES["fp16"].bound * np.abs(drawn[2]).max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"products": (1, 5, 15)}, r"products has shape \[1, 5, 15\], expected \[1, 5, 16\]"),
        ({"position_bias": (4, 4)}, r"longer than position_bias \[4, 4\] allows"),
        ({"value": (1, 5, 7)}, r"value has shape \[1, 5, 7\], expected \[1, 5, 8\]"),
    ],
)
def test_operators_around_product_refuse_wrong_shapes(
    library: Path, changes: dict[str, tuple[int, ...]], message: str
) -> None:
    shapes = dict.fromkeys(("query", "key", "value"), (1, 5, 8))
    shapes |= {"position_bias": (5, 5), "products": (1, 5, 16)} | changes
    inputs = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(Exception, match=message):
        run_operator(
            "AftFullFinish", inputs | {"lengths": np.array([5])}, "fp32", library, gate="none"
        )


def test_finish_without_kernel_is_refused(library: Path) -> None:
    inputs = dict(zip(INPUTS["AftFull"], random_inputs("AftFull", 1, 5, 8), strict=True))
    with pytest.raises(Exception, match='gate is "relu", expected sigmoid, tanh or none'):
        run_around_product(inputs, "fp32", gate="relu", library=library)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_collapsed_fastformer_layer_equals_original(
    library: Path, dtype: type[np.floating], constant: bool
) -> None:
    layer = {name: x.astype(dtype) for name, x in fastformer.random_layer(48, 3).items()}
    x, lengths = fastformer.documents(3, 70, 48, [70, 1, 33])
    given = (layer, x.astype(dtype), lengths)
    options = {"library": library, "constant": constant, "precision": "int8"}
    actual = fastformer.run_layer(*given, **options)
    counts = np.arange(70) < lengths[:, None]
    error = encoder_runner.error(actual[counts], fastformer.definition(*given)[counts])
    assert error <= TOLERANCES["fp16" if dtype == np.float16 else "fp32"].bound
    assert np.isfinite(actual).all()


def test_collapsed_layer_refuses_wrong_shapes(library: Path) -> None:
    layer, given = fastformer.random_layer(12, 4), fastformer.documents(1, 5, 12)
    inputs = fastformer.operator_inputs(layer, *given)
    wrong = inputs | {"alpha_weight": np.zeros((12, 2), np.float32)}
    with pytest.raises(Exception, match=r"alpha_weight has shape \[12, 2\], expected \[12, 4\]"):
        encoder_runner.run(fastformer.OP, wrong, num_heads=4, library=library)
    with pytest.raises(Exception, match="not divisible by num_heads 5"):
        encoder_runner.run(fastformer.OP, inputs, num_heads=5, library=library)
    nothing = fastformer.documents(1, 0, 12)
    assert fastformer.run_layer(layer, *nothing, library=library).shape == (1, 0, 12)


@pytest.mark.parametrize(
    ("mechanism", "attention"),
    [
        (
            "aft_simple",
            {
                "AftSimple": "fused",
                "LayerNormQueryKeyValue": "portable",
                "LinearResidual": "portable",
            },
        ),
        ("fastformer", {"LayerNormFastformer": "fused"}),
    ],
)
def test_operators_without_kernel_run_by_body(
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mechanism: str,
    attention: dict[str, str],
) -> None:
    monkeypatch.setattr(aftplugins, "library", lambda runtime: library)
    model = tiny_models.classifier(mechanism)
    path = tmp_path / "model.onnx"
    onnx.save(finish(lower(capture(model))), path)
    assert operator_paths(path) == attention | {"LayerNormFeedForward": "portable"}
    ids, lengths = np.arange(80).reshape(2, 40), np.array([40, 13])
    with torch.inference_mode():
        expected = model.double()(torch.from_numpy(ids), torch.from_numpy(lengths))
    logits = OnnxRuntimeEngine(path).run({"input_ids": ids, "lengths": lengths})["logits"]
    bound = TOLERANCES["fp32"].bound * max(1.0, expected.abs().max().item())
    np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=bound)


@pytest.mark.parametrize("mechanism", ["aft_local", "fastformer"])
def test_runtime_without_provider_runs_bodies(mechanism: str, tmp_path: Path) -> None:
    """The library as it is installed, in a runtime that has no CUDA execution provider."""
    path = tmp_path / "model.onnx"
    program = capture(tiny_models.classifier(mechanism))
    onnx.save(finish(lower(program), fuse=False), path)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(emulated.build() / "libaftplugins_onnxruntime_cuda.so"))
    ids, lengths = np.arange(80).reshape(2, 40), np.array([40, 13])
    feeds = {"input_ids": ids, "lengths": lengths}
    logits = [
        onnxruntime.InferenceSession(path, given, providers=["CPUExecutionProvider"]).run(
            None, feeds
        )[0]
        for given in (options, onnxruntime.SessionOptions())
    ]
    np.testing.assert_array_equal(*logits)
