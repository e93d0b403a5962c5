"""The comparison of all available engines of a bundle with PyTorch on all requested cases."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

import aftplugins
from aftexport.bundle.bundle import Bundle
from aftexport.bundle.golden import IN_WINDOWS, Array, Case
from aftexport.bundle.manifest import Manifest
from aftexport.bundle.tokenizer import parse_tokenizer
from aftexport.chunked.windows import WindowRuns
from aftexport.deploy.build_engine import compare as compare_engine
from aftexport.deploy.build_engine import find, wanted_here
from aftexport.engines import Engine
from aftexport.engines import onnxruntime as ort
from aftexport.engines.tensorrt.engine import TensorrtEngine
from aftexport.engines.tensorrt.runtimes import TITLES
from aftexport.errors import EngineError, UsageError
from aftexport.extra_inputs import sample_values
from aftexport.options import ModelSource
from aftexport.parity.activations import Extremes, find_extremes
from aftexport.parity.calibration import read_details
from aftexport.parity.comparison import Comparison, compare, worst
from aftexport.parity.report import Layers, Report, environment, inputs_of, tolerance_of
from aftexport.parity.run_cases import verify
from aftexport.parity.stock_session import verify_stock
from aftexport.system.console import stage
from aftexport.system.onnx_files import read_model
from aftexport.verify.documents import as_inputs, random_documents, read_documents

if TYPE_CHECKING:  # the import needs torch
    from aftexport.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a comparison."""

    # `torch`, or `golden` for PyTorch's outputs stored in the bundle; None selects torch if the
    # source has a file or a factory
    against: str | None = None
    source: ModelSource = field(default_factory=ModelSource)  # the model of the bundle
    data: Path | None = None  # file of documents, one JSON object per line
    lengths: Sequence[int] = ()
    search: int = 0  # number of inputs to try in a search for the largest error; 0 for no search
    layers: bool = False
    fused: bool = True
    provider: ort.Provider = "cpu"


def check(bundle: Bundle, request: Request, console: Console) -> Report:
    """Compare a bundle with PyTorch."""
    source = _source(bundle, request)
    reference = None
    if source is not None and request.against != "golden":
        from aftexport.verify.reference_model import torch_engine

        reference = torch_engine(bundle, source, double=True)
    cases = bundle.golden()
    asked = _requested_inputs(bundle, request)
    notes = _path_notes(bundle, request)
    if source is not None:
        notes += _part_notes(bundle, source)
    if reference is not None:
        with stage(console, f"Running PyTorch in {bundle.manifest.reference}"):
            # PyTorch does not run single operators; their stored reference is the definition.
            model_inputs = {**inputs_of(cases), **asked}
            cases = [
                *(_case(name, inputs, reference) for name, inputs in model_inputs.items()),
                *(case for case in cases if case.is_of_operator),
                *_window_cases(bundle.manifest, cases, reference),
            ]
        notes += _stale_notes(bundle, cases)
    if reference is not None and request.search:
        extremes = _find_extremes(bundle, console)
        worst_case = _search(bundle, request, reference, extremes.ids, console)
        cases.insert(0, worst_case)
        notes.append(f"The case {worst_case.name!r} is the worst of {request.search} inputs.")
        if (beyond := extremes.beyond) is not None:
            notes.append(
                f"The value {beyond.value!r} reaches {beyond.size:,.6g} in {beyond.place}, and "
                "float16 ends at 65,504."
            )
            if beyond.token is not None:
                inputs = _drawn(np.array([[beyond.token]]), bundle.manifest)
                cases.insert(0, _case(f"token id {beyond.token}", inputs, reference))
    with stage(console, "Comparing with PyTorch"):
        results = verify(bundle, cases=cases, fused=request.fused, provider=request.provider)
        built, why_not = _built_engine(bundle, cases)
    with stage(console, "Comparing without our kernels"):
        stock = verify_stock(bundle, cases)
    if not stock:
        notes.append("No stock session ran: ONNX Runtime has no bfloat16 products on the CPU.")
    layers = None
    if request.layers:
        assert source is not None  # _source checks this
        with stage(console, "Comparing layer by layer"):
            layers = _layers(bundle, source, request, cases, results)
    return Report(
        bundle.manifest,
        [*results, *stock, *built],
        against=f"PyTorch in {bundle.manifest.reference}, run now" if reference else "",
        notes=[*notes, *why_not],
        inputs=inputs_of(cases),
        environment=environment(onnxruntime=ort.VERSION),
        layers=layers,
        calibration=read_details(bundle),
    )


