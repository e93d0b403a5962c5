"""A CausalConvWithState of ONNX or ONNX Runtime as CausalDepthwiseConv.

The operator of ONNX has the channels before the tokens, ours has them last. That of ONNX Runtime
may have them last too, in several axes. A dilated filter becomes one with zeros between its taps,
which has the same state.
"""

import numpy as np
import onnx_ir as ir

from aftexport.lowering.nodes import NewNodes, custom_node
from aftexport.operators.mechanisms.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.recognition.standard_recurrence.full_lengths import FullLengths
from aftexport.recognition.standard_recurrence.node_reading import NodeReading
from aftexport.recognition.standard_recurrence.node_values import (
    MICROSOFT,
    ForeignNode,
    NotTranslatable,
)

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
