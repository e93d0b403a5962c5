"""The export of a model file to a verified bundle: the steps, and the content of the folder."""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from rich.console import Console
from rich.progress import Progress as Bar

from aftexport._version import __version__
from aftexport.bundle.bundle import (
    CHUNKED,
    PARITY,
    PARITY_PAGE,
    TOKENIZER,
    Bundle,
    write_golden,
    write_manifest,
)
from aftexport.bundle.features import Features
from aftexport.bundle.golden import Case
from aftexport.bundle.manifest import ONNX_FILE, Manifest
from aftexport.bundle.output_path import check_output_path
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.token_flow import NotChunkable
from aftexport.deploy.build_engine import build_into
from aftexport.engines import onnxruntime as ort
from aftexport.engines.product_methods import ProductShares, forced_methods, usable_methods
from aftexport.engines.tensorrt.settings import BuildSettings, build_settings
from aftexport.heads import Head
from aftexport.lowering.evidence import Explainable
from aftexport.lowering.position_bias import position_biases
from aftexport.operators.domain import VERSION as OPERATOR_VERSION
from aftexport.operators.domain import operators_in
from aftexport.options import ExportOptions, ModelSource, StrPath, as_source, with_options
from aftexport.parity import TOLERANCES, Comparison, worst
from aftexport.parity.page import write_page
from aftexport.parity.run_cases import verify
from aftexport.parity.stock_session import verify_stock
from aftexport.pipeline.auto_precision import Advice, advise, measurements
from aftexport.pipeline.head_choice import HeadOptions, check_outputs, check_rows, choose_heads
from aftexport.pipeline.onnx_trace import trace_onnx
from aftexport.pipeline.request import (
    Request,
    check_pair_types,
    check_precision,
    checked_request,
    tokenizer_text,
    with_pairs,
)
from aftexport.pipeline.results import (
    engine_record,
    export_notes,
    parity_error,
    parity_record,
    parity_report,
    print_place,
    print_summary,
    print_tables,
)
from aftexport.pipeline.traced_model import TracedModel
from aftexport.pipeline.value_ranges import MAX_FLOAT16, beyond_error
from aftexport.pipeline.windows import layout_of, policy_of
from aftexport.recognition.result import show_findings, show_recognition
from aftexport.system.console import Progress, escape, stage
from aftexport.system.contract import DEFAULT_OPSET
from aftexport.system.files import aside_folder, move_into_place, sha256, write_json
from aftexport.system.onnx_files import WeightFile, write_model
from aftexport.system.process import give_back

if TYPE_CHECKING:
    from aftexport.checkpoint import Checkpoint


def export(
    model: StrPath | Callable[..., Any] | ModelSource | None = None,
    options: ExportOptions | None = None,
    *,
    console: Console | None = None,
    verbose: bool = False,
    **changes: Any,
) -> Bundle:
    """Export a model to a bundle and compare it with PyTorch.

    Args:
        model: an ``nn.Module``, which is not changed; its class or another callable without
            arguments that returns one; any of the seven kinds of model file that ``aftexport.load``
            reads; an ONNX file; or a whole source. None for the module of a factory.
        options: the options; all defaults by default.
        console: console for the progress and the summary; standard output by default, and
            ``Console(quiet=True)`` prints nothing.
        verbose: print each step, each comparison and the size of each file too.
        changes: fields of ``ExportOptions`` and ``ModelSource`` by name, such as
            ``precision="int8"`` or ``factory="package.module:callable"``.

    Raises:
        AftexportError: if the export fails. CheckpointError, UsageError, TraceError and
            EngineError write nothing. ParityError keeps the bundle at ``<out>.failed``; with
            auto, it writes nothing if fp32 is outside ``tolerance`` too.
        TypeError: if an option has an unknown name.
    """
    source, options = with_options(
        "export", changes, as_source(model), ExportOptions() if options is None else options
    )
    console = console or Console(emoji=False)
    bundle = run_export(checked_request(source, options), console, is_verbose=verbose)
    print_place(console, bundle)
    return bundle


