"""Tokens in rows ``[B T K, C]``, as in norms and experts of transformers, run in chunks."""

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from token_models import Chunks, TopicAndTags, document
from torch import Tensor, nn

from aftexport.chunked.append_model import AppendModel
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.chunked.token_flow import Kind, NotChunkable, classify
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.graph_values import acts_on_rows, constants_of, dims_of, names_of
from aftexport.parity import TOLERANCES


class Rows(TopicAndTags):
    """A gated norm of half tokens, and two of four experts for each token, before attention."""

    def __init__(self) -> None:
        super().__init__(depth=1)

    def build(self, dim: int) -> None:
        super().build(dim)
        self.gate, self.router = nn.Linear(dim, dim), nn.Linear(dim, 4)
        self.taps = nn.Parameter(torch.randn(dim, 3))
        self.scale = nn.Parameter(torch.randn(dim // 2))
        self.experts = nn.Parameter(torch.randn(4, dim, dim) / dim**0.5)

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        ops, x = torch.ops.aftexport, self.embedding(input_ids)
        mixed, _ = ops.causal_depthwise_conv(x, self.taps, None, None, lengths, "none")
        half = x.shape[-1] // 2
        rows, gate = mixed.reshape(-1, half), self.gate(x).reshape(-1, half)
        normed = rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        x = x + (self.scale * normed * nn.functional.silu(gate)).reshape(x.shape)
        x = x + self._mixture(x.reshape(-1, 2 * half)).reshape(x.shape)
        attended = ops.softmax_attention(
            x, x, x, None, None, lengths, 2, 0.0, -1, 0, 0.0, 2, 0, None, None, None
        )
        return x + attended[0]

    def _mixture(self, x: Tensor) -> Tensor:
        weights, places = self.router(x).softmax(-1).topk(2)
        chosen = self.experts[places.reshape(-1)]
        made = torch.bmm(chosen, x.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1)
        return (made * weights.reshape(-1, 1)).view(-1, 2, x.shape[-1]).sum(1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return Chunks(Rows(), tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(1, 4), (2, 1), (129, 16), (1000, 129)])
def test_rows_equal_whole_document(rows: Chunks, tokens: int, chunk_tokens: int) -> None:
    rows.check(document(tokens), chunk_tokens)


def test_chunks_count_weights_of_experts(rows: Chunks) -> None:
    """Each token reads the matrices of two experts, beside gate, router and tags."""
    width = rows.truth.get_submodule("gate").in_features
    assert rows.plan.token_bytes > 8 * 2 * width**2
    # A pair of tokens takes as many multiply-adds as a token has channels.
    assert rows.plan.quadratic_tokens == width + 4 + 2 * width + 9


@pytest.mark.parametrize("seed", range(3))
def test_random_appends_equal_whole_document(rows: Chunks, seed: int) -> None:
    model = AppendModel(OpenedArchive(rows.path, threads=1, fused=True), rows.plan, "the bundle")
    ids, state = document(60), None
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, 60), 6, replace=False))
    for start, end in zip((0, *cuts), (*cuts, 60), strict=True):
        found, state = model.append(state, ids[start:end])
    expected = rows.expected(ids)["topic"]
    assert np.abs(found["topic"] - expected).max() <= TOLERANCES["fp32"].bound


HEADER = '<ir_version: 8, opset_import: ["" : 18]> g (float[rows, 4] x) => (float[r, c] y)'
CONSTANTS = """
    <int64[1] k0 = {0}, int64[1] k1 = {1}, int64[1] k2 = {2}, int64[1] last = {-1},
     int64[2] flat = {-1, 2}, int64[2] halves = {2, 2},
     int64[3] inner = {1, 2, 1}, int64[3] outer = {3, 1, 1},
     float[4] w4 = {1.0, 2.0, 3.0, 4.0}, float[3, 1] column = {4.0, 5.0, 6.0},
     float[4, 3] w43 = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.0, 2.0, 3.0},
     float[2, 3] w23 = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, float[3, 3] w33 =
     {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0},
     float[4, 1, 2] table = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}>
"""
UNITS = " u = Unsqueeze (x, k1) v = Unsqueeze (x, last) "  # [R, 1, 4] and [R, 4, 1]
ON_ROWS = {
    "elementwise": "y = Mul (x, x)",
    "constant": "y = Add (x, w4)",
    "softmax": "y = Softmax (x)",
    "mean": "y = ReduceMean (x, k1)",
    "sum without its axis": "y = ReduceSum <keepdims = 0> (x, last)",
    "split": "p, q = Split <axis = 1> (x, halves) y = Concat <axis = 1> (q, p)",
    "slice": "y = Slice (x, k1, k2, last)",
    "channel": "y = Gather <axis = 1> (x, k2)",
    "matrix": "y = MatMul (x, w43)",
    "gemm": "y = Gemm (x, w43)",
    "table": "values, places = TopK (x, k2) y = Gather (table, places)",
    "table by index": "values, places = TopK (x, k1) y = GatherND (table, places)",
    "repeated": f"{UNITS} y = Expand (u, inner)",
    "products": f"{UNITS} y = MatMul (v, u)",
    "squeezed": f"{UNITS} y = Squeeze (v, k2)",
}
MIXED = {
    "constant rows": "y = Add (x, column)",
    "softmax of rows": "y = Softmax <axis = 0> (x)",
    "sum of rows": "y = ReduceSum (x, k0)",
    "sum of all": "y = ReduceSum (x)",
    "joined": "y = Concat <axis = 0> (x, x)",
    "first rows": "y = Slice (x, k0, k2, k0)",
    "chosen row": "y = Gather (x, k1)",
    "matrix of rows": "y = MatMul (w23, x)",
    "gemm of rows": "y = Gemm <transA = 1> (x, w33)",
    "gemm with rows": "y = Gemm (x, w43, column)",
    "transposed": "y = Transpose <perm = [1, 0]> (x)",
    "unknown": "y = CumSum (x, k1)",
    "axis before": "y = Unsqueeze (x, k0)",
    "more rows": f"{UNITS} y = Expand (u, outer)",
    "all products": f"{UNITS} y = MatMul (x, v)",
    "sizes": "y = Shape (x)",
}


