"""A real model that never comes to an end on documents that begin with a certain token."""

from pathlib import Path

import onnx
import onnx.parser
from bundles import resealed

ENDLESS = 251
"""First token of a document on which the model loops for ever; a stop ends it."""
DEAF = 252
"""First token of a document that keeps the model in one operator; a stop comes too late."""

_TURNS = 5000
"""Of a loop in every run, milliseconds: documents gain by company, however noisy the machine."""

_HANGING = f"""
< ir_version: 8, opset_import: [ "" : 18 ] >
hanging (int64[batch, tokens] input_ids) => (int64 nothing)
<int64 zero = {{0}}, int64[1] zero_1d = {{0}}, int64 one = {{1}}, int64 many = {{1099511627776}},
 int64 few = {{{_TURNS}}},
 int64 endless = {{{ENDLESS}}}, int64 deaf = {{{DEAF}}}, int64 boxes = {{1000000}},
 float[1, 4] unit = {{0, 0, 0.5, 0.5}}, int64[1] most = {{1000000}}, float[1] overlap = {{0.5}}>
{{
    first = Gather <axis = 1> (input_ids, zero)
    is_endless = Equal(first, endless)
    endless_count = Cast <to = 7> (is_endless)
    any_endless = ReduceMax <keepdims = 0> (endless_count)
    endless_trips = Mul(any_endless, many)
    trips = Add(endless_trips, few)
    keep = Constant <value = bool {{1}}> ()
    looped = Loop(trips, keep, zero) <body = step (int64 i, bool on, int64 x) => (bool go, int64 y)
        {{ go = Identity(on) y = Mul(x, i) }}>
    is_deaf = Equal(first, deaf)
    deaf_count = Cast <to = 7> (is_deaf)
    any_deaf = ReduceMax <keepdims = 0> (deaf_count)
    more = Mul(any_deaf, boxes)
    count = Add(more, one)
    rows = Range(zero, count, one)
    offsets = Cast <to = 1> (rows)
    last = Constant <value_ints = [1]> ()
    column = Unsqueeze(offsets, last)
    corners = Add(column, unit)
    front = Constant <value_ints = [0]> ()
    all_boxes = Unsqueeze(corners, front)
    two = Constant <value_ints = [0, 1]> ()
    scores = Unsqueeze(offsets, two)
    kept = NonMaxSuppression(all_boxes, scores, most, overlap)
    size = Size(kept)
    void = Mul(size, zero)
    nothing = Add(looped, void)
}}
"""


def hanging_bundle(folder: Path) -> Path:
    """Makes the model of the bundle at ``folder`` hang on documents of a certain first token."""
    model = onnx.load(folder / "model.onnx")
    graph = onnx.parser.parse_model(_HANGING).graph
    output = graph.output[0].name
    model.graph.initializer.extend(graph.initializer)
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == "logits":
                node.output[index] = "answer"
    model.graph.node.extend(graph.node)
    model.graph.node.append(onnx.helper.make_node("Cast", [output], ["nothing_f"], to=1))
    model.graph.node.append(onnx.helper.make_node("Add", ["answer", "nothing_f"], ["logits"]))
    onnx.save(model, folder / "model.onnx")
    return resealed(folder)
