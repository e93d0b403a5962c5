"""The bundle: a folder with a model and everything needed to serve and check it."""

import json
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import onnx
import safetensors.numpy
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from safetensors import SafetensorError
from tokenizers import Tokenizer

from aftexport.bundle.golden import IN_WINDOWS, Case, pack_cases, unpack_cases
from aftexport.bundle.manifest import SCHEMA_VERSION, ChunkedPlan, FileEntry, Manifest, ManifestFile
from aftexport.bundle.tokenizer import parse_tokenizer
from aftexport.engines.tensorrt.engine_file import EngineFile
from aftexport.engines.tensorrt.settings import TARGETS, RuntimeName
from aftexport.errors import AftexportError, BundleError, CheckpointError, UsageError
from aftexport.operators.domain import VERSION as OPERATOR_VERSION
from aftexport.operators.domain import operators_in
from aftexport.system.contract import EVIDENCE
from aftexport.system.files import sha256, sha256_of, write_json
from aftexport.system.onnx_files import MODEL, MODEL_DATA, files_beside
from aftexport.system.validation import problem

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHUNKED = "chunked.zip"
GOLDEN = "golden.safetensors"
PARITY = "parity.json"
PARITY_PAGE = "parity.html"
CALIBRATION = "calibration.json"
ENGINE = ".engine"
RECORD = ".engine.json"
MAX_MANIFEST_BYTES = 1 << 26
EXPORT_AGAIN = "Export the model again."


def _unfit(path: Path, reason: str) -> BundleError:
    return BundleError(path, reason, EXPORT_AGAIN)


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were all checked."""

    path: Path
    manifest: Manifest
    files: Mapping[str, int]  # size in bytes of every file
    digest: str  # SHA-256 of the manifest, which holds those of all other files

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a bundle and check every file; raise BundleError naming the first unfit one."""
        try:
            return cls._open(path)
        except OSError as error:
            file = Path(error.filename or path)
            name = "it" if file == path else file.name
            raise BundleError(
                path, f"{name} cannot be read ({error.strerror})", "Check it and its permissions."
            ) from error

    @classmethod
    def _open(cls, path: Path) -> Self:
        content, digest = _read_manifest(path)
        for name, entry in content.files.items():
            file = path / name
            if not re.fullmatch(r"[\w-][\w.-]*", name):
                raise _unfit(path, f"{MANIFEST} names {name!r}, which is not a file name")
            if name.endswith((ENGINE, RECORD)):
                continue  # checked at load time: an engine can be rebuilt from the other files
            check_file(path, file, entry)
        for required in (MODEL, MODEL_DATA, GOLDEN, *([CHUNKED] if content.chunked else [])):
            if required not in content.files:
                raise _unfit(path, f"{MANIFEST} does not list {required}")
        if content.chunked:
            check_plan(path, path / CHUNKED, content.chunked)
        manifest = Manifest(**{name: getattr(content, name) for name in Manifest.model_fields})
        bundle = cls(path, manifest, {name: e.bytes for name, e in content.files.items()}, digest)
        bundle.check_model()
        return bundle

    def check_model(self) -> None:
        """Check that ``model.onnx`` is the model that the manifest describes."""
        try:
            model = onnx.load(self.model_path, load_external_data=False)
        except (DecodeError, ValueError) as error:
            raise _unfit(self.path, f"{MODEL} is not an ONNX model") from error
        for name in files_beside(model) - self.files.keys():
            raise _unfit(self.path, f"{MODEL} reads {name!r}, which {MANIFEST} does not list")
        inputs = tuple(value.name for value in model.graph.input)
        if inputs != self.manifest.inputs:
            raise _unfit(
                self.path,
                f"{MANIFEST} must list the inputs of {MODEL}, {', '.join(inputs)}, got "
                f"{', '.join(self.manifest.inputs)}",
            )
        self._check_features(model)
        self._check_extras(model)
        if operators_in(model) != self.manifest.operators:
            raise _unfit(self.path, f"{MANIFEST} must list the operators of {MODEL}, got others")
        self._check_outputs(model.graph)

    def _check_outputs(self, graph: onnx.GraphProto) -> None:
        """Check that each output of the graph has a head of its rank and width."""
        manifest = self.manifest
        outputs = {
            value.name: value.type.tensor_type.shape.dim
            for value in graph.output
            if value.name != EVIDENCE
        }
        if list(outputs) != list(manifest.heads):
            raise _unfit(
                self.path,
                f"{MANIFEST} must have a head for each output of {MODEL}, "
                f"{', '.join(outputs)}, got {', '.join(manifest.heads)}",
            )
        for name, head in manifest.heads.items():
            shape = outputs[name]
            if len(shape) != (3 if head.is_per_token else 2) or shape[-1].dim_value != head.width:
                raise _unfit(
                    self.path,
                    f"{MANIFEST} must have a head for the output {name} of {MODEL}, got "
                    f"{head.task} of width {head.width}",
                )

    def _check_features(self, model: onnx.ModelProto) -> None:
        main = next(v for v in model.graph.input if v.name == self.manifest.main_input)
        shape = main.type.tensor_type.shape.dim
        features = self.manifest.features
        expected = [] if features is None else [features.count]
        if [dim.dim_value for dim in shape[2:]] != expected:
            raise _unfit(
                self.path,
                f"{MANIFEST} must describe every feature of {MODEL}, got {expected or 'none'}",
            )

    def _check_extras(self, model: onnx.ModelProto) -> None:
        """Check the type and the axes of each extra input."""
        types = {value.name: value.type.tensor_type for value in model.graph.input}
        for extra in self.manifest.extra_inputs:
            given = types[extra.name]
            element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(extra.dtype))
            sizes = [dim.dim_value for dim in given.shape.dim]
            expected = [0, *extra.shape(0)]  # the size of a dynamic axis is 0
            if given.elem_type != element or sizes != expected:
                raise _unfit(
                    self.path,
                    f"{MANIFEST} must describe every input of {MODEL}, got {extra.name} as "
                    f"{extra.layout}",
                )

    def check_source(self, path: Path) -> None:
        """Check that a model file is the source of the bundle; folders are not checked."""
        digest = self.manifest.source.get("sha256")
        try:
            is_another = path.is_file() and digest is not None and sha256(path) != digest
        except OSError as error:
            raise UsageError(
                f"{path} cannot be read ({error.strerror}).", "Check its permissions."
            ) from error
        if is_another:
            raise UsageError(
                f"Expected the model file that {self.path} was exported from, got {path}.",
                "Give the original file, or export this one.",
            )

    @property
    def model_path(self) -> Path:
        """The ONNX model."""
        return self.path / MODEL

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, with padding and truncation off; None if the bundle has none."""
        if TOKENIZER not in self.files:
            return None
        try:
            return parse_tokenizer((self.path / TOKENIZER).read_text("utf-8"))
        except (AftexportError, UnicodeDecodeError) as error:
            raise _unfit(self.path, f"{TOKENIZER} cannot be read") from error

    def golden(self) -> list[Case]:
        """Return the golden cases, with PyTorch's outputs."""
        try:
            cases = unpack_cases(safetensors.numpy.load_file(self.path / GOLDEN))
        except (SafetensorError, ValueError) as error:
            raise _unfit(self.path, f"{GOLDEN}: {error}") from error
        if not any(case.subject == "model" for case in cases):
            raise _unfit(self.path, f"{GOLDEN} has no cases of the model")
        heads = self.manifest.heads
        for case in cases:
            if case.subject == IN_WINDOWS and self.manifest.windows is None:
                raise _unfit(self.path, f"{GOLDEN} has cases of windows, {MANIFEST} has none")
            if not case.is_of_operator and case.outputs.keys() != heads.keys():
                raise _unfit(
                    self.path,
                    f"{GOLDEN} must have the outputs {', '.join(heads)} in "
                    f"{case.subject}/{case.name}, got {', '.join(case.outputs)}",
                )
        return cases


