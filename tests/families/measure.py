"""The export of one family, its comparison with transformers, and what its bundle has."""

import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console

from aftexport.bundle.bundle import PARITY, Bundle
from aftexport.chunked.incremental_model import append_problem
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import AftexportError, TraceError
from aftexport.pipeline.export import export
from aftexport.system.contract import MAX_TOKENS
from families.record import Row
from families.table import BY_TITLE, VOCABULARY, Family

BATCHES = ((1, 2), (128, 127), (129, 2, 1), (513, 128, 129))
"""The lengths of the documents of a batch."""
LONG = 4_097
PRECISIONS = ("bf16", "int8")
_FIRST_WORD = 5
"""The first token id that stands for no special token."""


def measure_alone(title: str, precisions: Sequence[str]) -> Row:
    """Return the row of a family, from a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(BY_TITLE[title], Path(folder), precisions=precisions)


def measure(family: Family, folder: Path, *, precisions: Sequence[str] = ()) -> Row:
    """Export a family from a folder of its own, and return its row of the record."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = folder / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about the random models
        family.save(source)
        row: Row = {"family": family.title, "class": family.class_name}
        try:
            bundle = export(source, out=folder / "bundle", console=Console(quiet=True))
        except TraceError as error:
            return row | {"refused": error.problem, "remedy": error.remedy}
        row |= facts(bundle) | {"error": error_of(family, source, bundle)}
        for precision in precisions:
            row[precision] = _precision(source, folder / precision, precision)
    return row


def facts(bundle: Bundle) -> Row:
    """Return what the manifest of a bundle says."""
    manifest = bundle.manifest
    parity = json.loads((bundle.path / PARITY).read_text("utf-8"))
    return {
        "operators": dict(sorted(manifest.operators.items())),
        "parity": max(case["error"] for case in parity["cases"] if case["subject"] == "model"),
        "max_tokens": manifest.max_tokens or MAX_TOKENS,
        "not_longer_than_memory": manifest.whole_only,
        "not_append": append_problem(bundle),
        "not_evidence": manifest.no_evidence
        or ("; ".join(manifest.refused_evidence.values()) if not manifest.evidence_heads else None),
    }


def error_of(family: Family, source: Path, bundle: Bundle) -> float:
    """Return the largest error of batches of mixed lengths, by transformers in float64.

    The library runs each document by itself, without padding.
    """
    engine = OnnxRuntimeEngine(bundle.model_path)
    library = getattr(transformers, family.class_name).from_pretrained(
        source, experts_implementation="eager"
    )
    library = library.eval().double()
    error = 0.0
    for batch in _batches(bundle.manifest.max_tokens or MAX_TOKENS):
        lengths = np.array(batch, np.int64)
        ids = _documents(lengths, library.config)
        inputs = {"input_ids": ids, "lengths": lengths}
        given = next(iter(engine.run({n: inputs[n] for n in engine.input_names}).values()))
        for row, tokens in zip(range(len(batch)), batch, strict=True):
            expected = _library_output(library, torch.from_numpy(ids[row : row + 1, :tokens]))
            own = given[row, :tokens] if expected.ndim == 2 else given[row]
            scale = max(1.0, float(np.abs(expected).max()))
            error = max(error, float(np.abs(own - expected).max()) / scale)
    return error


def _batches(max_tokens: int) -> Iterator[tuple[int, ...]]:
    for batch in (*BATCHES, (LONG,)):
        if max(batch) <= max_tokens:
            yield batch


def _documents(lengths: NDArray[np.int64], config: Any) -> NDArray[np.int64]:
    """Return random documents of some lengths, each with the end token where the class reads it."""
    random = np.random.default_rng(int(lengths.sum()))
    ids = random.integers(_FIRST_WORD, VOCABULARY, (len(lengths), lengths.max()))
    if config.eos_token_id is not None and config.is_encoder_decoder:
        ids[np.arange(len(lengths)), lengths - 1] = config.eos_token_id
    return ids


def _library_output(library: Any, ids: torch.Tensor) -> NDArray[Any]:
    """Return the output for one document, without the axis of the batch."""
    # The library changes the attention of BigBird for good after a short document.
    if hasattr(library.base_model, "set_attention_type"):
        library.base_model.set_attention_type(library.config.attention_type)
    with torch.inference_mode():
        result = library(input_ids=ids, attention_mask=torch.ones_like(ids))
    output = result["logits"] if "logits" in result else result["last_hidden_state"]
    array: NDArray[Any] = output[0].numpy()
    return array


def _precision(source: Path, out: Path, precision: str) -> Row:
    """Return the precision of a bundle, or the reason why the family has none."""
    try:
        bundle = export(
            source, out=out, precision=precision, check_parity=False, console=Console(quiet=True)
        )
    except AftexportError as error:
        return {"refused": error.problem}
    return {"title": bundle.manifest.precision_title}
