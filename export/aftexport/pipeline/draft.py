"""The files of a bundle that do not depend on the result of its parity check."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from aftexport._version import __version__
from aftexport.bundle.bundle import CHUNKED, TOKENIZER, Bundle, write_golden
from aftexport.bundle.features import Features
from aftexport.bundle.manifest import Manifest
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.token_flow import NotChunkable
from aftexport.engines import onnxruntime as ort
from aftexport.heads import Head
from aftexport.lowering.evidence import Explainable
from aftexport.lowering.position_bias import position_biases
from aftexport.operators.domain import VERSION as OPERATOR_VERSION
from aftexport.operators.domain import operators_in
from aftexport.pipeline.auto_precision import Advice
from aftexport.pipeline.options import ExportOptions
from aftexport.pipeline.source import OnnxSource
from aftexport.pipeline.traced_model import TracedModel
from aftexport.system.contract import DEFAULT_OPSET
from aftexport.system.files import sha256
from aftexport.system.onnx_files import write_model
from aftexport.system.process import give_back

if TYPE_CHECKING:  # a bundle of an ONNX file needs no torch
    from aftexport.checkpoint import Checkpoint


def write_draft(
    folder: Path, manifest: Manifest, traced: TracedModel, tokenizer: str | None, *, chunks: bool
) -> Bundle:
    """Write model, golden cases, tokenizer and, if the model allows it, the chunked graphs.

    Args:
        folder: an empty folder.
        manifest: the manifest so far.
        traced: the model.
        tokenizer: the text of a tokenizer.json; None for no tokenizer.
        chunks: whether graphs for documents longer than memory are tried.

    Returns:
        The bundle; its manifest states whether documents run in chunks, and is not written yet.
    """
    if chunks:
        manifest = _write_chunks(folder / CHUNKED, traced, manifest)
    write_model(folder, traced.model)
    write_golden(folder, list(traced.cases))
    if tokenizer is not None:
        (folder / TOKENIZER).write_text(tokenizer, "utf-8")
    return Bundle(folder, manifest, {}, "")


def make_manifest(
    checkpoint: "Checkpoint | OnnxSource",
    traced: TracedModel,
    heads: Mapping[str, Head],
    options: ExportOptions,
    advice: Advice | None,
    *,
    features: Features | None,
) -> Manifest:
    """Return the manifest of a model in ONNX, without engine and chunks.

    Args:
        checkpoint: the model as it was read.
        traced: the model in ONNX.
        heads: each head by the name of its output.
        options: the options of the export.
        advice: the precision of each node, with ``--precision auto``.
        features: the features of a token; None for a model of token ids.
    """
    manifest = Manifest.model_validate(
        {
            "source": _source(checkpoint, options.source_file),
            "config": _config(checkpoint),
            "inputs": traced.spec.names,
            "vocab_size": traced.spec.vocab_size,
            "features": features,
            "max_tokens": traced.spec.max_tokens,
            "extra_inputs": traced.spec.extras,
            "batching": options.batching,
            "heads": heads,
            "precision": traced.precision,
            "reference": traced.reference,
            "opset": options.opset or DEFAULT_OPSET,
            "operators": operators_in(traced.model),
            "position_biases": position_biases(traced.model),
            "operator_version": OPERATOR_VERSION,
            "hardware": "any",
            **_evidence(traced.evidence),
            "versions": _versions(with_torch=not traced.is_of_onnx),
        }
    )
    if advice is None:
        return manifest
    changes = {
        "precision": advice.coarsest,
        "tolerance": advice.tolerance,
        "node_precisions": advice.nodes,
    }
    return manifest.model_copy(update=changes)


def _source(checkpoint: "Checkpoint | OnnxSource", path: Path | None) -> dict[str, str | None]:
    digest = sha256(path) if path is not None and path.is_file() else None
    return {"kind": checkpoint.kind, "sha256": digest}


def _config(checkpoint: "Checkpoint | OnnxSource") -> dict[str, Any] | None:
    if checkpoint.module is None:
        return None
    from aftexport.nn import DocumentClassifier, MultiHeadClassifier  # imports torch

    if isinstance(checkpoint.module, DocumentClassifier | MultiHeadClassifier):
        return checkpoint.module.config.to_dict()
    return None


def _evidence(evidence: Explainable | str) -> dict[str, Any]:
    if isinstance(evidence, str):
        return {"no_evidence": evidence}
    return {"evidence_heads": evidence.offsets, "refused_evidence": evidence.refused}


def _versions(*, with_torch: bool) -> dict[str, str]:
    return {
        "aftexport": __version__,
        "onnx": onnx.__version__,
        "onnxruntime": ort.VERSION,
        "python": platform.python_version(),
        **({"onnxscript": version("onnxscript"), "torch": version("torch")} if with_torch else {}),
    }


def _write_chunks(path: Path, traced: TracedModel, manifest: Manifest) -> Manifest:
    try:
        plan = write_chunked(
            path,
            traced.lowered,
            precision=traced.precision,
            explained=tuple(manifest.evidence_heads or ()),
        )
        give_back()  # release the memory of the chunked graphs
    except NotChunkable as reason:
        path.unlink(missing_ok=True)
        return manifest.model_copy(update={"whole_only": str(reason)})
    return manifest.model_copy(update={"chunked": plan})
