"""PyTorch's side of a comparison by layer: every tensor of the captured program, in float64.

A value of the exported graph keeps the name of its ``torch.export`` node. A second capture, as in
the export, gives the module and the correct value of each tensor.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from aftexport.bundle.golden import Array
from aftexport.bundle.manifest import Manifest
from aftexport.capture.capture import ENGINE_PRECISIONS, PRECISIONS, capture, prepared
from aftexport.capture.model_outputs import output_names, output_nodes
from aftexport.capture.reference_module import float64_by_default
from aftexport.checkpoint import Checkpoint
from aftexport.extra_inputs import ExtraInput
from aftexport.lowering.to_onnx import decomposed
from aftexport.system.contract import DEFAULT_OPSET, main_input

Double = NDArray[np.float64]
_NARROW = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Span:
    """The part of the PyTorch module that computes a tensor from other tensors."""

    modules: tuple[str, ...]  # paths of the innermost modules, in order
    parameters: tuple[str, ...]


class Program:
    """A captured program that runs in float64, whole or in part.

    ``exact`` has the parameters, buffers and constants as they were trained; those of the
    program are rounded to its type.
    """

    def __init__(self, program: ExportedProgram, exact: Mapping[str, Tensor]) -> None:
        self._graph = program.graph
        self._module = program.graph_module
        signature = program.graph_signature
        self._parameter_of = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        rounded = {**program.state_dict, **program.constants}
        self._own = {name: rounded[name].detach() for name in self._parameter_of.values()}
        self._weights = {
            False: {name: _widened(rounded[name]) for name in self._parameter_of.values()},
            True: {name: _widened(exact[name]) for name in self._parameter_of.values()},
        }
        self._nodes = {node.name: node for node in self._graph.nodes if node.op != "output"}
        results = [node for node in output_nodes(self._graph) if node is not None]
        # The names of the outputs in the exported graph.
        self._nodes |= dict(zip(output_names(program), results, strict=True))

    @classmethod
    def of(cls, checkpoint: Checkpoint, manifest: Manifest) -> "Program":
        """Capture a model again, as in the export; raise TraceError if it cannot be captured."""
        if checkpoint.program is not None:
            program = decomposed(checkpoint.program, opset=manifest.opset)
            return cls(program, {**program.state_dict, **program.constants})
        assert checkpoint.module is not None  # a checkpoint holds one of the two
        types = PRECISIONS if manifest.engine is None else ENGINE_PRECISIONS
        return cls.captured(
            checkpoint.module,
            types[manifest.precision],
            max_tokens=manifest.max_tokens,
            num_features=manifest.features.count if manifest.features else None,
            extras=manifest.extra_inputs,
            mask="lengths" in manifest.inputs,
            opset=manifest.opset,
        )

    @classmethod
    def captured(
        cls,
        module: nn.Module,
        dtype: torch.dtype,
        *,
        max_tokens: int | None = None,
        num_features: int | None = None,
        extras: tuple[ExtraInput, ...] = (),
        mask: bool = True,
        opset: int = DEFAULT_OPSET,
    ) -> "Program":
        """Capture a module; see ``capture.capture`` and ``lowering.to_onnx.lower``."""
        captured = capture(
            module,
            dtype=dtype,
            max_tokens=max_tokens,
            num_features=num_features,
            extras=extras,
            mask=mask,
        )
        program = decomposed(captured, opset=opset)
        wide = prepared(module, torch.float64, captured.graph_signature.user_inputs)
        exact = dict[str, Tensor]([*wide.named_parameters(remove_duplicate=False)])
        exact |= wide.named_buffers(remove_duplicate=False)
        # Constants in the code of the forward have no name in the module.
        return cls(program, {**program.constants, **exact})

    def __contains__(self, name: str) -> bool:
        return name in self._nodes and self._nodes[name].op == "call_function"

    def parameter(self, name: str) -> Double:
        """Return a parameter or buffer as it was trained."""
        return self._weights[True][name].numpy()

    def module(self, name: str) -> str:
        """Return the path of the innermost module that computes a tensor; empty for the model."""
        return _module(self._nodes[name])

    def counting(self, name: str, inputs: Mapping[str, Array]) -> NDArray[np.bool_] | None:
        """Return the mask of a tensor's numbers outside the padding; None if all are outside."""
        if "lengths" not in inputs:
            return None
        main = main_input(inputs)
        tokens = self._nodes[main].meta["val"].shape[1]
        # Compare symbolic sizes: another axis may happen to have the length of the document.
        sizes = self._nodes[name].meta["val"].shape
        axes = [i for i, size in enumerate(sizes) if i and str(size) == str(tokens)]
        batch, length = inputs[main].shape[:2]
        valid = np.arange(length) < np.asarray(inputs["lengths"], np.int64)[:, None]
        masks = []
        for axis in axes:
            shape = [1] * len(sizes)
            shape[0], shape[axis] = batch, length
            masks.append(valid.reshape(shape))
        return np.logical_and.reduce(np.broadcast_arrays(*masks)) if masks else None

    def run(
        self,
        names: Collection[str],
        starts: Mapping[str, Array],
        *,
        exact: bool = True,  # whether the parameters are used as trained instead of rounded
    ) -> dict[str, Double]:
        """Compute floating-point tensors in float64 from ``starts``; leave out all others."""
        known = {
            self._nodes[name]: _widened(torch.from_numpy(np.array(value)))
            for name, value in starts.items()
        }
        wanted = {name: self._nodes[name] for name in names}
        values: dict[fx.Node, object] = {}
        with torch.inference_mode(), float64_by_default():
            for node in self._needed(set(wanted.values()), set(known)):
                values[node] = known[node] if node in known else self._compute(node, values, exact)
        return {
            name: tensor.numpy()
            for name, node in wanted.items()
            if isinstance(tensor := values[node], Tensor) and tensor.is_floating_point()
        }

    def run_own(self, name: str, starts: Mapping[str, Array]) -> Double:
        """Compute a tensor as PyTorch does in the types of the program, and widen the result.

        Raises:
            RuntimeError: if PyTorch lacks an operator for such a type.
        """
        target = self._nodes[name]
        known = {
            node: torch.from_numpy(np.array(value)).to(node.meta["val"].dtype)
            for node, value in ((self._nodes[other], array) for other, array in starts.items())
        }
        values: dict[fx.Node, object] = {}
        with torch.inference_mode():
            for node in self._needed({target}, set(known)):
                values[node] = known[node] if node in known else self._compute(node, values, None)
        result = values[target]
        assert isinstance(result, Tensor)
        return result.double().numpy()

    def span(self, name: str, starts: Collection[str]) -> Span:
        """Return the part of the module that computes a tensor from the tensors ``starts``."""
        known = {self._nodes[other] for other in starts if other != name and other in self._nodes}
        nodes = [n for n in self._needed({self._nodes[name]}, known) if n not in known]
        called = [n for n in nodes if n.op == "call_function" and _is_float(n)]
        parameters = (self._parameter_of[n.name] for n in nodes if n.name in self._parameter_of)
        return Span(tuple(dict.fromkeys(map(_module, called))), tuple(dict.fromkeys(parameters)))

    def _needed(self, wanted: set[fx.Node], known: set[fx.Node]) -> Iterator[fx.Node]:
        """Return ``wanted`` and the nodes on which they depend, in order."""
        needed, left = set[fx.Node](), list(wanted)
        while left:
            node = left.pop()
            if node not in needed:
                needed.add(node)
                if node not in known:
                    left += node.all_input_nodes
        return (node for node in self._graph.nodes if node in needed)

    def _compute(
        self, node: fx.Node, values: Mapping[fx.Node, object], exact: bool | None
    ) -> object:
        """Return the value of a node in float64, or in its own type if ``exact`` is None."""
        if node.op == "placeholder":
            weights = self._own if exact is None else self._weights[exact]
            return weights[self._parameter_of[node.name]]
        if node.op == "get_attr":
            return getattr(self._module, str(node.target))
        assert callable(node.target)

        def known(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return values[argument]
            return torch.float64 if exact is not None and argument in _NARROW else argument

        args: Any = fx.node.map_aggregate(node.args, known)
        kwargs: Any = fx.node.map_aggregate(node.kwargs, known)
        return node.target(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.double() if tensor.is_floating_point() else tensor


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _module(node: fx.Node) -> str:
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return str(stack[-1]) if stack else ""
