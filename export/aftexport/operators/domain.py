"""The ONNX operator domain that exported models and kernel libraries share.

Its numbers hold for every form of an operator.
"""

import math
from collections import Counter

import onnx

DOMAIN = "ai.aftexport"


VERSION = 1


PLUGIN_ATTRIBUTES = {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION)}
"""Attributes of every custom node. TensorRT's parser prefers a plugin over the
model-local function only if the node names the plugin's namespace."""


MASKED = -math.inf
"""The logit of a masked key. If every key is masked, the mean is 0."""


MAX_BLOCK = 1024
"""The maximum number of terms that a runtime may add one by one. The error grows with their number:
a million equal tokens would be off by 1e-2. Sums are computed in two levels, of blocks."""


SIDE_BY_SIDE = 16
"""The number of blocks of a sum of up to 16,384 terms; of fewer than 241, the size of a block."""


def operator_name(op_type: str) -> str:
    """Return the operator of a node, whose type may name a form; see ``attach_bodies``."""
    return op_type.partition("_")[0]


def operators_in(model: onnx.ModelProto) -> Counter[str]:
    """Return the number of custom nodes of a model by operator and form, sorted by name."""
    return Counter(sorted(node.op_type for node in model.graph.node if node.domain == DOMAIN))


def opset_of(model: onnx.ModelProto) -> int:
    """Return the opset of a model's standard operators; 0 if the model names none."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
