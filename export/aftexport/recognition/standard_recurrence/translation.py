"""The recurrent nodes of other domains in a graph, each replaced by an operator of ours.

CausalConvWithState becomes CausalDepthwiseConv. The operator of ONNX has the channels before the
tokens, ours has them last. That of ONNX Runtime may have them last too, in several axes. A dilated
filter becomes one with zeros between its taps, which has the same state.

LinearAttention becomes RecurrentLinearAttention. ONNX Runtime's operator has two extensions. With
more key heads than query heads, each query head reads several states; the query is repeated here.
A window of states has no counterpart.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from aftexport.errors import UsageError
from aftexport.lowering.nodes import NewNodes, custom_node, take_place
from aftexport.operators.domain import DOMAIN, VERSION
from aftexport.operators.mechanisms.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.operators.mechanisms.recurrent_linear_attention import (
    DELTA_RULES,
    GATED_RULES,
    RECURRENT_LINEAR_ATTENTION,
)
from aftexport.recognition.standard_recurrence.node_values import (
    CAUSAL_CONV,
    LINEAR_ATTENTION,
    MICROSOFT,
    REMEDY,
    Arrays,
    ForeignNode,
    FullLengths,
    NodeReading,
    NotTranslatable,
    is_foreign,
    is_standard,
    title,
)


@dataclass(frozen=True)
class Replacement:
    """A node that was replaced."""

    source: str  # the operator of the file, with its domain
    operator: str
    value: str


@dataclass
class Translation:
    """The result for a graph."""

    # Nodes that were replaced, in the order of the graph.
    replaced: list[Replacement] = field(default_factory=list)
    # Operator, the first output and the reason for each node that stays.
    left: list[tuple[str, str, str]] = field(default_factory=list)


def check_foreign_nodes(model: ir.Model) -> bool:
    """Return whether a graph, without its subgraphs, has a recurrent node of another domain.

    Raises:
        UsageError: if the attributes of a node, or the presence of its inputs, violate its
            definition.
    """
    nodes = [node for node in model.graph if is_foreign(node)]
    for node in nodes:
        try:
            _READINGS[node.op_type](ForeignNode(node, {})).check()
        except NotTranslatable as reason:
            if is_standard(node):
                raise _not_standard(ForeignNode(node, {}), reason) from reason
    return bool(nodes)


def check_sizes(node: ir.Node, run: Arrays) -> None:
    """Raise UsageError if the sizes of the inputs of a node violate its definition."""
    _READINGS[node.op_type](ForeignNode(node, run)).check_sizes()


def translate(model: ir.Model, run: Arrays) -> Translation:
    """Replace recurrent nodes of other domains in place; raises UsageError for an invalid node."""
    result, known = Translation(), dict[ir.Value, ir.Value]()
    for node in list(model.graph):
        if not is_foreign(node):
            continue
        value = str(node.outputs[0].name)
        source = title(node)
        reading = _READINGS[node.op_type]
        new = NewNodes(model.graph, value)
        given = ForeignNode(node, run)
        try:
            outputs = reading(given).translate(FullLengths(new, known), new)
        except NotTranslatable as reason:
            if is_standard(node):
                raise _not_standard(given, reason) from reason
            result.left.append((source, value, str(reason)))
            continue
        model.graph.insert_before(node, new.nodes)
        for old, replacing in zip(node.outputs, outputs, strict=False):
            take_place(old, replacing)
        model.graph.remove(node, safe=True)
        result.replaced.append(Replacement(source, reading.operator, value))
    if result.replaced:
        model.opset_imports[DOMAIN] = VERSION
        cancel_transposes(model.graph)
        CommonSubexpressionEliminationPass()(model)
        RemoveUnusedNodesPass()(model)
        if not any(node.domain == MICROSOFT for node in model.graph.all_nodes()):
            model.opset_imports.pop(MICROSOFT, None)
    return result


_ACTIVATIONS = {"none": "none", "silu": "silu", "swish": "silu"}


_EXTENSIONS = {"channels_last": 0, "dilation": 1, "ndim": 1, "state_window": 0}


_MAX_FILTER_NUMBERS = 2**24
"""The maximum numbers of a filter with zeros between its taps, 64 MiB in float32."""


class CausalConvReading(NodeReading):
    """The reading of a CausalConvWithState."""

    operator = CAUSAL_DEPTHWISE_CONV.op_type

    def __init__(self, given: ForeignNode) -> None:
        extensions = _EXTENSIONS if given.node.domain == MICROSOFT else {}
        self._given = ForeignNode(given.node, given.run, {"activation": "none", **extensions})
        self._attributes = _EXTENSIONS | self._given.attributes()

    def check(self) -> None:
        """Check the attributes and the presence of inputs; see ``NodeReading.check``."""
        self._activation()
        self._given.check(self._dilation > 0, "a dilation above 0", self._dilation)
        self._given.required(0, "input")
        self._given.required(1, "weight")

    def check_sizes(self) -> None:
        """Check the sizes in the run; see ``NodeReading.check_sizes``."""
        given = self._given
        x, weight = given.required(0, "input"), given.required(1, "weight")
        shape = given.shape(weight, "weight", 3)
        given.check(shape[1] == 1 and shape[2] > 0, "a weight [channels, 1, K]", list(shape))
        channels, rank = shape[0], len(given.shape_of(x))
        self._check_channels(x, channels)
        if (bias := given.input(2)) is not None:
            found = given.shape(bias, "bias", 1)
            given.check(found == (channels,), f"{channels} numbers of bias", list(found))
        if (past := given.input(3)) is not None:
            tokens = (shape[2] - 1) * self._dilation
            size = given.shape(past, "past_state", rank)[1 if self._is_last else 2]
            given.check(size == tokens, f"past_state of {tokens} tokens", size)

    def translate(self, lengths: FullLengths, new: NewNodes) -> list[ir.Value]:
        """Add the nodes of the operator; see ``NodeReading.translate``."""
        self.check()
        self._refuse_extensions()
        self.check_sizes()
        given = self._given
        x, weight = given.required(0, "input"), given.required(1, "weight")
        channels, past = given.shape_of(weight)[0], given.input(3)
        taps = self._taps(weight, new)
        packed = self._packed(x, channels, new)
        before = None if past is None else self._packed(past, channels, new)
        node = custom_node(
            self.operator,
            [packed, taps, given.input(2), before, lengths.of(packed)],
            {"activation": self._activation()},
            num_outputs=2,
        )
        output, present = new.append(node)
        return [self._unpacked(output, x, new), self._unpacked(present, x, new)]

    @property
    def _dilation(self) -> int:
        return int(self._attributes["dilation"])

    @property
    def _is_last(self) -> bool:
        return self._attributes["channels_last"] == 1

    def _activation(self) -> str:
        found = self._attributes["activation"]
        expected = f"activation {', '.join(_ACTIVATIONS)}"
        self._given.check(found in _ACTIVATIONS, expected, repr(found))
        return _ACTIVATIONS[str(found)]

    def _refuse_extensions(self) -> None:
        axes, window = self._attributes["ndim"], self._attributes["state_window"]
        if axes != 1:
            raise NotTranslatable(f"it has {axes} axes of positions")
        if window:
            raise NotTranslatable(f"it returns a window of {window} states")

    def _check_channels(self, x: ir.Value, channels: int) -> None:
        given = self._given
        shape = given.shape_of(x) if self._is_last else given.shape(x, "input", 3)
        given.check(len(shape) >= 3, "an input of rank 3", f"the shape {list(shape)}")
        found = int(np.prod(shape[2:])) if self._is_last else shape[1]
        given.check(found == channels, f"{channels} channels of the input, as the weight", found)

    def _taps(self, weight: ir.Value, new: NewNodes) -> ir.Value:
        """Return the filter as ``[C, K]``, with zeros between the taps of a dilated one."""
        shape = self._given.shape_of(weight)
        if weight.const_value is None or weight.is_graph_input():
            if self._dilation > 1:
                raise NotTranslatable("it is dilated, and its filter is not constant")
            return new.add("Squeeze", weight, new.constant([1]))
        numbers = weight.const_value.numpy()[:, 0]
        span = (shape[2] - 1) * self._dilation + 1
        if self._dilation > 1 and shape[0] * span > _MAX_FILTER_NUMBERS:
            raise NotTranslatable(
                f"its dilated filter has {shape[0]} x {span} numbers, "
                f"more than {_MAX_FILTER_NUMBERS}"
            )
        dilated = np.zeros((shape[0], span), numbers.dtype)
        dilated[:, :: self._dilation] = numbers
        return new.constant(dilated)

    def _packed(self, value: ir.Value, channels: int, new: NewNodes) -> ir.Value:
        """Return a tensor or a state as ``[B, T, C]``."""
        if not self._is_last:
            return new.add("Transpose", value, perm=[0, 2, 1])
        if len(self._given.shape_of(value)) == 3:
            return value
        return new.add("Reshape", value, new.constant([0, 0, channels]))

    def _unpacked(self, value: ir.Value, x: ir.Value, new: NewNodes) -> ir.Value:
        """Return a result in the layout of the input."""
        if not self._is_last:
            return new.add("Transpose", value, perm=[0, 2, 1])
        shape = self._given.shape_of(x)
        if len(shape) == 3:
            return value
        return new.add("Reshape", value, new.constant([0, 0, *shape[2:]]))


RULES = next(a.choices for a in RECURRENT_LINEAR_ATTENTION.attributes if a.name == "update_rule")


_EPS = next(a for a in RECURRENT_LINEAR_ATTENTION.attributes if a.name == "eps")


_DEFAULTS: dict[str, int | float | str] = {
    "chunk_size": 64,
    "kv_num_heads": 0,
    "q_num_heads": 0,
    "scale": 0.0,
    "update_rule": "gated_delta",
}


_INPUTS = ("query", "key", "value", "past_state", "decay", "beta")


class LinearAttentionReading(NodeReading):
    """The reading of a LinearAttention."""

    operator = RECURRENT_LINEAR_ATTENTION.op_type

    def __init__(self, given: ForeignNode) -> None:
        windows = {"state_window": 0} if given.node.domain == MICROSOFT else {}
        self._given = ForeignNode(given.node, given.run, _DEFAULTS | windows)
        self._attributes = self._given.attributes()
        self._rule = str(self._attributes["update_rule"])
        self._query_heads = int(self._attributes["q_num_heads"])
        self._heads = int(self._attributes["kv_num_heads"])

    def check(self) -> None:
        """Check the attributes and the presence of inputs; see ``NodeReading.check``."""
        self._check_attributes()
        for place, name in enumerate(_INPUTS[:3]):
            self._given.required(place, name)
        self._check_presence("decay", 4, is_needed=self._rule in GATED_RULES)
        self._check_presence("beta", 5, is_needed=self._rule in DELTA_RULES)

    def check_sizes(self) -> None:
        """Check the sizes in the run; see ``NodeReading.check_sizes``."""
        given, heads = self._given, self._heads
        query, key, value = (given.required(i, n) for i, n in enumerate(_INPUTS[:3]))
        width = max(given.shape(query, "query", 3)[2] // self._query_heads, 1)
        values = max(given.shape(value, "value", 3)[2] // heads, 1)
        for name, tensor, last in (
            ("query", query, self._query_heads * width),
            ("key", key, heads * width),
            ("value", value, heads * values),
        ):
            size = given.shape(tensor, name, 3)[2]
            given.check(size == last, f"{last} channels of {name} for its heads", size)
        if (past := given.input(3)) is not None:
            shape = given.shape(past, "past_state", 4)[1:]
            expected = (heads, width, values)
            given.check(shape == expected, f"past_state [B, {heads}, {width}, {values}]", shape)
        if (beta := given.input(5)) is not None:
            size = given.shape(beta, "beta", 3)[2]
            given.check(size in (1, heads), f"1 or {heads} channels of beta", size)
        if (decay := given.input(4)) is not None:
            size, wide = given.shape(decay, "decay", 3)[2], heads * width
            given.check(size in (heads, wide), f"{heads} or {wide} channels of decay", size)

    def translate(self, lengths: FullLengths, new: NewNodes) -> list[ir.Value]:
        """Add the nodes of the operator; see ``NodeReading.translate``."""
        self.check()
        self.check_sizes()
        if window := self._attributes.get("state_window"):
            raise NotTranslatable(f"it returns a window of {window} states")
        names = [n for i, n in enumerate(_INPUTS) if self._given.input(i) is not None]
        values = {name: self._given.required(_INPUTS.index(name), name) for name in names}
        own = self._given.dtype(values["query"])
        state = self._given.dtype(values["past_state"]) if "past_state" in values else own
        # Our operator has one type: a wider state would lose digits in that of the query.
        inside = own if state == own else np.dtype(np.float32)
        values["query"] = self._repeated(values["query"], new)
        for name in values:
            have = state if name == "past_state" else own
            values[name] = new.cast(values[name], have, inside)
        node = custom_node(
            self.operator,
            [*(values.get(name) for name in _INPUTS), lengths.of(values["query"])],
            {
                "update_rule": self._rule,
                "direction": "forward",
                "normalizer": "none",
                "decay_granularity": self._granularity(),
                "q_num_heads": max(self._query_heads, self._heads),
                "kv_num_heads": self._heads,
                "scale": float(self._attributes["scale"]),
                "eps": float(_EPS.default),
            },
            num_outputs=2,
        )
        output, present = new.append(node)
        return [new.cast(output, inside, own), new.cast(present, inside, state)]

    def _check_attributes(self) -> None:
        check, heads, queries = self._given.check, self._heads, self._query_heads
        check(self._rule in RULES, f"update_rule {', '.join(RULES)}", repr(self._rule))
        counts = f"q_num_heads {queries} and kv_num_heads {heads}"
        check(min(queries, heads) > 0, "q_num_heads and kv_num_heads above 0", counts)
        may_be_fewer = self._given.node.domain == MICROSOFT and heads % queries == 0
        expected = "q_num_heads as a multiple of kv_num_heads"
        check(queries % heads == 0 or may_be_fewer, expected, counts)

    def _granularity(self) -> str:
        """Return the granularity of a decay whose size was checked."""
        decay = self._given.input(4)
        by_head = decay is None or self._given.shape_of(decay)[2] == self._heads
        return "head" if by_head else "channel"

    def _check_presence(self, name: str, place: int, *, is_needed: bool) -> None:
        is_given = self._given.input(place) is not None
        with_or_without = "the input" if is_needed else "no input"
        self._given.check(
            is_given == is_needed,
            f"{with_or_without} {name} for update_rule {self._rule}",
            "one" if is_given else "none",
        )

    def _repeated(self, query: ir.Value, new: NewNodes) -> ir.Value:
        """Return the query with one head for each state, where it has fewer."""
        if self._query_heads >= self._heads:
            return query
        width = self._given.shape(query, "query", 3)[2] // self._query_heads
        heads = new.add("Reshape", query, new.constant([0, 0, self._query_heads, width]))
        group = self._heads // self._query_heads
        chosen = new.constant(np.arange(self._heads) // group)
        repeated = new.add("Gather", heads, chosen, axis=2)
        return new.add("Reshape", repeated, new.constant([0, 0, self._heads * width]))


def _not_standard(given: ForeignNode, reason: NotTranslatable) -> UsageError:
    """Return the error of a standard node that no operator of ours, and no runtime, computes."""
    return UsageError(f"Expected {given.label} as ONNX defines it, but {reason}.", REMEDY)


def cancel_transposes(graph: ir.Graph) -> None:
    """Let the readers of two transposes that undo each other read the source of the first."""
    for second in [n for n in graph if n.op_type == "Transpose" and n.domain == ""]:
        value = second.inputs[0]
        first = None if value is None else value.producer()
        if first is None or first.op_type != "Transpose" or second.outputs[0].is_graph_output():
            continue
        order, before = _permutation(second), _permutation(first)
        if order is None or before is None or [before[i] for i in order] != sorted(order):
            continue
        source = first.inputs[0]
        assert source is not None  # a transpose has an input
        second.outputs[0].replace_all_uses_with(source)


def _permutation(node: ir.Node) -> list[int] | None:
    found = node.attributes.get("perm")
    return None if found is None else list(found.as_ints())


_READINGS: dict[str, type[NodeReading]] = {
    LINEAR_ATTENTION: LinearAttentionReading,
    CAUSAL_CONV: CausalConvReading,
}
