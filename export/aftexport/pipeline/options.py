"""The options of an export, checked before anything is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import onnx

from aftexport.bundle.features import Features, read_features
from aftexport.bundle.output_path import check_output_path
from aftexport.bundle.tokenizer import BYTES, byte_tokenizer, check_tokenizer, check_vocabulary
from aftexport.capture.model_inputs import InputSpec
from aftexport.deploy.build_engine import check_options
from aftexport.engines.tensorrt.settings import TARGETS as ENGINE_TARGETS
from aftexport.engines.tensorrt.settings import EngineOptions
from aftexport.errors import UsageError
from aftexport.extra_inputs import ExtraInput
from aftexport.heads import HEADS
from aftexport.lowering.file_format import check_opset
from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.operators.encoder import OPERATORS
from aftexport.parity.comparison import TOLERANCES
from aftexport.pipeline.head_choice import read_heads

TARGETS = ("onnx", *ENGINE_TARGETS)
_PRECISION = "precision"
"""The attribute of operators with products of a chosen precision."""


@dataclass(frozen=True)
class ExportOptions:
    """The options of ``pipeline.export.export``, under the same names.

    Attributes:
        source: the model file or folder; without a file the name of the factory.
        is_from_factory: whether the factory's own module is exported, without a file.
        out: the folder of the bundle.
    """

    source: Path
    is_from_factory: bool
    out: Path
    to: str
    precision: str
    tolerance: float | None
    max_length: int | None
    vocab_size: int | None
    features: int | None
    feature_file: Path | None
    inputs: tuple[ExtraInput, ...]
    engine: EngineOptions
    timing_cache: Path | None
    opset: int | None
    check_parity: bool
    batching: bool
    force: bool
    factory: str | None
    allow_pickle: bool
    trust_remote_code: bool
    task: str | Mapping[str, str] | None
    labels: Sequence[str] | None
    heads: Path | None
    tokenizer: str | Path | None

    @property
    def is_onnx(self) -> bool:
        """Whether the source is an ONNX file."""
        return not self.is_from_factory and self.source.suffix == ".onnx" and self.source.is_file()

    @property
    def source_file(self) -> Path | None:
        """The model file or folder; None for the module of a factory."""
        return None if self.is_from_factory else self.source

    @property
    def failed_out(self) -> Path:
        """The folder that keeps a bundle outside its tolerance."""
        return self.out.with_name(f"{self.out.name}.failed")

    def described_features(self) -> Features | None:
        """Return the features in ``feature_file``; None without a file.

        Raises:
            UsageError: if the file is not valid, or has another number of features.
        """
        if self.feature_file is None:
            return None
        return read_features(self.feature_file, self.features)

    def checked(self) -> Self:
        """Return the options with ``max_length`` in those of the engine.

        Raises:
            UsageError: if two options do not fit together, or ``out`` cannot be written.
        """
        _check_choice("--to", self.to, TARGETS)
        if isinstance(self.task, str):
            _check_choice("--task", self.task, tuple(HEADS))
        for name, task in self.task.items() if isinstance(self.task, Mapping) else ():
            _check_choice(f"--task {name}", task, tuple(HEADS))
        if self.heads is not None and not self.task is self.labels is None:
            raise UsageError(
                "--heads describes task and labels, got --task or --labels beside it.",
                "Leave these two out, or leave --heads out.",
            )
        _check_choice("--precision", self.precision, (*TOLERANCES, "auto"))
        _check_tolerance(self.precision, self.tolerance, to=self.to)
        if self.inputs and self.to != "onnx":
            raise UsageError(
                f"--input needs --to onnx, got --to {self.to}: its engines take only tokens and "
                "lengths.",
                "Export with --to onnx.",
            )
        if self.is_from_factory and (self.allow_pickle or self.trust_remote_code):
            option = "--allow-pickle" if self.allow_pickle else "--trust-remote-code"
            raise UsageError(
                f"{option} needs a model file or folder, got only --factory {self.factory}.",
                f"Leave {option} out.",
            )
        if not self.batching and (self.engine.max_batch or 1) > 1:
            raise UsageError(
                f"--max-batch {self.engine.max_batch} has no effect with --no-batching, which "
                "runs each document separately.",
                "Leave one of the two out.",
            )
        if self.opset is not None:
            check_opset(self.opset)
        if self.heads is not None:
            read_heads(self.heads)
        engine = replace(self.engine, max_length=self.max_length)
        check_options(self.to, engine, precision=self.precision, timing_cache=self.timing_cache)
        check_output_path(self.out, self.source_file, self.force)
        check_output_path(self.failed_out, self.source_file, force=True)
        return replace(self, engine=engine)


def find_places(
    path: str | Path | None, out: str | Path | None, factory: str | None
) -> tuple[Path, Path]:
    """Return the path of the model, or the name of its factory, and the folder of the bundle.

    Raises:
        UsageError: if ``out`` is a folder without a name, such as ``/``.
    """
    source = Path((factory or "").rpartition(":")[2] if path is None else path)
    if out is None:
        # "." has no name to which the suffix can be added.
        out = (source if source.name else source.resolve()).with_suffix(".bundle")
    folder = Path(out) if Path(out).name else Path(out).resolve()
    if not folder.name:
        raise UsageError(
            f"--out must name a folder that can be made, got {folder}.", "Choose another folder."
        )
    return source, folder


def check_precision(model: onnx.ModelProto, options: ExportOptions) -> None:
    """Check that a precision of products inside kernels changes the graph.

    Args:
        model: the exported graph, in that precision or, with auto, in fp32.
        options: the options of the export.

    Raises:
        UsageError: if the graph has no operator whose products have a precision.
    """
    precision = options.precision
    if options.to != "onnx" or precision in ("fp32", "fp16"):
        return
    is_auto = precision == "auto"
    nodes = [n for n in model.graph.node if operator_name(n.op_type) in OPERATORS or not is_auto]
    values = [a.s for n in nodes if n.domain == DOMAIN for a in n.attribute if a.name == _PRECISION]
    if not values or (not is_auto and set(values) == {b"fp32"}):
        fp16 = "" if options.is_onnx else ", or give fp16 for 16-bit weights and activations"
        raise UsageError(
            f"--precision {precision} is for products in operators of ai.aftexport, such as "
            "LayerNormFeedForward, got a model in which it changes none.",
            f"Leave --precision out{fp16}.",
        )


def tokenizer_text(own: str | None, path: str | Path | None) -> str | None:
    """Return the content of a tokenizer.json; None without a tokenizer.

    Args:
        own: the tokenizer of the model file.
        path: the path of another tokenizer, or the word ``bytes``; None takes that of the file.

    Raises:
        UsageError: if the file of the path cannot be read.
    """
    if path is None:
        return own
    if path == BYTES:  # a Path of this name is a file
        return str(byte_tokenizer().to_str())
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tokenizer {path}: {error}.", "Check the path.") from error


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
