"""The export of a model file to a verified bundle."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from aftexport.bundle.bundle import PARITY, PARITY_PAGE, Bundle, write_manifest
from aftexport.bundle.features import Features
from aftexport.bundle.golden import Case
from aftexport.bundle.manifest import Manifest
from aftexport.bundle.output_path import check_output_path
from aftexport.deploy.build_engine import build_into
from aftexport.engines import onnxruntime as ort
from aftexport.engines.product_methods import forced_methods, usable_methods
from aftexport.engines.tensorrt.settings import BuildSettings, EngineOptions, build_settings
from aftexport.extra_inputs import parse_inputs
from aftexport.heads import Head
from aftexport.parity import TOLERANCES, Comparison, worst
from aftexport.parity.page import write_page
from aftexport.parity.run_cases import verify
from aftexport.parity.stock_session import verify_stock
from aftexport.pipeline.auto_precision import Advice, advise, measurements
from aftexport.pipeline.draft import make_manifest, write_draft
from aftexport.pipeline.head_choice import HeadOptions, check_outputs, check_rows, choose_heads
from aftexport.pipeline.options import ExportOptions, check_precision, find_places, tokenizer_text
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
    path: str | Path | None = None,
    *,
    to: str = "onnx",
    out: str | Path | None = None,
    precision: str = "fp32",
    tolerance: float | None = None,
    max_length: int | None = None,
    vocab_size: int | None = None,
    features: int | None = None,
    feature_file: str | Path | None = None,
    inputs: Mapping[str, str] | None = None,
    engine: EngineOptions | None = None,
    timing_cache: Path | None = None,
    opset: int | None = None,
    check_parity: bool = True,
    batching: bool = True,
    force: bool = False,
    factory: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    task: str | Mapping[str, str] | None = None,
    labels: Sequence[str] | None = None,
    heads: str | Path | None = None,
    tokenizer: str | Path | None = None,
    console: Console | None = None,
) -> Bundle:
    """Export a model file to a bundle and compare it with PyTorch.

    Args:
        path: any of the seven kinds that ``aftexport.load`` reads, or an ONNX file; None for the
            module that the factory returns.
        to: ``onnx``; or ``trt`` or ``trt-rtx``, which add a TensorRT engine to the ONNX model.
        out: the bundle's folder; ``<path without suffix>.bundle`` by default.
        precision: fp32; fp16, 16-bit weights and activations; bf16 or int8, only the products
            inside the kernels of the encoder. Sums are float32 or wider. For an engine, bf16
            applies to weights and activations, and int8 is not supported. AFT-full's exponentials
            use 16 bits if ``position_bias.safe_precision`` allows it. auto: for each node of
            the encoder the cheapest of int8, bf16 and fp32 within ``tolerance``.
        tolerance: maximum error of the model, with auto; that of fp32 by default.
        max_length: maximum tokens of a document.
        vocab_size: number of token ids; by default the rows of the model's embedding.
        features: number of features of each token, for a model that takes features instead of
            token ids; by default the ``num_features`` of the module or of its config.
        feature_file: path of a JSON file with the names, the means and the scales of the features;
            see ``bundle.features.Features``.
        inputs: the kind of each further parameter of the forward that is an input, by its name:
            number, vector:K, category, categories:K or token_category; see
            ``extra_inputs.parse_inputs``.
        engine: further options of an engine.
        timing_cache: file of TensorRT's kernel timings, which is read if it exists and written
            back.
        opset: opset of the standard operators of a PyTorch model, 20 by default.
        check_parity: whether the bundle is compared with PyTorch and must be within tolerance.
        batching: whether documents may share a run. The export fails if documents of one run
            change each other's scores. False runs each document separately.
        force: whether an existing bundle at ``out`` is replaced.
        factory: ``package.module:callable`` for a bare state dict.
        allow_pickle: whether a pickled module is loaded, which runs code from the file.
        trust_remote_code: whether the class of a transformers folder may come from code in the
            folder, which then runs.
        task: the task of the only output, or of each output by name, one of ``heads.HEADS``; by
            default that of the file, or single_label_classification for two or more logits of a
            document.
        labels: names of the classes or values of the only output; by default those of the file.
        heads: path of a JSON file with the head of each output, instead of ``task`` and
            ``labels``; see ``heads.head_file``.
        tokenizer: path of a tokenizer.json, or the word ``bytes`` for a model whose ids are the
            bytes of the text in UTF-8; by default the tokenizer of the file.
        console: console for the progress; standard output by default.

    Raises:
        AftexportError: if the export fails. CheckpointError, UsageError, TraceError and
            EngineError write nothing. ParityError keeps the bundle at ``<out>.failed``; with
            auto, it writes nothing if fp32 is outside ``tolerance`` too.
    """
    source, folder = find_places(path, out, factory)
    options = ExportOptions(
        source=source,
        is_from_factory=path is None,
        out=folder,
        to=to,
        precision=precision,
        tolerance=tolerance,
        max_length=max_length,
        vocab_size=vocab_size,
        features=features,
        feature_file=None if feature_file is None else Path(feature_file),
        inputs=parse_inputs(inputs or {}),
        engine=engine or EngineOptions(),
        timing_cache=timing_cache,
        opset=opset,
        check_parity=check_parity,
        batching=batching,
        force=force,
        factory=factory,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        task=task,
        labels=labels,
        heads=None if heads is None else Path(heads),
        tokenizer=tokenizer,
    )
    return _Export(options.checked(), console or Console(emoji=False)).run()


class _Export:
    """An export, with a method for each step in the order of ``run``."""

    def __init__(self, options: ExportOptions, console: Console) -> None:
        self._options = options
        self._console = console

    def run(self) -> Bundle:
        described = self._options.described_features()
        checkpoint = read_source(self._options, self._console)
        tokenizer = tokenizer_text(checkpoint.tokenizer, self._options.tokenizer)
        self._check_first(checkpoint, tokenizer, described)
        traced = trace_source(checkpoint, self._options, described, tokenizer, self._console)
        heads = self._heads(checkpoint, traced)
        check_precision(traced.model, self._options)
        advice = self._advice(traced, heads)
        settings = self._engine_settings(traced)
        notes = self._print_notes(traced)
        if traced.beyond is not None:
            raise beyond_error(traced.beyond, traced.model, tokenizer, is_of_onnx=traced.is_of_onnx)
        features = described
        if features is None and (count := traced.spec.num_features) is not None:
            features = Features.of_count(count)
        with aside_folder(self._options.out) as folder:
            with stage(self._console, "Writing the bundle"):
                manifest = make_manifest(
                    checkpoint, traced, heads, self._options, advice, features=features
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
            extras=options.inputs,
        )
        if outputs is not None:
            choose_heads(outputs, self._declared_heads(checkpoint))

    def _declared_heads(self, checkpoint: "Checkpoint | OnnxSource") -> HeadOptions:
        options = self._options
        return HeadOptions(
            task=options.task,
            labels=options.labels,
            head_file=options.heads,
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
            timing_cache=self._options.timing_cache,
            parity=self._options.check_parity,
            console=self._console,
        )

    def _publish(self, folder: Path, *, passed: bool) -> None:
        options = self._options
        out = options.out if passed else options.failed_out
        # Another bundle may have been written meanwhile.
        check_output_path(out, options.source_file, options.force or not passed)
        move_into_place(folder, out)

    def _finish(
        self, paths: dict[str, str], results: Sequence[Comparison], *, passed: bool
    ) -> Bundle:
        """Print the summary; return the bundle, or raise ParityError."""
        options = self._options
        bundle = Bundle.open(options.out if passed else options.failed_out)
        print_summary(self._console, bundle, paths, results)
        if not passed:
            raise parity_error(worst(results), bundle, options.precision)
        return bundle