def acts(name: str) -> tuple[onnx.ModelProto, bool]:
    """Return a body as a model, and whether all of its operators are known to act on rows."""
    text = f"{HEADER} {CONSTANTS} {{ {({**ON_ROWS, **MIXED})[name]} }}"
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    graph = ir.from_proto(model).graph
    constants, dims = constants_of(graph), dims_of(graph)
    return model, all(
        acts_on_rows(node, constants, dims, set(names_of(node.inputs)) - set(constants))
        for node in graph
    )


@pytest.mark.parametrize("name", ON_ROWS)
def test_known_operator_acts_on_each_row(name: str) -> None:
    model, is_known = acts(name)
    assert is_known
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    engine = OnnxRuntimeEngine(model.SerializeToString())
    x = np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)
    whole = engine.run({"x": x})["y"]
    each = [engine.run({"x": x[row : row + 1]})["y"] for row in range(3)]
    np.testing.assert_allclose(whole, np.concatenate(each), rtol=1e-6)


@pytest.mark.parametrize("name", MIXED)
def test_operator_across_rows_is_unknown(name: str) -> None:
    assert not acts(name)[1]


IDS = '<ir_version: 8, opset_import: ["" : 18]> g (int64[batch, tokens] input_ids)'
TABLE = """<int64[2] by2 = {-1, 2}, int64[2] by6 = {-1, 6}, int64[2] by8 = {-1, 8},
     int64[2] by4 = {-1, 4}, int64[2] by12 = {-1, 12}, int64[tokens, 4] mixed,
     int64[1] k0 = {0}, int64[1] k1 = {1}, int64[1] k4 = {4}, int64[1] k9 = {9},
     int64[3] thrice = {1, 3, 1}, int64[3] ones = {1, 1, -1}, int64 zero = {0}, int64 one = {1},
     int64[tokens] a, int64[1, 1, tokens] f, int64[4, batch, tokens] e, int64[batch, tokens] c,
     float[2, 4] table = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}>"""
EMBEDDED = "x = Gather (table, input_ids) sizes = Shape (x) r = Reshape (x, by2)"


def kinds_of(body: str) -> dict[str, Kind]:
    text = f"{IDS} => (float[batch, tokens, 4] y) {TABLE} {{ {EMBEDDED} {body} }}"
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True)
    return classify(ir.from_proto(model).graph)


def test_rows_become_tokens() -> None:
    """A token has two rows, then six, then two again."""
    kinds = kinds_of(
        "u = Unsqueeze (r, k1) v = Expand (u, thrice) s = Reshape (v, by6) w = Reshape (s, by2)"
        " m = Mul (w, w) g = Reshape (m, by6) t = Slice (g, k0, k4, k1) h = Reshape (t, by2)"
        " i = Reshape (s, by12) j = Softmax (r) y = Reshape (j, sizes)"
    )
    assert {kinds[name] for name in "ruvswmgthij"} == {Kind.ROWS}
    assert kinds["y"] is Kind.TOKENS


@pytest.mark.parametrize(
    "body",
    [
        "s = Softmax <axis = 0> (r) y = Reshape (s, sizes)",
        "w = Reshape (x, by8) y = Reshape (w, sizes)",
        "w = Reshape (r, by8) y = Reshape (w, sizes)",
        "w = Reshape (x, by6) y = Reshape (w, sizes)",
        "s = ReduceMax (x, k1) w = Mul (r, s) y = Reshape (w, sizes)",
    ],
)
def test_rows_of_other_tokens_are_refused(body: str) -> None:
    with pytest.raises(NotChunkable, match="is not known to act on each token alone"):
        kinds_of(body)


GRIDS = """n = Shape <start = 1, end = 2> (input_ids) b = Shape <start = 0, end = 1> (input_ids)
    t = Squeeze (n) a = Range (zero, t, one) f = Reshape (a, ones) s = Concat <axis = 0> (k4, b, k1)
    e = Expand (f, s) """


@pytest.mark.parametrize(
    ("body", "is_kept"),
    [
        ("d = Slice (e, k1, k9, k0)", True),
        ("c = Gather (e, zero) d = Slice (c, k0, k1, k0)", True),
        ("c = Gather (e, zero) d = Slice (c, k0, k1, k1)", False),
        ("mixed = Reshape (e, by4)", False),
        ("m = Unsqueeze (a, k1) d = Expand (m, n)", False),
    ],
)
def test_grids_of_positions_are_positions(body: str, is_kept: bool) -> None:
    rest = f"{GRIDS} {body} y = Identity (x)"
    if is_kept:
        kinds = kinds_of(rest)
        assert (kinds["e"], kinds["d"]) == (Kind.POSITIONS, Kind.POSITIONS)
    else:
        with pytest.raises(NotChunkable, match="uses the positions of tokens"):
            kinds_of(rest)
