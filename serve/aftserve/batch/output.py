"""The output: a row for each document, as Parquet or JSON lines."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from aftexport.heads import Head, is_one_label
from aftexport.heads.answer import Field
from aftexport.heads.calibration import Calibration
from aftserve.batch.answering import Outcome
from aftserve.model.documents import TokenAnswers
from aftserve.settings import AnswerPolicy

ERROR = "error"
_ONE_LABEL = ("label", "scores", "calibrated", "abstain")
"""The columns of one head with one label; the last two only with a calibration."""
_OF_BYTES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
"""Types whose values may not be UTF-8: Parquet does not check strings."""
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


_WINDOWS = pa.struct(
    {
        **dict.fromkeys(("count", "tokens", "stride"), pa.int64()),
        "aggregate": pa.string(),
        "decided": pa.list_(
            pa.struct(
                {
                    **dict.fromkeys(("head", "name"), pa.string()),
                    **dict.fromkeys(("window", "start_token", "end_token"), pa.int64()),
                }
            )
        ),
    }
)
"""The type of the windows of a document, as ``aftserve.schemas.Windows``."""


def schema(
    heads: Mapping[str, Head],
    ids: pa.DataType | None,
    calibrations: Mapping[str, Calibration] | None = None,
    *,
    has_windows: bool = False,
) -> pa.Schema:
    """Return the columns: an id, the fields of the server's answer without times, and an error."""
    kinds = [
        pa.field(name, _answer_type(head, (calibrations or {}).get(name)))
        for name, head in heads.items()
    ]
    answers = list(kinds[0].type) if is_one_label(heads) else [pa.field("heads", pa.struct(kinds))]
    return pa.schema(
        [
            pa.field("id", ids if ids is not None else pa.int64()),
            *answers,
            pa.field("tokens_total", pa.int64()),
            pa.field("tokens_used", pa.int64()),
            pa.field("truncated", pa.bool_()),
            pa.field("policy", pa.string()),
            *([pa.field("windows", _WINDOWS)] if has_windows else ()),
            pa.field("bundle", pa.string()),
            pa.field(ERROR, pa.string()),
        ]
    )


def table(
    ids: pa.ChunkedArray | None,
    outcomes: Sequence[Outcome],
    columns: pa.Schema,
    *,
    policy: AnswerPolicy,
    bundle: str,
) -> pa.Table:
    """Return a row for each outcome; rows without ids are numbered by the writer."""
    values: dict[str, list[Any]] = {
        "tokens_total": [outcome.tokens_total for outcome in outcomes],
        "tokens_used": [outcome.tokens_used for outcome in outcomes],
        "truncated": [o.answer and o.tokens_used < o.tokens_total for o in outcomes],
        "policy": [policy] * len(outcomes),
        "bundle": [bundle] * len(outcomes),
        ERROR: [outcome.error and str(outcome.error) for outcome in outcomes],
    }
    if "windows" in columns.names:
        values["windows"] = [o.windows and o.windows.model_dump() for o in outcomes]
    arrays = {name: pa.array(column, columns.field(name).type) for name, column in values.items()}
    arrays |= _answer_columns(outcomes, columns)
    numbers = pa.nulls(len(outcomes), pa.int64())
    return pa.table({"id": numbers if ids is None else ids} | arrays, schema=columns)


def _answer_type(head: Head, calibration: Calibration | None) -> pa.StructType:
    """Return the type of a head's answers."""
    numbers = pa.struct([pa.field(name, pa.float64()) for name in head.names])
    types: Mapping[Field, pa.DataType] = {
        "name": pa.string(),
        "names": pa.list_(pa.string()),
        "numbers": numbers,
        "vector": pa.list_(pa.float32()),
        **_token_types(head),
    }
    fields = [pa.field(name, types[kind]) for name, kind in head.fields.items()]
    if calibration is not None:
        fields.append(pa.field("calibrated", numbers))
    if calibration is not None and calibration.threshold is not None:
        fields.append(pa.field("abstain", pa.bool_()))
    return pa.struct(fields)


def _answer_columns(outcomes: Sequence[Outcome], columns: pa.Schema) -> dict[str, pa.Array]:
    """Return the columns that the heads fill."""
    answers = [outcome.answer for outcome in outcomes]
    if "heads" not in columns.names:
        only = [answer and next(iter(answer.heads.values())).model_dump() for answer in answers]
        return {
            name: pa.array([one and one[name] for one in only], columns.field(name).type)
            for name in _ONE_LABEL
            if name in columns.names
        }
    kind = columns.field("heads").type
    tokens = [outcome.tokens for outcome in outcomes]
    arrays = []
    for field in kind:
        given = next((one for one in tokens if one and field.name in one.results), None)
        if given is not None:
            head = given.heads[field.name]
            arrays.append(_token_column(field.name, head, tokens, field.type))
            continue
        values = [
            answer.heads[field.name].model_dump() if answer and field.name in answer.heads else None
            for answer in answers
        ]
        arrays.append(pa.array(values, field.type))
    missing = pa.array([answer is None for answer in answers], pa.bool_())
    return {"heads": pa.StructArray.from_arrays(arrays, fields=list(kind), mask=missing)}


class Writer:
    """A writer of rows to a file, whose final name decides the format."""

    def __init__(self, path: Path, name: Path, columns: pa.Schema, *, numbered: bool) -> None:
        self._numbered = numbered
        self.rows = 0
        self._parquet: pa.parquet.ParquetWriter | None = None
        if name.suffix == ".parquet":
            self._parquet = pa.parquet.ParquetWriter(path, columns)
        else:
            self._lines = path.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        (self._parquet or self._lines).close()

    def write(self, rows: pa.Table) -> None:
        """Append rows."""
        if self._numbered:
            numbers = pa.array(range(self.rows, self.rows + len(rows)), pa.int64())
            rows = rows.set_column(0, rows.schema.field("id"), numbers)
        self.rows += len(rows)
        if self._parquet is not None:
            self._parquet.write_table(rows)
            return
        for id, row in zip(json_ids(rows["id"]), rows.drop_columns("id").to_pylist(), strict=True):
            line = json.dumps({"id": id} | row, ensure_ascii=False, default=str, allow_nan=False)
            self._lines.write(line + "\n")


def json_ids(ids: pa.ChunkedArray) -> list[Any]:
    """Convert ids to JSON values; every id can be converted, so that no run fails for its ids."""
    # Bytes that are not UTF-8 become ``\x`` and two digits, and NaN and infinity become null.
    kind = ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type
    if any(is_of(kind) for is_of in _OF_BYTES):
        ids = ids.cast(pa.large_binary())
    elif pa.types.is_temporal(kind):
        ids = ids.cast(pa.string())  # Python's dates end with the year 9999
    return list(map(_plain, ids.to_pylist()))


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case float() if not math.isfinite(value):
            return None
        case list():
            return list(map(_plain, value))
        case dict():
            return {name: _plain(part) for name, part in value.items()}
    return value


def _token_types(head: Head) -> Mapping[Field, pa.DataType]:
    """Return the type of each kind of field that grows with the tokens of a document."""
    return {
        "token_names": pa.list_(pa.string()),
        "token_numbers": pa.list_(pa.float32()),
        "spans": pa.list_(_SPAN),
        "vectors": pa.list_(pa.list_(pa.float32(), head.width)),
    }


def _token_column(
    name: str, head: Head, answers: Sequence[TokenAnswers | None], kind: pa.StructType
) -> pa.StructArray:
    """Return the column of a head for tokens, with null for a document without an answer."""
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
