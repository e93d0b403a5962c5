"""Runs of cases in a bundle's engines."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.bundle.golden import IN_WINDOWS, OPERATOR_OUTPUT, Array, Case, join_outputs
from aftexport.chunked.runner import ChunkedModel
from aftexport.chunked.windows import WindowedModel
from aftexport.engines import Engine
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, Provider
from aftexport.engines.onnxruntime.sessions import padded_choices
from aftexport.errors import EngineError
from aftexport.extra_inputs import values_of
from aftexport.operators.domain import DOMAIN, VERSION, opset_of
from aftexport.operators.schema import LOG_SUM_OUTPUT
from aftexport.parity import Comparison, compare
from aftexport.system.contract import EVIDENCE, EXPLAINED, largest

_OF_SHAPES = re.compile(r"dimension|\bdim\b|reshaped|data bounds", re.IGNORECASE)
"""Words of the runtime's errors about inputs of a node whose sizes do not fit."""
_OF_MEMORY = re.compile("allocat|bad_alloc|out of memory", re.IGNORECASE)


def verify(
    bundle: Bundle,
    *,
    cases: Sequence[Case] | None = None,
    engine: Engine | None = None,  # engine with the bundle's model; None to load it for this call
    fused: bool = True,
    provider: Provider = "cpu",
) -> list[Comparison]:
    """Compare the bundle's model, and each of its operators separately, with PyTorch's outputs."""
    cases = bundle.golden() if cases is None else cases
    engine = engine or OnnxRuntimeEngine(bundle.model_path, fused=fused, provider=provider)
    model = onnx.load(bundle.model_path, load_external_data=False)
    results = []
    for case in cases:
        if case.subject == IN_WINDOWS:
            results += _in_windows(bundle, case, engine)
            continue
        if case.subject == "model":
            choice = _choice(bundle) if engine.takes_choice else ()
            outputs = _outputs(engine, case, choice)
            results += _evidence(bundle, case, outputs)
        else:
            single = operator_model(model, case).SerializeToString()
            parts = OnnxRuntimeEngine(single, fused=fused, provider=provider).run(case.inputs)
            outputs = {OPERATOR_OUTPUT: join_outputs(parts)}
        results += _compare(bundle, case, outputs)
        if case.subject == "model" and bundle.manifest.chunked:
            results += _in_chunks(bundle, case, fused, provider)
    return results


def _choice(bundle: Bundle) -> Sequence[int]:
    """Return the numbers of the largest logit of each head with evidence."""
    return [largest(place) for place in range(len(bundle.manifest.evidence_heads or ()))]


def _outputs(engine: Engine, case: Case, choice: Sequence[int]) -> Mapping[str, Array]:
    chosen = {EXPLAINED: padded_choices([choice])} if choice else {}
    try:
        return engine.run({**case.inputs, **chosen})
    except EngineError as error:
        if not _OF_SHAPES.search(error.problem) or _OF_MEMORY.search(error.problem):
            raise
        shapes = " and ".join(f"{name} {list(x.shape)}" for name, x in case.inputs.items())
        raise EngineError(
            f"The exported graph fails on {shapes}, which PyTorch accepts. {error.problem}",
            "Remove operations from forward that behave differently for such sizes, such as "
            "squeeze() for sizes of 1, and export again.",
        ) from error


def _compare(bundle: Bundle, case: Case, outputs: Mapping[str, Array]) -> list[Comparison]:
    manifest = bundle.manifest
    return compare(
        case, outputs, manifest.precision, bound=_bound(bundle, case), heads=manifest.heads
    )


def _evidence(bundle: Bundle, case: Case, outputs: Mapping[str, Array]) -> list[Comparison]:
    """Compare the logits, with the largest of each head replaced by its evidence and offset."""
    manifest, results = bundle.manifest, []
    if manifest.evidence_heads is None:
        return []
    documents, tokens = case.shape[:2]
    totals = outputs[EVIDENCE].reshape(documents, -1, tokens).sum(2, dtype=np.float64)
    # An engine that takes no choice explains the first head only.
    for (name, offsets), total in zip(manifest.evidence_heads.items(), totals.T, strict=False):
        logits = outputs[name].astype(np.float64)
        chosen = logits.argmax(1)[:, None]
        np.put_along_axis(logits, chosen, total[:, None] + np.array(offsets)[chosen], 1)
        # The comparison counts units in the last place of the type in which logits are computed.
        found = {name: logits.astype(outputs[name].dtype)}
        explained = replace(case, outputs={name: case.outputs[name]})
        results += _compare(bundle, explained, found)
    return [replace(result, subject="evidence") for result in results]


