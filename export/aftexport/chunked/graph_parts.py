"""Parts of a graph, as models of their own."""

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from aftexport.chunked.document import FIRST_POSITION
from aftexport.chunked.summaries import DOMAIN as SUMMARY_DOMAIN
from aftexport.chunked.token_flow import classify, is_position_embedding
from aftexport.chunked.token_kinds import Kind
from aftexport.lowering.graph_values import constants_of, dims_of, main_input_of, names_of
from aftexport.lowering.nodes import NewNodes, remove
from aftexport.operators.domain import DOMAIN
from aftexport.system.contract import LENGTHS

FLOAT = ir.DataType.FLOAT
ANY_TOKENS = (1, None, None)
"""The axes ``[1, T, C]``."""


class GraphParts:
    """A graph, changed by ``rewrite_as_means``, with the kind of each value; parts become models.

    Raises:
        NotChunkable: if the graph cannot run in chunks; gives the reason.
    """

    def __init__(self, model: ir.Model) -> None:
        self._ir_version = model.ir_version
        self._graph = graph = model.graph
        self.outputs = names_of(graph.outputs)
        self.kinds = classify(graph)
        self.constants = constants_of(graph)
        self.dims = dims_of(graph)
        self.opset = graph.opset_imports.get("", 0)
        self.main = str(main_input_of(graph).name)
        self._count_by_lengths()
        self._shift_position_embeddings()
        self.given = names_of(graph.inputs)
        self.nodes = list(graph)
        values = (v for node in self.nodes for v in node.outputs)
        self._values = {str(v.name): v for v in (*graph.inputs, *values)}

    def _count_by_lengths(self) -> None:
        """Read the number of tokens from ``lengths``: a shape would need the tokens themselves."""
        # A chunk has one document. OpenVINO needs the size: a Squeeze without axes depends on it.
        lengths = number_of_tokens(self._graph)
        lengths.shape = ir.Shape([1])
        for node in tuple(self._graph):
            if node.op_type == "Shape" and self.kinds[str(node.outputs[0].name)] is Kind.LENGTH:
                node.outputs[0].replace_all_uses_with(lengths)
                remove([node])

    def _shift_position_embeddings(self) -> None:
        """Read embeddings of positions from the position of the chunk's first token on."""
        for node in tuple(self._graph):
            if self.kinds[
                str(node.outputs[0].name)
            ] is Kind.POSITION_EMBEDDING and is_position_embedding(
                node, self.kinds, self.constants
            ):
                new = NewNodes(self._graph, "chunk")
                place = 1 if node.op_type == "Gather" else 2
                positions = node.inputs[place]
                like = new.add("CastLike", first_position(self._graph), positions)
                node.replace_input_with(place, new.add("Add", positions, like))
                if node.op_type == "Slice":
                    node.replace_input_with(1, like)
                self._graph.insert_before(node, new.nodes)
                for added in new.nodes:
                    self.kinds[str(added.outputs[0].name)] = Kind.POSITIONS
        self.kinds[FIRST_POSITION] = Kind.POSITIONS

    def subgraph(self, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Graph:
        """Return the graph that computes ``outputs``, with the needed ones of ``inputs``."""
        needed, nodes = set(outputs), []
        for node in reversed(self.nodes):
            if any(name in needed and name not in inputs for name in names_of(node.outputs)):
                nodes.append(node)
                needed.update(names_of(node.inputs))
        used_inputs = [name for name in dict.fromkeys(inputs) if name in needed]
        ends = {name: self._described(name) for name in (*used_inputs, *outputs)}
        part = ir.GraphView(
            [ends[name] for name in used_inputs],
            [ends[name] for name in outputs],
            nodes=nodes[::-1],
            initializers=[v for name, v in self._graph.initializers.items() if name in needed],
            opset_imports={
                domain: version
                for domain, version in self._graph.opset_imports.items()
                if domain in ("", DOMAIN)
            },
            name="main",
        )
        return part.clone()

    def _described(self, name: str) -> ir.Value:
        """Return a value, with a type and axes if ``rewrite_as_means`` added it without."""
        value = self._values[name]
        if value.dtype is None:
            value.dtype, value.shape = self._element(value), ir.Shape(ANY_TOKENS)
        return value

    def _element(self, value: ir.Value) -> ir.DataType:
        """Return the type of a value, or that of its input if ``rewrite_as_means`` added it."""
        if value.dtype is not None:
            return value.dtype
        node = value.producer()
        assert node is not None  # inputs have types
        operands = [v for v in node.inputs if v is not None]
        return self._element(next(v for v in operands if self.kinds[str(v.name)] is Kind.TOKENS))

    def model(self, graph: ir.Graph, function: onnx.FunctionProto | None = None) -> ir.Model:
        """Return a graph as a model, with a function of ``summaries`` if it has one."""
        model = ir.Model(graph, ir_version=self._ir_version)
        if function is not None:
            add_function(model, function)
        return model


def add_function(model: ir.Model, function: onnx.FunctionProto) -> None:
    """Add a function of ``summaries`` to a model."""
    summary = ir.serde.deserialize_function(function)
    model.functions[summary.identifier()] = summary
    model.graph.opset_imports[SUMMARY_DOMAIN] = 1


def number_of_tokens(graph: ir.Graph) -> ir.Value:
    """Return the input with the number of a chunk's tokens, which the graph gets if it lacks it."""
    return given(graph, LENGTHS, ir.DataType.INT64, (1,))


def first_position(graph: ir.Graph) -> ir.Value:
    """Return the input with the position of a chunk's first token, likewise."""
    return given(graph, FIRST_POSITION, ir.DataType.INT64, (1,))


def given(graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int | None]) -> ir.Value:
    """Return the input of a graph with a name, which the graph gets if it lacks it."""
    found = next((value for value in graph.inputs if value.name == name), None)
    if found is None:
        found = ir.val(name, dtype, ir.Shape(shape))
        graph.inputs.append(found)
    return found
