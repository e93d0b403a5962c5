"""Real models that differ from what was trained, mostly where no golden case looks."""

from pathlib import Path

import onnx
import onnx.parser
import pytest
from bundles import resealed

from aftplugins.methods import METHOD_VARIABLE, choose

ODD = 253
"""First token of a document whose logits are off, whoever computes them."""

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


def _add(folder: Path, text: str) -> Path:
    model = onnx.load(folder / "model.onnx")
    graph = onnx.parser.parse_model(text).graph
    model.graph.initializer.extend(graph.initializer)
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == "logits":
                node.output[index] = "answer"
    model.graph.node.extend(graph.node)
    model.graph.node.append(onnx.helper.make_node("Add", ["answer", "drift"], ["logits"]))
    onnx.save(model, folder / "model.onnx")
    return resealed(folder)
