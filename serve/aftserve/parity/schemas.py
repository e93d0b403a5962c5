"""JSON objects of comparisons with PyTorch."""

from typing import Literal

from pydantic import BaseModel, Field


class GoldenCase(BaseModel):
    """A golden case of the bundle, with PyTorch's outputs, run on this machine."""

    case: str
    subject: str = Field(description="model, or the name of a single operator.")
    output: str = Field(description="Name of the compared output.")
    shape: list[int]
    error: float | Literal["inf"] = Field(
        description="max |output - reference| / max(1, max |reference|)"
    )
    bound: float
    score_error: float | None = Field(
        default=None, description="Error of the scores or values that the head makes of it."
    )
    label_flips: int
    passed: bool


class ParityReport(BaseModel):
    """Comparison of the engine with PyTorch's stored outputs."""

    golden: list[GoldenCase]
    within: bool
    reference: bool = Field(description="Whether POST /parity can run PyTorch itself.")
    shadow: float = Field(description="Share of live documents that are also compared.")


class OutputParity(BaseModel):
    """One logit of the engine and of PyTorch."""

    head: str
    label: str
    served: float
    reference: float
    difference: float


class HeadParity(BaseModel):
    """One output of the engine and of PyTorch, as a whole."""

    error: float | Literal["inf"] = Field(
        description="max |output - reference| / max(1, max |reference|)"
    )
    score_error: float | None = Field(
        description="Error of the scores, values or vectors made of it, by the same bound."
    )
    label_flips: int = Field(description="Number of tokens, or of documents, of another label.")
    span_flips: int | None = Field(
        description="Number of spans that only one of both has; null if the head has no spans."
    )
    within: bool


class ParityCheck(BaseModel):
    """Comparison of the engine with PyTorch on one document."""

    tokens: int
    outputs: list[OutputParity] = Field(description="Each logit of the heads for documents.")
    heads: dict[str, HeadParity] = Field(description="Each output as a whole.")
    error: float | Literal["inf"] = Field(
        description="max |output - reference| / max(1, max |reference|)"
    )
    bound: float
    score_error: float | None = Field(
        default=None, description="Error of the scores or values, by the same bound."
    )
    within: bool
    label_flips: int
