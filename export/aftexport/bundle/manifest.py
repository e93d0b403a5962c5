"""What a bundle says of itself: ``manifest.json``."""

import re
from collections import Counter
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Len
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from aftexport.contract import MAX_TOKENS, MAX_VOCABULARY
from aftexport.engines.tensorrt.settings import BuildSettings, Count

SCHEMA_VERSION = 1


_PLAIN = (("a valid array", "a list"), ("a valid integer", "an integer"), ("a valid ", "a "))
"""Words of pydantic, and plain ones."""
_MAX_SHOWN = 40
"""Characters of a wrong value that an error repeats."""
Tokens = Annotated[int, Ge(0), Le(MAX_TOKENS)]
"""A number of tokens of one document."""


class FileEntry(BaseModel):
    """Size and digest of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: Annotated[int, Ge(0), Le((1 << 63) - 1)]
    sha256: str


class PositionBias(BaseModel):
    """The position bias of one AFT-full node.

    Attributes:
        node: its name in ``model.onnx``.
        row_range: the largest ``max - min`` of a row, over the keys that the row sees; None
            where the graph computes the bias or it is not finite.
        precision: of the exponentials in a fused kernel, chosen by that range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    node: str
    row_range: Annotated[float, Ge(0)] | None
    precision: Literal["fp32", "fp16", "bf16", "int8"]


class NodePrecision(BaseModel):
    """The precision that was chosen for one node, and why.

    Attributes:
        node: its name in ``model.onnx``.
        operator: its type.
        precision: of the products in its fused kernel.
        errors: of the model on its golden cases with this node alone in each precision.
        reason: why it is no cheaper one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    node: str
    operator: str
    precision: Literal["fp32", "bf16", "int8"]
    errors: dict[str, Annotated[float, Ge(0)]]
    reason: str


class EnginePlan(BaseModel):
    """The TensorRT engine that a bundle was exported for.

    Attributes:
        settings: what it is built for.
        file: the engine, where it was built at export; what it is stands in the file's record.
        deferred: each thing that waits for the first GPU, and why.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    settings: BuildSettings
    file: str | None
    deferred: tuple[str, ...]


Pooling = Literal["sum", "max", "first"]
"""How what is pooled from parts of a document combines."""


class ChunkedStage(BaseModel):
    """One attention of a model that runs chunk by chunk.

    Attributes:
        left, right: tokens before and after a chunk that it is run with.
        causal: only what is before a token counts.
        keeps: what was kept of every token before it and is needed after it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    left: Tokens
    right: Tokens
    causal: bool
    keeps: tuple[str, ...]


class ChunkedPlan(BaseModel):
    """How the graphs in ``chunked.zip`` run a document of any length.

    Attributes:
        stages: in order.
        pooled: each value pooled from the tokens, to how those of chunks combine.
        token_bytes: at most what a token takes while a graph runs.
        evidence: whether they say what each token adds to the largest logit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    stages: tuple[ChunkedStage, ...]
    pooled: Annotated[dict[str, Pooling], Len(1)]
    token_bytes: Count
    evidence: bool = False


class Manifest(BaseModel):
    """What a bundle says of itself, apart from its files.

    Attributes:
        source: kind and sha256 of the model file.
        config: of the classifier, where the checkpoint has one.
        inputs: names of the model's inputs, all int64: ``input_ids [batch, tokens]``
            and, where used, ``lengths [batch]``.
        vocab_size: ids are below this.
        max_tokens: most tokens of a document; None for no bound.
        batching: whether documents may share a run.
        labels: class names in the order of the logits.
        precision: fp32; fp16, of weights and activations; bf16 or int8, of the products
            inside kernels; bf16 of weights and activations where there is an ``engine``; of
            ``node_precisions`` the cheapest.
        reference: type that PyTorch computed the golden outputs in; float64 but for a captured
            program, or a module whose forward fixes another.
        tolerance: on the model's error, where one was given instead of the table's.
        node_precisions: of each node, where they were chosen one by one.
        opset: of the standard operators.
        operators: number of nodes of each custom operator.
        position_biases: of its AFT-full nodes.
        operator_version: of the ``ai.aftexport`` domain.
        hardware: what the model file needs; ``any`` for ONNX.
        versions: of the tools that made the bundle.
        engine: the TensorRT engine it was exported for; None for ONNX alone.
        chunked: how a document longer than memory runs; None where it cannot.
        whole_only: why it cannot.
        evidence: of each label, what its logit has that comes of no token, where the model puts
            out what each token adds; None where it does not.
        no_evidence: why it does not.
    """

    # From JSON: a tuple is a list there, and nothing else is converted.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    source: dict[str, str | None]
    config: dict[str, Any] | None
    inputs: tuple[Literal["input_ids", "lengths"], ...]
    vocab_size: Annotated[int, Ge(1), Le(MAX_VOCABULARY)]
    max_tokens: Annotated[Tokens, Ge(1)] | None
    batching: bool = True
    labels: Annotated[tuple[str, ...], Len(1)]
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    reference: Literal["float64", "float32", "float16", "bfloat16"] = "float64"
    tolerance: Annotated[float, Gt(0)] | None = None
    node_precisions: tuple[NodePrecision, ...] = ()
    opset: Count
    operators: dict[str, Count]
    position_biases: tuple[PositionBias, ...] = ()
    operator_version: Count
    hardware: str
    versions: dict[str, str]
    engine: EnginePlan | None = None
    chunked: ChunkedPlan | None = None
    whole_only: str | None = None
    evidence: tuple[float, ...] | None = None
    no_evidence: str | None = None

    @property
    def precision_title(self) -> str:
        """The precision for people; where nodes have their own, how many have which."""
        if not self.node_precisions:
            return self.precision
        counts = Counter(node.precision for node in self.node_precisions)
        return "auto: " + ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))

    @model_validator(mode="after")
    def _labels_fit(self) -> Self:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("labels: a name stands there twice")
        if self.evidence is not None and len(self.evidence) != len(self.labels):
            raise ValueError("evidence: there is not one offset for each label")
        return self


class ManifestFile(Manifest):
    """``manifest.json`` whole: with the schema version and the files."""

    schema_version: Count
    files: dict[str, FileEntry]


def problem(error: ValidationError) -> str:
    """Return the first thing wrong: the place, what was expected there, and what came."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "missing":
            return f"{place}: the field is missing"
        case "extra_forbidden":
            return f"{place}: the field is not known"
        case "value_error":
            message = first["msg"].removeprefix("Value error, ")
            return f"{place}: {message}" if place else message
    expected = re.sub(r"^Input should (be |have )?", "", first["msg"])
    expected = re.sub(r"^\w+ (should have .+?),? not \d+$", r"\1", expected)
    expected = expected.removeprefix("should have ").partition(" after validation")[0]
    for said, plain in _PLAIN:
        expected = expected.replace(said, plain)
    return f"{place}: expected {expected}, got {_shown(first['input'])}"


def _shown(value: object) -> str:
    """A value of JSON for people, without all that a long one holds."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return f"an object of {len(value)}"
        case list() | tuple():
            return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
