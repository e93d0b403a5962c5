"""``chunked.zip``: the graphs of both passes, as they stand in a bundle.

``0.reduce.onnx`` is a graph, ``0.reduce+0.apply.onnx`` the weights that both of them have: a model
whose graph is nothing but initializers. A message of protobuf is merged with one that follows it in
the same bytes, so that graph and weights, one after the other, are the graph with its weights.
"""

import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import onnx

from aftexport.bundle.manifest import ChunkedPlan, ChunkedStage
from aftexport.chunked.partition import Partition, partition
from aftexport.chunked.softmax_as_mean import as_means
from aftexport.onnx_io import MAX_MODEL_BYTES
from aftexport.passes.evidence import NoEvidenceError, add_direction
from aftexport.passes.finish import finish
from aftexport.passes.token_flow import WholeOnlyError, constants_of
from aftexport.system.files import sha256_of

_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_SMALL_BYTES = 1024
"""A weight below this stays with each graph that has it."""


def write_chunked(path: Path, model: onnx.ModelProto, *, precision: str) -> ChunkedPlan:
    """Cuts a model and writes its parts.

    Args:
        path: of the archive.
        model: the graph of bare operators, before anything around them is fused.
        precision: that the model is exported in.

    Returns:
        How to run the parts.

    Raises:
        WholeOnlyError: saying what stands against it.
    """
    if model.ByteSize() > MAX_MODEL_BYTES:
        raise WholeOnlyError("its graphs would be over 2 GiB")
    means = as_means(model)
    try:
        summed = add_direction(means).tokens
    except NoEvidenceError:  # or only where the document is whole
        summed = None
    parts = partition(means, summed)
    graphs = _named(parts)
    plan = ChunkedPlan(
        stages=tuple(
            ChunkedStage(left=s.reach.left, right=s.reach.right, causal=s.causal, keeps=s.keeps)
            for s in parts.stages
        ),
        pooled=parts.pooled,
        evidence=parts.explain is not None,
        token_bytes=max(map(_token_bytes, graphs.values())),
    )
    del means, parts  # each has all weights, and the graphs go one by one
    _write(path, ((name, _finished(graphs.pop(name), precision)) for name in tuple(graphs)))
    return plan


def _named(parts: Partition) -> dict[str, onnx.ModelProto]:
    named = {}
    for number, stage in enumerate(parts.stages):
        named[f"{number}.reduce"] = stage.reduce
        named[f"{number}.merge"] = stage.merge
        named[f"{number}.apply"] = stage.apply
    named |= {"pool": parts.pool, "head": parts.head}
    if parts.explain is not None:
        named["explain"] = parts.explain
    return named


def _finished(model: onnx.ModelProto, precision: str) -> onnx.ModelProto:
    summaries = list(model.functions)
    del model.functions[:]
    finished = finish(model, precision=precision)
    finished.functions.extend(summaries)
    return finished


def _write(path: Path, graphs: Iterable[tuple[str, onnx.ModelProto]]) -> None:
    bare: dict[str, bytes] = {}
    weights: dict[str, bytes] = {}
    users: dict[str, list[str]] = defaultdict(list)
    for name, model in graphs:
        initializers = list(model.graph.initializer)
        del model.graph.initializer[:]
        for tensor in initializers:
            if tensor.ByteSize() < _SMALL_BYTES:
                model.graph.initializer.append(tensor)
                continue
            alone = onnx.ModelProto()
            alone.graph.initializer.append(tensor)
            content = _serialized(alone)
            digest = sha256_of(content)
            weights.setdefault(digest, content)
            users[digest].append(name)
        bare[name] = _serialized(model)
    members = defaultdict(list, {name: [content] for name, content in bare.items()})
    for digest, names in users.items():
        members["+".join(names)].append(weights[digest])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, contents in members.items():
            with archive.open(zipfile.ZipInfo(f"{name}.onnx", _LONG_AGO), "w") as member:
                member.writelines(contents)


def _serialized(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))


def _token_bytes(model: onnx.ModelProto) -> int:
    """At most what one token takes while a graph runs: every product and a copy of it."""
    weights = constants_of(model.graph)
    widths = [
        weights[node.input[1]].shape[-1]
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in weights
    ]
    tables = [
        weights[node.input[0]].shape[-1]
        for node in model.graph.node
        if node.op_type == "Gather"
        and node.input[0] in weights
        and weights[node.input[0]].ndim == 2
    ]
    return 8 * int(sum((*widths, *tables)))
