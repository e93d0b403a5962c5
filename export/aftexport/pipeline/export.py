"""The export of a model file to a verified bundle."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from aftexport.bundle.bundle import PARITY, PARITY_PAGE, Bundle, write_manifest
from aftexport.bundle.features import Features
from aftexport.bundle.golden import Case
from aftexport.bundle.manifest import Manifest
from aftexport.bundle.output_path import check_output_path
from aftexport.deploy.export_engine import build_into
from aftexport.engines import onnxruntime as ort
from aftexport.engines.product_methods import forced_methods, usable_methods
from aftexport.engines.tensorrt.settings import BuildSettings, build_settings
from aftexport.heads import Head
from aftexport.options import ExportOptions, ModelSource, StrPath, as_source, with_options
from aftexport.parity import TOLERANCES, Comparison, worst
from aftexport.parity.page import write_page
from aftexport.parity.run_cases import verify
from aftexport.parity.stock_session import verify_stock
from aftexport.pipeline.auto_precision import Advice, advise, measurements
from aftexport.pipeline.draft import make_manifest, write_draft
from aftexport.pipeline.head_choice import HeadOptions, check_outputs, check_rows, choose_heads
from aftexport.pipeline.request import (
    Request,
    check_precision,
    checked_request,
    tokenizer_text,
)
from aftexport.pipeline.results import (
    engine_record,
    export_notes,
    parity_error,
    parity_record,
    parity_report,
    print_summary,
)
from aftexport.pipeline.source import OnnxSource, read_source, trace_source
from aftexport.pipeline.traced_model import TracedModel
from aftexport.pipeline.value_ranges import MAX_FLOAT16, beyond_error
from aftexport.recognition.result import show_recognition
from aftexport.system.console import escape, stage
from aftexport.system.files import aside_folder, move_into_place, write_json
from aftexport.system.process import give_back

if TYPE_CHECKING:  # a bundle of an ONNX file needs no torch
    from aftexport.checkpoint import Checkpoint


def export(
    path: StrPath | ModelSource | None = None,
    options: ExportOptions | None = None,
    *,
    console: Console | None = None,
    **changes: Any,
) -> Bundle:
    """Export a model to a bundle and compare it with PyTorch.

    Args:
        path: any of the seven kinds of model file that ``aftexport.load`` reads, an ONNX file, or a
            whole source; None for the module of a factory.
        options: the options; all defaults by default.
        console: console for the progress; standard output by default.
        changes: fields of ``ExportOptions`` and ``ModelSource`` by name, such as
            ``precision="int8"`` or ``factory="package.module:callable"``.

    Raises:
        AftexportError: if the export fails. CheckpointError, UsageError, TraceError and
            EngineError write nothing. ParityError keeps the bundle at ``<out>.failed``; with
            auto, it writes nothing if fp32 is outside ``tolerance`` too.
        TypeError: if there is no option of a name.
    """
    source, options = with_options(
        "export", changes, as_source(path), ExportOptions() if options is None else options
    )
    return _Export(checked_request(source, options), console or Console(emoji=False)).run()


class _Export:
    """An export, with a method for each step in the order of ``run``."""

    def __init__(self, request: Request, console: Console) -> None:
        self._request = request
        self._options = request.options
        self._console = console

    def run(self) -> Bundle:
        described = self._request.described_features()
        checkpoint = read_source(self._request, self._console)
        tokenizer = tokenizer_text(checkpoint.tokenizer, self._options.tokenizer)
        self._check_first(checkpoint, tokenizer, described)
        traced = trace_source(checkpoint, self._request, described, tokenizer, self._console)
        heads = self._heads(checkpoint, traced)
        check_precision(traced.model, self._request)
        advice = self._advice(traced, heads)
        settings = self._engine_settings(traced)
        notes = self._print_notes(traced)
        if traced.beyond is not None:
            raise beyond_error(traced.beyond, traced.model, tokenizer, is_of_onnx=traced.is_of_onnx)
        features = described
        if features is None and (count := traced.spec.num_features) is not None:
            features = Features.of_count(count)
        with aside_folder(self._request.out) as folder:
            with stage(self._console, "Writing the bundle"):
                manifest = make_manifest(
                    checkpoint, traced, heads, self._request, advice, features=features
                )
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
        with Progress(console=self._console, transient=True) as bar:
            task = bar.add_task("Measuring each node", total=measurements(traced.model))
            advance = partial(bar.advance, task)
            return advise(traced.model, traced.cases, bound, advance, heads=heads)

    def _check_first(
        self,
        checkpoint: "Checkpoint | OnnxSource",
        tokenizer: str | None,
        described: Features | None,
    ) -> None:
        """Check the tokenizer and the heads on two runs in PyTorch, before the long capture."""
        if isinstance(checkpoint, OnnxSource):
            return
        from aftexport.pipeline.trace import first_outputs  # imports torch

        options = self._options
        outputs = first_outputs(
            checkpoint,
            tokenizer,
            num_features=options.features if described is None else described.count,
            extras=self._request.extras,
        )
        if outputs is not None:
            choose_heads(outputs, self._declared_heads(checkpoint))

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

    def _print_notes(self, traced: TracedModel) -> list[str]:
        """Print and return the notes on unexpected properties of the export."""
        longest = traced.spec.max_tokens
        # A note gives the reason for the bound of 16 bits.
        if self._options.max_length is None and longest not in (None, MAX_FLOAT16):
            self._console.print(
                f"[yellow]Documents may have at most {longest} tokens, the limit of the model.[/]"
            )
        notes = export_notes(traced, batching=self._options.batching)
        for note in notes:
            self._console.print(f"[yellow]{escape(note)}[/]")
        if traced.recognition is not None:
            show_recognition(traced.recognition, self._console)
        return notes

    def _verify(
        self, draft: Bundle, cases: Sequence[Case], long_case: Case | None
    ) -> list[Comparison]:
        if not self._options.check_parity:
            return []
        title = f"Comparing with {draft.manifest.reference_title}"
        # Another machine may choose the coarsest method that the precision allows.
        methods = usable_methods(draft.manifest.precision)
        with stage(self._console, title), forced_methods(methods):
            results = verify(draft)
            if long_case is not None:
                results += verify(draft, cases=[long_case])
        if all(r.passed for r in results):
            with stage(self._console, "Comparing in a stock session"):
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
        print_summary(self._console, bundle, paths, results)
        if not passed:
            raise parity_error(worst(results), bundle, self._options.precision)
        return bundle
