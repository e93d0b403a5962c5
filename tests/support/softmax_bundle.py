"""A bundle whose run takes memory for each pair of tokens, and which has no chunks."""

from pathlib import Path

import onnx
import onnx.parser
from bundles import changed_manifest, resealed

SOFTMAX = """
< ir_version: 8, opset_import: [ "" : 18 ] >
softmax (int64[batch, tokens] input_ids) => (float[batch, 1] nothing)
<int64[1] last = {2}, int64[1] middle = {1}, int64[2] both = {1, 2}, float zero = {0},
 float low = {-1.0}>
{
    ids = Cast <to = 1> (input_ids)
    columns = Unsqueeze(ids, last)
    rows = Unsqueeze(ids, middle)
    pairs = MatMul(columns, rows)
    is_low = Less(pairs, low)
    masked = Where(is_low, low, pairs)
    shares = Softmax(masked)
    mean = ReduceMean <keepdims = 0> (shares, both)
    void = Mul(mean, zero)
    nothing = Unsqueeze(void, middle)
}
"""
"""A graph with a float for each pair of tokens in four tensors, and a boolean in one."""


def softmax_bundle(folder: Path) -> Path:
    """Make the model of the bundle at ``folder`` compute a softmax over all pairs of tokens."""
    model = onnx.load(folder / "model.onnx")
    graph = onnx.parser.parse_model(SOFTMAX).graph
    model.graph.initializer.extend(graph.initializer)
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == "logits":
                node.output[index] = "answer"
    model.graph.node.extend(graph.node)
    model.graph.node.append(onnx.helper.make_node("Add", ["answer", "nothing"], ["logits"]))
    onnx.save(model, folder / "model.onnx")
    (folder / "chunked.zip").unlink(missing_ok=True)
    changed_manifest(folder, {"chunked": None, "whole_only": "its softmax needs all pairs"})
    return resealed(folder)
