"""JSON objects of the HTTP interface."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StrictInt,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from aftexport.bundle.features import Features
from aftexport.bundle.manifest import Aggregate, WindowPolicy
from aftexport.extra_inputs import ExtraInput
from aftexport.heads import AnyAnswer, AnyHead
from aftexport.heads.calibration import Calibration as HeadCalibration
from aftserve.settings import AnswerPolicy
from aftserve.types import Document, ExtraFields, TextPair


def _convert_whole_floats(ids: Any) -> Any:
    """Turn whole floats into integers, because 5.0 is an integer in JSON."""
    if isinstance(ids, list) and float in set(map(type, ids)):
        return [int(i) if isinstance(i, float) and i.is_integer() else i for i in ids]
    return ids


def _check_array(ids: Any, check_list: ValidatorFunctionWrapHandler) -> Any:
    """Check the array that a large body has in place of a list of token ids."""
    if not isinstance(ids, np.ndarray):
        return check_list(ids)
    # 1e400 is infinite, and its own floor.
    if ids.ndim > 1 or not np.isfinite(ids).all() or (ids != np.floor(ids)).any():
        raise ValueError("expected a list of integers")
    return ids


ARRAY_OR_LIST = WrapValidator(
    lambda given, check_list: given if isinstance(given, np.ndarray) else check_list(given)
)
"""Validator of a list that large bodies may have as an array."""
TokenIds = Annotated[
    list[StrictInt],
    FailFast(),
    BeforeValidator(_convert_whole_floats),
    WrapValidator(_check_array),
    Field(description="Token ids of one document."),
]
Rows = Annotated[list[Any], ARRAY_OR_LIST]


def _axes(*axes: str, is_entry: bool = False) -> Callable[[Any], Any]:
    """Return a check of the brackets of a list with these axes, or of one of its entries."""

    def check(given: Any) -> Any:
        if given is None:
            return given
        levels, inner = int(is_entry), given
        while isinstance(inner, list) and inner:
            levels, inner = levels + 1, inner[0]
        levels += np.ndim(inner) if isinstance(inner, list | np.ndarray) else 0
        missing = len(axes) - levels
        # An empty list has no axes that could be missing.
        if missing < 0 or (missing and np.size(inner)):
            raise ValueError(
                f"expected {_count(len(axes))} of brackets, [{', '.join(axes)}], got {levels}; "
                f"{'add' if missing > 0 else 'remove'} {_count(abs(missing))}"
            )
        return given

    return check


def _count(levels: int) -> str:
    return "one level" if levels == 1 else f"{levels} levels"


def _paired(text: str, second: str | list[str] | None) -> Document:
    return TextPair(text, second) if isinstance(second, str) else text


_DocumentIds = Annotated[TokenIds, BeforeValidator(_axes("documents", "tokens", is_entry=True))]
_DocumentRows = Annotated[
    Rows, BeforeValidator(_axes("documents", "tokens", "features", is_entry=True))
]


class InferRequest(BaseModel):
    """Documents to classify, in exactly one of the four forms."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(None, description="One document; the answer is one object.")
    texts: list[str] | None = Field(None, description="Documents.", min_length=1, fail_fast=True)
    text_pair: str | list[str] | None = Field(
        None,
        description="Second text of each pair, for a model of pairs: a text with text, a list with "
        "texts.",
    )
    input_ids: list[_DocumentIds] | None = Field(
        None,
        description="Tokenized documents, each of its own length.",
        min_length=1,
        fail_fast=True,
    )

    input_features: list[_DocumentRows] | None = Field(
        None,
        description="Documents of features, a list of numbers for each token.",
        min_length=1,
        fail_fast=True,
    )

    inputs: dict[str, Any] | list[dict[str, Any]] | None = Field(
        None,
        description="Extra inputs by name: an object with text, else a list of objects, one for "
        "each document.",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [self.text, self.texts, self.input_ids, self.input_features]
        if sum(form is not None for form in given) != 1:
            raise ValueError("give exactly one of text, texts, input_ids and input_features")
        self._check_pairs()
        if self.inputs is None:
            return self
        if isinstance(self.inputs, dict) is (self.text is None):
            raise ValueError("give inputs as an object with text, else as a list of objects")
        if len(self.given or ()) != len(self.documents):
            raise ValueError(
                f"expected inputs for each of {len(self.documents)} documents, got "
                f"{len(self.inputs)}; send one object for each document"
            )
        return self

    def _check_pairs(self) -> None:
        second = self.text_pair
        if second is None:
            return
        first = self.text if isinstance(second, str) else self.texts
        if first is None:
            raise ValueError("give text_pair as a text with text, or as a list with texts")
        if isinstance(second, list) and len(second) != len(first):
            raise ValueError(
                f"expected a text_pair for each of {len(first)} texts, got {len(second)}"
            )

    @property
    def given(self) -> Sequence[ExtraFields] | None:
        """The extra inputs of each document; None without any."""
        return [self.inputs] if isinstance(self.inputs, dict) else self.inputs

    @property
    def documents(self) -> Sequence[Document]:
        """Texts, pairs of texts, token ids or features."""
        if self.text is not None:
            return [_paired(self.text, self.text_pair)]
        if self.texts is not None and isinstance(self.text_pair, list):
            return list(map(TextPair, self.texts, self.text_pair))
        return self.texts or self.input_ids or self.input_features or []


class DocumentRequest(BaseModel):
    """One document, in exactly one of the three forms."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    text_pair: str | None = Field(
        None, description="Second text of a pair, for a model of pairs; only with text."
    )
    input_ids: list[StrictInt] | None = Field(None, fail_fast=True)

    input_features: Rows | None = None
    inputs: dict[str, Any] | None = Field(None, description="Extra inputs by name.")

    _whole_ids = field_validator("input_ids", mode="before")(_convert_whole_floats)
    _array_of_ids = field_validator("input_ids", mode="wrap")(_check_array)
    _axes_of_ids = field_validator("input_ids", mode="before")(_axes("tokens"))
    _axes_of_features = field_validator("input_features", mode="before")(
        _axes("tokens", "features")
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [self.text, self.input_ids, self.input_features]
        if sum(form is not None for form in given) != 1:
            raise ValueError("give exactly one of text, input_ids and input_features")
        if self.text is None and self.text_pair is not None:
            raise ValueError("give text_pair only with text")
        return self

    @property
    def document(self) -> Document:
        """A text, a pair of texts, token ids or features."""
        if self.text is not None:
            return _paired(self.text, self.text_pair)
        found = self.input_features if self.input_ids is None else self.input_ids
        return [] if found is None else found


class LineProblem(BaseModel):
    """The problem of a line that has no answer."""

    detail: str
    status: int = Field(description="Status that a request with only this document would get.")
    retry_after: int | None = Field(
        default=None, description="Seconds after which a retry may succeed, if ever."
    )


class Timings(BaseModel):
    """Times of the stages of an answer, in seconds."""

    tokenize_seconds: float
    queue_seconds: float = Field(description="Wait for earlier documents.")
    inference_seconds: float = Field(description="Time of its run, which it may share.")
    predicted_seconds: float = Field(
        description="Predicted time of queue and inference of the request when it was accepted."
    )


class EvidenceSpan(BaseModel):
    """A passage that contributes more to the logit than as many average tokens."""

    start_token: int
    end_token: int = Field(description="Index of the token after its last.")
    start: int | None = Field(
        default=None, description="Index of its first character, if the document was sent as text."
    )
    end: int | None = Field(default=None, description="Index of the character after its last.")
    text: str | None = Field(
        default=None, description="The passage, if the document was sent as text."
    )
    text_pair: bool | None = Field(
        default=None,
        description="Whether `start`, `end` and `text` are of the second text of a pair; absent "
        "for one text, and for a passage from the one into the other.",
    )
    until_token: int | None = Field(
        default=None,
        description="Index after the last token that `contribution` counts, of a causal model: its "
        "rows after a passage hold the passage too.",
    )
    contribution: float = Field(description="Exact contribution of its tokens to the logit.")
    above_average: float = Field(
        description="Contribution minus the contribution of as many average tokens."
    )
    logit_without: float | None = Field(
        default=None,
        description="Logit of the document without this passage, if `evidence_check` asked for it.",
    )
    drop: float | None = Field(default=None, description="Logit minus `logit_without`.")


class Evidence(BaseModel):
    """Contributions of the tokens to a logit, at the last layer."""

    head: str | None = Field(
        default=None, description="Output of that logit; present if it was chosen by `explain`."
    )
    name: str | None = Field(
        default=None,
        description="Label or value of that logit; without `explain` only if it is not the "
        "answer's label.",
    )
    logit: float = Field(description="Sum of all contributions and the offset.")
    offset: float = Field(description="Part that does not depend on the tokens.")
    spread: bool = Field(
        description="Whether no passage stands out: the tokens of the first add less above the "
        "average than twice the mean size of a contribution."
    )
    spans: list[EvidenceSpan] = Field(description="Passages by their contribution above average.")


class DecidingWindow(BaseModel):
    """The window that decided a logit: the largest one, or the smallest of the background."""

    head: str = Field(description="Output of the logit.")
    name: str = Field(description="Label or value of the logit.")
    window: int = Field(description="Index of the window.")
    start_token: int = Field(description="First token of the document in it.")
    end_token: int = Field(description="Index of the token after its last.")


class Windows(BaseModel):
    """The windows in which a document was read, and which together cover every token."""

    count: int
    tokens: int = Field(description="Tokens of a window, with those that the tokenizer adds.")
    stride: int = Field(
        description="Tokens from one start to the next; the last window is moved back to be full."
    )
    aggregate: Aggregate | None = Field(
        description="Rule that makes one answer; null if every token has its own answer."
    )
    decided: list[DecidingWindow] = Field(
        description="Window that decided each logit; empty for means, to which all contribute."
    )


class DocumentResult(BaseModel):
    """The answer for one document."""

    bundle: str = Field(description="Digest of the bundle that answered; see GET /info.")
    label: str | None = Field(
        default=None, description="Label, if the model tells labels apart that exclude each other."
    )
    scores: dict[str, float] | None = Field(
        default=None, description="Probability of every label; present with label."
    )
    calibrated: dict[str, float] | None = Field(
        default=None,
        description="Calibrated probability of every label; present with label, if the bundle has "
        "a calibration.",
    )
    abstain: bool | None = Field(
        default=None,
        description="Whether the confidence is below the threshold of the error budget; present "
        "with label, if the bundle has one.",
    )
    heads: dict[str, AnyAnswer] | None = Field(
        default=None,
        description="Answer of each head, for every other model; see heads of GET /info.",
    )
    tokens_total: int = Field(description="Tokens of the document.")
    tokens_used: int = Field(description="Tokens that the model saw.")
    truncated: bool = Field(description="Whether the model saw less than the document.")
    policy: AnswerPolicy = Field(
        description="Policy for documents over the memory budget; `windows` if the bundle declares "
        "that documents over a window are read in windows."
    )
    windows: Windows | None = Field(
        default=None, description="Windows of the document; present with the policy `windows`."
    )
    timings: Timings
    evidence: Evidence | None = Field(
        default=None,
        description="Evidence for the largest logit; present if it was requested without "
        "`explain`.",
    )
    explained: list[Evidence] | None = Field(
        default=None,
        description="Evidence for each label or value that `explain` chose; without labels that "
        "do not hold, if it chose an output.",
    )


class InferResponse(BaseModel):
    """The answers for several documents, in the order of the request."""

    results: list[DocumentResult]


class Problem(BaseModel):
    """The problem of a request, and its remedy."""

    detail: str


class Status(BaseModel):
    """Liveness or readiness."""

    status: str


class Limits(BaseModel):
    """The limits of a request."""

    max_tokens: int = Field(description="Maximum tokens of one document.")
    max_characters: int = Field(description="Maximum characters of one text.")
    max_documents: int
    max_body_bytes: int
    max_array_bytes: int = Field(description="Maximum bytes of a .npy file of features.")
    max_queue_seconds: float = Field(
        description="Maximum predicted time of the queue before a request."
    )
    deadline_seconds: float = Field(
        description="Maximum time from a request's first byte to its answer."
    )
    max_inline_tokens: int | None = Field(
        description="Maximum tokens of a document whose answers for tokens are in one JSON object; "
        "null if no head answers for tokens."
    )
    budget_tokens: int = Field(description="Maximum tokens of a shared run, with padding.")
    batching: bool = Field(description="Whether documents may share a run.")
    whole_tokens: int = Field(description="Maximum tokens of a document within the memory budget.")
    long_documents: AnswerPolicy
    windows: WindowPolicy | None = Field(
        description="Windows in which longer documents are read; null without this policy."
    )
    whole_only: str | None = Field(
        description="Reason why no document can run in chunks; null if they can."
    )


class MeasuredRun(BaseModel):
    """The measured time of a run."""

    documents: int
    tokens: int = Field(description="Tokens of each document.")
    seconds: float
    pays: bool = Field(description="Whether it takes clearly less time than single runs.")


class ChunkedRun(BaseModel):
    """The measured time of a document in chunks."""

    documents: int
    tokens: int
    seconds: float


class Calibration(BaseModel):
    """The cost of documents on this machine."""

    measuring: bool = Field(
        description="Whether the costs are first estimates, which further measurements improve."
    )
    measurements: list[MeasuredRun]
    batch_up_to_tokens: int = Field(description="Maximum length of documents that share runs.")
    batch_up_to_documents: int
    in_chunks: list[ChunkedRun] = Field(description="Times of a document of one chunk, and of two.")
    slowdown: float = Field(
        serialization_alias="pace", description="Time of the last runs over their calibrated time."
    )


class Reload(BaseModel):
    """The result of a reload."""

    at: datetime
    bundle: str | None = Field(description="Digest of the loaded bundle; null if none was loaded.")
    seconds: float = Field(description="Duration of the reload.")
    problem: str | None = Field(
        description="Reason why the previous bundle stays in use; null if the new one is used."
    )


class ProductMethod(BaseModel):
    """The method that computes products of a precision, as chosen on this machine."""

    precision: str = Field(description="Requested precision, a bound on the error.")
    products: str = Field(description="`aft_full`, or `encoder_` and the width.")
    methods: list[str] = Field(
        description="Methods in order of preference. AFT-full takes the first that its position "
        "biases allow, other operators always take the first."
    )
    chosen_by: str = Field(
        description="`measurement`; `variable` for AFTEXPORT_METHOD; `precision` if the machine "
        "has only one method within the bound."
    )
    rates: dict[str, float] = Field(
        description="Measured billions of multiply-adds a second on one thread, by method."
    )
    kept: bool = Field(description="Whether the rates are in the cache that processes share.")
    instruction_set: str
    processor: str


class Info(BaseModel):
    """The server, its model and its limits."""

    version: str
    name: str = Field(description="Name of the model.")
    bundle: str = Field(description="Digest of the active bundle's manifest.")
    loaded: datetime
    last_reload: Reload | None
    engine: str
    provider: Literal["cpu", "cuda"] | None = Field(
        description="Execution provider of ONNX Runtime; null with another engine."
    )
    uses_standard_ops_only: bool = Field(
        serialization_alias="safe",
        description="Whether only fallbacks run, after a breach of parity.",
    )
    heads: dict[str, AnyHead] = Field(description="Head of each output: its task and its names.")
    labels: list[str] = Field(description="Names of the first head's labels or values.")
    scores: str = Field(description="Meaning of the first head's scores.")
    head_calibrations: dict[str, HeadCalibration] | None = Field(
        description="Calibration of the scores of each head, with its error by length and its "
        "threshold; null if the bundle has none.",
    )
    vocab_size: int | None = Field(description="Number of token ids; null with features.")
    features: Features | None = Field(
        description="Features of each token, which the server normalizes by (x - mean) / scale; "
        "null for token ids."
    )
    extra_inputs: tuple[ExtraInput, ...] = Field(
        description="Inputs beside the tokens: values of each document or of each token, to send "
        "by name in `inputs`."
    )
    precision: str = Field(description="Precision; the cheapest one if there are node_precisions.")
    node_precisions: dict[str, int] | None = Field(
        description="Number of nodes by precision, if each has its own (`--precision auto`)."
    )
    operators: dict[str, int]
    methods: list[ProductMethod] = Field(
        description="Methods of the CPU kernels for products in reduced precision; empty if there "
        "are none."
    )
    tokenizer: bool = Field(description="Whether texts are accepted beside token ids.")
    text_pairs: bool = Field(description="Whether each text must have a `text_pair`.")
    evidence: bool = Field(description="Whether the model returns the contribution of each token.")
    explainable: list[str] = Field(
        description="Outputs whose labels or values `explain` may choose for evidence."
    )
    limits: Limits
    calibration: Calibration