def write_golden(folder: Path, cases: list[Case]) -> None:
    """Write ``golden.safetensors``."""
    (folder / GOLDEN).write_bytes(safetensors.numpy.save(pack_cases(cases)))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` with the files in ``folder``; the last step of a bundle."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(folder.iterdir())
    }
    content = {"schema_version": SCHEMA_VERSION, **manifest.model_dump(), "files": files}
    write_json(folder / MANIFEST, content, ordered=("heads", "evidence_heads"))


def engine_file(folder: Path, runtime: RuntimeName) -> EngineFile:
    """Return the paths of a bundle's TensorRT engine and of its record."""
    target = next(to for to, name in TARGETS.items() if name == runtime)
    return EngineFile(folder / f"model.{target}{ENGINE}", folder / f"model.{target}{RECORD}")


def is_bundle(path: Path) -> bool:
    """Return whether a folder has a manifest, valid or not."""
    file = path / MANIFEST
    return file.exists() or file.is_symlink()


def refuse_bundle(path: Path) -> None:
    """Raise CheckpointError if a bundle is given as a model."""
    if is_bundle(path):
        raise CheckpointError(
            path,
            "a bundle, not the model that it was exported from",
            f"Serve it by aftserve {path}, show it by aftexport inspect {path}, or open it in "
            f"Python by aftserve.Predictor({str(path)!r}).",
        )


def is_replaceable(path: Path) -> bool:
    """Return whether a folder has the manifest of a bundle, which a new bundle may replace.

    The bundle may be of an earlier version.
    """
    try:
        text = _manifest_bytes(path / MANIFEST).decode("utf-8")
        content = json.loads(text)
        if isinstance(content, dict) and content.get("schema_version") in range(1, SCHEMA_VERSION):
            return isinstance(content.get("files"), dict) and MODEL in content["files"]
        ManifestFile.model_validate_json(text)
    except (ValueError, RecursionError, OSError):
        return False
    return True


def _manifest_bytes(file: Path) -> bytes:
    if (size := file.stat().st_size) > MAX_MANIFEST_BYTES:
        raise ValueError(f"it must have at most {MAX_MANIFEST_BYTES} bytes, got {size}")
    return file.read_bytes()


def _read_manifest(path: Path) -> tuple[ManifestFile, str]:
    """Return the manifest of a bundle and its digest."""
    manifest_file = path / MANIFEST
    for link in (path, manifest_file):
        check_link(path, link)
    if not path.exists():
        raise BundleError(path, "no such folder", "Check the path.")
    if manifest_file.exists() and not manifest_file.is_file():
        raise _unfit(path, f"{MANIFEST} is not a file")
    if not is_bundle(path):
        raise BundleError(
            path,
            f"not a bundle: it has no {MANIFEST}",
            "Give a folder that aftexport MODEL --to onnx wrote.",
        )
    try:
        raw = _manifest_bytes(manifest_file)
        text = raw.decode("utf-8")
        content = json.loads(text)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise BundleError(
                path,
                f"its schema version must be at most {SCHEMA_VERSION}, got {version}",
                "Upgrade aftexport.",
            )
        manifest = ManifestFile.model_validate_json(text)
    except ValidationError as error:
        raise _unfit(path, f"{MANIFEST}: {problem(error)}") from error
    except (ValueError, RecursionError) as error:
        raise _unfit(path, f"{MANIFEST} cannot be read ({error})") from error
    if manifest.operators and manifest.operator_version > OPERATOR_VERSION:
        raise BundleError(
            path,
            f"its version of the ai.aftexport operators must be at most {OPERATOR_VERSION}, got "
            f"{manifest.operator_version}",
            "Upgrade aftexport.",
        )
    return manifest, sha256_of(raw)


_LFS_POINTER = b"version https://git-lfs"


def check_file(path: Path, file: Path, entry: FileEntry) -> None:
    """Check the size and the digest of a file, or of the target of a link."""
    check_link(path, file)
    if not file.exists():
        raise _unfit(path, f"{file.name} is missing")
    if not file.is_file():
        raise _unfit(path, f"{file.name} is not a file")
    size = file.stat().st_size
    if size != entry.bytes:
        if _is_pointer(file):
            raise BundleError(
                path, f"{file.name} is a Git LFS pointer, not the file", "Run git lfs pull."
            )
        raise _unfit(path, f"{file.name} must have {entry.bytes} bytes, got {size}")
    if sha256(file) != entry.sha256:
        raise _unfit(path, f"{file.name} was changed or damaged")


def check_link(path: Path, link: Path) -> None:
    """Check that a link of a bundle has an existing target."""
    if not link.is_symlink() or link.exists():
        return
    target = link.readlink()
    # A server sends this reason to its clients, which must not see the paths of its files.
    shown = f".../{target.name}" if target.is_absolute() else target
    raise BundleError(
        path,
        f"{'it' if link == path else link.name} is a link to {shown}, which does not exist",
        "Fetch the targets of the bundle's links, or copy a complete bundle: cp -rL.",
    )


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(64).startswith(_LFS_POINTER)


DAMAGED = (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, struct.error)
"""The exceptions of zipfile for damaged archives."""


def check_plan(path: Path, archive: Path, plan: ChunkedPlan) -> None:
    """Check that an archive has the graphs of a plan."""
    try:
        with zipfile.ZipFile(archive) as opened:
            names = {name.removesuffix(".onnx") for name in opened.namelist()}
    except DAMAGED as error:
        raise _unfit(path, f"{archive.name}: {error}") from error
    stages = len({name.partition(".")[0] for name in names if re.fullmatch(r"\d+\.\w+", name)})
    if stages != len(plan.stages):
        raise _unfit(
            path,
            f"manifest.json: chunked.stages: expected {stages} stage{'s' * (stages != 1)}, as "
            f"{archive.name} has, got {len(plan.stages)}",
        )
    described = [
        ("pooled", bool(plan.pooled), "pool"),
        ("pooled", bool(plan.pooled), "head"),
        ("tokens", bool(plan.tokens), "tokens"),
        ("evidence", plan.evidence, "explain"),
    ]
    for field, is_described, graph in described:
        if is_described != (graph in names):
            some, none = ("true", "false") if field == "evidence" else ("a value", "none")
            reason = (
                f"expected {some}, as {archive.name} has {graph}.onnx, got {none}"
                if graph in names
                else f"expected {none}, as {archive.name} has no {graph}.onnx, got {some}"
            )
            raise _unfit(path, f"manifest.json: chunked.{field}: {reason}")
