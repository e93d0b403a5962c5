"""The nodes that run by a plugin, and those that run by their bodies.

TensorRT's parser takes the plugin of a node that names the namespace and the version of one. It
takes the function of the node's name for other nodes.
"""

import onnx_graphsurgeon as gs

from aftexport.engines.tensorrt.graph.network import Network, to_proto
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, operator_name
from aftexport.operators.kernel_forms import takes_form
from aftexport.operators.registry import operator_of

_SUFFIX = "Portable"


def name_plugins(network: Network) -> None:
    """Give each node that a plugin takes its name and attributes; the others run by their bodies.

    The most common form of an operator has the operator's name. If a node of another form gets
    that name, the body of the common form must not have it: a parser without the plugin then
    refuses the model, and does not run the wrong body.
    """
    bodies = {f.name: f for f in network.model.functions if f.domain == DOMAIN}
    portable: list[gs.Node] = []
    other_forms: set[str] = set()
    for node in _own_nodes(network.graph):
        name = operator_name(node.op)
        if operator_of(node.op) is None or not takes_form("tensorrt", to_proto(node)):
            portable.append(node)
            continue
        if node.op != name:
            other_forms.add(name)
            node.op = name
        node.attrs.update(PLUGIN_ATTRIBUTES)
    for node in portable:
        _run_by_body(node)
        if node.op in other_forms:
            node.op += _SUFFIX
    for name in sorted(other_forms & bodies.keys()):
        bodies[name].name += _SUFFIX


def remove_plugins(network: Network) -> None:
    """Let every node run by its body, also where an engine of this process holds the plugins."""
    for node in _own_nodes(network.graph):
        _run_by_body(node)


def _own_nodes(graph: gs.Graph) -> list[gs.Node]:
    return [node for node in graph.nodes if node.domain == DOMAIN]


def _run_by_body(node: gs.Node) -> None:
    for name in PLUGIN_ATTRIBUTES:
        node.attrs.pop(name, None)
