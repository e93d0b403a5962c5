"""The outputs that one run of a document in chunks has to compute."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from aftexport.bundle.chunked_plan import ChunkedPlan
from aftexport.errors import UsageError
from aftexport.system.contract import largest


@dataclass(frozen=True)
class Request:
    """The requested outputs of a model.

    Attributes:
        documents: the outputs per document.
        tokens: each output per token, with its width.
        explained: the numbers of the logits with evidence.
    """

    documents: Sequence[str]
    tokens: Mapping[str, int]
    explained: Sequence[int]

    @classmethod
    def of(
        cls,
        plan: ChunkedPlan,
        outputs: Collection[str] | None,
        evidence: bool | Sequence[int],
    ) -> Self:
        """Return the request of a call of ``ChunkedModel.run``.

        Raises:
            UsageError: if the plan lacks one of ``outputs``, or the evidence.
        """
        names = plan.output_names if outputs is None else outputs
        if unknown := set(names) - plan.output_names:
            raise UsageError(
                f"Expected outputs among {', '.join(sorted(plan.output_names))}, got "
                f"{min(unknown)}.",
                "Leave it out.",
            )
        explained = [largest(0)] if evidence is True else evidence or ()
        if explained and not plan.evidence:
            raise UsageError(
                "The plan of this model has no evidence for documents in chunks.",
                "Do not request evidence.",
            )
        return cls(
            documents=tuple(name for name in plan.documents if name in names),
            tokens={name: width for name, width in plan.tokens.items() if name in names},
            explained=tuple(explained),
        )