def run_export(request: Request, console: Console, *, is_verbose: bool) -> Bundle:
    """Run the steps of an export, see ``export``, without a line on the place of the bundle."""
    return _Export(request, console, is_verbose=is_verbose).run()


_HINT = " --long-documents windows reads longer ones in windows."
Stage = Callable[[str], AbstractContextManager[Progress]]
"""A step of an export with its title, see ``system.console.stage``."""


class _Export:
    """An export, with a method for each step in the order of ``run``."""

    def __init__(self, request: Request, console: Console, *, is_verbose: bool) -> None:
        self._request = request
        self._options = request.options
        self._console = console
        self._is_verbose = is_verbose
        self._stage: Stage = partial(stage, console, is_reported=is_verbose)

    def run(self) -> Bundle:
        checkpoint = read_source(self._request, self._stage)
        tokenizer = tokenizer_text(checkpoint.tokenizer, self._options.tokenizer)
        if not isinstance(checkpoint, OnnxSource):
            self._request = with_pairs(self._request, checkpoint, tokenizer)
            self._options = self._request.options
        self._check_first(checkpoint, tokenizer)
        traced = trace_source(checkpoint, self._request, tokenizer, self._stage)
        if self._options.text_pairs:
            check_pair_types(traced.spec, tokenizer)
        heads = self._heads(checkpoint, traced)
        check_precision(traced.model, self._request)
        advice = self._advice(traced, heads)
        settings = self._engine_settings(traced)
        products = ProductShares.of(traced.model, traced.spec.max_tokens)
        notes = self._print_notes(traced, products)
        if traced.beyond is not None:
            raise beyond_error(traced.beyond, traced.model, tokenizer, is_of_onnx=traced.is_of_onnx)
        features = self._request.described
        if features is None and (count := traced.spec.num_features) is not None:
            features = Features.of_count(count)
        with aside_folder(self._request.out) as folder:
            with self._stage("Writing the bundle"):
                manifest = make_manifest(
                    checkpoint, traced, heads, self._request, advice, features=features
                )
                if self._options.long_documents is not None:
                    layout = layout_of(self._options, traced.spec, tokenizer)
                    windows = policy_of(self._options, heads, layout)
                    manifest = manifest.model_copy(update={"windows": windows})
                chunks = self._options.to == "onnx"
                draft = write_draft(folder, manifest, traced, tokenizer, chunks=chunks)
            cases, long_case = traced.cases, traced.long_case
            del checkpoint, traced  # three copies of the weights; an engine needs the memory next
            give_back()
            paths = ort.operator_paths(draft.model_path)
            results = self._verify(draft, cases, long_case)
            record = parity_record(
                results, draft.manifest.reference, checked=self._options.check_parity
            )
            if products is not None:
                record["products"] = asdict(products)
            manifest = draft.manifest
            if settings is not None and all(r.passed for r in results):
                manifest, compared = self._build_engine(draft, settings)
                results += compared
                record["engine"] = engine_record(manifest, compared)
            write_json(folder / PARITY, record)
            write_page(folder / PARITY_PAGE, parity_report(manifest, results, cases, notes))
            write_manifest(folder, manifest)
            passed = all(r.passed for r in results)
            self._publish(folder, passed=passed)
        return self._finish(paths, results, passed=passed)

    def _advice(self, traced: TracedModel, heads: Mapping[str, Head]) -> Advice | None:
        """Return the precision of each node, with ``--precision auto``."""
        if self._options.precision != "auto":
            return None
        asked = self._options.tolerance
        bound = TOLERANCES["fp32"].bound if asked is None else asked
        with Bar(console=self._console, transient=True) as bar:
            task = bar.add_task("Measuring each node", total=measurements(traced.model))
            advance = partial(bar.advance, task)
            return advise(traced.model, traced.cases, bound, advance, heads=heads)

    def _check_first(self, checkpoint: "Checkpoint | OnnxSource", tokenizer: str | None) -> None:
        """Check the tokenizer and the heads on two runs in PyTorch, before the long capture."""
        if isinstance(checkpoint, OnnxSource):
            return
        from aftexport.pipeline.trace import first_outputs  # imports torch

        outputs = first_outputs(checkpoint, self._request, tokenizer)
        if outputs is not None:
            heads = choose_heads(outputs, self._declared_heads(checkpoint))
            if self._options.long_documents is not None:
                policy_of(self._options, heads)

    def _declared_heads(self, checkpoint: "Checkpoint | OnnxSource") -> HeadOptions:
        options = self._options
        return HeadOptions(
            task=options.task,
            labels=options.labels,
            head_file=None if options.heads is None else Path(options.heads),
            own_task=checkpoint.task,
            own_labels=checkpoint.labels,
            own_heads=checkpoint.heads,
        )

    def _heads(self, checkpoint: "Checkpoint | OnnxSource", traced: TracedModel) -> dict[str, Head]:
        """Return each head by the name of its output."""
        outputs, declared = traced.cases[0].outputs, self._declared_heads(checkpoint)
        check_rows([case for case in traced.cases if case.subject == "model"])
        names = (value.name for value in traced.lowered.graph.output)
        heads = choose_heads({name: outputs[name] for name in names}, declared)
        check_outputs(traced.lowered, heads)
        return heads

    def _engine_settings(self, traced: TracedModel) -> BuildSettings | None:
        """Return the settings of the TensorRT engine; None without an engine."""
        options = self._options
        if options.to == "onnx":
            return None
        return build_settings(
            options.to,
            options.engine,
            precision=traced.precision,
            max_tokens=traced.spec.max_tokens,
        )

    def _print_notes(self, traced: TracedModel, products: ProductShares | None) -> list[str]:
        """Print and return the notes on unexpected properties of the export."""
        longest = traced.spec.max_tokens
        # A note gives the reason for the bound of 16 bits.
        if self._options.max_length is None and longest not in (None, MAX_FLOAT16):
            self._console.print(
                f"[yellow]Documents may have at most {longest} tokens, the limit of the model."
                f"{_HINT * (not self._options.text_pairs)}[/]"
                if self._options.long_documents is None
                else f"[yellow]Documents of over {longest} tokens, the limit of the model, are "
                "read in windows.[/]"
            )
        notes = export_notes(traced, products, batching=self._options.batching)
        for note in notes:
            self._console.print(f"[yellow]{escape(note)}[/]")
        if traced.recognition is not None:
            show = show_recognition if self._is_verbose else show_findings
            show(traced.recognition, self._console)
        return notes

    def _verify(
        self, draft: Bundle, cases: Sequence[Case], long_case: Case | None
    ) -> list[Comparison]:
        if not self._options.check_parity:
            return []
        title = f"Comparing with {draft.manifest.reference_title}"
        # Another machine may choose the coarsest method that the precision allows.
        methods = usable_methods(draft.manifest.precision)
        with self._stage(title), forced_methods(methods):
            results = verify(draft)
            if long_case is not None:
                results += verify(draft, cases=[long_case])
        if all(r.passed for r in results):
            with self._stage("Comparing without our kernels"):
                results += verify_stock(draft, cases)
        return results

    def _build_engine(
        self, draft: Bundle, settings: BuildSettings
    ) -> tuple[Manifest, list[Comparison]]:
        return build_into(
            draft,
            settings,
            timing_cache=None if (file := self._options.timing_cache) is None else Path(file),
            parity=self._options.check_parity,
            console=self._console,
        )

    def _publish(self, folder: Path, *, passed: bool) -> None:
        request, force = self._request, self._options.force or not passed
        out = request.out if passed else request.failed_out
        # Another bundle may have been written meanwhile.
        check_output_path(out, request.source.file, force)
        move_into_place(folder, out)

    def _finish(
        self, paths: dict[str, str], results: Sequence[Comparison], *, passed: bool
    ) -> Bundle:
        """Print the summary; return the bundle, or raise ParityError."""
        request = self._request
        bundle = Bundle.open(request.out if passed else request.failed_out)
        if self._is_verbose:
            print_tables(self._console, bundle, paths, results)
        print_summary(self._console, bundle, paths, results)
        if not passed:
            raise parity_error(worst(results), bundle, self._options.precision)
        return bundle


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX file, which declares neither a task nor labels; see ``Checkpoint``."""

    path: Path
    kind: str = ONNX_FILE
    module: None = None
    labels: tuple[str, ...] | None = None
    tokenizer: str | None = None
    task: str | None = None
    heads: Mapping[str, Head] | None = None


def read_source(request: Request, stage: Stage) -> "Checkpoint | OnnxSource":
    """Return the model of a request.

    Raises:
        CheckpointError: if the file cannot be used.
    """
    if request.source.is_onnx:
        return OnnxSource(request.source.name)
    with stage(f"Reading {request.source.name}"):
        from aftexport.checkpoint import load  # imports torch

        return load(request.source)


def trace_source(
    source: "Checkpoint | OnnxSource",
    request: Request,
    tokenizer: str | None,
    stage: Stage,
) -> TracedModel:
    """Return the traced model of a source.

    Raises:
        TraceError: if the model cannot be traced.
        UsageError: if an option does not suit the model.
    """
    if isinstance(source, OnnxSource):
        with stage(f"Examining {request.source.name}") as progress:
            traced = trace_onnx(request, tokenizer, progress)
            give_back()
        return traced
    with stage("Tracing to ONNX") as progress:
        from aftexport.pipeline.trace import trace  # imports torch

        traced = trace(source, request, tokenizer, progress)
        give_back()  # release the memory of intermediate graphs
    return traced


def write_draft(
    folder: Path, manifest: Manifest, traced: TracedModel, tokenizer: str | None, *, chunks: bool
) -> Bundle:
    """Write all but the manifest into an empty folder; ``chunks`` also tries the chunked graphs."""
    weights = write_model(folder, traced.model)
    if chunks:
        manifest = _write_chunks(folder / CHUNKED, traced, manifest, weights)
    write_golden(folder, list(traced.cases))
    if tokenizer is not None:
        (folder / TOKENIZER).write_text(tokenizer, "utf-8")
    return Bundle(folder, manifest, {}, "")


def make_manifest(
    checkpoint: "Checkpoint | OnnxSource",
    traced: TracedModel,
    heads: Mapping[str, Head],
    request: Request,
    advice: Advice | None,
    *,
    features: Features | None,
) -> Manifest:
    """Return the manifest of a model in ONNX, without engine and chunks."""
    manifest = Manifest.model_validate(
        {
            "source": _source(checkpoint, request.source.file),
            "config": _config(checkpoint),
            "inputs": traced.spec.names,
            "vocab_size": traced.spec.vocab_size,
            "features": features,
            "max_tokens": traced.spec.max_tokens,
            "extra_inputs": traced.spec.extras,
            "text_pairs": request.options.text_pairs,
            "batching": request.options.batching,
            "heads": heads,
            "precision": traced.precision,
            "reference": traced.reference,
            "opset": request.options.opset or DEFAULT_OPSET,
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


def _write_chunks(
    path: Path, traced: TracedModel, manifest: Manifest, weights: WeightFile
) -> Manifest:
    try:
        plan = write_chunked(
            path,
            traced.lowered,
            precision=traced.precision,
            explained=tuple(manifest.evidence_heads or ()),
            weights=weights,
        )
        give_back()  # release the memory of the chunked graphs
    except NotChunkable as reason:
        path.unlink(missing_ok=True)
        return manifest.model_copy(update={"whole_only": str(reason)})
    return manifest.model_copy(update={"chunked": plan})
