"""A softmax of products of tokens is softmax attention, another softmax is not."""

import onnx.parser
import pytest

from aftexport.chunked.softmaxes import count_softmax_attention

HEADER = '<ir_version: 8, opset_import: ["" : 18]> g (float[b, t, 4] x, float[b, t, 4] y) => '
ATTENTION = """
    scores = MatMul (x, columns)
    scaled = Mul (scores, half)
    masked = Add (scaled, half)
    weights = Softmax <axis = -1> (masked)
    out = MatMul (weights, y)
"""
GRAPHS = {
    "attention": ("columns = Transpose <perm = [0, 2, 1]> (y)" + ATTENTION, 1),
    "pooling": (
        "logits = MatMul (x, w) weights = Softmax <axis = 1> (logits) out = Mul (weights, y)", 0),
    "pooling by a transposed weight": (
        "v = Transpose (w) logits = MatMul (x, v) weights = Softmax <axis = 1> (logits)"
        " out = Mul (weights, y)", 0),
    "product after the softmax": (
        "q = Softmax (x) c = Transpose <perm = [0, 2, 1]> (y) m = MatMul (c, y)"
        " out = MatMul (q, m)", 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", GRAPHS)
def test_softmax_attention_is_counted(kind: str) -> None:
    nodes, expected = GRAPHS[kind]
    weights = ", ".join(["1"] * 16)
    constants = f"<float[4, 4] w = {{{weights}}}, float half = {{0.5}}>"
    model = onnx.parser.parse_model(f"{HEADER}(float[b, t, 4] out) {constants} {{ {nodes} }}")
    assert count_softmax_attention(model) == expected
