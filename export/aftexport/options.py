"""The options of an export and the source of a model: name, type, default and meaning, stated once.

The command line and the documentation are filled from the fields, see ``cli.options``. The text
below a field is its help: a fragment without an end, and "False: ..." for a field that is True.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Ge

from aftexport.errors import UsageError
from aftexport.system.arguments import nearest

StrPath = str | Path
Factory = str | Callable[..., Any]
Count = Annotated[int, Ge(1)]
Target = Literal["onnx", "trt", "trt-rtx"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "auto"]


class SerializableTokenizer(Protocol):
    """A ``tokenizers.Tokenizer``."""

    def to_str(self) -> str:
        """Return its JSON."""
        ...


@dataclass(frozen=True)
class ModelSource:
    """A model to read: its file, or its factory, with the permissions to run code."""

    path: StrPath | None = None
    """model file or folder; without one, the factory returns the module with its weights"""
    factory: Factory | None = field(default=None, metadata={"metavar": "PACKAGE.MODULE:FACTORY"})
    """callable without arguments that returns the module, in Python also the callable or the module
    itself; needed for a state dict and for a model without a file"""
    allow_pickle: bool = False
    """load a pickled module, or with --factory pickled weights; loading runs code from the file,
    so use it only for files you trust"""
    trust_remote_code: bool = False
    """load a transformers folder whose model class is code in the folder, which runs; use it only
    for folders you trust"""

    @property
    def file(self) -> Path | None:
        """The model file or folder; None for the module of a factory."""
        return None if self.path is None else Path(self.path)

    @property
    def name(self) -> Path:
        """The model file or folder; without one, the name of the factory."""
        return self.file or Path(self.factory_name.rpartition(":")[2])

    @property
    def factory_name(self) -> str:
        """The name of the factory, for messages and the bundle."""
        if self.factory is None or isinstance(self.factory, str):
            return self.factory or ""
        name = str(getattr(self.factory, "__name__", type(self.factory).__name__))
        # A lambda has no name that a file could have.
        return name if name.isidentifier() else "model"

    @property
    def is_onnx(self) -> bool:
        """Whether the source is an ONNX file."""
        return self.file is not None and self.file.suffix == ".onnx" and self.file.is_file()

    def check(self) -> None:
        """Raise UsageError if there is nothing to read, or a permission without a file."""
        if self.path is None and self.factory is None:
            raise UsageError(
                "Expected a model file, or --factory PACKAGE.MODULE:FACTORY, got neither.",
                "Give one of the two.",
            )
        if self.path is None and self.permissions:
            option = self.permissions[0]
            raise UsageError(
                f"{option} needs a model file or folder, got only --factory {self.factory_name}.",
                f"Leave {option} out.",
            )

    @property
    def permissions(self) -> tuple[str, ...]:
        """The options that permit to run code, as on the command line, as far as they are given."""
        given = (one.name for one in fields(self) if getattr(self, one.name) is True)
        return tuple(f"--{name.replace('_', '-')}" for name in given)


@dataclass(frozen=True)
class EngineOptions:
    """The options of a TensorRT engine; None and empty select the default."""

    min_length: Count | None = None
    """minimum tokens of a document (default: 1)"""
    opt_lengths: tuple[Count, ...] = field(default=(), metadata={"flag": "--opt-length"})
    """lengths to optimize for, one profile for each (default: 2048, within the minimum and the
    maximum)"""
    max_batch: Count | None = None
    """maximum documents in a run (default: 8)"""
    workspace_mib: Count | None = field(
        default=None, metadata={"flag": "--workspace", "metavar": "MIB"}
    )
    """maximum scratch memory of a layer in MiB (default: TensorRT's own limit)"""
    compute_capabilities: tuple[Count, ...] = field(
        default=(), metadata={"flag": "--compute-capability"}
    )
    """compute capabilities of the GPUs, 86 for 8.6; only with --to trt-rtx (default:
    80,86,89,120)"""


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export. The text of each is also its help on the command line."""

    to: Target = "onnx"
    """onnx: a bundle with the ONNX model; trt: also a TensorRT engine, built on the GPU that will
    run it; trt-rtx: also a portable TensorRT-RTX engine, built with or without a GPU"""
    out: StrPath | None = field(default=None, metadata={"metavar": "DIR"})
    """folder of the bundle (default: MODEL.bundle)"""
    precision: Precision = "fp32"
    """fp16: 16-bit weights and activations; bf16, int8: only the products of the fused encoder
    kernels, but for an engine bf16 weights and activations; auto: for each of these products the
    cheapest of int8, bf16 and fp32 within --tolerance, measured here, with fp32 weights and
    activations; sums are always float32 or wider"""
    tolerance: float | None = None
    """maximum error of the model with --precision auto (default: that of fp32)"""
    max_length: int | None = None
    """maximum tokens of a document (default: the model's own limit; 16384 for an engine without
    one)"""
    long_documents: Literal["windows"] | None = None
    """windows: read a document longer than a window in windows, and make one answer of theirs by
    --aggregate (default: refuse documents over the limit of the model)"""
    window: Count | None = None
    """tokens of a window, with those that the tokenizer adds (default: the limit of the model)"""
    stride: Count | None = None
    """tokens from the start of a window to that of the next (default: 3/4 of the window)"""
    aggregate: Literal["max", "mean", "logsumexp", "noisy_or"] | None = None
    """the answer of all windows. max: the largest logit; mean: the mean logit by tokens; logsumexp:
    the logarithm of the mean exponential; noisy_or: 1 - prod(1 - p) of the probabilities. Exclusive
    labels: max is the window with the smallest probability of the background label, noisy_or the
    product of these probabilities, of which the other labels share the rest. Values take max or
    mean; vectors are always the mean, and each token has the answer of the window in which it is
    most central (default: none for labels and values)"""
    background_label: str | None = None
    """exclusive label that means that nothing was found, for --aggregate max or noisy_or (default:
    the first of two labels; none of more, whose log probabilities are aggregated one by one)"""
    vocab_size: Count | None = None
    """number of token ids (default: the rows of the model's embedding)"""
    features: Count | None = None
    """number of features of each token, for a model that takes input_features [batch, tokens, N]
    instead of token ids (default: num_features of the module or its config)"""
    feature_file: StrPath | None = None
    """JSON file with names, mean and scale of the features; the server normalizes values by
    (x - mean) / scale"""
    inputs: Mapping[str, str] | None = field(
        default=None, metadata={"flag": "--input", "metavar": "NAME=KIND"}
    )
    """extra input for the parameter NAME of forward; repeat it for several. Of each document:
    number, vector:K, category or categories:K; of each token: token_category. A category may end
    in :N, for integers below N (default: the rows of the table that looks them up); a number or
    vector in :MIN..MAX, for numbers from MIN to MAX"""
    text_pairs: bool = False
    """a document is two texts, text and text_pair, as for reranking and inference (NLI), which the
    tokenizer joins; a forward with the parameter token_type_ids gets their types (default: only
    for a CrossEncoder)"""
    opset: int | None = None
    """ONNX opset, 18 to 25 (default: 20)"""
    batching: bool = True
    """False: run each document separately, for a model that computes over the whole batch"""
    check_parity: bool = field(default=True, metadata={"flag": "--no-verify"})
    """False: do not compare with PyTorch"""
    force: bool = False
    """replace an existing bundle"""
    task: str | Mapping[str, str] | None = field(default=None, metadata={"metavar": "[NAME=]TASK"})
    """task of the only output, or of the output NAME; repeat it for several:
    single_label_classification, multi_label_classification, binary_classification, regression,
    token_classification or feature_extraction (default: that of the file; the first for two or
    more logits of a document)"""
    labels: Sequence[str] | None = None
    """names of the classes or values of the only output (default: those of the file, or class_0,
    class_1, ...)"""
    heads: StrPath | None = None
    """JSON file of the head of each output, with names, thresholds or units (default: from --task
    and --labels)"""
    tokenizer: Literal["bytes"] | StrPath | SerializableTokenizer | None = field(
        default=None, metadata={"metavar": "FILE|bytes"}
    )
    """path of a tokenizer.json; or bytes, if the model's ids are the bytes of the text in UTF-8, 0
    to 255 (default: the tokenizer in the model file)"""
    engine: EngineOptions = field(
        default_factory=EngineOptions, metadata={"group": "engine options"}
    )
    """options of the engine"""
    timing_cache: StrPath | None = field(default=None, metadata={"group": "engine options"})
    """file of TensorRT kernel timings, read if it exists and written back; only with --to trt"""


def with_options(function: str, given: Mapping[str, Any], *all_options: Any) -> list[Any]:
    """Return options with those of ``given`` that they have.

    Args:
        function: name of the function that takes the options, for the error.
        given: further options by name.
        all_options: instances of the classes above.

    Raises:
        TypeError: if none of them has an option of the name; it names the nearest.
    """
    names = [[one.name for one in fields(options)] for options in all_options]
    known = [name for own in names for name in own]
    for name in given:
        if name not in known:
            likely = nearest(name, known)
            hint = f"did you mean {likely!r}?" if likely else f"it takes {', '.join(known)}"
            raise TypeError(f"{function}() got an unexpected option {name!r}; {hint}")
    return [
        replace(options, **{name: given[name] for name in own if name in given})
        for options, own in zip(all_options, names, strict=True)
    ]


def as_source(given: StrPath | Callable[..., Any] | ModelSource | None) -> ModelSource:
    """Return the source of a path, a module, or a callable that returns one; None has none.

    Raises:
        UsageError: for an object of another type.
    """
    if isinstance(given, ModelSource):
        return given
    if given is None or isinstance(given, str | Path):
        return ModelSource(given)
    if callable(given):
        return ModelSource(factory=given)
    raise UsageError(
        "Expected a model file, an nn.Module, or a callable that returns one, got an object of "
        f"type {type(given).__name__}.",
        _REMEDIES.get(type(given).__name__, "Give one of the three."),
    )


_REMEDIES = dict.fromkeys(
    ("dict", "OrderedDict"),
    "Load the state dict into its module by load_state_dict, and give the module.",
) | {"ModelProto": "Write it by onnx.save(model, 'model.onnx'), and give the file."}
"""What to do with a model in another form, by its type."""
