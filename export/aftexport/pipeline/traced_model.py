"""A model in ONNX, with the cases of its parity check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from aftexport.bundle.golden import Case
from aftexport.capture.model_inputs import InputSpec
from aftexport.lowering.evidence import Explainable
from aftexport.parity.activations import Beyond
from aftexport.recognition.result import Recognition


@dataclass(frozen=True)
class TracedModel:
    """A model in ONNX, with the inputs and results of its parity check.

    Attributes:
        lowered: the model before the encoder is fused.
        model: the model after the encoder is fused.
        evidence: the heads with evidence, or the reason why the graph has none.
        spec: the model's inputs.
        precision: precision of the graph.
        cases: cases of the model and of its operators.
        recognition: result of the recognition; None for models with aftexport's layers.
        long_case: a case of a 16-bit graph beyond 65,536 tokens, for the export only; None for a
            model of shorter documents.
        beyond: a value that float16 does not hold; None if all fit.
        reference: type in which PyTorch computed the cases.
        why_not_float64: the reason if that type should be float64 but is not; else empty.
        left_out: parameters of the forward for padding that keep their defaults.
        is_of_onnx: whether the source is an ONNX file, whose own outputs are the reference.
        renamed: outputs of such a file with their new names; empty names for those left out.
    """

    lowered: onnx.ModelProto
    model: onnx.ModelProto
    evidence: Explainable | str
    spec: InputSpec
    precision: str
    cases: Sequence[Case]
    recognition: Recognition | None
    reference: str
    why_not_float64: str
    left_out: tuple[str, ...]
    is_of_onnx: bool = False
    long_case: Case | None = None
    beyond: Beyond | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
