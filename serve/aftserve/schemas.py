"""What goes over the wire."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StrictInt,
    field_validator,
    model_validator,
)

from aftserve.settings import Policy
from aftserve.types import Document


def _whole(ids: Any) -> Any:
    """As JSON has it, 5.0 is an integer too; few send it, and they wait."""
    if isinstance(ids, list) and float in set(map(type, ids)):
        return [int(i) if isinstance(i, float) and i.is_integer() else i for i in ids]
    return ids


TokenIds = Annotated[
    list[StrictInt],
    FailFast(),
    BeforeValidator(_whole),
    Field(description="Token ids of one document."),
]


class InferRequest(BaseModel):
    """Documents to classify: exactly one of the three forms."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(None, description="One document; the answer is one object.")
    texts: list[str] | None = Field(None, description="Documents.", min_length=1, fail_fast=True)
    input_ids: list[TokenIds] | None = Field(
        None,
        description="Tokenized documents, each of its own length.",
        min_length=1,
        fail_fast=True,
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [self.text, self.texts, self.input_ids]
        if sum(form is not None for form in given) != 1:
            raise ValueError("give exactly one of text, texts and input_ids")
        return self

    @property
    def documents(self) -> Sequence[Document]:
        """Texts, or token ids."""
        return [self.text] if self.text is not None else self.texts or self.input_ids or []


class DocumentRequest(BaseModel):
    """One document: exactly one of the two forms."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    input_ids: list[StrictInt] | None = Field(None, fail_fast=True)

    _whole_ids = field_validator("input_ids", mode="before")(_whole)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give exactly one of text and input_ids")
        return self

    @property
    def document(self) -> Document:
        """A text, or token ids."""
        return self.text if self.text is not None else self.input_ids or []


class LineProblem(BaseModel):
    """Why a line has no answer."""

    detail: str
    status: int = Field(description="That a request of this document alone would have got.")
    retry_after: int | None = Field(
        default=None, description="Seconds after which it is worth asking again, if ever."
    )


class Timings(BaseModel):
    """Where the time went, in seconds."""

    tokenize_seconds: float
    queue_seconds: float = Field(description="Waiting for documents that came before.")
    inference_seconds: float = Field(description="Of the run, alone or with others.")
    predicted_seconds: float = Field(
        description="Of queue and inference of the whole request, when it was accepted."
    )


class EvidenceSpan(BaseModel):
    """A passage that adds more to the logit than as many tokens do on average."""

    start_token: int
    end_token: int = Field(description="The one after its last.")
    start: int | None = Field(default=None, description="Its first character, of a text.")
    end: int | None = Field(default=None, description="The one after its last.")
    text: str | None = Field(default=None, description="The passage, of a text.")
    contribution: float = Field(description="What its tokens add to the logit, exactly.")
    above_average: float = Field(description="Of that, what as many tokens do not add on average.")


class Evidence(BaseModel):
    """What each token adds to the logit of the label, at the last layer."""

    logit: float = Field(description="What all tokens add, and the offset.")
    offset: float = Field(description="What comes of no token.")
    spans: list[EvidenceSpan] = Field(description="Those that add the most above average, first.")


class DocumentResult(BaseModel):
    """The answer for one document."""

    bundle: str = Field(description="Digest of the bundle that gave it; GET /info has the latest.")
    label: str
    scores: dict[str, float] = Field(
        description="Probability of every label: a softmax over labels that exclude each other."
    )
    tokens_total: int = Field(description="Tokens of the document.")
    tokens_used: int = Field(description="Tokens the model saw.")
    truncated: bool = Field(description="Whether the model saw less than the document.")
    policy: Policy = Field(description="For documents over the memory budget: exact cuts none.")
    timings: Timings
    evidence: Evidence | None = Field(default=None, description="Where it was asked for.")


class InferResponse(BaseModel):
    """The answers for several documents, in the order they were sent."""

    results: list[DocumentResult]


class Problem(BaseModel):
    """What is wrong with a request, and what to do."""

    detail: str


class Status(BaseModel):
    """Liveness or readiness."""

    status: str


class Limits(BaseModel):
    """What a request may have at most."""

    max_tokens: int = Field(description="Of one document.")
    max_characters: int = Field(description="Of one text.")
    max_documents: int
    max_body_bytes: int
    max_queue_seconds: float = Field(description="Predicted work before it; more is refused.")
    deadline_seconds: float = Field(description="From its first line to the answer.")
    budget_tokens: int = Field(description="Of one run of several documents, with padding.")
    batching: bool = Field(description="Whether documents may share a run.")
    whole_tokens: int = Field(description="A longer document runs in chunks, or as the policy is.")
    long_documents: Policy
    whole_only: str | None = Field(description="Why no document can run in chunks, if so.")


class GoldenCase(BaseModel):
    """One of the bundle's own cases, with PyTorch's outputs, run on this machine."""

    case: str
    subject: str = Field(description="model, or an operator alone.")
    shape: list[int]
    error: float | Literal["inf"] = Field(
        description="max |output - reference| / max(1, max |reference|)"
    )
    bound: float
    label_flips: int
    passed: bool


class ParityReport(BaseModel):
    """How the served engine compares with PyTorch's stored outputs."""

    golden: list[GoldenCase]
    within: bool
    reference: bool = Field(description="Whether POST /parity can ask PyTorch itself.")
    shadow: float = Field(description="Share of live documents that are checked in passing.")


class OutputParity(BaseModel):
    """One logit."""

    label: str
    served: float
    reference: float
    difference: float


class ParityCheck(BaseModel):
    """The served engine against PyTorch, on one document."""

    tokens: int
    outputs: list[OutputParity]
    error: float = Field(description="max |output - reference| / max(1, max |reference|)")
    bound: float
    within: bool
    label_flips: int


class MeasuredRun(BaseModel):
    """A run timed at start."""

    documents: int
    tokens: int = Field(description="Of each document.")
    seconds: float
    pays: bool = Field(description="Clearly less than the documents one by one.")


class ChunkedRun(BaseModel):
    """A document that ran in chunks, timed at start."""

    documents: int
    tokens: int
    seconds: float


class Calibration(BaseModel):
    """What documents cost on this machine."""

    measurements: list[MeasuredRun]
    batch_up_to_tokens: int = Field(description="Documents longer than this run alone.")
    batch_up_to_documents: int
    in_chunks: list[ChunkedRun] = Field(description="Of one chunk and of two.")
    pace: float = Field(description="Time of the last runs, over what was calibrated.")


class Reload(BaseModel):
    """How a reload ended."""

    at: datetime
    bundle: str | None = Field(description="Digest of what was loaded; None where nothing was.")
    seconds: float = Field(description="That it took.")
    problem: str | None = Field(description="Why the bundle before answers on, if it does.")


class Info(BaseModel):
    """The server, its model and its limits."""

    version: str
    bundle: str = Field(description="Digest of the bundle that answers: of its manifest.")
    loaded: datetime
    last_reload: Reload | None
    engine: str
    safe: bool = Field(description="Serving by portable bodies alone, after a breach of parity.")
    labels: list[str]
    scores: str = Field(description="Meaning of the scores of an answer.")
    vocab_size: int
    precision: str = Field(description="Where node_precisions are given, the cheapest of them.")
    node_precisions: dict[str, int] | None = Field(
        description="How many nodes have which, where each has its own (`--precision auto`)."
    )
    operators: dict[str, int]
    tokenizer: bool = Field(description="Whether texts are taken, and not ids alone.")
    evidence: bool = Field(description="Whether the model says what each token adds.")
    limits: Limits
    calibration: Calibration
