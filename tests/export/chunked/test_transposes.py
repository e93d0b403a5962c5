"""Operators on transposed tokens run in chunks; moved transposes leave the results as they are."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from token_models import Chunks, TopicAndTags, document
from torch import Tensor, nn

from aftexport.chunked.append_model import AppendModel
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.chunked.transposes import move_transposes
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.parity import TOLERANCES


class Moved(TopicAndTags):
    """Norms the heads of queries behind the axis of heads, and gates channels before tokens."""

    def __init__(self) -> None:
        super().__init__(depth=1)

    def build(self, dim: int) -> None:
        super().build(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.gates = nn.Linear(dim, 2 * dim)
        self.scale = nn.Parameter(torch.randn(2, 1, dim // 2))
        self.taps = nn.Parameter(torch.randn(dim, 3))

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        ops, x = torch.ops.aftexport, self.embedding(input_ids)
        gate, value = self.gates(x).transpose(1, 2).chunk(2, dim=1)
        value = (value * gate.sigmoid()).transpose(1, 2)
        mixed, _ = ops.causal_depthwise_conv(value, self.taps, None, None, lengths, "none")
        x = x + (gate * mixed.transpose(1, 2)).transpose(1, 2)
        query, key = (self._normed(layer(x)) for layer in (self.query, self.key))
        attended = ops.softmax_attention(
            query, key, self.value(x), None, None, lengths, 2, 0.0, 5, 0, 0.0, 2, 0, None, None,
            None,
        )  # fmt: skip
        return x + attended[0]

    def _normed(self, x: Tensor) -> Tensor:
        """Norm the two heads as ``[B, H, T, C]``, each with a scale of its own."""
        by_head = x.unflatten(2, (2, -1)).transpose(1, 2)
        normed = by_head * (by_head.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (normed * self.scale).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return Chunks(Moved(), tmp_path_factory.mktemp("moved"))


@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(1, 4), (7, 3), (40, 1), (200, 9)])
def test_moved_axes_equal_whole_document(moved: Chunks, tokens: int, chunk_tokens: int) -> None:
    assert len(moved.plan.stages) == 2
    moved.check(document(tokens), chunk_tokens)


@pytest.mark.parametrize("seed", range(3))
def test_random_appends_equal_whole_document(moved: Chunks, seed: int) -> None:
    model = AppendModel(OpenedArchive(moved.path, threads=1, fused=True), moved.plan, "the bundle")
    ids, state = document(60), None
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, 60), 6, replace=False))
    for start, end in zip((0, *cuts), (*cuts, 60), strict=True):
        found, state = model.append(state, ids[start:end])
        expected = moved.expected(ids[:end])
        for name, truth in expected.items():
            new = truth[:, start:end] if truth.ndim == 3 else truth
            error = np.abs(found[name] - new).max() / max(1.0, np.abs(new).max())
            assert error <= TOLERANCES["fp32"].bound, name


HEADER = '<ir_version: 8, opset_import: ["" : 18]> g (float[2, 3, 4, 5] x) => (float[a, b, c, d] y)'
CONSTANTS = """
    <int64[1] zero = {0}, int64[1] one = {1}, int64[1] last = {-1}, int64[1] three = {3},
     int64[2] halves = {2, 2}, float[3] w3 = {1.0, 2.0, 3.0}, float[3, 1] column = {4.0, 5.0, 6.0}>
"""
START = "t = Transpose <perm = [0, 2, 3, 1]> (x) "  # [2, 4, 5, 3]
END = " y = Transpose <perm = [0, 3, 1, 2]> (r)"
BODIES = {
    "elementwise": ("r = Mul (t, t)", 1),
    "constant": ("r = Add (t, w3)", 1),
    "softmax": ("r = Softmax <axis = 2> (t)", 1),
    "softmax of the last axis": ("r = Softmax (t)", 1),
    "split": ("p, q = Split <axis = 1> (t, halves) r = Concat <axis = -1> (p, q)", 1),
    "slice": ("r = Slice (t, one, three, last)", 1),
    "sum": ("r = ReduceSum (t, one)", 1),
    "two orders": (
        "p = Transpose <perm = [0, 2, 1, 3]> (t) q = Mul (p, p)"
        " r = Transpose <perm = [0, 2, 1, 3]> (q)", 1),
    "mean": ("r = ReduceMean (t, last)", 1),
    "sum without its axis": ("s = ReduceSum <keepdims = 0> (t, one) r = Unsqueeze (s, one)", 2),
    "untransposed operand": (
        "z = Slice (x, zero, three, last) s = Expand (w3, u) r = Add (t, s)", 2),
}  # fmt: skip
"""Each body, with the transposes that remain; that of an output stays as one of no effect."""


@pytest.mark.parametrize("name", BODIES)
def test_moved_transposes_keep_results(name: str) -> None:
    body, remaining = BODIES[name]
    unit = "u = Constant <value_ints = [1, 1, 1, 3]> () "
    text = f"{HEADER} {CONSTANTS} {{ {unit}{START}{body}{END} }}"
    model = onnx.parser.parse_model(text)
    changed = ir.from_proto(model)
    move_transposes(changed.graph)
    used = [n for n in changed.graph if n.op_type == "Transpose" and _is_read(n)]
    assert len(used) == remaining
    x = np.random.default_rng(3).standard_normal((2, 3, 4, 5)).astype(np.float32)
    before, after = (
        OnnxRuntimeEngine(m.SerializeToString()).run({"x": x})["y"]
        for m in (model, ir.to_proto(changed))
    )
    np.testing.assert_allclose(after, before, rtol=1e-6)


def _is_read(node: ir.Node) -> bool:
    return bool(list(node.outputs[0].uses())) or node.outputs[0].is_graph_output()
