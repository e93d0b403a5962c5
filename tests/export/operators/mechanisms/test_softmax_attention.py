"""Softmax attention: definition, torch op and portable body."""

import os
import subprocess
import sys
import zlib
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_runtimes import RUNTIMES
from oracles.softmax_attention import softmax_attention

import aftplugins
from aftexport.capture.capture import capture
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.schema import INTEGER_INPUTS
from aftexport.operators.torch_ops import SINGLE_OPERATORS
from aftexport.parity import TOLERANCES

from . import peak_memory

LIBRARY = aftplugins.library("onnxruntime")
needs_kernels = pytest.mark.skipif(LIBRARY is None, reason="the fused CPU kernels are not built")
OPERATOR = SINGLE_OPERATORS["SoftmaxAttention"]
BOUND = {"float64": 1e-12, "float32": TOLERANCES["fp32"].bound, "float16": TOLERANCES["fp16"].bound}
Arrays = dict[str, np.ndarray]
Results = tuple[np.ndarray, ...]
"""The output, and if it was asked for the logarithms of the divisors."""


@dataclass(frozen=True)
class Attributes:
    """The attributes of a node; the heads are 4 of the query, and 4 or fewer of the keys."""

    num_heads: int = 4
    scale: float = 0.0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    kv_num_heads: int = 0
    interleaved: int = 0


@dataclass(frozen=True)
class Form:
    """A node: its attributes and optional inputs.

    Attributes:
        keys: number of keys; None for as many as queries.
        reach: R of the bias by distance; None for no bias.
        width, value_width: channels of a head.
        rotary: r of the rotated channels; None for no rotation.
        start: position of the first query; None if absent.
    """

    name: str
    attributes: Attributes = Attributes()
    keys: int | None = None
    sink: bool = False
    reach: int | None = None
    width: int = 8
    value_width: int = 8
    rotary: int | None = None
    start: int | None = None

    def __str__(self) -> str:
        return self.name


FORMS = [
    Form("full"),
    Form("causal", Attributes(window_right=0)),
    Form("window", Attributes(window_left=5, window_right=3)),
    Form("causal window", Attributes(window_left=64, window_right=0)),
    Form("itself", Attributes(window_left=0, window_right=0)),
    Form("wide window", Attributes(window_left=9000, window_right=9000)),
    Form("largest window", Attributes(window_left=2**63 - 1, window_right=2**63 - 1)),
    Form("later keys", Attributes(window_left=0), width=3, value_width=3),
    Form("shared heads", Attributes(kv_num_heads=2, scale=0.3), value_width=5),
    Form("one key head", Attributes(kv_num_heads=1, window_right=0, softcap=2.0)),
    Form("sink", Attributes(window_left=8, window_right=0, kv_num_heads=2), sink=True),
    Form("bias", reach=6),
    Form("sink and bias", Attributes(window_left=20, softcap=5.0), sink=True, reach=0),
    Form("other keys", Attributes(kv_num_heads=4), keys=70, value_width=3),
    Form("other keys in window", Attributes(window_left=4, window_right=4), keys=20, sink=True),
    Form("rotated halves", Attributes(window_right=0), rotary=8),
    Form("rotated pairs", Attributes(kv_num_heads=2, interleaved=1), rotary=6, value_width=5),
    Form(
        "few halves", Attributes(window_left=5, window_right=3), rotary=10, width=37, value_width=37
    ),
    Form("later queries", Attributes(window_left=30, window_right=0), keys=90, start=40, reach=6),
    Form("earlier queries", Attributes(window_right=9), keys=50, start=-20, sink=True),
    Form("far queries", Attributes(window_left=5), keys=50, start=2000),
    Form("rotated later queries", Attributes(window_right=0), keys=60, start=25, rotary=4),
]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)
TOKENS = (1, 2, 7, 127, 128, 129, 300)


