"""The printed description of a bundle or a model file."""

from collections.abc import Mapping
from typing import Any

import onnx
from rich.console import Console

import aftplugins
from aftexport.bundle.bundle import TOKENIZER, Bundle
from aftexport.bundle.manifest import EnginePlan, Manifest
from aftexport.chunked.incremental_model import append_problem
from aftexport.chunked.runner import MEMORY_BUDGET
from aftexport.deploy.build_engine import find, show_engine, wanted_here
from aftexport.deploy.summary import gaps, stored_report
from aftexport.engines.onnxruntime import operator_paths
from aftexport.engines.peak_memory import predict_memory
from aftexport.engines.product_methods import ProductShares, method_table, product_methods
from aftexport.errors import EngineError
from aftexport.options import ModelSource
from aftexport.parity.calibration import error_table, threshold_sentence
from aftexport.system.console import escape, operator_table, plain_table, size_table
from aftexport.system.contract import MAX_TOKENS

_SHOWN_FEATURES = 8


def show_bundle(bundle: Bundle, console: Console) -> None:
    """Print a bundle's manifest, its files, and the path of each operator on this machine."""
    manifest, report = bundle.manifest, stored_report(bundle)
    rows: dict[str, object] = {"bundle": bundle.path, "from": manifest.source.get("kind")}
    rows |= manifest.config or {}
    rows |= {
        "inputs": ", ".join(manifest.inputs),
        "extra inputs": _extra_inputs(manifest),
        "vocabulary": manifest.vocab_size,
        "features": _features(manifest),
        "tokenizer": _tokenizer(bundle),
        "longest document": _tokens(None if manifest.windows else manifest.max_tokens),
        "windows": _windows(manifest),
        "longer than memory": f"no: {manifest.whole_only}"
        if manifest.whole_only
        else "in chunks"
        if manifest.chunked
        else None,
        "memory": _memory(bundle),
        "append": _append(bundle),
        "batching": None if manifest.batching else "no: each document runs separately",
        "evidence": _evidence(manifest),
        **_heads(manifest),
        "calibration": _calibration(manifest),
        "precision": manifest.precision_title,
        **_products(bundle),
        **_node_precisions(manifest),
        **_position_biases(manifest),
        "opset": manifest.opset,
        "parity": f"{report.verdict}. {report.reason}",
        "made with": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
    }
    _show(console, rows)
    for name, calibration in (manifest.calibration or {}).items():
        console.print(f"Calibration of {escape(name)}:")
        console.print(error_table(calibration))
        if calibration.threshold is not None:
            console.print(threshold_sentence(calibration.threshold), soft_wrap=True)
    console.print(operator_table(manifest.operators, operator_paths(bundle.model_path)))
    if methods := product_methods(bundle.model_path, bundle.manifest.precision):
        console.print(method_table(methods))
    if manifest.operators and (why := aftplugins.missing("onnxruntime")):
        console.print(f"[yellow]{why}[/]")
    if plan := manifest.engine:
        show_engine(plan, bundle.path, console)
        _show_fit(bundle, plan, console)
    console.print(size_table(bundle.files))
    for gap in gaps(bundle):
        console.print(f"[yellow]{escape(gap)}[/]", soft_wrap=True)


def _append(bundle: Bundle) -> str:
    """Return whether tokens can be appended, and the size of a state that grows with them."""
    if reason := append_problem(bundle):
        return f"no: {reason}"
    plan = bundle.manifest.chunked
    if plan is None or not plan.token_state_bytes:
        return "yes"
    kib = plan.token_state_bytes / 1024
    most = min(bundle.manifest.max_tokens or MAX_TOKENS, plan.max_state_tokens)
    return f"yes, with {kib:,.4g} KiB of state for each of at most {most:,} tokens"


def _memory(bundle: Bundle) -> str:
    """Return the predicted memory of some runs, and the longest in the default budget."""
    fused = aftplugins.library("onnxruntime") is not None
    most, plan = bundle.manifest.max_tokens or MAX_TOKENS, bundle.manifest.chunked
    least = plan.token_bytes if plan else 0
    memory = predict_memory(bundle.model_path, most, fused=fused, token_bytes=least)
    longest, budget = memory.longest(MEMORY_BUDGET, most), f"{MEMORY_BUDGET >> 20} MiB"
    sizes = [
        f"at most {budget} for {n:,} tokens, in chunks"
        if plan and n > longest
        else f"{memory.bytes_of(n) / (1 << 20):,.4g} MiB for {n:,} tokens"
        for n in sorted({min(1024, most), min(8192, most), most})
    ]
    return f"{', '.join(sizes)}; {longest:,} tokens fit {budget}{' as a whole' * bool(plan)}"


def _products(bundle: Bundle) -> dict[str, object]:
    """Return the row of the shares of precisions in the products; none if all are in float32."""
    model = onnx.load(bundle.model_path, load_external_data=False)
    shares = ProductShares.of(model, bundle.manifest.max_tokens)
    return {} if shares is None else {"products": shares}


