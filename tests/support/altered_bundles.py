"""Bundles whose model was changed: wrong answers, endless runs, or much memory."""

from pathlib import Path

import onnx
import onnx.parser
import pytest
from bundles import changed_manifest, resealed

from aftplugins.methods import METHOD_VARIABLE, choose

ODD = 253
"""A document that begins with this token gets wrong logits from every engine."""

_ODD_FIRST = f"""
< ir_version: 8, opset_import: [ "" : 18 ] >
drifting (int64[batch, tokens] input_ids) => (float[batch, 1] drift)
<int64 zero = {{0}}, int64[1] one_1d = {{1}}, int64 odd = {{{ODD}}}>
{{
    first = Gather <axis = 1> (input_ids, zero)
    is_odd = Equal(first, odd)
    drifts = Cast <to = 1> (is_odd)
    drift = Unsqueeze(drifts, one_1d)
}}
"""

_LARGE_BATCH = """
< ir_version: 8, opset_import: [ "" : 18 ] >
drifting (int64[batch, tokens] input_ids) => (float drift)
<int64 zero = {0}, int64 four = {4}>
{
    shape = Shape(input_ids)
    documents = Gather(shape, zero)
    is_large = Greater(documents, four)
    drift = Cast <to = 1> (is_large)
}
"""

_ALWAYS = """
< ir_version: 8, opset_import: [ "" : 18 ] >
drifting (int64[batch, tokens] input_ids) => (float drift)
{ drift = Constant <value = float {1}> () }
"""


def odd_first_token(folder: Path) -> Path:
    """Makes the bundle's model wrong on documents that begin with ``ODD``."""
    return _add(folder, _ODD_FIRST)


def large_batches(folder: Path) -> Path:
    """Makes the bundle's model wrong on more than four documents at once."""
    return _add(folder, _LARGE_BATCH)


def always(folder: Path) -> Path:
    """Makes the bundle's model wrong on every document, golden cases too."""
    return _add(folder, _ALWAYS)


def coarse_kernels(folder: Path) -> Path:
    """Has the fused kernels round to int8, of which the manifest and the bodies know nothing."""
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "precision":
                attribute.s = b"int8"
    onnx.save(model, folder / "model.onnx")
    return resealed(folder)


def use_coarsest_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernels round as int8 may, where a more exact method is the fastest."""
    choice = choose("int8", None)
    if choice is not None:
        errors = ("fp32", "int16", "bf16", "amx_bf16", "int8", "amx_int8")
        monkeypatch.setenv(METHOD_VARIABLE, max(choice.methods, key=errors.index))


ENDLESS = 251
"""First token of a document on which the model loops for ever; a stop ends it."""
DEAF = 252
"""First token of a document that keeps the model in one operator; a stop comes too late."""

_TURNS = 5000
"""Of a loop in every run, milliseconds: documents gain by company, however noisy the machine."""

_HANGING = f"""
< ir_version: 8, opset_import: [ "" : 18 ] >
hanging (int64[batch, tokens] input_ids) => (float nothing)
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
    whole = Add(looped, void)
    nothing = Cast <to = 1> (whole)
}}
"""


def hanging_bundle(folder: Path) -> Path:
    """Makes the model of the bundle at ``folder`` hang on documents of a certain first token."""
    return _add(folder, _HANGING)


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
    (folder / "chunked.zip").unlink(missing_ok=True)
    changed_manifest(folder, {"chunked": None, "whole_only": "its softmax needs all pairs"})
    return _add(folder, SOFTMAX)


def _add(folder: Path, text: str) -> Path:
    """Add the only output of a graph to the logits of the bundle's model."""
    model = onnx.load(folder / "model.onnx")
    graph = onnx.parser.parse_model(text).graph
    model.graph.initializer.extend(graph.initializer)
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == "logits":
                node.output[index] = "answer"
    model.graph.node.extend(graph.node)
    added = graph.output[0].name
    model.graph.node.append(onnx.helper.make_node("Add", ["answer", added], ["logits"]))
    onnx.save(model, folder / "model.onnx")
    return resealed(folder)