def lengths_of(tokens: int) -> tuple[int, ...]:
    """Return a whole document, a part of one, an empty one, and lengths out of range."""
    return (tokens, tokens // 2 + 1, 0, tokens + 9, -3)


def draw(form: Form, tokens: int, dtype: str = "float32", spread: float = 1.0) -> Arrays:
    """Draw inputs that float16 holds exactly; what is padding differs from 0."""
    rng = np.random.default_rng(zlib.crc32(f"{form} {tokens}".encode()))
    lengths, heads = lengths_of(tokens), form.attributes.num_heads
    groups = form.attributes.kv_num_heads or heads
    keys = tokens if form.keys is None else form.keys
    inputs = {
        "query": rng.normal(size=(len(lengths), tokens, heads * form.width)) * spread,
        "key": rng.normal(size=(len(lengths), keys, groups * form.width)) * spread,
        "value": rng.normal(size=(len(lengths), keys, groups * form.value_width)),
    }
    if form.sink:
        inputs["sink"] = rng.normal(size=heads)
    if form.reach is not None:
        inputs["bias"] = rng.normal(size=(heads, 2 * form.reach + 1))
    if form.rotary is not None:
        positions = np.arange(max(keys, tokens + max(form.start or 0, 0)))[:, None]
        angles = positions * 0.7 ** np.arange(form.rotary // 2)
        inputs |= {"cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
    drawn: Arrays = {n: x.astype(np.float16).astype(dtype) for n, x in inputs.items()}
    drawn["lengths"] = np.array(lengths)
    if form.start is not None:
        drawn["query_start"] = np.array([form.start])
    if form.keys is not None:
        drawn["key_lengths"] = np.array([keys, keys // 2, 0, keys + 1, 1])
    return drawn


def typed(inputs: Arrays, dtype: str) -> Arrays:
    """Return the inputs with floating-point tensors of another type."""
    return {n: x.astype(dtype) if x.dtype.kind == "f" else x for n, x in inputs.items()}


def run_torch(form: Form, inputs: Arrays, *, definition: bool = False) -> Results:
    """Run the torch op, or its definition."""
    tensors = [torch.from_numpy(inputs[n].copy()) if n in inputs else None for n in OPERATOR.inputs]
    attributes = asdict(form.attributes)
    with torch.no_grad():
        if definition:
            return tuple(x.numpy() for x in OPERATOR.reference(*tensors, **attributes))
        named = dict(zip(OPERATOR.inputs, tensors, strict=True))
        return tuple(x.numpy() for x in OPERATOR.torch_op(**named, **attributes))


@cache
def body_model(
    form: Form, present: tuple[str, ...], dtype: str, opset: int = 20
) -> onnx.ModelProto:
    """Return a model of one node with its portable body, every axis dynamic.

    ``present`` are its inputs, and ``log_sum`` for that output.
    """
    helper, attributes = onnx.helper, asdict(form.attributes)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = [
        helper.make_tensor_value_info(
            name,
            onnx.TensorProto.INT64 if name in INTEGER_INPUTS else element,
            [f"{name}_{axis}" for axis in range(len(shape.split()))],
        )
        for name, shape in zip(OPERATOR.inputs, OPERATOR.shapes, strict=True)
        if name in present
    ]
    names = [name if name in present else "" for name in OPERATOR.inputs]
    while not names[-1]:
        names.pop()
    types = {"output": element}
    types |= {"log_sum": onnx.TensorProto.FLOAT} if "log_sum" in present else {}
    node = helper.make_node(
        OPERATOR.op_type, names, [*types], domain=DOMAIN, **attributes, **PLUGIN_ATTRIBUTES
    )
    outputs = [
        helper.make_tensor_value_info(name, of_output, ["batch", "tokens", f"{name}_channels"])
        for name, of_output in types.items()
    ]
    return helper.make_model(
        helper.make_graph([node], OPERATOR.op_type, values, outputs),
        functions=[OPERATOR.function({}, opset, present)],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION)],
        ir_version=10,
    )


def model_of(
    form: Form, inputs: Arrays, *, opset: int = 20, log_sum: bool = True
) -> onnx.ModelProto:
    """Return the model of one node that takes some inputs."""
    present = (*(n for n in OPERATOR.inputs if n in inputs), *["log_sum"] * log_sum)
    return body_model(form, present, str(inputs["query"].dtype), opset)


def run_body(
    form: Form, inputs: Arrays, runtime: str = "onnxruntime", *, log_sum: bool = True
) -> Results:
    """Run the portable body."""
    results = RUNTIMES[runtime](model_of(form, inputs, log_sum=log_sum))(inputs)
    return tuple(results.values())


def kernel_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Return a session of a model that has the fused CPU kernels."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    options.register_custom_ops_library(str(LIBRARY))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_kernel(form: Form, inputs: Arrays, *, log_sum: bool = True) -> Results:
    """Run the fused CPU kernel."""
    return tuple(kernel_session(model_of(form, inputs, log_sum=log_sum)).run(None, inputs))


def counted_error(results: Results, expected: Results, lengths: np.ndarray) -> float:
    """Return the error of the rows within the lengths; the others of the output are finite."""
    counted = (np.arange(results[0].shape[1]) < lengths[:, None])[..., None]
    assert np.isfinite(results[0]).all()
    parts = ([np.where(counted, x, 0) for x in arrays] for arrays in (results, expected))
    return error(*map(tuple, parts))


def error(results: Results, expected: Results) -> float:
    """Return the largest difference, relative to the largest value of its array above 1."""
    errors = []
    for result, exact in zip(results, expected, strict=False):
        assert result.shape == exact.shape
        assert (np.isneginf(result) == np.isneginf(exact)).all()
        found, wanted = (np.where(np.isneginf(exact), 0, x) for x in (result, exact))
        assert np.isfinite(found).all()
        errors.append(abs(found.astype(np.float64) - wanted).max() / max(1.0, abs(wanted).max()))
    return max(errors)


def expected(form: Form, inputs: Arrays) -> Results:
    return softmax_attention(inputs, **asdict(form.attributes))


@pytest.mark.parametrize("tokens", [1, 7, 40])
@every_form
def test_definition_and_torch_op_equal_formula(form: Form, tokens: int) -> None:
    inputs = draw(form, tokens)
    wide = typed(inputs, "float64")
    formula = expected(form, wide)
    assert error(run_torch(form, wide, definition=True), formula) < BOUND["float64"]
    assert error(run_torch(form, wide), formula) < BOUND["float64"]
    assert error(run_torch(form, inputs), formula) < BOUND["float32"]


@pytest.mark.table(keep=0.3, by=lambda form, tokens: (tokens,))
@pytest.mark.parametrize("tokens", TOKENS)
@every_form
def test_torch_op_and_body_equal_definition(form: Form, tokens: int) -> None:
    inputs = draw(form, tokens)
    formula = run_torch(form, typed(inputs, "float64"), definition=True)
    assert error(run_torch(form, typed(inputs, "float64")), formula) < BOUND["float64"]
    assert error(run_body(form, inputs, log_sum=False), formula) < BOUND["float32"]


@pytest.mark.table(keep=0.15, by=lambda runtime, form, dtype: (runtime, dtype))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("runtime", RUNTIMES)
@every_form
def test_body_is_right_in_runtime(form: Form, runtime: str, dtype: str) -> None:
    inputs = draw(form, 150, dtype)
    formula = run_torch(form, typed(inputs, "float64"), definition=True)
    assert error(run_body(form, inputs, runtime), formula) < BOUND[dtype]


@needs_kernels
@pytest.mark.table(keep=0.3, by=lambda tokens, dtype, **_: (tokens, dtype))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [*TOKENS, 1300])
@every_form
def test_kernel_equals_formula(form: Form, tokens: int, dtype: str) -> None:
    inputs = draw(form, tokens, dtype)
    formula = run_torch(form, typed(inputs, "float64"))
    assert counted_error(run_kernel(form, inputs), formula, inputs["lengths"]) < BOUND[dtype]


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_left": -2}, "window_left is -2, expected a number of keys, or -1 for all"),
        ({"softcap": -1.0}, "softcap is -1.0+, expected a finite number of at least 0"),
        ({"kv_num_heads": 3}, "kv_num_heads is 3, expected a divisor of num_heads 4"),
        ({"kv_num_heads": -1}, "kv_num_heads is -1, expected at least 0"),
        ({"num_heads": 0}, "num_heads is 0, expected at least 1"),
        ({"interleaved": 2}, "interleaved is 2, expected 0 or 1"),
    ],
)
def test_kernel_refuses_bad_attribute(changes: dict[str, float], message: str) -> None:
    form = Form("bad", replace(Attributes(), **changes))
    model = body_model(form, ("query", "key", "value", "lengths"), "float32")
    with pytest.raises(Exception, match=f"SoftmaxAttention: .*{message}"):
        kernel_session(model)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("key", (5, 6, 32), r"key has shape \[5, 6, 32\], expected \[5, 7, 32\]"),
        ("value", (5, 7, 31), r"value has shape \[5, 7, 31\], expected \[5, 7, 32\]"),
        ("query", (5, 7, 30), r"query has shape \[5, 7, 30\], whose width is not divisible"),
        ("sink", (3,), r"sink has shape \[3\], expected \[4\]"),
        ("bias", (4, 6), r"bias has shape \[4, 6\], expected \[4, an odd number of distances\]"),
        ("key_lengths", (4,), r"key_lengths has shape \[4\], expected \[5\]"),
        ("cos_cache", (9, 3), "sin_cache is absent, expected one beside cos_cache"),
        ("cos_cache", (6, 3), r"cos_cache has shape \[6, 3\], expected at least 7 positions"),
        ("cos_cache", (9, 5), r"cos_cache has shape \[9, 5\], expected .* of at most 4 pairs"),
        ("sin_cache", (9, 2), r"sin_cache has shape \[9, 2\], expected \[9, 3\]"),
        ("query_start", (2,), r"query_start has shape \[2\], expected \[1\]"),
        ("query_start", (1,), "key_lengths is absent, expected them beside query_start"),
    ],
)
def test_kernel_refuses_bad_shape(name: str, shape: tuple[int, ...], message: str) -> None:
    inputs = draw(FORMS[0], 7)
    if name == "sin_cache":
        inputs["cos_cache"] = np.zeros((9, 3), np.float32)
    elif name == "cos_cache" and "absent" not in message:
        inputs["sin_cache"] = np.zeros(shape, np.float32)
    elif name == "query_start" and "absent" not in message:
        inputs["key_lengths"] = inputs["lengths"]
    inputs[name] = np.zeros(shape, np.int64 if name in INTEGER_INPUTS else np.float32)
    with pytest.raises(Exception, match=f"SoftmaxAttention: .*{message}"):
        run_kernel(FORMS[0], inputs, log_sum=False)


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("form", [f for f in FORMS if f.sink or f.keys], ids=str)
def test_body_has_only_standard_operators(form: Form, opset: int) -> None:
    inputs = draw(form, 40)
    model = model_of(form, inputs, opset=opset)
    onnx.checker.check_model(model, full_check=True)
    assert all(node.domain == "" for node in model.functions[0].node)
    results = tuple(RUNTIMES["onnxruntime"](model)(inputs).values())
    assert error(results, expected(form, inputs)) < BOUND["float32"]


