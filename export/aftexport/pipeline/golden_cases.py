"""The cases of the parity check, with PyTorch's outputs in float64."""

import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn
from torch.export import ExportedProgram

from aftexport.bundle.golden import OPERATOR_OUTPUT, Array, Case, join_outputs
from aftexport.capture.model_spec import InputSpec
from aftexport.capture.reference_module import ReferenceModule
from aftexport.engines.torch import TorchEngine
from aftexport.errors import TraceError
from aftexport.operators.domain import operator_name, operators_in
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.operators.schema import INTEGER_INPUTS, OnnxOperator
from aftexport.operators.torch_ops import expected_outputs
from aftexport.parity import TOLERANCES
from aftexport.pipeline.case_inputs import case_inputs, few_tokens
from aftexport.pipeline.divergence import breach_error
from aftexport.pipeline.independence import DOUBLE_BOUND, Breach, find_breach

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
            joined = join_outputs(dict(zip(operator.outputs, outputs, strict=True)))
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
            inputs[name] = np.array([tokens, tokens // 3], np.int64)
            continue
        reach = magnitude if name in operator.exponents else 1.0
        low, high = operator.ranges.get(name, (-reach, reach))
        lows = np.full(size[-1:], low)
        if name in nonnegative:
            lows[nonnegative[name] :] = max(low, 0.0)
        inputs[name] = generator.uniform(lows, high, size).astype(dtype)
    return inputs
