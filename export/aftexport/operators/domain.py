"""The ONNX operator domain every exported model and every kernel library shares."""

from collections import Counter

import onnx

DOMAIN = "ai.aftexport"
VERSION = 1

PLUGIN_ATTRIBUTES = {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION)}
"""Carried by every custom node: TensorRT's parser prefers a plugin over the
model-local function only where the node names the plugin's namespace."""


def operators_in(model: onnx.ModelProto) -> Counter[str]:
    """Counts the custom nodes of a model by operator, in the order of their names."""
    return Counter(sorted(node.op_type for node in model.graph.node if node.domain == DOMAIN))


def opset_of(model: onnx.ModelProto) -> int:
    """The opset of a model's standard operators; 0 where it names none."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
