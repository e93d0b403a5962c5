"""Transposes around operators, folded into the projections of images."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx.helper import make_node
from onnx.numpy_helper import from_array
from torch import Tensor, nn

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.parity import TOLERANCES
from aftexport.recognition.projections import TRANSPOSES_COST

from .graphs import assert_equal, exported, fused, operators, scripted
from .implementations.images import DiffusionAttention, ReluAttention, Size, layers

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
SIZE = Size()
WIDE = Size(channels=8, heads=1, width=256)
ANY_SIZE = {0: "b", 2: "h", 3: "w"}


class HeadsFirst(ReluAttention):
    """The channels of query, key and value lie together in each head, as in EfficientViT."""

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        parts = self.qkv(x).reshape(batch, self.heads, 3 * self.width, height * width)
        q, k, v = parts.split(self.width, dim=2)
        return x + self.output(self.attend(q, k, v).reshape(batch, -1, height, width))


class Unbound(ReluAttention):
    """Query, key and value are the entries of an axis; the output has a bias and no residual."""

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        parts = self.qkv(x).reshape(batch, 3, self.heads, self.width, height * width)
        out = self.attend(parts[:, 0], parts[:, 1], parts[:, 2])
        return self.output(out.reshape(batch, -1, height, width))


class ShiftedFeatures(ReluAttention):
    """Features that are outside the operator, but functions of one number."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All are ``[B, H, d, T]``."""
        q, k = (x.relu() + 1e-2 for x in (q, k))
        return v @ k.transpose(-1, -2) @ q


class ReadFeatures(ShiftedFeatures):
    """The features are read by another part of the graph."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All are ``[B, H, d, T]``."""
        return super().attend(q, k, v) + (k.relu() + 1e-2).amax(-1, keepdim=True)


