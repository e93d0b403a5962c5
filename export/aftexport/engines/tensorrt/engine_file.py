"""The file of a built engine and its record, which limits where the engine may run."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import filelock
from pydantic import ValidationError

from aftexport.engines.cuda import Device
from aftexport.engines.tensorrt.builder import BuiltEngine
from aftexport.engines.tensorrt.runtimes import REBUILD, TITLES
from aftexport.engines.tensorrt.settings import BuildSettings, Count, RuntimeName
from aftexport.errors import EngineError
from aftexport.system.files import aside_folder, move_into_place, sha256, sha256_of
from aftexport.system.validation import StrictModel

MAX_ENGINE_BYTES = 1 << 37
"""Limit of an engine, at least the memory of any GPU; an engine must fit into GPU memory."""
MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class EngineRequirements:
    """The requirements of this machine on an engine for one model."""

    version: str
    device: Device | None  # GPU; None if there is no GPU
    settings: BuildSettings
    precision: str
    model: str  # digest of `model.onnx` and of its weights
    # sha256 of the plugin library; None if the library is not built or has no kernels for the GPUs
    plugins: str | None


class EngineRecord(StrictModel):
    """The record of an engine: the ``EngineRequirements`` of its build, and the result."""

    runtime: RuntimeName  # runtime that built the engine; only this version loads it
    version: str
    gpu: str | None  # name of the GPU of the build; None for a portable engine
    capability: Count | None  # compute capability of that GPU times 10, 90 for 9.0
    # see `EngineRequirements`; the engine should contain its plugins, see `runtimes.deserialize`
    settings: BuildSettings
    precision: str
    model: str
    plugins: str | None
    types: dict[str, str]  # element types of inputs and outputs, by name
    # `plugin` or `portable` for each custom operator
    operators: dict[str, Literal["plugin", "portable"]]
    # state of the comparison with PyTorch, which needs a GPU
    parity: Literal["checked", "deferred"]
    sha256: str  # digest of the engine's bytes

    @property
    def uses_plugins(self) -> bool:
        """Whether an operator runs by a plugin."""
        return "plugin" in self.operators.values()

    @classmethod
    def of(cls, built: BuiltEngine, wanted: EngineRequirements) -> Self:
        """Return the record of a new engine, which was not compared with PyTorch yet."""
        portable = bool(wanted.settings.compute_capabilities)
        device = None if portable else wanted.device
        return cls.model_validate(
            {
                "runtime": wanted.settings.runtime,
                "version": wanted.version,
                "gpu": device and device.name,
                "capability": device and device.capability,
                "settings": wanted.settings,
                "precision": wanted.precision,
                "model": wanted.model,
                "plugins": wanted.plugins,
                "types": dict(built.types),
                "operators": dict(built.operators),
                "parity": "deferred",
                "sha256": sha256_of(built.engine),
            }
        )

    def misfit(self, wanted: EngineRequirements) -> str | None:
        """Return why this engine must not be used, as a clause; None if it may be used."""
        title = TITLES[self.runtime]
        settings = wanted.settings
        if self.runtime != settings.runtime:
            return f"it was built for {title}, not {TITLES[settings.runtime]}"
        if self.model != wanted.model:
            return "it was built from another model.onnx"
        if self.version != wanted.version:
            return f"it was built by {title} {self.version}, this machine has {wanted.version}"
        if self.settings != settings or self.precision != wanted.precision:
            return "it was built with other settings"
        device = wanted.device
        if device is not None and self.gpu is not None:
            own = Device(self.gpu, self.capability or 0)
            if own != device:
                return f"it was built on {own}, this machine has {device}"
        elif device is not None and device.capability not in settings.compute_capabilities:
            known = ", ".join(map(str, settings.compute_capabilities))
            return f"it was built for compute capability {known}, this machine has {device}"
        if wanted.plugins not in (None, self.plugins):
            return "it was built with plugins that differ from the installed ones"
        return None


@dataclass(frozen=True)
class EngineFile:
    """The paths of an engine and of its record."""

    engine: Path
    record: Path

    def read(self, wanted: EngineRequirements) -> tuple[bytes, EngineRecord]:
        """Return the engine and its record; raise EngineError if it must not be used here."""
        record = self.read_record()
        if reason := record.misfit(wanted):
            raise EngineError(f"{self.engine} is not used: {reason}.", REBUILD)
        try:
            _check_file(self.engine, MAX_ENGINE_BYTES)
            # Compute the digest first, because it does not load a wrong file into memory.
            is_intact = sha256(self.engine) == record.sha256
            content = self.engine.read_bytes() if is_intact else b""
        except OSError as error:
            raise EngineError(f"{self.engine}: {error.strerror}.", REBUILD) from error
        if sha256_of(content) != record.sha256:
            raise EngineError(f"{self.engine} was changed or damaged.", REBUILD)
        return content, record

    def read_record(self) -> EngineRecord:
        """Return the record of the engine; raise EngineError if the record is absent or invalid."""
        try:
            _check_file(self.record, MAX_RECORD_BYTES)
            return EngineRecord.model_validate_json(self.record.read_text("utf-8"))
        except OSError as error:
            raise EngineError(f"{self.record}: {error.strerror}.", REBUILD) from error
        except (ValidationError, ValueError) as error:
            raise EngineError(f"{self.record} is not a record of an engine.", REBUILD) from error

    def write(self, engine: bytes, record: EngineRecord) -> None:
        """Write the engine and its record; neither file may exist."""
        self.engine.write_bytes(engine)
        text = json.dumps(record.model_dump(), indent=2, sort_keys=True)
        self.record.write_text(text + "\n", "utf-8")


def _check_file(path: Path, max_bytes: int) -> None:
    """Raise EngineError unless the path is a file of at most ``max_bytes``."""
    if (path.exists() or path.is_symlink()) and not path.is_file():
        raise EngineError(f"{path} is not a file.", REBUILD)
    if (size := path.stat().st_size) > max_bytes:
        raise EngineError(f"{path} must have at most {max_bytes} bytes, got {size}.", REBUILD)


VARIABLE = "AFTEXPORT_CACHE"
"""Variable of the cache folder; the default is ``aftexport`` in XDG_CACHE_HOME or ~/.cache."""


@dataclass(frozen=True)
class EngineCache:
    """The engines of one model, each in a folder that is named for its runtime and GPU."""

    folder: Path

    def entry(self, wanted: EngineRequirements) -> EngineFile:
        """Return the place of the engine, whether or not it exists."""
        return _files(self.folder / _key(wanted))

    def others(self, wanted: EngineRequirements) -> list[EngineFile]:
        """Return the engines for another GPU, version, plugin library or setting."""
        folders = sorted(self.folder.glob("*/")) if self.folder.is_dir() else []
        own = _key(wanted)
        return [_files(f) for f in folders if f.name != own and not f.name.startswith(".")]

    @contextmanager
    def locked(self, wanted: EngineRequirements, wait: Callable[[], None]) -> Iterator[None]:
        """Hold the lock under which only one process builds an engine."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.folder / f"{_key(wanted)}.lock")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                wait()
                lock.acquire()
        except OSError as error:
            raise EngineError(
                f"The engine cache {self.folder} cannot be written ({error.strerror}).",
                f"Set {VARIABLE} to a writable folder.",
            ) from error
        try:
            yield
        finally:
            lock.release()

    def put(self, wanted: EngineRequirements, engine: bytes, record: EngineRecord) -> EngineFile:
        """Store an engine; replace an earlier one only after the new one is complete."""
        place = self.folder / _key(wanted)
        try:
            with aside_folder(place) as folder:
                _files(folder).write(engine, record)
                move_into_place(folder, place)
        except OSError as error:
            raise EngineError(
                f"{place} cannot be written ({error.strerror}).",
                f"Free disk space, or set {VARIABLE} to another folder.",
            ) from error
        return _files(place)


def engine_cache(model: str) -> EngineCache:
    """Return the cache of the model with a digest, see ``EngineRequirements``."""
    override = os.environ.get(VARIABLE)
    # Without HOME, this takes the user database; plugins/cpu/methods/rate_file.cc keeps no file.
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(override) if override else Path(base) / "aftexport"
    return EngineCache(root / "engines" / model[:16])


def _files(folder: Path) -> EngineFile:
    return EngineFile(folder / "engine", folder / "record.json")


def _key(wanted: EngineRequirements) -> str:
    """Return a folder name with the runtime, the GPU, and a digest of everything else."""
    settings = wanted.settings
    if settings.compute_capabilities:
        gpu = "sm" + "-".join(map(str, settings.compute_capabilities))
    else:
        gpu = f"{wanted.device.name}-sm{wanted.device.capability}" if wanted.device else "no-gpu"
    parts = (gpu, settings.model_dump_json(), wanted.precision, wanted.model, wanted.plugins)
    digest = sha256_of(repr(parts).encode())[:12]
    name = f"{settings.runtime}-{wanted.version}-{gpu}-{digest}"
    return re.sub(r"[^\w.-]+", "_", name)
