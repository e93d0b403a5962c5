"""The tensors of a model's extra inputs."""

import math
from collections.abc import Mapping, Sequence

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftexport.extra_inputs import ExtraInput
from aftserve.api.open_inference.schemas import Datatype, InputTensor, TensorMetadata
from aftserve.api.open_inference.tensors import Array
from aftserve.types import Document, ExtraFields


def extra_tensors(manifest: Manifest) -> list[TensorMetadata]:
    """Return the metadata of the extra inputs."""
    return [
        TensorMetadata(name=extra.name, datatype=_datatype(extra), shape=[-1, *_sizes(extra)])
        for extra in manifest.extra_inputs
    ]


def check_extra_tensors(
    described: Mapping[str, InputTensor], documents: int, manifest: Manifest
) -> None:
    """Check the types and shapes of the extra inputs before their values are read.

    Args:
        described: the tensors of a request by name.
        documents: the number of documents.
        manifest: the manifest of the model.

    Raises:
        InputError: if one is missing or does not fit.
    """
    tokens = described.get(manifest.main_input)
    width = tokens.shape[1] if tokens is not None else None
    for extra in manifest.extra_inputs:
        expected = f"{_datatype(extra)} {_shown(documents, extra)}"
        tensor = described.get(extra.name)
        if tensor is None:
            raise InputError(
                f"The model needs the input {extra.name!r}, {expected}, got none.",
                "Send the tensor beside the documents.",
            )
        kinds = ("FP32",) if extra.dtype == "float32" else ("INT64", "INT32")
        if tensor.datatype not in kinds or not _fits(tensor.shape, documents, width, extra):
            raise InputError(
                f"The input {extra.name!r} must be {expected}, got {tensor.datatype} "
                f"{tensor.shape}.",
                "Send one row for each document.",
            )


def extra_fields(
    arrays: Mapping[str, Array], documents: Sequence[Document], manifest: Manifest
) -> list[ExtraFields]:
    """Return the extra inputs of each document; of tokens only those that it has.

    Args:
        arrays: the tensors of a request by name.
        documents: texts, token ids or features.
        manifest: the manifest of the model.
    """
    fields: list[dict[str, Array]] = [{} for _ in documents]
    for extra in manifest.extra_inputs:
        rows = arrays[extra.name]
        if extra.kind == "document":
            rows = rows.reshape(len(documents), *extra.shape(0))
        for index, document in enumerate(documents):
            row = rows[index, ...]
            # The number of tokens of a text is not known yet.
            is_padded = extra.kind == "token" and not isinstance(document, str)
            fields[index][extra.name] = row[: len(document)] if is_padded else row
    return list(fields)


def _datatype(extra: ExtraInput) -> Datatype:
    return "FP32" if extra.dtype == "float32" else "INT64"


def _sizes(extra: ExtraInput) -> list[int]:
    return [-1] if extra.kind == "token" else list(extra.shape(0))


def _shown(documents: int, extra: ExtraInput) -> str:
    sizes = ["tokens" if size == -1 else str(size) for size in _sizes(extra)]
    return f"[{', '.join([str(documents), *sizes])}]"


def _fits(shape: Sequence[int], documents: int, tokens: int | None, extra: ExtraInput) -> bool:
    """Return whether a shape fits; ``tokens`` is None if texts have unknown numbers of tokens."""
    if extra.kind == "token":
        return len(shape) == 2 and shape[0] == documents and tokens in (None, shape[1])
    if extra.width is None:
        return math.prod(shape) == documents  # some clients send [documents, 1]
    return list(shape) == [documents, extra.width]