class OfTokens(ReluAttention):
    """An image that is made of tokens, whose transpose is theirs."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.tanh(x.flatten(2).transpose(1, 2))
        return super().forward(tokens.transpose(1, 2).reshape(x.shape))


class ReadElsewhere(DiffusionAttention):
    """The values are also the input of another convolution, and keep the first one."""

    def __init__(self) -> None:
        super().__init__(SIZE, of_queries=True, of_keys=True)
        self.near_values = nn.Conv2d(SIZE.heads * SIZE.width, SIZE.channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.near_values(self.qkv(x).chunk(3, 1)[2])


FOLDED: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: ReluAttention(SIZE),
    "both softmaxes": lambda: DiffusionAttention(SIZE, of_queries=True, of_keys=True),
    "einsum": lambda: DiffusionAttention(SIZE, of_queries=True, of_keys=True, is_einsum=True),
    "no softmax": lambda: DiffusionAttention(SIZE),
    "heads first": lambda: HeadsFirst(SIZE),
    "unbound": lambda: Unbound(SIZE),
    "features outside": lambda: ShiftedFeatures(SIZE),
    "of tokens": lambda: OfTokens(SIZE),
}
TRANSPOSES = {"of tokens": 3}
"""The transposes that stay, if not one of the image and one of the result."""


def example(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return FOLDED[name]()


def counts(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def output(model: onnx.ModelProto, x: Tensor, *, kernels: bool) -> NDArray[np.float32]:
    engine = OnnxRuntimeEngine(model.SerializeToString(), threads=1, fused=kernels)
    (name,) = engine.input_names
    (found,) = engine.run({name: x.numpy()}).values()
    return found


@pytest.mark.parametrize("name", FOLDED)
def test_transposes_fold_into_projections(name: str) -> None:
    """One transpose of the image and one of the result remain, and the numbers are the same."""
    module = made(name)
    found, model = fused(scripted(module, example(2, 8, 4, 6), axes=ANY_SIZE))
    onnx.checker.check_model(model)
    assert len(operators(found)) == 1, found.near_misses
    assert counts(model)["Conv"] == 0
    assert counts(model)["Transpose"] <= TRANSPOSES.get(name, 2)
    wide = made(name).double()
    for shape in ((2, 8, 4, 6), (1, 8, 1, 1), (3, 8, 5, 2), (1, 8, 9, 31)):
        x = example(*shape)
        with torch.no_grad():
            expected = wide(x.double()).numpy()
        for kernels in (False, True):
            error = np.abs(output(model, x, kernels=kernels) - expected).max()
            assert error / max(1.0, np.abs(expected).max()) < TOLERANCES["fp32"].bound


@pytest.mark.parametrize("axes", [{}, {2: "h", 3: "w"}], ids=["one size", "any image"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.table(keep=0.25)
def test_transposes_of_fixed_batch_fold(name: str, batch: int, axes: dict[int, str]) -> None:
    module = made(name)
    found, model = fused(scripted(module, example(batch, 8, 4, 6), axes=axes))
    assert len(operators(found)) == 1, found.near_misses
    assert counts(model)["Conv"] == 0
    assert counts(model)["Transpose"] <= TRANSPOSES.get(name, 2)
    others = [example(batch, 8, 3, 5)] if axes else []
    assert_equal(module, model, example(batch, 8, 4, 6), *others)


@pytest.mark.slow
def test_channels_split_by_other_exporter() -> None:
    """Only the keys, whose softmax is outside, stay rows of the image."""
    torch.manual_seed(1)
    module, dim = DiffusionAttention(WIDE, of_keys=True), torch.export.Dim
    axes = (dim("b"), None, dim("h", max=400), dim("w", max=400))
    found, model = fused(exported(module, example(2, 8, 4, 6), axes=axes))
    assert len(operators(found)) == 1, found.near_misses
    assert counts(model)["Conv"] == 0
    assert counts(model)["Transpose"] == 3
    assert_equal(module, model, example(2, 8, 4, 6), example(1, 8, 3, 5))


def test_projection_that_is_read_elsewhere_stays() -> None:
    module = ReadElsewhere()
    found, model = fused(scripted(module, example(2, 8, 4, 6), axes=ANY_SIZE))
    assert operators(found) == ["EfficientAttention"]
    assert counts(model)["Conv"] == 2
    assert_equal(module, model, example(2, 8, 4, 6), example(1, 8, 3, 5))


@pytest.mark.parametrize(
    "module",
    [
        DiffusionAttention(SIZE, of_keys=True),
        ReluAttention(SIZE, has_depthwise=True),
        ReadFeatures(SIZE),
    ],
    ids=["softmax of keys", "depthwise", "read features"],
)
@pytest.mark.parametrize(
    ("batch", "axes"), [(2, ANY_SIZE), (2, {}), (1, {})], ids=["any", "two", "one"]
)
def test_costly_transposes_leave_graph_alone(
    module: nn.Module, batch: int, axes: dict[int, str]
) -> None:
    before = scripted(module, example(batch, 8, 4, 6), axes=axes)
    found, model = fused(before)
    assert operators(found) == []
    assert [miss.reason for miss in found.near_misses] == [TRANSPOSES_COST]
    assert counts(model)["Transpose"] == counts(before)["Transpose"]


@pytest.mark.parametrize("batch", [1, 2])
def test_wide_heads_of_fixed_batch(batch: int) -> None:
    """In heads of 256 channels the operator saves more than transposes cost."""
    torch.manual_seed(1)
    module = ReluAttention(WIDE, has_depthwise=True)
    found, model = fused(scripted(module, example(batch, 8, 4, 6), axes={}))
    assert operators(found) == ["NormalizedLinearAttention"], found.near_misses
    assert_equal(module, model, example(batch, 8, 4, 6))


def test_rejected_rewrites_leave_no_nodes() -> None:
    """The softmaxes are a part of the operator, and no other node reads them."""
    _, module = layers()["softmax_of_both_matmul"]
    _, model = fused(scripted(module, example(2, 8, 4, 6), axes=ANY_SIZE))
    assert counts(model)["Softmax"] == 0


PLACES = {"channel": 1, "from_channels": [1], "from_height": [2], "to_width": [4]}
READERS = {
    "shape": [make_node("Shape", ["rows"], ["sizes"])],
    "channels": [make_node("Shape", ["rows"], ["sizes"], start=1, end=2)],
    "gathered channels": [
        make_node("Shape", ["rows"], ["shape"]),
        make_node("Gather", ["shape", "channel"], ["sizes"]),
    ],
    "sliced height and width": [
        make_node("Shape", ["rows"], ["shape"]),
        make_node("Slice", ["shape", "from_height", "to_width"], ["sizes"]),
    ],
    "sliced channels": [
        make_node("Shape", ["rows"], ["shape"]),
        make_node("Slice", ["shape", "from_channels", "from_height"], ["sizes"]),
    ],
    "height and width": [make_node("Shape", ["rows"], ["sizes"], start=2)],
}
"""The nodes that make an output from the shape of the first convolution's result."""