@every_form
def test_padding_is_not_read(form: Form) -> None:
    """Infinity and NaN stand where no key counts."""
    inputs = draw(form, 140)
    formula = expected(form, inputs)
    counts = np.clip(inputs.get("key_lengths", inputs["lengths"]), 0, inputs["key"].shape[1])
    for name, number in (("key", np.inf), ("value", np.nan)):
        for document, count in enumerate(counts):
            inputs[name][document, count:] = number
    assert error(run_torch(form, inputs), formula) < BOUND["float32"]
    assert error(run_body(form, inputs, log_sum=False), formula) < BOUND["float32"]


@pytest.mark.parametrize("spread", [32.0, 8192.0])
@pytest.mark.parametrize("form", [f for f in FORMS if f.reach is None], ids=str)
def test_large_products_keep_their_rank(form: Form, spread: float) -> None:
    """Logits of up to 1e8 leave one key, or a few equal ones, which must be the right ones.

    The scale is a power of two, so that equal logits are equal in float32 too.
    """
    form = replace(form, attributes=replace(form.attributes, scale=0.25))
    inputs = draw(form, 40)
    for name in ("query", "key"):
        inputs[name] = np.sign(inputs[name]) * np.float32(spread)
    formula = expected(form, inputs)
    assert error(run_torch(form, inputs), formula) < BOUND["float32"]
    assert error(run_body(form, inputs, log_sum=False), formula) < BOUND["float32"]


