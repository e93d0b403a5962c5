"""The comparison of one head's answers with PyTorch's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.heads import Head, TokenClassification
from aftexport.heads.token_classification import TokenLabels
from aftexport.parity import Comparison
from aftserve.model.answers import Decoding
from aftserve.parity.schemas import HeadParity

Spans = set[tuple[int, int, int]]


def head_parity(result: Comparison, span_flips: Mapping[str, int]) -> HeadParity:
    """Return the comparison of an output in the form of a response.

    Args:
        result: the comparison of the output.
        span_flips: see ``count_span_flips``.
    """
    return HeadParity(
        error=result.error if np.isfinite(result.error) else "inf",
        score_error=result.score_error,
        label_flips=result.label_flips,
        span_flips=span_flips.get(result.output),
        within=result.passed,
    )


def count_span_flips(
    heads: Mapping[str, Head],
    outputs: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[Any]],
    decoding: Decoding,
) -> dict[str, int]:
    """Return the number of spans that only one of two outputs has, for each head with spans.

    Args:
        heads: heads of the model.
        outputs, expected: the rows ``[T, width]`` of each output.
        decoding: decoding of the document.
    """
    return {
        name: len(_spans(head, outputs[name], decoding) ^ _spans(head, expected[name], decoding))
        for name, head in heads.items()
        if isinstance(head, TokenClassification) and head.aggregation != "none"
    }


def _spans(head: TokenClassification, rows: NDArray[Any], decoding: Decoding) -> Spans:
    decoder = head.decoder(decoding.starts_word, is_special=decoding.is_special)
    decoder.add(rows)
    result = decoder.finish()
    assert isinstance(result, TokenLabels)  # the decoder is that of this head
    spans = result.spans
    columns = (spans.starts, spans.ends, spans.labels)
    return set(zip(*(column.tolist() for column in columns), strict=True))