def with_sizes(model: onnx.ModelProto, reader: str) -> onnx.ModelProto:
    """Return a model with another output, the sizes of its first convolution's result."""
    rows = next(node.output[0] for node in model.graph.node if node.op_type == "Conv")
    for node in READERS[reader]:
        model.graph.node.add().CopyFrom(node)
        model.graph.node[-1].input[:] = [rows if n == "rows" else n for n in node.input]
    model.graph.initializer.extend(from_array(np.array(n), name) for name, n in PLACES.items())
    model.graph.output.append(onnx.ValueInfoProto(name="sizes"))
    return model


def sizes(model: onnx.ModelProto, x: Tensor) -> list[int]:
    engine = OnnxRuntimeEngine(model.SerializeToString(), threads=1, fused=False)
    (name,) = engine.input_names
    return [*engine.run({name: x.numpy()})["sizes"].reshape(-1)]


@pytest.mark.parametrize("reader", READERS)
def test_sizes_in_output_are_kept(reader: str) -> None:
    """The image and the convolution's result differ in their channels."""
    before = with_sizes(
        scripted(made("both softmaxes"), example(2, 8, 4, 6), axes=ANY_SIZE), reader
    )
    found, model = fused(before)
    assert operators(found) == ["EfficientAttention"]
    assert (counts(model)["Conv"] == 0) == ("height and width" in reader)
    for shape in ((2, 8, 4, 6), (1, 8, 3, 5)):
        assert sizes(model, example(*shape)) == sizes(before, example(*shape))


@pytest.mark.parametrize(("reader", "operator"), [
    ("sliced height and width", ["NormalizedLinearAttention"]), ("channels", []),
])  # fmt: skip
def test_cost_knows_readers_of_sizes(reader: str, operator: list[str]) -> None:
    """The operator of relu features is worth it only if the transposes will be folded."""
    before = with_sizes(scripted(made("relu"), example(2, 8, 4, 6), axes=ANY_SIZE), reader)
    found, model = fused(before)
    assert operators(found) == operator
    assert (counts(model)["Conv"] == 0) == bool(operator)
    assert sizes(model, example(1, 8, 3, 5)) == sizes(before, example(1, 8, 3, 5))


def test_transpose_without_perm_stays() -> None:
    """A Transpose of the image without perm reverses its dims."""
    before = scripted(made("both softmaxes"), example(2, 8, 4, 6), axes=ANY_SIZE)
    for node in before.graph.node:
        node.input[:] = ["image" if n == "x" else n for n in node.input]
    before.graph.node.insert(0, make_node("Transpose", ["x"], ["image"]))
    dims = before.graph.input[0].type.tensor_type.shape.dim
    reverse = [onnx.TensorShapeProto.Dimension.FromString(d.SerializeToString()) for d in dims]
    del dims[:], before.graph.value_info[:]
    dims.extend(reversed(reverse))
    found, model = fused(before)
    assert operators(found) == ["EfficientAttention"]
    x = example(6, 4, 8, 2)
    expected = output(before, x, kernels=False)
    assert np.abs(output(model, x, kernels=True) - expected).max() < TOLERANCES["fp32"].bound
