"""The output tensors of the protocol, from the answers of every kind of head."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aftexport.bundle.manifest import Manifest
from aftexport.heads import Head, is_one_label
from aftexport.heads.answer import Field
from aftserve.api.open_inference import tensors
from aftserve.api.open_inference.schemas import Datatype, TensorMetadata
from aftserve.model.documents import DocumentAnswer, TokenAnswers

_DATATYPES: dict[Field, Datatype] = {
    "name": "BYTES",
    "names": "BOOL",
    "numbers": "FP32",
    "token_names": "INT64",
    "token_numbers": "FP32",
    "spans": "BYTES",
    "vector": "FP32",
    "vectors": "FP32",
}
"""The datatype of each field of an answer.

Names are given as whether each of all names holds, names of tokens as their numbers, and spans as
the JSON of each document's list.
"""
TOKEN_FIELDS = ("token_names", "token_numbers", "spans", "vectors")
"""The kinds of fields that grow with the tokens of a document."""
_NO_NAME = -1
"""The number of a name in padding."""
_MAX_PART_NUMBERS = 1 << 14


def outputs_of(manifest: Manifest) -> tuple[TensorMetadata, ...]:
    """Return the outputs: ``label`` and ``scores`` of one such head, else ``HEAD.FIELD``."""
    outputs = []
    for name, head in manifest.heads.items():
        start = prefix(manifest.heads, name)
        outputs += [_metadata(f"{start}{field}", kind, head) for field, kind in head.fields.items()]
        calibration = (manifest.calibration or {}).get(name)
        if calibration is not None:
            outputs.append(_metadata(f"{start}calibrated", "numbers", head))
        if calibration is not None and calibration.threshold is not None:
            outputs.append(TensorMetadata(name=f"{start}abstain", datatype="BOOL", shape=[-1]))
    return (
        *outputs,
        TensorMetadata(name="tokens_total", datatype="INT64", shape=[-1]),
        TensorMetadata(name="tokens_used", datatype="INT64", shape=[-1]),
    )


class OutputNames:
    """The names of the outputs of the current model, which are made once for each bundle."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._names: tuple[str, ...] = ()

    def of(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the names of the outputs of a model."""
        if manifest is not self._manifest:
            self._names = tuple(output.name for output in outputs_of(manifest))
            self._manifest = manifest
        return self._names


def prefix(heads: Mapping[str, Head], name: str) -> str:
    """Return the start of the names of a head's outputs."""
    return "" if is_one_label(heads) else f"{name}."


def _metadata(name: str, kind: Field, head: Head) -> TensorMetadata:
    shapes: dict[Field, list[int]] = {
        "name": [-1],
        "spans": [-1],
        "token_names": [-1, -1],
        "token_numbers": [-1, -1],
        "vectors": [-1, -1, head.width],
    }
    parameters = {"labels": list(head.names)} if kind == "token_names" else None
    shape = shapes.get(kind, [-1, len(head.names)])
    return TensorMetadata(name=name, datatype=_DATATYPES[kind], shape=shape, parameters=parameters)


@dataclass(frozen=True)
class PaddedRows:
    """Rows of the tokens of several documents, padded to the longest."""

    rows: Sequence[tensors.Array]
    datatype: Datatype
    padding: int

    @property
    def shape(self) -> list[int]:
        """``[documents, tokens, ...]``."""
        return [len(self.rows), max(map(len, self.rows)), *self.rows[0].shape[1:]]

    def parts(self) -> Iterator[tensors.Array]:
        """Yield all rows in arrays of some thousand numbers."""
        _, longest, *width = self.shape
        step = max(1, _MAX_PART_NUMBERS // int(np.prod(width)))
        for rows in self.rows:
            for start in range(0, longest, step):
                own = rows[start : start + step].astype(tensors.dtype_of(self.datatype))
                missing = min(step, longest - start) - len(own)
                filled = [(0, missing), *((0, 0) for _ in width)]
                yield np.pad(own, filled, constant_values=self.padding)


@dataclass(frozen=True)
class Column:
    """An output tensor: a value for each document, or the rows of all tokens."""

    datatype: Datatype
    values: list[str] | tensors.Array | PaddedRows

    @property
    def shape(self) -> list[int]:
        """Its shape."""
        if isinstance(self.values, list):
            return [len(self.values)]
        return list(self.values.shape)

    def lists(self) -> Iterator[list[Any]]:
        """Yield its values for JSON in lists, none of which is empty unless it is the only one."""
        if isinstance(self.values, list):
            yield self.values
        elif isinstance(self.values, PaddedRows):
            yield from (part.ravel().tolist() for part in self.values.parts())
        else:
            # The schema has BOOL as 0 and 1.
            numbers = self.values.astype(np.int8) if self.datatype == "BOOL" else self.values
            yield numbers.ravel().tolist()

    def content(self) -> tuple[int, Iterator[bytes]]:
        """Return the number of its bytes, and the bytes in parts."""
        if isinstance(self.values, PaddedRows):
            size = int(np.prod(self.shape)) * tensors.dtype_of(self.datatype).itemsize
            return size, (tensors.to_bytes(p, self.datatype) for p in self.values.parts())
        content = tensors.to_bytes(self.values, self.datatype)
        return len(content), iter([content])


def columns_of(
    answers: Sequence[DocumentAnswer], wanted: Sequence[str] | None
) -> dict[str, Column]:
    """Return the output tensors of answers."""
    heads = answers[0].tokens.heads
    columns: dict[str, Column] = {}
    for name, head in heads.items():
        if answers[0].of_head(name) is None and name not in answers[0].tokens.results:
            continue  # no output of this head is requested
        start = prefix(heads, name)
        for field, kind in head.fields.items():
            if wanted is None or f"{start}{field}" in wanted:
                columns[f"{start}{field}"] = _column(name, head, field, kind, answers)
        columns |= _calibrated_columns(start, [answer.of_head(name) for answer in answers])
    for field in ("tokens_total", "tokens_used"):
        counts = np.array([getattr(answer.result, field) for answer in answers])
        columns[field] = Column("INT64", counts)
    return {n: column for n, column in columns.items() if wanted is None or n in wanted}


def _column(
    name: str, head: Head, field: str, kind: Field, answers: Sequence[DocumentAnswer]
) -> Column:
    values: Any
    if kind == "spans":
        values = [_spans_json(answer.tokens, name) for answer in answers]
    elif kind in TOKEN_FIELDS:
        rows = [getattr(answer.tokens.results[name], field) for answer in answers]
        values = PaddedRows(rows, _DATATYPES[kind], _NO_NAME if kind == "token_names" else 0)
    else:
        values = [getattr(answer.of_head(name), field) for answer in answers]
        if kind == "names":
            values = np.array([[one in names for one in head.names] for names in values])
        elif kind == "numbers":
            values = np.array([list(row.values()) for row in values], dtype=np.float32)
        elif kind == "vector":
            values = np.array(values, dtype=np.float32)
    return Column(_DATATYPES[kind], values)


def _calibrated_columns(start: str, contents: Sequence[Any]) -> dict[str, Column]:
    columns = {}
    if getattr(contents[0], "calibrated", None) is not None:
        rows = [list(one.calibrated.values()) for one in contents]
        columns[f"{start}calibrated"] = Column("FP32", np.array(rows, dtype=np.float32))
    if getattr(contents[0], "abstain", None) is not None:
        columns[f"{start}abstain"] = Column("BOOL", np.array([one.abstain for one in contents]))
    return columns


def _spans_json(tokens: TokenAnswers, name: str) -> str:
    """Return the spans of a document as a JSON list."""
    spans = (span.model_dump_json(exclude_none=True) for span in tokens.all_spans(name))
    return f"[{','.join(spans)}]"