def _source(bundle: Bundle, request: Request) -> "Checkpoint | None":
    """Return the model of the bundle if it is given."""
    given = request.source
    if given.path is None and given.factory is None and not given.allow_pickle:
        options = {
            "--against torch": request.against == "torch",
            "--data": request.data is not None,
            "--lengths": bool(request.lengths),
            "--search": bool(request.search),
            "--layers": request.layers,
        }
        if asked := [option for option, is_set in options.items() if is_set]:
            raise UsageError(
                f"{asked[0]} needs the PyTorch module, which a bundle does not contain.",
                "Give --model with the file of the export, or --factory for an export without a "
                "file.",
            )
        if given.permissions:
            raise UsageError(
                f"{given.permissions[0]} needs a folder, got none.",
                "Give the folder with --model.",
            )
        return None
    if request.against == "golden" and (request.data or request.lengths or request.search):
        raise UsageError(
            "--against golden only has outputs for the bundle's own cases, got further inputs.",
            "Leave --against out.",
        )
    from aftexport.verify.reference_model import load_source

    return load_source(bundle, given)


def _part_notes(bundle: Bundle, source: "Checkpoint") -> list[str]:
    """Return notes on labels and tokenizer that differ from the file of the export."""
    notes = []
    # The labels of a file belong to its only output.
    heads = list(bundle.manifest.heads.values())
    if source.labels is not None and len(heads) == 1 and source.labels != heads[0].names:
        notes.append(
            f"The labels of the bundle, {', '.join(heads[0].names)}, are not those of "
            f"{source.path}: {', '.join(source.labels)}."
        )
    tokenizer = bundle.tokenizer()
    if source.tokenizer is not None and (
        tokenizer is None or tokenizer.to_str() != parse_tokenizer(source.tokenizer).to_str()
    ):
        notes.append(f"The tokenizer of the bundle is not that of {source.path}.")
    return notes


def _stale_notes(bundle: Bundle, cases: Sequence[Case]) -> list[str]:
    """Return a note on the stored outputs that differ from PyTorch's in ``cases``.

    The server checks its parity with the stored outputs.
    """
    now = {case.name: case.outputs for case in cases if case.subject == "model"}
    bound, precision = tolerance_of(bundle.manifest).bound, bundle.manifest.precision
    stale = [
        repr(case.name)
        for case in bundle.golden()
        if case.subject == "model"
        and not all(r.error <= bound for r in compare(case, now[case.name], precision))
    ]
    if not stale:
        return []
    return [
        f"The stored outputs differ from PyTorch's in {len(stale)} of {len(now)} cases, such as "
        f"{stale[0]}. If this is the model that is served, export it again, because aftserve and "
        "verify without --model compare with them. If not, give its file and its factory."
    ]


def _find_extremes(bundle: Bundle, console: Console) -> Extremes:
    manifest = bundle.manifest
    with stage(console, "Searching for unusual tokens") as progress:
        return find_extremes(
            read_model(bundle.model_path),
            manifest.vocab_size,
            lambda ids: _drawn(ids, manifest),
            documents=None if manifest.batching else 1,
            max_tokens=manifest.max_tokens,
            progress=progress,
        )


def _drawn(ids: NDArray[np.int64], manifest: Manifest) -> dict[str, Array]:
    """Return the inputs for documents of ids, with random extra inputs."""
    generator = np.random.default_rng(0)
    extras = [sample_values(manifest.extra_inputs, generator, len(row)) for row in ids]
    return as_inputs(list(ids), manifest, extras)


