"""``chunked.zip``: the graphs of both passes in a bundle.

``0.reduce.onnx`` is a graph; ``0.reduce+0.apply.onnx`` holds the weights of both graphs, as a model
with only initializers. Protobuf merges messages that follow each other in the same bytes, so the
concatenation of graph and weights is the graph with its weights.
"""

import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from aftexport.bundle.chunked_plan import ChunkedPlan
from aftexport.chunked.partition import Partition, partition
from aftexport.chunked.softmax_as_mean import rewrite_as_means
from aftexport.chunked.softmax_attention import count_softmax_attention
from aftexport.chunked.token_kinds import NotChunkable
from aftexport.engines.explained_input import take_choice
from aftexport.lowering.evidence import add_direction
from aftexport.lowering.finish import finish
from aftexport.lowering.graph_values import constants_of, names_of
from aftexport.lowering.summed_heads import NoEvidence
from aftexport.system.files import sha256_of
from aftexport.system.onnx_files import MAX_MODEL_BYTES

_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_SMALL_BYTES = 1024
"""The minimum size of a shared weight; smaller ones are stored in each graph."""


def write_chunked(
    path: Path, model: onnx.ModelProto, *, precision: str, explained: Sequence[str] | None = None
) -> ChunkedPlan:
    """Split a model and write its parts.

    Args:
        path: the path of the archive.
        model: the graph of bare operators, before any fusion around them.
        precision: the precision of the export.
        explained: the outputs with evidence, as ``evidence.add_evidence`` returns them for
            ``model``; None to look for them.

    Returns:
        The plan for the runs of the parts.

    Raises:
        NotChunkable: if the model cannot run in chunks; gives the reason.
    """
    if model.ByteSize() > MAX_MODEL_BYTES:
        raise NotChunkable("its graphs would be over 2 GiB")
    means = rewrite_as_means(model)
    try:
        summed = add_direction(means, explained).tokens
    except NoEvidence:  # the chunks return no evidence; the whole graph may still do
        summed = None
    try:
        parts = partition(means, summed)
    except NotChunkable as reason:
        # The first refused node is often one of rotary positions, which hides the true reason.
        if count_softmax_attention(model):
            raise NotChunkable(
                f"its softmax attention needs the whole document; {reason}"
            ) from reason
        raise
    graphs = _named(parts)
    plan = ChunkedPlan(
        stages=tuple(stage.plan for stage in parts.stages),
        pooled=parts.pooled,
        evidence=parts.explain is not None,
        documents=parts.documents,
        tokens=parts.widths,
        tokens_use_last_stage=parts.tokens_use_last_stage,
        token_bytes=max(
            _token_bytes(graph, parts.widths if name == "tokens" else {})
            for name, graph in graphs.items()
        ),
    )
    del means, parts  # the graphs are released one by one
    _write(path, ((name, _finished(graphs.pop(name), precision)) for name in tuple(graphs)))
    return plan


def _named(parts: Partition) -> dict[str, ir.Model]:
    named: dict[str, ir.Model] = {}
    for number, stage in enumerate(parts.stages):
        named |= {f"{number}.{name}": graph for name, graph in stage.graphs.items()}
    late = {
        "pool": parts.pool,
        "head": parts.head,
        "tokens": parts.tokens,
        "explain": parts.explain,
    }
    return named | {name: graph for name, graph in late.items() if graph is not None}


def _finished(part: ir.Model, precision: str) -> onnx.ModelProto:
    model = ir.to_proto(part)
    take_choice(model)
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
            shared = onnx.ModelProto()
            shared.graph.initializer.append(tensor)
            content = _serialized(shared)
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


def _token_bytes(model: ir.Model, outputs: Mapping[str, int]) -> int:
    """Return the maximum bytes of one token during the run of a graph: products and copies.

    Args:
        model: the graph.
        outputs: the width of each output per token.
    """
    weights = constants_of(model.graph)
    widths, tables = [], []
    for node in model.graph:
        inputs = names_of(node.inputs)
        if node.op_type == "MatMul" and inputs[1] in weights:
            widths.append(weights[inputs[1]].shape[-1])
        if node.op_type == "Gather" and inputs[0] in weights and weights[inputs[0]].ndim == 2:
            tables.append(weights[inputs[0]].shape[-1])
    return 8 * int(sum((*widths, *tables, *outputs.values())))