def describe_checkpoint(source: ModelSource) -> dict[str, Any]:
    """Return the kind, the configuration and the size of a model file as JSON-ready values.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    from aftexport.checkpoint import load
    from aftexport.nn import ClassifierConfig

    checkpoint = load(source)
    if checkpoint.program is not None:
        weights = dict(checkpoint.program.state_dict)
    else:
        assert checkpoint.module is not None
        weights = dict(checkpoint.module.state_dict())
    config = getattr(checkpoint.module, "config", None)
    return {
        "model": str(source.path),
        "kind": checkpoint.kind,
        "config": config.to_dict() if isinstance(config, ClassifierConfig) else None,
        "tensors": len(weights),
        "numbers": sum(t.numel() for t in weights.values()),
        "task": checkpoint.task,
        "labels": checkpoint.labels,
        "has_tokenizer": checkpoint.tokenizer is not None,
    }


def show_checkpoint(described: Mapping[str, Any], console: Console) -> None:
    """Print the description of a model file."""
    rows = {
        "model": described["model"],
        "kind": described["kind"],
        **(described["config"] or {}),
        "weights": f"{described['numbers']:,} in {described['tensors']}",
        "task": described["task"] or "not declared",
        "labels": ", ".join(described["labels"] or ()) or "none",
        "tokenizer": "yes" if described["has_tokenizer"] else "none",
    }
    _show(console, rows)


def _show(console: Console, rows: Mapping[str, object]) -> None:
    """Print the rows that have a value."""
    table = plain_table("", "")
    for name, value in rows.items():
        if value is not None:
            # A label or a path may look like markup.
            table.add_row(name, escape(str(value)))
    console.print(table)


def _show_fit(bundle: Bundle, plan: EnginePlan, console: Console) -> None:
    try:
        file = find(bundle, wanted_here(bundle, plan.settings))
        console.print(f"The engine for this machine: {escape(str(file.engine))}", soft_wrap=True)
    except EngineError as error:
        console.print(f"[yellow]No engine for this machine:[/] {escape(error.problem)}")


def _evidence(manifest: Manifest) -> str | None:
    if manifest.no_evidence:
        return f"no: {manifest.no_evidence}"
    if manifest.evidence_heads is None:
        return None
    lines = [f"of each token, for {', '.join(manifest.evidence_heads)}"]
    lines += [f"not for {name}: {why}" for name, why in manifest.refused_evidence.items()]
    return "\n".join(lines)


def _calibration(manifest: Manifest) -> str:
    lines = []
    for name, calibration in (manifest.calibration or {}).items():
        by_length = ", by length" if calibration.depends_on_length else ""
        line = f"{name}: {calibration.method}{by_length}, {calibration.documents:,} documents"
        if (threshold := calibration.threshold) is not None:
            line += f", abstains below {threshold.confidence:.4g} (budget {threshold.budget:g})"
        lines.append(line)
    return "\n".join(lines) or "none"


def _node_precisions(manifest: Manifest) -> dict[str, object]:
    if not manifest.node_precisions:
        return {}
    lines = []
    for node in manifest.node_precisions:
        errors = ", ".join(f"{p} {error:.1e}" for p, error in sorted(node.errors.items()))
        lines.append(f"{node.node}: {node.precision}: {node.reason} (errors: {errors})")
    return {"tolerance": manifest.tolerance, "precision of nodes": "\n".join(lines)}


def _position_biases(manifest: Manifest) -> dict[str, object]:
    lines = []
    for bias in manifest.position_biases:
        span = "unknown" if bias.row_range is None else f"{bias.row_range:.3g}"
        lines.append(f"{bias.node}: range of a row {span}, exponentials in {bias.precision}")
    return {"position biases": "\n".join(lines)} if lines else {}


def _features(manifest: Manifest) -> str | None:
    features = manifest.features
    if features is None:
        return None
    shown = ", ".join(features.names[:_SHOWN_FEATURES])
    more = features.count - _SHOWN_FEATURES
    shown += f" and {more} more" if more > 0 else ""
    is_raw = features.mean is None and features.scale is None
    return f"{shown} ({'not normalized' if is_raw else 'normalized by mean and scale'})"


def _tokenizer(bundle: Bundle) -> str | None:
    if TOKENIZER not in bundle.files:
        return None
    return "yes, for pairs of texts" if bundle.manifest.text_pairs else "yes"


def _extra_inputs(manifest: Manifest) -> str | None:
    lines = []
    for extra in manifest.extra_inputs:
        limit = "" if extra.maximum is None else f", 0 to {extra.maximum}"
        lines.append(f"{extra.name}: {extra.layout}{limit}")
    return "\n".join(lines) or None


def _windows(manifest: Manifest) -> str | None:
    """Return the policy for documents over the model's limit; None for a model without one."""
    policy = manifest.windows
    if policy is None:
        is_limited = manifest.max_tokens is not None and not manifest.text_pairs
        return "no: export with --long-documents windows for longer documents" * is_limited or None
    added = len(policy.prefix) + len(policy.suffix)
    lines = [
        f"{policy.tokens} tokens ({added} of them added by the tokenizer) every {policy.stride}, "
        f"answer by {policy.aggregate or 'the most central window of each token'}"
    ]
    lines += [f"background of {name}: {label}" for name, label in policy.backgrounds.items()]
    return "\n".join(lines)


def _heads(manifest: Manifest) -> dict[str, object]:
    """Return the rows of the only head, or those of several under the names of their outputs."""
    rows: dict[str, object] = {}
    for output, head in manifest.heads.items():
        place = "" if len(manifest.heads) == 1 else f" of {output}"
        rows |= {
            f"task{place}": head.task,
            f"labels{place}": ", ".join(head.names),
            f"scores{place}": head.meaning,
        }
    return rows


def _tokens(count: int | None) -> str:
    return f"{MAX_TOKENS if count is None else count} tokens"
