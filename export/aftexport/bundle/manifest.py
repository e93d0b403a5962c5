"""The description of a bundle, ``manifest.json``, and in it the plan of documents in chunks."""

import math
from collections import Counter
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import ConfigDict, Field, model_validator

from aftexport.bundle.features import Features
from aftexport.engines.tensorrt.settings import BuildSettings, Count
from aftexport.extra_inputs import MAX_INPUTS, TEXT_PAIR, TOKEN_TYPES, ExtraInput
from aftexport.heads import AnyHead, FeatureExtraction, Head, Regression, SingleLabelClassification
from aftexport.heads.calibration import Calibration
from aftexport.system.contract import FEATURES, IDS, INPUTS, MAX_TOKENS, MAX_VOCABULARY, main_input
from aftexport.system.validation import StrictModel

Tokens = Annotated[int, Ge(0), Le(MAX_TOKENS)]
"""A number of tokens of one document."""
MAX_STATE = 1 << 28
"""The maximum numbers in the state of a recurrence, or of all kept keys: it is in memory."""
Pooling = Literal["sum", "max", "logsumexp", "top_k", "first", "marked", "ties"]
"""The combination of values pooled from parts of a document.

``marked`` has the largest mark. ``top_k`` are the largest values ``[B, k, D]`` of each channel, and
``ties`` the same with one more row, the number of tokens with the least of them.
"""