@pytest.mark.parametrize("form", [f for f in FORMS if f.keys is None], ids=str)
def test_gradients_are_right(form: Form) -> None:
    inputs = {n: x[:2, :5] if x.ndim == 3 else x for n, x in draw(form, 5, "float64").items()}
    inputs["lengths"] = np.array([5, 3])
    named = [n for n in OPERATOR.inputs if n in inputs and n not in INTEGER_INPUTS]
    leaves = [torch.from_numpy(inputs[name]).requires_grad_() for name in named]
    lengths = torch.from_numpy(inputs["lengths"])

    def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"sink": None, "bias": None} | dict(zip(named, tensors, strict=True))
        output, log_sum = OPERATOR.torch_op(**given, lengths=lengths, **asdict(form.attributes))
        return output, log_sum.clamp(min=-1e3)

    assert torch.autograd.gradcheck(compute, leaves, fast_mode=True)


def test_torch_op_equals_pytorch() -> None:
    form = Form("causal", Attributes(window_right=0, kv_num_heads=2))
    inputs = draw(form, 33)
    inputs["lengths"][:] = 33
    query, key, value = (
        torch.from_numpy(inputs[n]).unflatten(2, (heads, -1)).transpose(1, 2)
        for n, heads in (("query", 4), ("key", 2), ("value", 2))
    )
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    assert error(run_torch(form, inputs), (result.transpose(1, 2).flatten(2).numpy(),)) < 1e-6


