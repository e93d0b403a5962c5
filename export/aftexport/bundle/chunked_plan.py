"""The plan by which a document longer than memory runs, a part of ``manifest.json``."""

import math
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import BaseModel, ConfigDict, model_validator

from aftexport.engines.tensorrt.settings import Count
from aftexport.system.contract import MAX_TOKENS

Tokens = Annotated[int, Ge(0), Le(MAX_TOKENS)]
"""A number of tokens of one document."""
_MAX_STATE = 1 << 28
"""The maximum numbers in the state of a recurrence, which is in memory."""
Pooling = Literal["sum", "max", "first"]
"""The combination of values pooled from parts of a document."""


class Recurrence(BaseModel):
    """The states of a recurrence, which replace the summaries of an attention's chunks."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # order of the tokens, forward or reverse; bidirectional for one recurrence in each order
    direction: Literal["forward", "reverse", "bidirectional"]
    # shape of the state in one order, for one document
    shape: Annotated[tuple[Tokens, ...], Len(2, 3)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if math.prod(self.shape) > _MAX_STATE:
            raise ValueError(f"shape: expected at most {_MAX_STATE} numbers, got {self.shape}")
        return self


class ChunkedStage(BaseModel):
    """One attention, recurrence or convolution of a model that runs chunk by chunk."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    left: Tokens  # tokens before and after a chunk that its run includes
    right: Tokens
    causal: bool  # whether a token attends only to itself and earlier tokens
    keeps: tuple[str, ...]  # values per token that are kept from before the stage for after it
    # states that pass from chunk to chunk; None for an attention, whose chunks have summaries
    recurrence: Recurrence | None

    @model_validator(mode="after")
    def _recurrence_fits(self) -> Self:
        if self.recurrence is None:
            return self
        if self.left or self.right:
            raise ValueError(
                f"left, right: expected 0 for a recurrence, got {self.left} and {self.right}"
            )
        if self.causal != (self.recurrence.direction == "forward"):
            raise ValueError(
                f"causal: expected {str(not self.causal).lower()} for a recurrence that is "
                f"{self.recurrence.direction}"
            )
        return self


class ChunkedPlan(BaseModel):
    """The plan by which the graphs in ``chunked.zip`` run a document of any length."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    stages: tuple[ChunkedStage, ...]
    # each value pooled from the tokens, with the combination of those of chunks; empty if all
    # outputs are per token and need none
    pooled: dict[str, Pooling]
    token_bytes: Count  # maximum memory per token during the run of a graph
    evidence: bool  # whether the graphs return each token's evidence for the largest logit
    documents: tuple[str, ...]  # names of the outputs per document
    tokens: dict[str, Count]  # each output per token, with its width
    tokens_use_last_stage: bool  # whether the outputs per token need the last stage's own results

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