class Recurrence(StrictModel):
    """The states of a recurrence, which replace the summaries of an attention's chunks."""

    # order of the tokens, forward or reverse; bidirectional for one recurrence in each order
    direction: Literal["forward", "reverse", "bidirectional"]
    # shape of the state in one order, for one document
    shape: Annotated[tuple[Tokens, ...], Len(2, 3)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if math.prod(self.shape) > MAX_STATE:
            raise ValueError(f"shape: expected at most {MAX_STATE} numbers, got {self.shape}")
        return self


class KeptKeys(StrictModel):
    """The keys and values of a softmax attention, which are kept as they are."""

    # number of keys before and after its own position that a query sees; None for all
    window_left: Tokens | None
    window_right: Tokens | None
    width: Count  # numbers of one key and its value

    @property
    def is_window(self) -> bool:
        """Whether the keys that a query sees have a maximum number."""
        return self.window_left is not None and self.window_right is not None


class ChunkedStage(StrictModel):
    """One attention, recurrence or convolution of a model that runs chunk by chunk."""

    left: Tokens  # tokens before a chunk that its run includes
    right: Tokens  # those after it
    causal: bool  # whether a token attends only to itself and earlier tokens
    keeps: tuple[str, ...]  # values per token that are kept from before the stage for after it
    # states that pass from chunk to chunk; None for an attention
    recurrence: Recurrence | None
    # keys of a softmax attention; None for another one, whose chunks have summaries
    keys: KeptKeys | None = None

    @model_validator(mode="after")
    def _recurrence_fits(self) -> Self:
        if self.recurrence is None:
            return self
        self._check_margins("a recurrence")
        self._check_causal(
            self.recurrence.direction == "forward",
            f"recurrence that is {self.recurrence.direction}",
        )
        return self

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        if self.keys is None:
            return self
        if self.recurrence is not None:
            raise ValueError("keys: expected none for a recurrence, got some")
        self._check_margins("kept keys")
        right = self.keys.window_right
        self._check_causal(right == 0, f"window with {right} keys on the right")
        return self

    def _check_margins(self, kind: str) -> None:
        if self.left or self.right:
            raise ValueError(
                f"left, right: expected 0 for {kind}, got {self.left} and {self.right}"
            )

    def _check_causal(self, expected: bool, kind: str) -> None:
        if self.causal != expected:
            raise ValueError(f"causal: expected {str(expected).lower()} for a {kind}")


class ChunkedPlan(StrictModel):
    """The plan by which the graphs in ``chunked.zip`` run a document of any length."""

    stages: tuple[ChunkedStage, ...]
    # each value pooled from the tokens, with the combination of those of chunks; empty if all
    # outputs are per token and need none
    pooled: dict[str, Pooling]
    token_bytes: Count  # maximum memory per token during the run of a graph
    evidence: bool  # whether the graphs return each token's evidence for the largest logit
    documents: tuple[str, ...]  # names of the outputs per document
    tokens: dict[str, Count]  # each output per token, with its width
    tokens_use_last_stage: bool  # whether the outputs per token need the last stage's own results
    # length at which pairs of tokens take as many multiply-adds as products with weights; None if
    # no stage attends to all keys
    quadratic_tokens: Count | None = None

    @property
    def token_state_bytes(self) -> int:
        """The bytes that every token adds to the state of a document that grows."""
        kept = (stage.keys for stage in self.stages)
        return 4 * sum(keys.width for keys in kept if keys and keys.window_left is None)

    @property
    def max_state_tokens(self) -> int:
        """The maximum number of tokens of such a document."""
        fitting = 4 * MAX_STATE // (self.token_state_bytes or 1)
        return min(fitting, MAX_TOKENS)

    @property
    def output_names(self) -> frozenset[str]:
        """The names of all outputs."""
        return frozenset((*self.documents, *self.tokens))

    @model_validator(mode="after")
    def _outputs_have_sources(self) -> Self:
        if not self.output_names:
            raise ValueError("documents: expected an output per document or per token, got none")
        if self.documents and not self.pooled:
            raise ValueError("pooled: expected a value for the outputs per document, got none")
        if repeated := set(self.documents) & self.tokens.keys():
            raise ValueError(f"tokens: expected outputs beside documents, got {min(repeated)}")
        return self


Aggregate = Literal["max", "mean", "logsumexp", "noisy_or"]
"""The rule that makes one answer of the answers for windows; see ``aftexport.chunked.windows``."""


class WindowLayout(StrictModel):
    """The places of the windows of a document."""

    tokens: Count  # of each window, with the prefix and the suffix
    stride: Count  # from the first token of a window to that of the next
    # ids that the tokenizer adds before and after a text, and so every window has
    prefix: tuple[Tokens, ...] = ()
    suffix: tuple[Tokens, ...] = ()

    @property
    def content(self) -> int:
        """The tokens of a window without the prefix and the suffix."""
        return self.tokens - len(self.prefix) - len(self.suffix)

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content < 1:
            raise ValueError(f"tokens: expected more than prefix and suffix, got {self.tokens}")
        if self.stride > self.content:
            raise ValueError(f"stride: expected at most {self.content}, got {self.stride}")
        return self


class WindowPolicy(WindowLayout):
    """The declared treatment of documents that are longer than a window."""

    aggregate: Aggregate | None  # None if no head has labels or values of documents
    # the label of each head of exclusive labels that means that nothing was found
    backgrounds: dict[str, str] = Field(default_factory=dict)

    def problem_for(self, name: str, head: Head) -> str | None:
        """Return the reason why the policy does not fit a head; None if it does."""
        background = self.backgrounds.get(name)
        if background is not None and (
            not isinstance(head, SingleLabelClassification) or background not in head.labels
        ):
            return f"backgrounds: expected a label of {name}, got {background!r}"
        if head.is_per_token or isinstance(head, FeatureExtraction):
            return None
        if self.aggregate is None:
            return f"aggregate: expected one for {name}, got none"
        if isinstance(head, Regression) and self.aggregate not in ("max", "mean"):
            return (
                f"aggregate: expected max or mean for {name}, whose values are not probabilities, "
                f"got {self.aggregate}"
            )
        return None


SCHEMA_VERSION: Literal[4] = 4
ONNX_FILE = "ONNX file"
"""The kind of a source that is an ONNX model: there is no PyTorch to compare with."""


class FileEntry(StrictModel):
    """The size and digest of one file."""

    bytes: Annotated[int, Ge(0), Le((1 << 63) - 1)]
    sha256: str


class PositionBias(StrictModel):
    """The position bias of one AFT-full node."""

    node: str  # name of the node in `model.onnx`
    # largest `max - min` of a row, over the visible keys of the row; None if the graph computes the
    # bias, or if the bias is not finite
    row_range: Annotated[float, Ge(0)] | None
    precision: Literal["fp32", "fp16", "bf16", "int8"]


class NodePrecision(StrictModel):
    """The precision chosen for one node, with the reason."""

    node: str  # name of the node in `model.onnx`
    operator: str
    precision: Literal["fp32", "bf16", "int8"]
    # model's error on its golden cases with only this node in each precision
    errors: dict[str, Annotated[float, Ge(0)]]
    reason: str  # reason against a cheaper precision


class EnginePlan(StrictModel):
    """The TensorRT engine that a bundle was exported for."""

    settings: BuildSettings
    # name of the engine built at export, described by its record; None if not built
    file: str | None
    deferred: tuple[str, ...]  # each step that waits for the first GPU, with the reason


class Manifest(StrictModel):
    """The description of a bundle, without its files."""

    model_config = ConfigDict(allow_inf_nan=False)

    source: dict[str, str | None]  # kind and sha256 of the model file
    # configuration of the classifier; None if the checkpoint has none
    config: dict[str, Any] | None
    # names of the model's inputs: `input_ids` int64 `[batch, tokens]` or `input_features` float32
    # `[batch, tokens, features]`; if used, `lengths` int64 `[batch]`; and the extra inputs
    inputs: tuple[str, ...]
    # number of token ids; every id is below it. None for a model of features
    vocab_size: Annotated[int, Ge(1), Le(MAX_VOCABULARY)] | None
    features: Features | None = None
    # maximum length of a document in tokens; None for no bound
    max_tokens: Annotated[Tokens, Ge(1)] | None
    extra_inputs: Annotated[tuple[ExtraInput, ...], Len(0, MAX_INPUTS)] = ()
    # whether a document is a text and a text pair, for which the tokenizer makes the input
    # `token_type_ids`, if the model has it
    text_pairs: bool = False
    batching: bool = True  # whether documents may share a run
    # each head by the name of its output, in the order of the outputs
    heads: Annotated[dict[str, AnyHead], Len(1)]
    # fp32; fp16, for weights and activations; bf16 or int8, for the products inside kernels; bf16,
    # for weights and activations if there is an `engine`; with `node_precisions` the cheapest of
    # them
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    # type in which PyTorch computed the golden outputs; float64, except for a captured program, or
    # a module whose forward fixes another type
    reference: Literal["float64", "float32", "float16", "bfloat16"] = "float64"
    # requested bound on the model's error; None for that of the table
    tolerance: Annotated[float, Gt(0), Lt(1)] | None = None
    node_precisions: tuple[NodePrecision, ...] = ()
    opset: Count
    operators: dict[str, Count]  # number of nodes of each custom operator
    position_biases: tuple[PositionBias, ...] = ()
    operator_version: Count  # version of the `ai.aftexport` domain
    hardware: str  # hardware required by the model file; `any` for ONNX
    versions: dict[str, str]
    engine: EnginePlan | None = None  # TensorRT engine it was exported for; None for only ONNX
    # plan for documents longer than memory; None if there is none
    chunked: ChunkedPlan | None = None
    whole_only: str | None = None  # the reason for runs of whole documents only
    # treatment of documents longer than a window; None to refuse those over `max_tokens`
    windows: WindowPolicy | None = None
    no_evidence: str | None = None  # reason why the model returns no evidence
    # for each head whose logits a request can choose, the part of each logit that does not depend
    # on the tokens, in the order of the logits' numbers, see `lowering.evidence`; None if the model
    # does not return the evidence of each token
    evidence_heads: Annotated[dict[str, tuple[float, ...]], Len(1)] | None = None
    # reason against evidence for each other head for documents
    refused_evidence: dict[str, str] = Field(default_factory=dict)
    # calibration of heads by their names; None if there is none
    calibration: Annotated[dict[str, Calibration], Len(1)] | None = None

    @property
    def precision_title(self) -> str:
        """The precision for messages; with precisions by node, the number of nodes of each."""
        if not self.node_precisions:
            return self.precision
        counts = Counter(node.precision for node in self.node_precisions)
        return "auto: " + ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))

    @property
    def is_of_onnx(self) -> bool:
        """Whether the bundle was made from an ONNX file, whose own outputs are the reference."""
        return self.source.get("kind") == ONNX_FILE

    @property
    def reference_title(self) -> str:
        """The runtime and the type of the golden outputs, for messages."""
        return f"{self.reference_name} in {self.reference}"

    @property
    def reference_name(self) -> str:
        """The model whose outputs are the reference, for messages."""
        return "the ONNX file" if self.is_of_onnx else "PyTorch"

    @property
    def explained(self) -> str | None:
        """The output that evidence explains without a choice: the first with evidence, if any."""
        return next(iter(self.evidence_heads or ()), None)

    @property
    def main_input(self) -> str:
        """The input with the tokens, ``input_ids`` or ``input_features``."""
        return main_input(self.inputs)

    @model_validator(mode="after")
    def _inputs_fit(self) -> Self:
        extras = [extra.name for extra in self.extra_inputs]
        own = tuple(name for name in self.inputs if name not in extras)
        if own not in INPUTS or len(set(self.inputs)) < len(self.inputs):
            raise ValueError(f"inputs: expected one of {INPUTS}, got {own}")
        if sorted(extras) != sorted(set(self.inputs) - set(own)):
            raise ValueError(f"extra_inputs: expected inputs of the model, got {extras}")
        for extra in self.extra_inputs:
            if extra.dtype == "int64" and extra.maximum is None:
                raise ValueError(f"extra_inputs: expected a maximum of {extra.name!r}, got none")
            if extra.name in self.heads:
                raise ValueError(f"extra_inputs: expected no output {extra.name!r}, got one")
        field = {IDS: "vocab_size", FEATURES: "features"}
        for main, name in field.items():
            if (getattr(self, name) is None) is (main == self.main_input):
                raise ValueError(f"expected {field[self.main_input]} only, for {self.main_input}")
        return self

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        if self.text_pairs and (self.main_input != IDS or self.windows is not None):
            raise ValueError("text_pairs: expected token ids, and no windows")
        return self

    @property
    def typed_pairs(self) -> bool:
        """Whether the tokenizer makes the types of the tokens of a pair."""
        return self.text_pairs and TOKEN_TYPES in self.inputs

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a table beside its texts: the second text of a pair, and extra inputs."""
        names = tuple(extra.name for extra in self.extra_inputs)
        if not self.text_pairs:
            return names
        return (TEXT_PAIR, *(name for name in names if name != TOKEN_TYPES))

    @model_validator(mode="after")
    def _chunks_fit(self) -> Self:
        plan = self.chunked
        if plan is None:
            return self
        widths = {name: head.width for name, head in self.heads.items() if head.is_per_token}
        if plan.tokens != widths:
            raise ValueError(
                f"chunked.tokens: expected the heads per token with their widths, {widths}, got "
                f"{plan.tokens}"
            )
        if set(plan.documents) != self.heads.keys() - widths.keys():
            raise ValueError(
                "chunked.documents: expected the other heads, "
                f"{sorted(self.heads.keys() - widths.keys())}, got {sorted(plan.documents)}"
            )
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> Self:
        windows = self.windows
        if windows is None:
            return self
        if self.max_tokens is not None and windows.tokens > self.max_tokens:
            raise ValueError(
                f"windows.tokens: expected at most {self.max_tokens}, got {windows.tokens}"
            )
        largest = max((*windows.prefix, *windows.suffix), default=-1)
        if largest >= (self.vocab_size or 0) and largest >= 0:
            raise ValueError(f"windows: expected ids below {self.vocab_size}, got {largest}")
        if unknown := windows.backgrounds.keys() - self.heads.keys():
            raise ValueError(f"windows.backgrounds: expected heads, got {min(unknown)!r}")
        for name, head in self.heads.items():
            if reason := windows.problem_for(name, head):
                raise ValueError(f"windows.{reason}")
        return self

    @model_validator(mode="after")
    def _evidence_heads_fit(self) -> Self:
        for name, offsets in (self.evidence_heads or {}).items():
            head = self.heads.get(name)
            if head is None or head.is_per_token:
                raise ValueError(f"evidence_heads: expected heads for documents, got {name!r}")
            if len(offsets) != head.width:
                raise ValueError(
                    f"evidence_heads.{name}: expected an offset for each of {head.width} logits, "
                    f"got {len(offsets)}"
                )
        return self

    @model_validator(mode="after")
    def _calibration_fits(self) -> Self:
        for name, calibration in (self.calibration or {}).items():
            if name not in self.heads:
                raise ValueError(f"calibration: expected names of heads, got {name!r}")
            if reason := calibration.problem_for(self.heads[name]):
                raise ValueError(f"calibration.{name}: {reason}")
        return self


class ManifestFile(Manifest):
    """The complete ``manifest.json``, with the schema version and the files."""

    schema_version: Literal[4]
    files: dict[str, FileEntry]