def test_log_sums_merge_disjoint_keys() -> None:
    """Two halves of the keys, the second seen from queries that start before it."""
    form = Form("merged", Attributes(window_left=50, window_right=9), keys=60)
    inputs = draw(form, 70)
    inputs["key_lengths"][:] = 60
    outputs, log_sums = [], []
    for first in (0, 30):
        part = inputs | {n: inputs[n][:, first : first + 30] for n in ("key", "value")}
        part |= {"key_lengths": np.full(5, 30), "query_start": np.array([-first])}
        output, log_sum = run_body(form, part)
        outputs.append(output)
        log_sums.append(log_sum)
    total = np.logaddexp(*log_sums)
    shares = (np.exp(log_sum - total).repeat(8, 2) for log_sum in log_sums)
    merged = sum(output * share for output, share in zip(outputs, shares, strict=True))
    assert error((merged, total), expected(form, inputs)) < BOUND["float32"]


class Module(torch.nn.Module):
    """Two calls, one of which reads the logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)

    def forward(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        rest = (None, None, lengths, 2, 0.0, -1, 0, 0.0)
        output, _ = torch.ops.aftexport.softmax_attention(x, x, x, *rest)
        again, log_sum = torch.ops.aftexport.softmax_attention(output, x, x, *rest)
        result: torch.Tensor = (again + log_sum[..., :1])[:, 0]
        return result


def test_unused_log_sum_is_dropped() -> None:
    module = Module().eval()
    model = finish(lower(capture(module)))
    assert sorted(len(n.output) for n in model.graph.node if n.domain == DOMAIN) == [1, 2]
    feeds = {"input_ids": np.arange(18).reshape(2, 9), "lengths": np.array([9, 4])}
    with torch.no_grad():
        truth = module(*map(torch.from_numpy, feeds.values())).numpy()
    assert error(tuple(RUNTIMES["onnxruntime"](model)(feeds).values()), (truth,)) < 1e-6


def caches(cos: tuple[int, ...], sin: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    return {"cos_cache": torch.zeros(cos), "sin_cache": torch.zeros(sin or cos)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_left": -2}, "window_left must be a number of keys, or -1 for all, got -2"),
        ({"window_right": -9}, "window_right must be"),
        ({"scale": float("nan")}, "scale must be finite and at least 0, got nan"),
        ({"softcap": -1.0}, "softcap must be finite and at least 0, got -1.0"),
        ({"sink": torch.zeros(3)}, r"sink must be \[4\], got shape \(3,\)"),
        ({"bias": torch.zeros(4, 6)}, r"bias must be \[4, an odd number of distances\]"),
        ({"bias": torch.zeros(5)}, r"bias must be \[4, an odd number of distances\]"),
        ({"kv_num_heads": 3}, "kv_num_heads must divide num_heads 4, got 3"),
        ({"key": torch.zeros(5, 6, 32)}, r"key must be \[5, 7, 32\]"),
        ({"interleaved": 2}, "interleaved must be 0 or 1, got 2"),
        ({"cos_cache": torch.zeros(9, 3)}, "cos_cache and sin_cache must be given together"),
        (caches((9, 5)), r"cos_cache must be \[positions, at most 4\], got shape \(9, 5\)"),
        (caches((6, 3)), "cos_cache must have a row for each of 7 tokens, got 6 rows"),
        (caches((9, 3), (9, 2)), r"sin_cache must be \[9, 3\], got shape \(9, 2\)"),
        ({"query_start": torch.zeros(1)}, r"query_start must be int64 \[1\], got torch.float32"),
        ({"query_start": torch.tensor([3])}, "query_start must come with key_lengths"),
    ],
)
def test_bad_call_is_refused(changes: dict[str, object], message: str) -> None:
    given = {n: torch.from_numpy(x) for n, x in draw(FORMS[0], 7).items()}
    given |= {"sink": None, "bias": None} | asdict(FORMS[0].attributes) | changes
    with pytest.raises(ValueError, match=f"SoftmaxAttention: {message}"):
        OPERATOR.torch_op(**given)


@pytest.mark.parametrize("window", [-1, 128])
def test_memory_grows_with_tokens_only(window: int, tmp_path: Path) -> None:
    """At 6,000 tokens the products of all pairs would take 275 MiB for two heads."""
    form = Form("long", Attributes(num_heads=2, window_left=window, window_right=window))
    inputs = {name: x[:1] for name, x in draw(form, 6000).items()}
    present = ("query", "key", "value", "lengths")
    onnx.save(body_model(form, present, "float32"), tmp_path / "model.onnx")
    np.savez(tmp_path / "inputs.npz", **inputs)
    script = [sys.executable, peak_memory.__file__]
    files = ["model.onnx", "inputs.npz", "output.npy"]
    # A fixed threshold returns each large tensor to the system as soon as it is freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    printed = subprocess.run(
        [*script, *files, "3000", "6000"],
        cwd=tmp_path,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    short, long = map(int, printed.split())
    assert long < 60 * 1024
    assert long < 2.5 * short
