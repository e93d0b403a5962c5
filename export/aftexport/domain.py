"""The ONNX operator domain every exported model and every kernel library shares."""

DOMAIN = "ai.aftexport"
VERSION = 1

PLUGIN_ATTRIBUTES = {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION)}
"""Carried by every custom node: TensorRT's parser prefers a plugin over the
model-local function only where the node names the plugin's namespace."""
