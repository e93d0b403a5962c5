"""A built engine in a file, and the record of what it is: it runs nowhere it does not belong."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from aftexport.engines.cuda import Device
from aftexport.engines.tensorrt.builder import Built
from aftexport.engines.tensorrt.runtimes import TITLES
from aftexport.engines.tensorrt.settings import BuildSettings, Count, RuntimeName
from aftexport.errors import EngineError
from aftexport.system.files import sha256, sha256_of

REBUILD = "Run: aftexport build BUNDLE --rebuild"
MAX_ENGINE_BYTES = 1 << 37
"""No less than the memory of the GPUs there are, in which an engine lies whole."""
MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """What an engine must be to be used here for one model.

    Attributes:
        version: of the runtime.
        device: the GPU; None where there is none.
        settings: what it is built for.
        precision: of the graph.
        model: sha256 of ``model.onnx``.
        plugins: sha256 of the plugin library; None where it is not built, or has no kernels
            for the GPUs.
    """

    version: str
    device: Device | None
    settings: BuildSettings
    precision: str
    model: str
    plugins: str | None


class EngineRecord(BaseModel):
    """What an engine is: ``Wanted`` when it was built, and what came of it.

    Attributes:
        runtime, version: what built it; nothing else loads it.
        gpu: it was built on; None for a portable engine.
        capability: of that GPU, 90 for 9.0.
        settings, precision, model, plugins: see ``Wanted``; the plugins it uses are part of it.
        types: of its inputs and outputs, by name.
        operators: custom operator to ``plugin`` or ``portable``.
        parity: whether it was compared with PyTorch, which takes a GPU.
        sha256: of the engine's bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    runtime: RuntimeName
    version: str
    gpu: str | None
    capability: Count | None
    settings: BuildSettings
    precision: str
    model: str
    plugins: str | None
    types: dict[str, str]
    operators: dict[str, Literal["plugin", "portable"]]
    parity: Literal["checked", "deferred"]
    sha256: str

    @classmethod
    def of(cls, built: Built, wanted: Wanted) -> Self:
        """The record of an engine that was built just now, and not compared yet."""
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

    def misfit(self, wanted: Wanted) -> str | None:
        """Why this engine must not be used, as the rest of a sentence; None where it may."""
        title = TITLES[self.runtime]
        settings = wanted.settings
        if self.runtime != settings.runtime:
            return f"it was built for {title}, not {TITLES[settings.runtime]}"
        if self.model != wanted.model:
            return "it was built from another model.onnx"
        if self.version != wanted.version:
            return f"it was built by {title} {self.version}, here is {wanted.version}"
        if self.settings != settings or self.precision != wanted.precision:
            return "it was built with other settings"
        device = wanted.device
        if device is not None and self.gpu is not None:
            own = Device(self.gpu, self.capability or 0)
            if own != device:
                return f"it was built on {own}, here is {device}"
        elif device is not None and device.capability not in settings.compute_capabilities:
            known = ", ".join(map(str, settings.compute_capabilities))
            return f"it was built for compute capability {known}, here is {device}"
        if wanted.plugins not in (None, self.plugins):
            return "it was built with other plugins than are installed here"
        return None


@dataclass(frozen=True)
class EngineFile:
    """An engine and its record, side by side."""

    engine: Path
    record: Path

    def read(self, wanted: Wanted) -> tuple[bytes, EngineRecord]:
        """Reads an engine that may be used here.

        Raises:
            EngineError: where it is absent, damaged, or built for something else.
        """
        record = self.read_record()
        if reason := record.misfit(wanted):
            raise EngineError(f"{self.engine} is not used: {reason}.", REBUILD)
        try:
            _check_file(self.engine, MAX_ENGINE_BYTES)
            # A digest takes no memory: what is not the engine is never held as a whole.
            whole = sha256(self.engine) == record.sha256
            content = self.engine.read_bytes() if whole else b""
        except OSError as error:
            raise EngineError(f"{self.engine}: {error.strerror}.", REBUILD) from error
        if sha256_of(content) != record.sha256:
            raise EngineError(f"{self.engine} was changed or damaged.", REBUILD)
        return content, record

    def read_record(self) -> EngineRecord:
        """What the engine is.

        Raises:
            EngineError: where the record is absent or no record.
        """
        try:
            _check_file(self.record, MAX_RECORD_BYTES)
            return EngineRecord.model_validate_json(self.record.read_text("utf-8"))
        except OSError as error:
            raise EngineError(f"{self.record}: {error.strerror}.", REBUILD) from error
        except (ValidationError, ValueError) as error:
            raise EngineError(f"{self.record} is no record of an engine.", REBUILD) from error

    def write(self, engine: bytes, record: EngineRecord) -> None:
        """Writes both; nothing may stand there."""
        self.engine.write_bytes(engine)
        text = json.dumps(record.model_dump(), indent=2, sort_keys=True)
        self.record.write_text(text + "\n", "utf-8")


def _check_file(path: Path, most_bytes: int) -> None:
    """Raise EngineError unless the path is a file of at most ``most_bytes``."""
    if (path.exists() or path.is_symlink()) and not path.is_file():
        raise EngineError(f"{path} is not a file.", REBUILD)
    if (size := path.stat().st_size) > most_bytes:
        raise EngineError(f"{path} has {size} bytes, more than {most_bytes}.", REBUILD)
