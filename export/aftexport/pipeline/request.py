"""The request of an export, checked before anything is read."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import onnx

from aftexport.bundle.bundle import refuse_bundle
from aftexport.bundle.features import Features, read_features
from aftexport.bundle.manifest import Aggregate
from aftexport.bundle.output_path import check_output_path
from aftexport.bundle.tokenizer import (
    BYTES,
    byte_tokenizer,
    check_tokenizer,
    check_vocabulary,
    largest_pair_type,
)
from aftexport.capture.model_spec import InputSpec
from aftexport.deploy.build_engine import check_options
from aftexport.errors import UsageError
from aftexport.extra_inputs import TOKEN_TYPES, ExtraInput, parse_inputs
from aftexport.heads import HEADS
from aftexport.lowering.file_format import check_opset
from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.operators.encoder import OPERATORS
from aftexport.options import (
    ExportOptions,
    ModelSource,
    Precision,
    SerializableTokenizer,
    StrPath,
    Target,
)
from aftexport.pipeline.head_choice import read_heads

if TYPE_CHECKING:
    from aftexport.checkpoint import Checkpoint

_PRECISION = "precision"
"""The attribute of operators with products of a chosen precision."""


@dataclass(frozen=True)
class Request:
    """A source and the options of its export, checked before anything is read."""

    source: ModelSource
    options: ExportOptions
    out: Path
    extras: tuple[ExtraInput, ...]
    described: Features | None = None
    """The content of ``feature_file``."""

    @property
    def failed_out(self) -> Path:
        """The folder that keeps a bundle outside its tolerance."""
        return self.out.with_name(f"{self.out.name}.failed")

    @property
    def num_features(self) -> int | None:
        """The declared number of features of a token; None if it is not declared."""
        return self.options.features if self.described is None else self.described.count


def checked_request(source: ModelSource, options: ExportOptions) -> Request:
    """Return the request of an export.

    Raises:
        UsageError: if two options do not fit together, ``out`` cannot be written, or a file of an
            option is not valid.
    """
    if source.file is not None:
        refuse_bundle(source.file)
    options = replace(options, task=_normalized(options.task))
    out = _bundle_folder(source, options.out)
    request = Request(source, options, out, parse_inputs(options.inputs or {}))
    _check_choice("--to", options.to, get_args(Target))
    tasks = (
        {"--task": options.task}
        if isinstance(options.task, str)
        else {f"--task {name}": task for name, task in (options.task or {}).items()}
    )
    for option, task in tasks.items():
        _check_choice(option, task, tuple(HEADS))
    if options.heads is not None and (options.task is not None or options.labels is not None):
        raise UsageError(
            "--heads describes task and labels, got --task or --labels beside it.",
            "Leave these two out, or leave --heads out.",
        )
    _check_choice("--precision", options.precision, get_args(Precision))
    _check_tolerance(options.precision, options.tolerance, to=options.to)
    if options.inputs:
        _check_target(options.to, "--input")
    _check_windows(options)
    source.check()
    if not options.batching and (options.engine.max_batch or 1) > 1:
        raise UsageError(
            f"--max-batch {options.engine.max_batch} has no effect with --no-batching, which "
            "runs each document separately.",
            "Leave one of the two out.",
        )
    if options.opset is not None:
        check_opset(options.opset)
    if options.heads is not None:
        read_heads(Path(options.heads))
    check_options(options)
    check_output_path(out, source.file, options.force)
    check_output_path(request.failed_out, source.file, force=True)
    if options.feature_file is not None:
        described = read_features(Path(options.feature_file), options.features)
        request = replace(request, described=described)
    return request


def _check_target(target: str, option: str) -> None:
    """Raise UsageError for an input that engines lack."""
    if target != "onnx":
        raise UsageError(
            f"{option} needs --to onnx, got --to {target}: its engines take only tokens and "
            "lengths.",
            "Export with --to onnx.",
        )


def _normalized(task: str | Mapping[str, str] | None) -> str | dict[str, str] | None:
    """Return tasks with underscores in place of the hyphens that pipelines of transformers have."""
    if task is None or isinstance(task, str):
        return task and task.replace("-", "_")
    return {name: one.replace("-", "_") for name, one in task.items()}


def _bundle_folder(source: ModelSource, out: StrPath | None) -> Path:
    if out is None:
        # "." has no name to which the suffix can be added.
        out = (source.name if source.name.name else source.name.resolve()).with_suffix(".bundle")
    folder = Path(out) if Path(out).name else Path(out).resolve()
    if not folder.name:
        raise UsageError(
            f"--out must name a folder that can be made, got {folder}.", "Choose another folder."
        )
    return folder


def check_precision(model: onnx.ModelProto, request: Request) -> None:
    """Check that a precision of products inside kernels changes the graph.

    Raises:
        UsageError: if the graph has no operator whose products have a precision.
    """
    precision = request.options.precision
    if request.options.to != "onnx" or precision in ("fp32", "fp16"):
        return
    is_auto = precision == "auto"
    nodes = [n for n in model.graph.node if operator_name(n.op_type) in OPERATORS or not is_auto]
    values = [a.s for n in nodes if n.domain == DOMAIN for a in n.attribute if a.name == _PRECISION]
    if not values or (not is_auto and set(values) == {b"fp32"}):
        fp16 = "" if request.source.is_onnx else ", or give fp16 for 16-bit weights and activations"
        raise UsageError(
            f"--precision {precision} is for products in operators of ai.aftexport, such as "
            "LayerNormFeedForward, got a model in which it changes none.",
            f"Leave --precision out{fp16}.",
        )


def tokenizer_text(own: str | None, given: StrPath | SerializableTokenizer | None) -> str | None:
    """Return the JSON of a file, of ``bytes`` or of an object; for None, the model's ``own``.

    Raises:
        UsageError: if the file cannot be read, or the object has no such JSON.
    """
    if given is None:
        return own
    if given == BYTES:  # a Path of this name is a file
        return str(byte_tokenizer().to_str())
    if not isinstance(given, str | Path):
        if not hasattr(given, "to_str"):
            raise UsageError(
                "--tokenizer must be the path of a tokenizer.json, bytes, or in Python a "
                f"tokenizers.Tokenizer, got a {type(given).__name__}.",
                "Give the path of the tokenizer.json that its save_pretrained writes.",
            )
        return str(given.to_str())
    try:
        return Path(given).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tokenizer {given}: {error}.", "Check the path.") from error


def with_pairs(request: Request, checkpoint: "Checkpoint", tokenizer: str | None) -> Request:
    """Return the request for a model of text pairs, with the types of their tokens as an input.

    Raises:
        UsageError: if the tokenizer does not join texts, or an option does not suit pairs.
    """
    options = request.options
    name = "--text-pairs" if options.text_pairs else "A CrossEncoder"
    if not (options.text_pairs or checkpoint.text_pairs):
        return request
    if tokenizer is None:
        raise UsageError(
            f"{name} needs a tokenizer, got a model without one.",
            "Give its tokenizer.json by --tokenizer FILE.",
        )
    if options.long_documents is not None:
        raise UsageError(
            f"{name} needs whole documents, got --long-documents {options.long_documents}: a "
            "window would hold one of two texts.",
            "Leave --long-documents out.",
        )
    extras, largest = request.extras, largest_pair_type(tokenizer)
    module = checkpoint.module
    takes_types = module is not None and TOKEN_TYPES in inspect.signature(module.forward).parameters
    if largest and takes_types and TOKEN_TYPES not in [extra.name for extra in extras]:
        extras = (*extras, *parse_inputs({TOKEN_TYPES: "token_category"}))
        _check_target(options.to, f"{name} with {TOKEN_TYPES}")
    return replace(request, options=replace(options, text_pairs=True), extras=extras)


def check_pair_types(spec: InputSpec, tokenizer: str | None) -> None:
    """Raise UsageError if a tokenizer of pairs has types that the model lacks."""
    assert tokenizer is not None  # checked by with_pairs
    largest = largest_pair_type(tokenizer)
    for extra in spec.extras:
        if extra.name == TOKEN_TYPES and (extra.maximum or 0) < largest:
            raise UsageError(
                f"The tokenizer's token types must be at most {extra.maximum}, as the model's, got "
                f"{largest}.",
                "Give the tokenizer of the training.",
            )


def check_ids(spec: InputSpec, tokenizer: str | None) -> None:
    """Check the number of token ids of a model, and its tokenizer.

    Raises:
        UsageError: if there are too many ids, the tokenizer has other ids, or the model takes
            features and has a tokenizer.
    """
    if spec.vocab_size is not None:
        check_vocabulary(spec.vocab_size)
        if tokenizer is not None:
            check_tokenizer(tokenizer, spec.vocab_size)
    elif tokenizer is not None:
        raise UsageError(
            "Expected no tokenizer for a model of features, got one.", "Leave --tokenizer out."
        )


def _check_windows(options: ExportOptions) -> None:
    """Check that the options of windows stand beside --long-documents, and fit the target."""
    names = ("window", "stride", "aggregate", "background_label")
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) is not None]
    if options.long_documents is None:
        if given:
            raise UsageError(
                f"{given[0]} needs --long-documents windows, got none.", f"Add it to {given[0]}."
            )
        return
    _check_choice("--long-documents", options.long_documents, ("windows",))
    if options.aggregate is not None:
        _check_choice("--aggregate", options.aggregate, get_args(Aggregate))
    if options.to != "onnx":
        raise UsageError(
            f"--long-documents windows needs --to onnx, got --to {options.to}.",
            "Export with --to onnx.",
        )


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(
            f"{option} must be one of {', '.join(choices)}, got {value!r}.",
            f"Choose one of {', '.join(choices)}.",
        )


def _check_tolerance(precision: str, tolerance: float | None, *, to: str) -> None:
    if precision != "auto" and tolerance is not None:
        raise UsageError(
            f"--tolerance needs --precision auto, got --precision {precision}.",
            "Leave --tolerance out, or add --precision auto.",
        )
    if precision == "auto" and to != "onnx":
        raise UsageError(
            f"--precision auto needs --to onnx, got --to {to}: an engine has one precision.",
            "Choose one of fp32, fp16 and bf16.",
        )
    if tolerance is not None and not 0 < tolerance < 1:  # an error of 1 may be any probability
        raise UsageError(
            f"--tolerance must be a number between 0 and 1, got {tolerance}.",
            "Give such a number, or leave --tolerance out.",
        )
