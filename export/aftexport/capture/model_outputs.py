"""The outputs of a forward: one tensor, or several by name."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from aftexport.errors import TraceError
from aftexport.system.contract import AXES, EVIDENCE, LOGITS, main_input
from aftexport.system.internals.torch_operators import pytree

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_EXPECTED = "a tensor from the model's forward, or a dict or NamedTuple of tensors by name"
_WRAP = "Wrap the model in a module whose forward returns only these tensors."


def name_outputs(result: Any) -> Any:
    """Return the entries of a mapping or a NamedTuple as a dict, without those that are None.

    Other results of a forward are returned unchanged. The mappings include the ModelOutput of the
    transformers library, which torch.export does not know.
    """
    entries = result._asdict() if hasattr(result, "_asdict") else result
    if not isinstance(entries, Mapping):
        return result
    return {name: value for name, value in entries.items() if value is not None}


def named_tensors(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a forward's result by the name of their output.

    Raises:
        TraceError: if it is neither a tensor nor tensors by name, or a name is not allowed.
    """
    outputs = {LOGITS: result} if isinstance(result, Tensor) else name_outputs(result)
    if not isinstance(outputs, dict):
        raise TraceError(f"Expected {_EXPECTED}, got {type(result).__name__}.", _WRAP)
    if not outputs:
        raise TraceError(f"Expected {_EXPECTED}, got no tensors.", _WRAP)
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            raise TraceError(
                f"Expected {_EXPECTED}, got {type(value).__name__} for {str(name)[:80]!r}.", _WRAP
            )
    check_names(outputs)
    return outputs


def check_names(names: Iterable[object]) -> None:
    """Raise TraceError for names that are reserved or not ASCII identifiers of up to 64 letters."""
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise TraceError(
                "Expected names of outputs with up to 64 ASCII letters, digits and '_', the first "
                f"not a digit, got {str(name)[:80]!r}.",
                "Rename this entry in the dict that forward returns.",
            )
        if name in AXES or name.startswith(EVIDENCE):
            raise TraceError(
                f"Expected names of outputs other than {', '.join(AXES)} and those that begin "
                f"with {EVIDENCE}, got {name!r}.",
                "Rename this entry in the dict that forward returns.",
            )


def output_names(program: ExportedProgram) -> tuple[str, ...]:
    """Return the names of a captured program's outputs, in order.

    Raises:
        TraceError: if they are not tensors by name, or two of them are the same tensor.
    """
    nodes = output_nodes(program.graph)
    spec = program.call_spec.out_spec
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in nodes]
    outputs = named_tensors(pytree.tree_unflatten(values, spec) if spec is not None else values)
    computed = [node for node in nodes if node is not None]
    for name, node in zip(outputs, computed, strict=True):
        if node.op != "call_function":
            raise TraceError(
                f"Expected outputs computed from the input, got {name!r}, which is an input or a "
                "parameter.",
                "Leave it out of the result of forward.",
            )
        if not outputs[name].is_floating_point():
            raise TraceError(
                f"Expected outputs of floating-point numbers, got {outputs[name].dtype} for "
                f"{name!r}.",
                "Leave it out of the result of forward.",
            )
        if computed.count(node) > 1:
            raise TraceError(
                f"Expected a tensor of its own for each output, got the same one for {name!r} and "
                "another output.",
                "Return each tensor by one name only.",
            )
    return tuple(outputs)


def single_numbers(program: ExportedProgram) -> dict[str, int]:
    """Return the rank with a width of 1 of each output that has no axis for its numbers.

    Such an output is one number for each document, ``[batch]``, or for each token, ``[batch,
    tokens]``.

    Raises:
        TraceError: if the outputs are not tensors by name.
    """
    main = main_input(tuple(map(str, program.graph_signature.user_inputs)))
    tokens = next(n for n in program.graph.find_nodes(op="placeholder") if n.name == main)
    rows = tokens.meta["val"].shape[:2]
    computed = [node for node in output_nodes(program.graph) if node is not None]
    return {
        name: rank + 1
        for name, node in zip(output_names(program), computed, strict=True)
        for rank in (1, 2)
        if isinstance(rows[rank - 1], torch.SymInt)
        and list(map(str, node.meta["val"].shape)) == list(map(str, rows[:rank]))
    }


def output_nodes(graph: fx.Graph) -> list[Any]:
    """Return the results of a captured graph: nodes, or constants such as None."""
    (results,) = graph.output_node().args
    assert isinstance(results, list | tuple)
    return list(results)
