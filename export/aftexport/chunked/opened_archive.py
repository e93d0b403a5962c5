"""An open ``chunked.zip`` and the engines of its graphs; see ``aftexport.chunked.archive``."""

import io
import shutil
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

_MAX_GRAPH_BYTES = 1 << 31
"""The maximum size of a protobuf message."""


class OpenedArchive:
    """The graphs of a ``chunked.zip``, which stays open until it is collected.

    Raises:
        EngineError: if it is not a zip file, or would need more memory than its size.
    """

    # A file that replaces it does not change the model.

    def __init__(
        self, path: Path, *, threads: int, fused: bool, provider: Provider = "cpu"
    ) -> None:
        self.name = path.name
        self._archive = _open_archive(path)
        self._threads = threads
        self._fused = fused
        self._provider: Provider = provider

    def graph(self, name: str) -> onnx.GraphProto:
        """Return a graph without its large weights; raise EngineError if it is damaged."""
        with self._reading():
            return onnx.load_from_string(self._archive.read(f"{name}.onnx")).graph

    def engine(self, graph: str) -> OnnxRuntimeEngine:
        """Return an engine with a graph and the weights that it shares.

        Make an engine right before its use: at most the weights of one layer are then in memory
        twice, and the memory that it keeps between chunks is freed with it.

        Raises:
            EngineError: if the graph is missing or damaged, or the runtime refuses it.
        """
        with self._reading():
            model = self._read(graph)
        return OnnxRuntimeEngine(
            model, threads=self._threads, fused=self._fused, provider=self._provider
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

    def _read(self, graph: str) -> bytes:
        shared = (
            member
            for member in self._archive.namelist()
            if "+" in member and graph in member.removesuffix(".onnx").split("+")
        )
        members = [f"{graph}.onnx", *shared]
        size = sum(self._archive.getinfo(m).file_size for m in members)
        if size > _MAX_GRAPH_BYTES:
            raise zipfile.BadZipFile(
                f"{graph} must have at most {_MAX_GRAPH_BYTES} bytes, got {size}"
            )
        # With its final size from the start, getvalue() makes no second copy.
        model = io.BytesIO(bytes(size))
        for member in members:
            with self._archive.open(member) as part:
                shutil.copyfileobj(part, model, 1 << 20)
        return model.getvalue()


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
