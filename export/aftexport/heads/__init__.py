"""What a model answers: one file for each kind of head.

A head states the meaning of an output of the model: how its numbers become those of an answer, what
is decided by them, and how their names are. Exporter and server use the same heads, without torch.
A new kind of head is one file here, and its entry in ``AnyHead``.
"""

from collections.abc import Mapping
from typing import Annotated, get_args

from pydantic import Field

from aftexport.heads.answer import Answer, Span
from aftexport.heads.binary_classification import BinaryClassification
from aftexport.heads.feature_extraction import FeatureExtraction, VectorAnswer, VectorsAnswer
from aftexport.heads.head import Head
from aftexport.heads.multi_label_classification import LabelsAnswer, MultiLabelClassification
from aftexport.heads.regression import Regression, ValuesAnswer
from aftexport.heads.single_label_classification import LabelAnswer, SingleLabelClassification
from aftexport.heads.token_classification import TokenClassification, TokenLabelsAnswer
from aftexport.heads.token_head import Decoder, TokenHead, TokenResult

__all__ = [
    "HEADS",
    "Answer",
    "AnyAnswer",
    "AnyHead",
    "BinaryClassification",
    "Decoder",
    "FeatureExtraction",
    "Head",
    "LabelAnswer",
    "LabelsAnswer",
    "MultiLabelClassification",
    "Regression",
    "SingleLabelClassification",
    "Span",
    "TokenClassification",
    "TokenHead",
    "TokenLabelsAnswer",
    "TokenResult",
    "ValuesAnswer",
    "VectorAnswer",
    "VectorsAnswer",
    "is_one_label",
]

_AnyHead = (
    SingleLabelClassification
    | MultiLabelClassification
    | BinaryClassification
    | Regression
    | TokenClassification
    | FeatureExtraction
)
AnyHead = Annotated[_AnyHead, Field(discriminator="task")]
"""A head of any kind, as ``manifest.json`` has it; ``task`` tells which."""
AnyAnswer = (
    LabelAnswer | LabelsAnswer | ValuesAnswer | TokenLabelsAnswer | VectorAnswer | VectorsAnswer
)
"""An answer of a head of any kind."""
HEADS: Mapping[str, type[Head]] = {
    kind.model_fields["task"].default: kind for kind in get_args(_AnyHead)
}
"""The kinds of heads, by their task."""


def is_one_label(heads: Mapping[str, Head]) -> bool:
    """Return whether answers are those of one head with one label.

    Such an answer has its ``label`` and ``scores`` beside its other fields. The answers of other
    models are under ``heads``, by the name of each head.
    """
    return [head.answer_type for head in heads.values()] == [LabelAnswer]
