"""The bundle: a folder that holds a model and all that is needed to serve and check it."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import safetensors.numpy
from safetensors import SafetensorError
from tokenizers import Tokenizer

from aftexport.domain import VERSION as OPERATOR_VERSION
from aftexport.errors import AftexportError, BundleError
from aftexport.files import sha256
from aftexport.parity import Case, pack_cases, unpack_cases
from aftexport.tokenization import parse_tokenizer

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MODEL = "model.onnx"
MODEL_DATA = "model.onnx.data"
TOKENIZER = "tokenizer.json"
GOLDEN = "golden.safetensors"
PARITY = "parity.json"
PARITY_PAGE = "parity.html"
MAX_MODEL_BYTES = (1 << 31) - (1 << 20)
"""Above this the weights go to a file of their own: a protobuf message ends at 2 GiB."""

_EXPORT_AGAIN = "Export the model again."


@dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself; ``manifest.json`` without the schema version and the files.

    Attributes:
        source: kind and sha256 of the model file.
        config: of the classifier, where the checkpoint has one.
        inputs: names of the model's inputs, all int64: ``input_ids [batch, tokens]``
            and, where used, ``lengths [batch]``.
        vocab_size: ids are below this.
        max_tokens: most tokens of a document; None for no bound.
        labels: class names in the order of the logits.
        precision: fp32 or fp16.
        opset: of the standard operators.
        operators: number of nodes of each custom operator.
        operator_version: of the ``ai.aftexport`` domain.
        hardware: what the model file needs; ``any`` for ONNX.
        versions: of the tools that made the bundle.
    """

    source: Mapping[str, str | None]
    config: Mapping[str, Any] | None
    inputs: tuple[str, ...]
    vocab_size: int
    max_tokens: int | None
    labels: tuple[str, ...]
    precision: str
    opset: int
    operators: Mapping[str, int]
    operator_version: int
    hardware: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Bundle:
    """A bundle that was checked whole.

    Attributes:
        path: the folder.
        manifest: what it says of itself.
        files: size in bytes of every file.
    """

    path: Path
    manifest: Manifest
    files: Mapping[str, int]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a bundle and checks every file against its digest.

        Raises:
            BundleError: naming the file and what is wrong with it.
        """
        content = _read_manifest(path)
        sizes = {}
        for name, entry in content.pop("files").items():
            file = path / name
            if not re.fullmatch(r"[\w.-]+", name) or file.is_symlink():
                raise BundleError(
                    path, f"{MANIFEST} names {name!r}, which is outside", _EXPORT_AGAIN
                )
            if not file.is_file():
                raise BundleError(path, f"{name} is missing", _EXPORT_AGAIN)
            size = file.stat().st_size
            if size != entry["bytes"]:
                raise BundleError(
                    path, f"{name} has {size} bytes instead of {entry['bytes']}", _EXPORT_AGAIN
                )
            if sha256(file) != entry["sha256"]:
                raise BundleError(path, f"{name} was changed or damaged", _EXPORT_AGAIN)
            sizes[name] = size
        for required in (MODEL, GOLDEN):
            if required not in sizes:
                raise BundleError(path, f"{MANIFEST} does not list {required}", _EXPORT_AGAIN)
        return cls(path, _parse_manifest(path, content), sizes)

    @property
    def model_path(self) -> Path:
        """The ONNX model."""
        return self.path / MODEL

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, with padding and truncation off; None where the bundle has none."""
        if TOKENIZER not in self.files:
            return None
        try:
            return parse_tokenizer((self.path / TOKENIZER).read_text("utf-8"))
        except AftexportError as error:
            raise BundleError(self.path, error.problem.rstrip("."), _EXPORT_AGAIN) from error

    def golden(self) -> list[Case]:
        """The golden cases, with PyTorch's outputs."""
        try:
            return unpack_cases(safetensors.numpy.load_file(self.path / GOLDEN))
        except (SafetensorError, ValueError) as error:
            raise BundleError(self.path, f"{GOLDEN}: {error}", _EXPORT_AGAIN) from error


def write_model(folder: Path, model: onnx.ModelProto, max_bytes: int = MAX_MODEL_BYTES) -> None:
    """Writes ``model.onnx``, its weights beside it where they are over ``max_bytes``."""
    external = model.ByteSize() > max_bytes
    onnx.save(
        model,
        folder / MODEL,
        save_as_external_data=external,
        location=MODEL_DATA if external else None,
        size_threshold=1024,
    )


def write_golden(folder: Path, cases: list[Case]) -> None:
    """Writes ``golden.safetensors``."""
    (folder / GOLDEN).write_bytes(safetensors.numpy.save(pack_cases(cases)))


def write_json(path: Path, content: Any) -> None:
    """Writes JSON whose bytes depend on the content alone."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, default=_plain)
    path.write_text(text + "\n", "utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes ``manifest.json`` over the files in ``folder``; the last step of a bundle."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(folder.iterdir())
    }
    content = {"schema_version": SCHEMA_VERSION, **asdict(manifest), "files": files}
    write_json(folder / MANIFEST, content)


def is_bundle(path: Path) -> bool:
    """Tells whether a folder is, or claims to be, a bundle."""
    return (path / MANIFEST).is_file()


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise BundleError(path, "no such folder", "Check the path.")
    if not is_bundle(path):
        raise BundleError(
            path, f"not a bundle: it has no {MANIFEST}", "Give a folder that aftexport wrote."
        )
    try:
        content = json.loads((path / MANIFEST).read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise BundleError(path, f"{MANIFEST} cannot be read ({error})", _EXPORT_AGAIN) from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise BundleError(path, f"{MANIFEST} has no schema_version", _EXPORT_AGAIN)
    if version > SCHEMA_VERSION:
        raise BundleError(
            path,
            f"its schema version {version} is newer than {SCHEMA_VERSION}, the newest known here",
            "Upgrade aftexport.",
        )
    files = content.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(e, dict) and isinstance(e.get("bytes"), int) and isinstance(e.get("sha256"), str)
        for e in files.values()
    ):
        raise BundleError(path, f"{MANIFEST} has no list of files", _EXPORT_AGAIN)
    return {name: value for name, value in content.items() if name != "schema_version"}


def _parse_manifest(path: Path, content: dict[str, Any]) -> Manifest:
    expected = set(Manifest.__dataclass_fields__)
    if set(content) != expected:
        names = ", ".join(sorted(expected ^ set(content)))
        raise BundleError(path, f"{MANIFEST} lacks or has too much: {names}", _EXPORT_AGAIN)
    lists = {name: tuple(content[name]) for name in ("inputs", "labels")}
    manifest = Manifest(**content | lists)
    if manifest.operators and manifest.operator_version > OPERATOR_VERSION:
        raise BundleError(
            path,
            f"it uses version {manifest.operator_version} of the ai.aftexport operators, "
            f"the newest known here is {OPERATOR_VERSION}",
            "Upgrade aftexport.",
        )
    return manifest
