"""Engines built on this machine, apart from the bundles, which are never written to again."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from aftexport.engines.tensorrt.engine_file import EngineFile, EngineRecord, Wanted
from aftexport.errors import EngineError
from aftexport.system.files import aside_folder, move_into_place, sha256_of

VARIABLE = "AFTEXPORT_CACHE"
"""The folder of the cache; without it ``aftexport`` below XDG_CACHE_HOME or ~/.cache."""


@dataclass(frozen=True)
class EngineCache:
    """One model's engines, each in a folder named for what it is for.

    Attributes:
        folder: of the model.
    """

    folder: Path

    def entry(self, wanted: Wanted) -> EngineFile:
        """Where the engine is, or would be."""
        return _files(self.folder / _key(wanted))

    def others(self, wanted: Wanted) -> list[EngineFile]:
        """The engines for another GPU, version, plugin library or setting."""
        folders = sorted(self.folder.glob("*/")) if self.folder.is_dir() else []
        own = _key(wanted)
        return [_files(f) for f in folders if f.name != own and not f.name.startswith(".")]

    @contextmanager
    def locked(self, wanted: Wanted, wait: Callable[[], None]) -> Iterator[None]:
        """Lets one process at a time build an engine.

        Args:
            wanted: the engine.
            wait: called once where another process is building it.

        Raises:
            EngineError: where the cache cannot be written.
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
                f"Set {VARIABLE} to a folder that can.",
            ) from error
        try:
            yield
        finally:
            lock.release()

    def put(self, wanted: Wanted, engine: bytes, record: EngineRecord) -> EngineFile:
        """Stores an engine; one that stood there goes only once the new one is whole.

        Raises:
            EngineError: where the cache cannot be written.
        """
        place = self.folder / _key(wanted)
        try:
            with aside_folder(place) as folder:
                _files(folder).write(engine, record)
                move_into_place(folder, place)
        except OSError as error:
            raise EngineError(
                f"{place} cannot be written ({error.strerror}).",
                f"Make room, or set {VARIABLE} to another folder.",
            ) from error
        return _files(place)


def engine_cache(model: str) -> EngineCache:
    """The cache of the model whose ``model.onnx`` has this sha256."""
    given = os.environ.get(VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(given) if given else Path(base) / "aftexport"
    return EngineCache(root / "engines" / model[:16])


def _files(folder: Path) -> EngineFile:
    return EngineFile(folder / "engine", folder / "record.json")


def _key(wanted: Wanted) -> str:
    """For people the runtime and the GPU; for the rest a digest."""
    settings = wanted.settings
    if settings.compute_capabilities:
        gpu = "sm" + "-".join(map(str, settings.compute_capabilities))
    else:
        gpu = f"{wanted.device.name}-sm{wanted.device.capability}" if wanted.device else "no-gpu"
    parts = (gpu, settings.model_dump_json(), wanted.precision, wanted.model, wanted.plugins)
    digest = sha256_of(repr(parts).encode())[:12]
    name = f"{settings.runtime}-{wanted.version}-{gpu}-{digest}"
    return re.sub(r"[^\w.-]+", "_", name)
