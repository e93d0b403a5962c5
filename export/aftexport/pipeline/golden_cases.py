"""The cases of the parity check with PyTorch's outputs, and the operator that mixes documents."""

import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from aftexport.bundle.golden import OPERATOR_OUTPUT, Array, Case, join_outputs
from aftexport.capture.model_spec import InputSpec
from aftexport.capture.reference_module import ReferenceModule
from aftexport.capture.shape_guards import last_own_line
from aftexport.engines.torch import TorchEngine
from aftexport.errors import TraceError
from aftexport.operators.domain import operator_name, operators_in
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.operators.schema import INTEGER_INPUTS, OnnxOperator
from aftexport.operators.torch_ops import expected_outputs
from aftexport.parity import TOLERANCES
from aftexport.parity.comparison import Differences
from aftexport.pipeline.independence import DOUBLE_BOUND, Breach, find_breach
from aftexport.pipeline.traced_model import case_inputs, few_tokens
from aftexport.system.contract import main_input
from aftexport.system.internals.torch_operators import OpOverload

_OPERATOR_SIZES = {"B": 2, "T": 67, "D": 16, "Tmax": 80, "W": 9, "s": 6, "E": 24, "F": 40, "G": 7}
"""Sizes of the operator cases: beyond blocks of 64 and 32, odd, with a window."""
_OTHER_TOKENS = 53
"""The number of keys in operator cases with lengths of their own."""


def model_cases(
    module: nn.Module,
    spec: InputSpec,
    embedding: torch.Tensor | None,
    program: ExportedProgram,
    *,
    batching: bool,
    ranks: Mapping[str, int],
) -> list[Case]:
    """Return cases of lengths, batches, padding and extreme tokens, with the module's outputs.

    The rows of ``embedding`` ``[vocab, D]`` with the largest and smallest norm make the extreme
    cases. Operators over the batch are searched in ``program``.

    Raises:
        TraceError: if the module is random, or if ``batching`` is set and documents in one run
            change each other's outputs.
    """
    reference = TorchEngine(module, spec.names, ranks=ranks)
    _refuse_random(reference, module, spec)
    if batching:
        _refuse_breach(reference, module, spec, embedding, program)
    cases = []
    order = None if embedding is None else _by_norm(embedding[: spec.vocab_size])
    for name, inputs in case_inputs(spec, order).items():
        cases.append(Case(name, "model", inputs, reference.run(inputs)))
    return cases


def _refuse_breach(
    reference: TorchEngine,
    module: nn.Module,
    spec: InputSpec,
    embedding: torch.Tensor | None,
    program: ExportedProgram,
) -> None:
    order = None if embedding is None else _by_norm(embedding)
    outputs = reference.run(few_tokens(spec))
    is_double = all(output.dtype == np.float64 for output in outputs.values())
    bound = DOUBLE_BOUND if is_double else TOLERANCES["fp32"].bound
    breach = find_breach(reference, spec, order, bound=bound)
    if breach is not None and is_double and isinstance(module, ReferenceModule):
        breach = _beyond_casts(breach, reference, module, spec, order)
    if breach is not None:
        raise breach_error(breach, program)


def _beyond_casts(
    breach: Breach,
    reference: TorchEngine,
    module: ReferenceModule,
    spec: InputSpec,
    order: NDArray[np.int64] | None,
) -> Breach | None:
    """Return a breach that the forward's own casts to float32 do not explain, None without one."""
    rounded = TOLERANCES["fp32"].bound
    if not module.casts_to_float32 or breach.error > rounded:
        return breach
    with module.without_casts():
        repeated = find_breach(reference, spec, order, bound=DOUBLE_BOUND)
    return repeated or find_breach(reference, spec, order, bound=rounded)


def _by_norm(table: torch.Tensor) -> NDArray[np.int64]:
    """Return the ids from the smallest row of a table to the largest."""
    order: NDArray[np.int64] = table.detach().norm(dim=1).argsort().numpy()
    return order