def _search(
    bundle: Bundle, request: Request, reference: Engine, unusual: Sequence[int], console: Console
) -> Case:
    from aftexport.verify.search import Search, token_norms

    engine = ort.OnnxRuntimeEngine(
        bundle.model_path, fused=request.fused, provider=request.provider
    )
    norms = token_norms(bundle.model_path)
    search = Search(bundle.manifest, engine, reference, norms, unusual=unusual)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("Searching for the worst input", total=request.search)
        return search.run(request.search, lambda: bar.advance(task))


def _layers(
    bundle: Bundle,
    source: "Checkpoint",
    request: Request,
    cases: Sequence[Case],
    results: Sequence[Comparison],
) -> Layers:
    from aftexport.verify.layer_comparison import compare_layers
    from aftexport.verify.torch_program import Program

    names = {case.name for case in cases if case.subject == "model"}
    return compare_layers(
        bundle.model_path,
        Program.of(source, bundle.manifest),
        _most_telling_case(cases, results),
        is_outside=any(r.case in names for r in results if not r.passed),
        bound=tolerance_of(bundle.manifest).bound,
        fused=request.fused,
        provider=request.provider,
    )


def _most_telling_case(cases: Sequence[Case], results: Sequence[Comparison]) -> Case:
    """Return the smallest case outside tolerance, or else the case with the largest error."""
    own = {case.name: case for case in cases if case.subject == "model"}
    of_model = [result for result in results if result.subject == "model"]
    failed = [result for result in results if not result.passed and result.case in own]
    of_failed = [result for result in failed if result.subject == "model"] or failed
    outside = [own[result.case] for result in of_failed]
    return min(outside, key=lambda case: math.prod(case.shape), default=own[worst(of_model).case])


def _requested_inputs(bundle: Bundle, request: Request) -> dict[str, Mapping[str, Array]]:
    inputs: dict[str, Mapping[str, Array]] = {**random_documents(request.lengths, bundle.manifest)}
    if request.data is not None:
        inputs |= read_documents(request.data, bundle.manifest, bundle.tokenizer())
    return inputs


def _case(name: str, inputs: Mapping[str, Array], reference: Engine) -> Case:
    return Case(name, "model", inputs, reference.run(inputs))


def _window_cases(manifest: Manifest, cases: Sequence[Case], reference: Engine) -> list[Case]:
    """Return the cases of windows with the reference's outputs."""
    if manifest.windows is None:
        return []
    runs = WindowRuns(reference, manifest.windows, manifest.inputs, manifest.extra_inputs)
    return [runs.case(one.name, one.inputs) for one in cases if one.subject == IN_WINDOWS]


def _path_notes(bundle: Bundle, request: Request) -> list[str]:
    if not bundle.manifest.operators:
        return []
    if not request.fused:
        return ["The fallbacks ran instead of the fused kernels, as requested."]
    provider = ort.PROVIDERS[request.provider]
    why = aftplugins.missing(provider.library)
    if why is None:
        return []
    if names := provider.rewritten(bundle.manifest.operators, bundle.manifest.precision):
        return [
            f"{' and '.join(names)} ran by fallbacks with 16-bit products for {provider.name}, the "
            f"other operators by their fallbacks: libaftplugins_{provider.library}.so is "
            "not installed. Run make cuda-wheel in aftexport's source folder and install "
            "dist/aftexport_cuda-*.whl."
        ]
    return [f"The fallbacks ran: {why}"]


def _built_engine(bundle: Bundle, cases: Sequence[Case]) -> tuple[list[Comparison], list[str]]:
    """Return the comparisons of the bundle's TensorRT engine, and a note if it cannot run here."""
    plan = bundle.manifest.engine
    if plan is None:
        return [], []
    try:
        wanted = wanted_here(bundle, plan.settings)
        content, record = find(bundle, wanted).read(wanted)
        engine = TensorrtEngine(content, record.runtime, uses_plugins=record.uses_plugins)
    except EngineError as error:
        return [], [f"The {TITLES[plan.settings.runtime]} engine was not compared: {error.problem}"]
    return compare_engine(bundle, engine, cases), []