def _in_chunks(bundle: Bundle, case: Case, fused: bool, provider: Provider) -> list[Comparison]:
    """Compare the case in at least three chunks; empty unless it is one document."""
    tokens = case.inputs[bundle.manifest.main_input]
    plan = bundle.manifest.chunked
    if plan is None or len(tokens) > 1:
        return []
    model = ChunkedModel(
        bundle.path / CHUNKED,
        plan,
        fused=fused,
        provider=provider,
        chunk_tokens=max(1, tokens.shape[1] // 3),
    )
    extras = values_of(bundle.manifest.extra_inputs, case.inputs, 0, tokens.shape[1])
    evidence = plan.evidence and (_choice(bundle) or True)
    outputs = model.run(tokens[0], extras, evidence=evidence)
    results = [
        *_compare(bundle, case, outputs),
        *(_evidence(bundle, case, outputs) if plan.evidence else ()),
    ]
    return [replace(one, subject=f"{one.subject} in chunks") for one in results]


def _in_windows(bundle: Bundle, case: Case, engine: Engine) -> list[Comparison]:
    """Compare the answer of all windows of a document with that of PyTorch's outputs for them."""
    manifest = bundle.manifest
    tokens = case.inputs[manifest.main_input][0]
    extras = values_of(manifest.extra_inputs, case.inputs, 0, len(tokens))
    # The memory budget of a server may fit no more than one window in a run.
    model = WindowedModel(manifest, engine, run_windows=1)
    whole = replace(case, subject="model", outputs=model.aggregated(tokens, case.outputs))
    # The comparison counts units in the last place of the type in which logits are computed.
    found = {n: x.astype(np.float32) for n, x in model.run(tokens, extras).items()}
    compared = _compare(bundle, whole, found)
    return [replace(result, subject=IN_WINDOWS) for result in compared]


def verify_engine(
    bundle: Bundle,
    engine: Engine,
    *,
    cases: Sequence[Case] | None = None,
    min_tokens: int,  # range of lengths; cases outside it are left out
    max_tokens: int,
) -> list[Comparison]:
    """Compare another engine with PyTorch's outputs, on the model's cases."""
    results = []
    for case in bundle.golden() if cases is None else cases:
        if case.subject == "model" and min_tokens <= case.shape[1] <= max_tokens:
            results += _compare(bundle, case, engine.run(case.inputs))
    if not results:
        raise EngineError(
            f"Expected a case with {min_tokens} to {max_tokens} tokens for the engine, got none.",
            "Export with another --min-length or --max-length.",
        )
    return results


def _bound(bundle: Bundle, case: Case) -> float | None:
    """Return the bundle's own tolerance for cases of the model; None for that of the table."""
    return bundle.manifest.tolerance if case.subject == "model" else None


def operator_model(model: onnx.ModelProto, case: Case) -> onnx.ModelProto:
    """Return a model of one node of ``model``, the operator of ``case``, with its portable body."""
    node = next((n for n in model.graph.node if n.op_type == case.subject), None)
    function = next((f for f in model.functions if f.name == case.subject), None)
    if node is None or function is None:
        raise EngineError(
            f"The model has no operator {case.subject} with a fallback.",
            "Export the model again.",
        )
    single = onnx.NodeProto()
    single.CopyFrom(node)
    del single.input[:], single.output[:]
    single.input.extend(name if name in case.inputs else "" for name in function.input)
    single.output.extend(function.output)
    elements = {
        name: onnx.helper.np_dtype_to_tensor_dtype(tensor.dtype)
        for name, tensor in case.inputs.items()
    }
    inputs = [
        onnx.helper.make_tensor_value_info(name, elements[name], case.inputs[name].shape)
        for name in function.input
        if name in case.inputs
    ]
    floats = elements[function.input[0]]
    types = {LOG_SUM_OUTPUT: onnx.TensorProto.FLOAT}
    outputs = [
        onnx.helper.make_tensor_value_info(n, types.get(n, floats), None) for n in function.output
    ]
    return onnx.helper.make_model(
        onnx.helper.make_graph([single], "operator", inputs, outputs),
        functions=[function],
        opset_imports=[
            onnx.helper.make_opsetid("", opset_of(model)),
            onnx.helper.make_opsetid(DOMAIN, VERSION),
        ],
        ir_version=model.ir_version,
    )
