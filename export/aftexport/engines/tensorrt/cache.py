"""The cache of engines built on this machine. Bundles are never modified after the export."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from aftexport.engines.tensorrt.engine_file import EngineFile, EngineRecord, EngineRequirements
from aftexport.errors import EngineError
from aftexport.system.files import aside_folder, move_into_place, sha256_of

VARIABLE = "AFTEXPORT_CACHE"
"""Variable of the cache folder; the default is ``aftexport`` in XDG_CACHE_HOME or ~/.cache."""


@dataclass(frozen=True)
class EngineCache:
    """The engines of one model, each in a folder that is named for its runtime and GPU.

    Attributes:
        folder: the folder of the model.
    """

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
        """Hold the lock under which only one process builds an engine.

        Args:
            wanted: the engine.
            wait: callback that is called once if another process is building the engine.

        Raises:
            EngineError: if the cache cannot be written.
        """
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
        """Store an engine; replace an earlier one only after the new one is complete.

        Raises:
            EngineError: if the cache cannot be written.
        """
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
    """Return the cache of the model whose ``model.onnx`` has this sha256."""
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