def _refuse_random(reference: TorchEngine, module: nn.Module, spec: InputSpec) -> None:
    inputs = few_tokens(spec)

    def run(seed: int) -> dict[str, Array]:
        python, numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
                return reference.run(inputs)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

    def are_equal(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
        # The order of a sum may depend on the threads.
        return all(
            np.allclose(first[name], second[name], rtol=1e-4, atol=1e-4, equal_nan=True)
            for name in first
        )

    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    first = run(0)
    if are_equal(first, run(1)):
        return
    problem = "Expected equal outputs for the same input, got different ones: "
    if are_equal(first, run(0)):
        raise TraceError(
            f"{problem}the forward draws random numbers in evaluation mode too.",
            "Draw random numbers only if self.training, or draw them once in __init__.",
        )
    after = dict(module.named_buffers())
    changed = [n for n, old in before.items() if n in after and not torch.equal(after[n], old)]
    state = f"the buffer {changed[0].removeprefix('module.')}" if changed else "its state"
    raise TraceError(
        f"{problem}the forward changes {state} in evaluation mode too.",
        "Change the state only if self.training, or keep no state between documents.",
    )


def operator_cases(model: onnx.ModelProto, dtype: np.dtype[Any]) -> list[Case]:
    """Return cases of each custom operator of ``model``, with keys and biases of a wide range."""
    cases = []
    for op_type in operators_in(model):
        operator = ALL_OPERATORS[operator_name(op_type)]
        node = next(n for n in model.graph.node if n.op_type == op_type)
        attributes = operator.attributes_of(node)
        ranges = {"ordinary range": 1.0}
        if operator.exponents:
            ranges["logits in +-100"] = 100.0
        for name, magnitude in ranges.items():
            present = operator.present_in(node)
            inputs = _operator_inputs(operator, attributes, present, magnitude, dtype)
            wide = [_wide(inputs.get(n)) for n in operator.inputs]
            outputs = [o.numpy() for o in expected_outputs(operator, *wide, **attributes)]
            joined = join_outputs(
                {
                    output: values
                    for output, values in zip(operator.outputs, outputs, strict=True)
                    if output not in operator.optional or output in present
                }
            )
            cases.append(Case(name, op_type, inputs, {OPERATOR_OUTPUT: joined}))
    return cases


def _wide(array: Array | None) -> torch.Tensor | None:
    if array is None:
        return None
    tensor = torch.from_numpy(array)
    return tensor.double() if tensor.is_floating_point() else tensor


def _operator_inputs(
    operator: OnnxOperator,
    attributes: Mapping[str, object],
    present: Collection[str],
    magnitude: float,
    dtype: np.dtype[Any],
) -> dict[str, Array]:
    heads = int(str(attributes.get("num_heads", 1)))
    sizes = _OPERATOR_SIZES | {"H": heads, "D": _OPERATOR_SIZES["D"] * heads}
    sizes["S"] = _OTHER_TOKENS if "key_lengths" in present else sizes["T"]
    sizes |= operator.sizes(attributes)
    nonnegative = operator.nonnegative(attributes)
    generator = np.random.default_rng(0)
    inputs: dict[str, Array] = {}
    for name, shape in zip(operator.inputs, operator.shapes, strict=True):
        if name in operator.optional and name not in present:
            continue
        size = [sizes[axis] for axis in shape.split()]
        if name in INTEGER_INPUTS:
            tokens = sizes["S" if name == "key_lengths" else "T"]
            inputs[name] = np.array([tokens, tokens // 3][-size[0] :], np.int64)
            continue
        reach = magnitude if name in operator.exponents else 1.0
        low, high = operator.ranges.get(name, (-reach, reach))
        lows = np.full(size[-1:], low)
        if name in nonnegative:
            lows[nonnegative[name] :] = max(low, 0.0)
        inputs[name] = generator.uniform(lows, high, size).astype(dtype)
    return inputs


_BOUND = 1e-3
"""Bound of a difference: the program may be in float16, and a batch sums in another order."""


_LAYOUT = frozenset({"reshape", "flatten", "unflatten", "contiguous", "clone", "cat", "pad",
                     "constant_pad_nd", "to", "_to_copy", "stack", "index_select",
                     "sym_size"})  # fmt: skip


def breach_error(breach: Breach, program: ExportedProgram) -> TraceError:
    """Return the error that names the operator through which documents change each other."""
    operator = _first_divergence(program, breach.inputs, breach.row, breach.alone())
    if breach.is_of_padding:
        named = f": {operator} is the first whose result differs" if operator else ""
        return TraceError(
            "Expected scores that do not depend on padding, got a difference of "
            f"{breach.error:.1e} if a longer document shares the run{named}.",
            "Mask the tokens from lengths on, or add --no-batching, which runs each document "
            "separately.",
        )
    named = f": {operator} computes over the batch" if operator else ""
    return TraceError(
        "Expected scores that do not depend on the other documents of a batch, got a difference "
        f"of {breach.error:.1e}{named}.",
        "Compute each document separately, or add --no-batching, which runs each document "
        "separately.",
    )


def _first_divergence(
    program: ExportedProgram, batch: Mapping[str, Array], row: int, alone: Mapping[str, Array]
) -> str:
    """Return the operator and the user's line at which a document differs; empty if none does.

    This is the first operator whose result has a batch axis and differs, or the one that
    computed its operand over the whole batch, as a maximum does.
    """
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    main = main_input(batch)
    shape = next(n for n in module.graph.nodes if n.name == main).meta["val"].shape
    tokens = alone[main].shape[1]
    together, single = _results(module, batch), _results(module, alone)
    differing: dict[fx.Node, bool] = {}  # to whether the result has a batch axis
    compared = set[fx.Node]()
    for node in module.graph.nodes:
        if node not in together:
            continue
        parts = (
            _part(node, together[node], shape, row, tokens),
            _part(node, single[node], shape, 0, tokens),
        )
        if parts[0] is None or parts[1] is None:
            continue
        compared.add(node)
        if _is_different(parts[0], parts[1]):
            differing[node] = any(_is_axis(n, shape[0]) for n in node.meta["val"].shape)
    node = next((n for n, has_batch in differing.items() if has_batch), None)
    while node is not None:
        over_batch = [n for n in node.all_input_nodes if differing.get(n) is False]
        if not over_batch:
            return _name(_mixing(node, compared))
        node = over_batch[0]
    return ""


def _mixing(node: fx.Node, compared: Collection[fx.Node]) -> fx.Node:
    """Return the nearest operator that mixes entries, among those that could not be compared.

    A tensor of windows has a different number of windows in each run. So the first visible
    difference is at the operator that joins the windows.
    """
    waiting, seen = [node], {node}
    while waiting:
        candidate = waiting.pop(0)
        if not _is_elementwise_or_layout(candidate):
            return candidate
        before = [n for n in candidate.all_input_nodes if n not in seen and n not in compared]
        waiting += [n for n in before if n.op == "call_function"]
        seen.update(before)
    return node


def _is_elementwise_or_layout(node: fx.Node) -> bool:
    """Return whether an operator is elementwise, or only moves numbers."""
    if not isinstance(node.target, OpOverload):
        return True
    own = node.target._schema.name.rpartition("::")[2]
    return torch.Tag.pointwise in node.target.tags or node.target.is_view or own in _LAYOUT


class _Recorder(fx.Interpreter):
    """An interpreter that keeps each operator's result."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.results: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor):
            self.results[n] = result.clone()  # a later operator may write to the tensor
        return result


def _results(module: fx.GraphModule, inputs: Mapping[str, Array]) -> dict[fx.Node, Tensor]:
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    recorder = _Recorder(module)
    with torch.inference_mode():
        recorder.run(*(torch.from_numpy(np.array(inputs[name])) for name in names))
    return recorder.results


def _part(node: fx.Node, result: Tensor, shape: torch.Size, row: int, tokens: int) -> Tensor | None:
    """Return the document's part of a result; None if an axis is neither batch nor tokens."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    for axis, size in enumerate(value.shape):
        if _is_axis(size, shape[0]):
            result = result.narrow(axis, row, 1)
        elif _is_axis(size, shape[1]):
            result = result.narrow(axis, 0, tokens)
        elif isinstance(size, torch.SymInt):
            return None
    return result


def _is_axis(size: int | torch.SymInt, axis: int | torch.SymInt) -> bool:
    """Return whether a dynamic size is that of an axis of the inputs."""
    # The operator == raises an error for a size that depends on values, as that of x[ids > 10].
    return isinstance(size, torch.SymInt) and str(size) == str(axis)


def _is_different(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    pair = (one.double().numpy(), other.double().numpy())
    if np.array_equal(*pair, equal_nan=True):  # masked logits may be infinite
        return False
    finite = np.isfinite(pair[0]) & np.isfinite(pair[1])
    return not (
        np.array_equal(pair[0][~finite], pair[1][~finite], equal_nan=True)
        and Differences.between(pair[0][finite], pair[1][finite]).error <= _BOUND
    )


def _name(node: fx.Node) -> str:
    """Return an operator's name with the user's line, as in ``max (model.py, line 9)``."""
    operator = str(node.meta.get("torch_fn", ("", node.target))[1]).rpartition(".")[2]
    line = last_own_line(node.meta)
    return f"{operator} ({line})" if line else operator
