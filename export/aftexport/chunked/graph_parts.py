"""Parts of a graph, as models of their own."""

from collections.abc import Sequence

import onnx

from aftexport.chunked.document import FIRST_POSITION
from aftexport.chunked.summaries import DOMAIN as SUMMARY_DOMAIN
from aftexport.contract import LENGTHS
from aftexport.operators.domain import DOMAIN, opset_of
from aftexport.passes.graph_values import constants_of, dims_of, main_input_of
from aftexport.passes.token_flow import classify, is_position_embedding
from aftexport.passes.token_kinds import Kind


class GraphParts:
    """A graph with the kind of each value, of which parts become models.

    Args:
        model: the result of ``rewrite_as_means``.

    Raises:
        NotChunkable: if the graph cannot run in chunks; gives the reason.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        graph = model.graph
        self.nodes = list(graph.node)
        self.outputs = [output.name for output in graph.output]
        self.kinds = classify(model)
        self.constants = constants_of(graph)
        self.dims = dims_of(graph)
        self.opset = opset_of(model)
        self.main = main_input_of(graph)
        self.given = list(dict.fromkeys([*(value.name for value in graph.input), LENGTHS]))
        self._described = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
        self._count_by_lengths()
        self._shift_position_embeddings()

    def _shift_position_embeddings(self) -> None:
        """Read embeddings of positions from the position of the chunk's first token on."""
        make = onnx.helper.make_node
        nodes = []
        for node in self.nodes:
            if self.kinds[node.output[0]] is Kind.POSITION_EMBEDDING and is_position_embedding(
                node, self.kinds, self.constants
            ):
                index = 1 if node.op_type == "Gather" else 2
                moved = f"{node.output[0]}_chunk_positions"
                like = f"{moved}_first"
                nodes += [
                    make("CastLike", [FIRST_POSITION, node.input[index]], [like]),
                    make("Add", [node.input[index], like], [moved]),
                ]
                node.input[index] = moved
                if node.op_type == "Slice":
                    node.input[1] = like
                self.kinds |= dict.fromkeys((moved, like), Kind.POSITIONS)
            nodes.append(node)
        if len(nodes) > len(self.nodes):
            self.nodes = nodes
            self.given.append(FIRST_POSITION)
            self.kinds[FIRST_POSITION] = Kind.POSITIONS
        self._described[FIRST_POSITION] = self.first_position

    @property
    def first_position(self) -> onnx.ValueInfoProto:
        """The description of the input with the position of a chunk's first token."""
        return onnx.helper.make_tensor_value_info(FIRST_POSITION, onnx.TensorProto.INT64, (1,))

    def _count_by_lengths(self) -> None:
        """Read the number of tokens from ``lengths``: a shape would need the tokens themselves."""
        for node in self.nodes:
            if node.op_type == "Shape" and self.kinds[node.output[0]] is Kind.LENGTH:
                node.op_type, node.input[0] = "Identity", LENGTHS
                del node.attribute[:]
        # A chunk has one document. OpenVINO needs the size: a Squeeze without axes depends on it.
        self._described[LENGTHS] = self.lengths

    @property
    def lengths(self) -> onnx.ValueInfoProto:
        """The description of the input with the number of tokens of a chunk."""
        return onnx.helper.make_tensor_value_info(LENGTHS, onnx.TensorProto.INT64, (1,))

    def subgraph(self, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.GraphProto:
        """Return the graph that computes ``outputs``, with the needed ones of ``inputs``."""
        needed, nodes = set(outputs), []
        for node in reversed(self.nodes):
            if any(name in needed and name not in inputs for name in node.output):
                nodes.append(node)
                needed.update(node.input)
        used_inputs = [name for name in dict.fromkeys(inputs) if name in needed]
        made = {name for node in nodes for name in node.output}
        return onnx.helper.make_graph(
            nodes[::-1],
            "main",
            [self._description(name) for name in used_inputs],
            [self._description(name) for name in outputs],
            [i for i in self._model.graph.initializer if i.name in needed],
            value_info=[
                v for v in self._model.graph.value_info if v.name in made and v.name not in outputs
            ],
        )

    def _description(self, name: str) -> onnx.ValueInfoProto:
        description: onnx.ValueInfoProto | None = self._described.get(name)
        return description or described(name, self._element(name))

    def _element(self, name: str) -> int:
        """Return the type of a value, or that of its input if ``rewrite_as_means`` added it."""
        if name in self._described:
            return int(self._described[name].type.tensor_type.elem_type)
        node = next(node for node in self.nodes if name in node.output)
        return self._element(next(n for n in node.input if self.kinds[n] is Kind.TOKENS))

    def model(
        self, graph: onnx.GraphProto, function: onnx.FunctionProto | None = None
    ) -> onnx.ModelProto:
        """Return a graph as a model, with a function of ``summaries`` if it has one."""
        imports = [o for o in self._model.opset_import if o.domain in ("", DOMAIN)]
        if function is not None:
            imports.append(onnx.helper.make_opsetid(SUMMARY_DOMAIN, 1))
        return onnx.helper.make_model(
            graph,
            opset_imports=imports,
            functions=[function] if function is not None else [],
            ir_version=self._model.ir_version,
        )


def described(name: str, element: int) -> onnx.ValueInfoProto:
    """Return the description of ``[1, T, C]`` of one type."""
    return onnx.helper.make_tensor_value_info(name, element, (1, None, None))
