"""The cases of the parity check, with PyTorch's outputs in float64."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.export import ExportedProgram

from aftexport.bundle.golden import OPERATOR_OUTPUT, Array, Case
from aftexport.bundle.random_tokens import random_tokens
from aftexport.capture.input_spec import InputSpec
from aftexport.engines.torch import TorchEngine
from aftexport.errors import TraceError
from aftexport.operators.domain import operators_in
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.operators.schema import OnnxOperator
from aftexport.operators.torch_ops import expected_outputs
from aftexport.parity import TOLERANCES
from aftexport.pipeline.independence import DOUBLE_BOUND, breach_error, find_breach
from aftexport.pipeline.token_samples import extreme_extras, extreme_features, with_extras

LONG = 4096
_MANY_IDS, _FEW_IDS = 1 << 24, 1 << 10
_OPERATOR_SIZES = {"B": 2, "T": 67, "D": 16, "Tmax": 80, "W": 9, "s": 6, "E": 24, "F": 40, "G": 7}
"""Sizes of the operator cases: beyond blocks of 64 and 32, odd, with a window."""


def model_cases(
    module: nn.Module,
    spec: InputSpec,
    embedding: torch.Tensor | None,
    program: ExportedProgram,
    *,
    batching: bool,
) -> list[Case]:
    """Return cases of lengths, batches, padding and extreme tokens, with the module's outputs.

    Args:
        module: the model as trained, a ``ReferenceModule`` or a captured program.
        spec: the model's inputs.
        embedding: the embedding table, ``[vocab, D]``, whose rows of largest and smallest norm
            make the extreme cases; None leaves these cases out.
        program: the captured module, in which operators over the batch are searched.
        batching: whether documents may share a run.

    Raises:
        TraceError: if the module is random, or if ``batching`` is set and documents in one run
            change each other's outputs.
    """
    reference = TorchEngine(module, spec.names)
    _refuse_random(reference, module, spec)
    if batching:
        _refuse_breach(reference, spec, embedding, program)
    cases = []
    for name, inputs in case_inputs(spec, embedding).items():
        cases.append(Case(name, "model", inputs, reference.run(inputs)))
    return cases


def _refuse_breach(
    reference: TorchEngine,
    spec: InputSpec,
    embedding: torch.Tensor | None,
    program: ExportedProgram,
) -> None:
    outputs = reference.run(_few_tokens(spec))
    is_double = all(output.dtype == np.float64 for output in outputs.values())
    bound = DOUBLE_BOUND if is_double else TOLERANCES["fp32"].bound
    if (breach := find_breach(reference, spec, embedding, bound=bound)) is not None:
        raise breach_error(breach, program)


def _refuse_random(reference: TorchEngine, module: nn.Module, spec: InputSpec) -> None:
    inputs = _few_tokens(spec)

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


def _few_tokens(spec: InputSpec) -> dict[str, Array]:
    count = min(7, spec.vocab_size or 7, spec.max_tokens or 7)
    tokens: Array = np.arange(count)[None]
    if spec.num_features is not None:
        tokens = _random_tokens(spec, np.random.default_rng(2), (1, count))
    inputs = {spec.main: tokens, "lengths": np.array([count])}
    return with_extras(inputs, spec, np.random.default_rng(2))


def _random_tokens(
    spec: InputSpec, generator: np.random.Generator, sizes: tuple[int, ...]
) -> Array:
    return random_tokens(
        generator, sizes, vocab_size=spec.vocab_size, num_features=spec.num_features
    )


def case_inputs(spec: InputSpec, embedding: torch.Tensor | None) -> dict[str, dict[str, Array]]:
    """Return the inputs of the model's cases by name, with lengths also where it takes none."""
    generator = np.random.default_rng(0)
    rows = _FEW_IDS if embedding is None else len(embedding)

    def tokens(*sizes: int) -> Array:
        ids = _random_tokens(spec, generator, sizes)
        if spec.vocab_size is None or spec.vocab_size <= _MANY_IDS:
            return ids
        # A model may clamp ids: then nearly all of so many ids would use the same row.
        few = generator.integers(0, rows, sizes, dtype=np.int64)
        return np.where(generator.random(sizes) < 0.5, ids, few)

    def whole(tokens: Array) -> dict[str, Array]:
        batch, length = tokens.shape[:2]
        return {spec.main: tokens, "lengths": np.full(batch, length, np.int64)}

    def fit(length: int) -> int:
        return min(length, spec.max_tokens or length)

    inputs = {
        "one token": whole(tokens(1, 1)),
        "seven tokens": whole(tokens(2, fit(7))),
        "prime length": whole(tokens(1, fit(509))),
        "long": whole(tokens(1, fit(LONG))),
    }
    if "lengths" in spec.names:
        width = fit(257)
        lengths = np.maximum([width, width // 2, 1, width - 1], 1).astype(np.int64)
        inputs["padded batch"] = {spec.main: tokens(4, width), "lengths": lengths}
    if spec.num_features is not None:
        for name, features in extreme_features(tokens(1, fit(1024))).items():
            inputs[name] = whole(features)
    if embedding is not None:
        order = embedding[: spec.vocab_size].norm(dim=1).argsort().numpy()
        width = fit(1024)
        inputs["largest token repeated"] = whole(np.full((1, width), order[-1], np.int64))
        pattern = np.resize(np.concatenate([order[:8], order[-8:]]), (1, width))
        inputs["extreme tokens"] = whole(pattern.astype(np.int64))
    # In some of these cases, x[:, 1:], x[:, 2:] and x[:, ::2] have no token or one token.
    for number, batch in {"two": 2, "three": 3}.items():
        for length in range(1, fit(3) + 1):
            inputs[f"{number} documents of {length}"] = whole(tokens(batch, length))
    cases = {name: with_extras(case, spec, generator) for name, case in inputs.items()}
    return cases | extreme_extras(cases["seven tokens"], spec)


def operator_cases(model: onnx.ModelProto, dtype: np.dtype[Any]) -> list[Case]:
    """Return cases of each custom operator of ``model``, with keys and biases of a wide range.

    Args:
        model: the exported graph, whose nodes give the attributes.
        dtype: type of the operators, float32 or float16.
    """
    cases = []
    for op_type in operators_in(model):
        operator = ALL_OPERATORS[op_type]
        node = next(n for n in model.graph.node if n.op_type == op_type)
        attributes = operator.attributes_of(node)
        ranges = {"ordinary range": 1.0}
        if operator.exponents:
            ranges["logits in +-100"] = 100.0
        for name, magnitude in ranges.items():
            inputs = _operator_inputs(operator, attributes, magnitude, dtype)
            tensors = [torch.from_numpy(inputs[n]) for n in operator.inputs]
            wide = [t.double() if t.is_floating_point() else t for t in tensors]
            expected = torch.cat(expected_outputs(operator, *wide, **attributes), dim=-1)
            cases.append(Case(name, op_type, inputs, {OPERATOR_OUTPUT: expected.numpy()}))
    return cases


def _operator_inputs(
    operator: OnnxOperator,
    attributes: Mapping[str, object],
    magnitude: float,
    dtype: np.dtype[Any],
) -> dict[str, Array]:
    heads = int(str(attributes.get("num_heads", 1)))
    sizes = _OPERATOR_SIZES | {"H": heads, "D": _OPERATOR_SIZES["D"] * heads}
    generator = np.random.default_rng(0)
    inputs: dict[str, Array] = {}
    for name, shape in zip(operator.inputs, operator.shapes, strict=True):
        size = [sizes[axis] for axis in shape.split()]
        if name == "lengths":
            inputs[name] = np.array([sizes["T"], sizes["T"] // 3], np.int64)
            continue
        reach = magnitude if name in operator.exponents else 1.0
        inputs[name] = generator.uniform(-reach, reach, size).astype(dtype)
    return inputs
