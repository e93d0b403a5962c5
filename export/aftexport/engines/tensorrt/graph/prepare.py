"""The graph that TensorRT's parser gets: every rewrite of a model, in order."""

from collections.abc import Callable

import onnx
import onnx_graphsurgeon as gs

from aftexport.engines.tensorrt.graph.network import Network, quiet
from aftexport.engines.tensorrt.graph.plugin_nodes import name_plugins, remove_plugins
from aftexport.engines.tensorrt.graph.simplify import (
    fold_constants,
    infer_types,
    remove_idle_casts,
)
from aftexport.errors import EngineError
from aftexport.operators.portable_bodies import inline_partial_calls

Rewrite = Callable[[Network], None]
"""A change of a graph in place."""

PLUGIN_REWRITES: tuple[Rewrite, ...] = (name_plugins,)
"""The rewrites of a graph whose operators run by plugins."""
PORTABLE_REWRITES: tuple[Rewrite, ...] = (remove_plugins,)
"""The rewrites of a graph whose operators run by their bodies."""
SIMPLIFICATIONS: tuple[Rewrite, ...] = (infer_types, remove_idle_casts, fold_constants)
"""The rewrites of every graph, after the others and in topological order."""


def prepare_graph(model: onnx.ModelProto, *, has_plugins: bool) -> onnx.ModelProto:
    """Rewrite a model for TensorRT, with its nodes sorted and without unused ones.

    Args:
        model: the model, which may be changed. Weights in files are not read.
        has_plugins: whether the plugin library is registered.

    Raises:
        EngineError: if the graph is not valid.
    """
    rewrites = PLUGIN_REWRITES if has_plugins else PORTABLE_REWRITES
    try:
        network = Network(inline_partial_calls(model))
        for rewrite in rewrites:
            rewrite(network)
        with quiet():
            network.graph.cleanup().toposort()
        for simplify in SIMPLIFICATIONS:
            simplify(network)
        with quiet():
            network.graph.cleanup()
        return network.to_model()
    except gs.OnnxGraphSurgeonException as error:
        raise EngineError(
            f"The graph cannot be prepared for TensorRT: {error}", "Export the model again."
        ) from error
