"""A LinearAttention of ONNX or ONNX Runtime as RecurrentLinearAttention.

ONNX Runtime's operator has two extensions. With more key heads than query heads, each query head
reads several states; the query is repeated here. A window of states has no counterpart.
"""

import numpy as np
import onnx_ir as ir

from aftexport.lowering.nodes import NewNodes, custom_node
from aftexport.operators.mechanisms.recurrent_linear_attention import (
    DELTA_RULES,
    GATED_RULES,
    RECURRENT_LINEAR_ATTENTION,
)
from aftexport.recognition.standard_recurrence.full_lengths import FullLengths
from aftexport.recognition.standard_recurrence.node_reading import NodeReading
from aftexport.recognition.standard_recurrence.node_values import (
    MICROSOFT,
    ForeignNode,
    NotTranslatable,
)

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
