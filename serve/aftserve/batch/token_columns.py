"""The columns of heads that answer for every token, made from arrays without an object a token."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from aftexport.heads import Head
from aftexport.heads.answer import Field
from aftserve.model.results import TokenAnswers

_SPAN = pa.struct(
    [
        pa.field("label", pa.string()),
        pa.field("start_token", pa.int64()),
        pa.field("end_token", pa.int64()),
        pa.field("score", pa.float64()),
        pa.field("start", pa.int64()),
        pa.field("end", pa.int64()),
        pa.field("text", pa.string()),
    ]
)


def token_types(head: Head) -> Mapping[Field, pa.DataType]:
    """Return the type of each kind of field that grows with the tokens of a document."""
    return {
        "token_names": pa.list_(pa.string()),
        "token_numbers": pa.list_(pa.float32()),
        "spans": pa.list_(_SPAN),
        "vectors": pa.list_(pa.list_(pa.float32(), head.width)),
    }


def token_column(
    name: str, head: Head, answers: Sequence[TokenAnswers | None], kind: pa.StructType
) -> pa.StructArray:
    """Return the column of a head.

    Args:
        name: name of the head.
        head: a head for tokens.
        answers: answers of the documents; None for a document without an answer.
        kind: type of the column.
    """
    arrays = [_array(name, head, field, answers) for field in head.fields]
    missing = pa.array([answer is None for answer in answers], pa.bool_())
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=missing)


def _array(
    name: str, head: Head, field: str, answers: Sequence[TokenAnswers | None]
) -> pa.ListArray:
    kind = head.fields[field]
    if kind == "spans":
        spans = [
            [] if answer is None else [span.model_dump() for span in answer.all_spans(name)]
            for answer in answers
        ]
        return pa.array(spans, pa.list_(_SPAN))
    shape = (0, head.width) if kind == "vectors" else (0,)
    parts = [
        np.empty(shape, np.uint8 if kind == "token_names" else np.float32)
        if answer is None
        else getattr(answer.results[name], field)
        for answer in answers
    ]
    offsets = np.cumsum([0, *map(len, parts)])
    flat = np.concatenate(parts).ravel() if parts else np.empty(0)
    values = pa.array(flat)
    if kind == "token_names":
        values = pa.DictionaryArray.from_arrays(values, list(head.names)).cast(pa.string())
    elif kind == "vectors":
        values = pa.FixedSizeListArray.from_arrays(values, head.width)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
