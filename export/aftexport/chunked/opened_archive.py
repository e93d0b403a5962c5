"""An open ``chunked.zip`` and the engines of its graphs; see ``aftexport.chunked.archive``."""

import weakref
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from aftexport.bundle.bundle import DAMAGED
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, Provider
from aftexport.errors import EngineError
from aftexport.system.files import unstored_member
from aftexport.system.onnx_files import MODEL_DATA, OpenedWeights

_MAX_GRAPH_BYTES = 1 << 31
"""The maximum size of a protobuf message."""


class OpenedArchive:
    """The graphs of a ``chunked.zip`` and their weights, both open until they are collected.

    Raises:
        EngineError: if it is not a zip file, or would need more memory than its size.
    """

    # Files that replace them do not change the model.

    def __init__(
        self, path: Path, *, threads: int, fused: bool, provider: Provider = "cpu"
    ) -> None:
        self.name = path.name
        self._archive = _open_archive(path)
        with self._reading():
            self._weights = OpenedWeights(path.with_name(MODEL_DATA))
        self._threads = threads
        self._fused = fused
        self._provider: Provider = provider

    def graph(self, name: str) -> onnx.GraphProto:
        """Return a graph without its large weights; raise EngineError if it is damaged."""
        return self._read(name).graph

    def engine(self, graph: str) -> OnnxRuntimeEngine:
        """Return an engine with a graph, which maps the weights into memory.

        Make an engine right before its use: the memory that it keeps between chunks, and the copies
        of weights in another layout, are freed with it.

        Raises:
            EngineError: if the graph is missing or damaged, or the runtime refuses it.
        """
        model = self._read(graph)
        if (engine := self._mapped(model)) is not None:
            return engine
        # If another bundle has taken the place of this one, the open file still has the weights.
        with self._reading():
            self._weights.load(model)
        return self._loaded(model, None)

    def _mapped(self, model: onnx.ModelProto) -> OnnxRuntimeEngine | None:
        """Return an engine that maps the weights; None if it would map another file."""
        if not self._weights.is_reachable:
            return None
        try:
            engine = self._loaded(model, self._weights.path.parent)
        except EngineError:
            if self._weights.is_reachable:
                raise
            return None
        return engine if self._weights.is_reachable else None

    def _loaded(self, model: onnx.ModelProto, folder: Path | None) -> OnnxRuntimeEngine:
        return OnnxRuntimeEngine(
            model.SerializeToString(),
            folder=folder,
            threads=self._threads,
            fused=self._fused,
            provider=self._provider,
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise EngineError if a graph is missing or damaged."""
        try:
            yield
        except (OSError, KeyError, DecodeError, *DAMAGED) as error:
            raise EngineError(
                f"{self.name}: {str(error) or 'it is truncated'}.",
                "Replace the bundle as a whole, and never write into its files.",
            ) from error

    def _read(self, graph: str) -> onnx.ModelProto:
        with self._reading():
            name = f"{graph}.onnx"
            if (size := self._archive.getinfo(name).file_size) > _MAX_GRAPH_BYTES:
                raise zipfile.BadZipFile(
                    f"{graph} must have at most {_MAX_GRAPH_BYTES} bytes, got {size}"
                )
            model = onnx.load_from_string(self._archive.read(name))
            self._weights.locate(model)
            return model


def _open_archive(path: Path) -> zipfile.ZipFile:
    with ExitStack() as closing:
        file = closing.enter_context(path.open("rb"))
        try:
            archive = zipfile.ZipFile(file)
            reason = unstored_member(archive, path.stat().st_size)
        except DAMAGED as error:
            raise EngineError(f"{path}: {error}.", "Export the model again.") from error
        if reason is not None:
            raise EngineError(f"{path}: {reason}.", "Export the model again.")
        # In a cycle of references, the file may be collected before the archive can close it.
        weakref.finalize(archive, closing.pop_all().close)
        return archive
