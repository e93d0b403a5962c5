"""Reading and writing of ONNX models and the files of their weights, which may be links.

A model is written with its weights in a file of their own, which several graphs may share and a
runtime maps into memory.

The onnx package refuses weights behind a link, and ONNX Runtime refuses links to targets outside
the folder of the model. Caches and mounted volumes consist of such links.
"""

import math
import mmap
import os
import weakref
from pathlib import Path

import onnx

from aftexport.errors import EngineError
from aftexport.system.files import sha256, sha256_of

MODEL = "model.onnx"
MODEL_DATA = "model.onnx.data"
MAX_MODEL_BYTES = (1 << 31) - (1 << 20)
"""The maximum size of a model with its weights in one file: protobuf messages end at 2 GiB."""
_MIN_WEIGHT_BYTES = 1024
"""The minimum size of a weight outside its graph."""
_PAGE_BYTES = 4096
"""The alignment of weights, which the ONNX format recommends for memory mapping."""


class WeightFile:
    """A new ``model.onnx.data`` in a folder, with the weights of several models, each once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / MODEL_DATA
        self._path.write_bytes(b"")
        self._offsets: dict[str, int] = {}

    def take(self, model: onnx.ModelProto) -> bytes:
        """Move the weights of a model into the file; return the serialized graph without them."""
        with self._path.open("ab") as file:
            for tensor in model.graph.initializer:
                content = tensor.raw_data
                if len(content) < _MIN_WEIGHT_BYTES:
                    continue
                digest = sha256_of(content)
                if digest not in self._offsets:
                    file.write(bytes(-file.tell() % _PAGE_BYTES))
                    self._offsets[digest] = file.tell()
                    file.write(content)
                tensor.ClearField("raw_data")
                tensor.data_location = onnx.TensorProto.EXTERNAL
                place = {"offset": self._offsets[digest], "length": len(content)}
                for key, value in {"location": MODEL_DATA, **place}.items():
                    tensor.external_data.add(key=key, value=str(value))
        return bytes(model.SerializeToString(deterministic=True))


def write_model(folder: Path, model: onnx.ModelProto) -> WeightFile:
    """Write ``model.onnx``, and move the weights out of the model to the returned file."""
    weights = WeightFile(folder)
    (folder / MODEL).write_bytes(weights.take(model))
    return weights


def model_digest(path: Path) -> str:
    """Return a digest of a model and of its weights."""
    names = files_beside(onnx.load(path, load_external_data=False))
    digests = (sha256(path.parent / name) for name in (path.name, *sorted(names)))
    return sha256_of("".join(digests).encode())


def without_weights(model: onnx.ModelProto, max_items: int = 1024) -> onnx.ModelProto:
    """Return a model whose weights are inputs, but for small constants such as shapes and axes."""
    given = model.graph
    graph = onnx.GraphProto(
        name=given.name, node=given.node, input=given.input, output=given.output
    )
    known = {value.name for value in given.input}
    for tensor in given.initializer:
        is_external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if not is_external and math.prod(tensor.dims) <= max_items:
            graph.initializer.append(tensor)
        elif tensor.name not in known:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(info)
    bare = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    return bare


def files_beside(model: onnx.ModelProto) -> set[str]:
    """Return the names of the files with weights of a model."""
    return {entry.value for tensor in _outside(model) for entry in _locations(tensor)}


def read_model(path: Path) -> onnx.ModelProto:
    """Read a model with all its weights into memory; raise EngineError if they cannot be read."""
    model = onnx.load(path, load_external_data=False)
    try:
        load_weights(model, path.parent)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{path.name}: its weights cannot be read ({error}).", "Export the model again."
        ) from error
    return model


def load_weights(model: onnx.ModelProto, folder: Path) -> None:
    """Read the external weights of a model into it, through links to any place.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a name leads out of the folder, or weights end beyond the end of their file.
    """
    for tensor in _outside(model):
        load_weight(tensor, folder)


def load_weight(tensor: onnx.TensorProto, folder: Path) -> None:
    """Read one external weight of a model into it; see ``load_weights``."""
    name = Path(_place(tensor).get("location", ""))
    if name.is_absolute() or ".." in name.parts or not (folder / name).is_file():
        raise ValueError(f"{tensor.name} must name a file beside the model, got {str(name)!r}")
    with (folder / name).open("rb") as file:
        offset, length = _extent(tensor, file.fileno())
        file.seek(offset)
        _inline(tensor, file.read(length))


class OpenedWeights:
    """An open ``model.onnx.data``; a file that replaces it does not change the weights."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()  # runtimes follow no links
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    @property
    def is_reachable(self) -> bool:
        """Whether a runtime that opens the path gets this file."""
        try:
            is_same = os.path.samestat(self.path.stat(), os.fstat(self._file))
        except OSError:
            return False
        return is_same and is_unicode(self.path)

    def locate(self, model: onnx.ModelProto) -> None:
        """Let the weights of a model refer to the path; raise ValueError if they lie elsewhere."""
        for tensor in _outside(model):
            if _place(tensor).get("location") != MODEL_DATA:
                raise ValueError(f"the weight {tensor.name} must be in {MODEL_DATA}")
            _extent(tensor, self._file)
            for entry in _locations(tensor):
                entry.value = self.path.name

    def load(self, model: onnx.ModelProto) -> None:
        """Read the located weights of a model into it.

        Raises:
            EngineError: if they are too large for one message.
            ValueError: if they end beyond the end of the file.
        """
        extents = [(tensor, *_extent(tensor, self._file)) for tensor in _outside(model)]
        if (size := sum(length for _, _, length in extents)) > MAX_MODEL_BYTES:
            raise EngineError(
                f"Expected {MODEL_DATA} as it was opened, got another file, and weights of "
                f"{size / 2**30:.1f} GiB exceed 2 GiB, the limit without a file.",
                "Send the document again.",
            )
        for tensor, offset, length in extents:
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as view:
                _inline(tensor, view[offset : offset + length])


def is_unicode(path: Path) -> bool:
    """Return whether runtimes can open a path: names on Linux may have any bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def without_links(path: Path) -> tuple[onnx.ModelProto, Path] | None:
    """Return a model that names the real files of its weights, and the folder of these files.

    It is None if neither the model nor its weights are links: runtimes can then read the path.
    Links to several folders raise EngineError.
    """
    if not any(file.is_symlink() for file in path.parent.iterdir()):
        return None
    model = onnx.load(path, load_external_data=False)
    names = files_beside(model)
    if not names or any(Path(name).name != name for name in names):
        return None  # the runtime itself refuses names that lead out of the folder
    if not any((path.parent / name).is_symlink() for name in (path.name, *names)):
        return None
    targets = {name: (path.parent / name).resolve() for name in names}
    if len(folders := {target.parent for target in targets.values()}) > 1:
        raise EngineError(
            f"{path.name}: its weights must lie in one folder, got links to {len(folders)}.",
            "Copy the bundle without links: cp -rL.",
        )
    for tensor in _outside(model):
        for entry in _locations(tensor):
            entry.value = targets[entry.value].name
    return model, folders.pop()


def _outside(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]


def _locations(tensor: onnx.TensorProto) -> list[onnx.StringStringEntryProto]:
    return [entry for entry in tensor.external_data if entry.key == "location"]


def _place(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _extent(tensor: onnx.TensorProto, file: int) -> tuple[int, int]:
    """Return the first byte and the number of bytes of a weight in an open file."""
    size, place = os.fstat(file).st_size, _place(tensor)
    offset = int(place.get("offset", 0))
    length = int(place.get("length", size - offset))
    if not 0 <= offset <= offset + length <= size:
        raise ValueError(
            f"{tensor.name} must end within the {size} bytes of {place['location']}, got "
            f"{offset + length}"
        )
    return offset, length


def _inline(tensor: onnx.TensorProto, content: bytes) -> None:
    tensor.raw_data = content
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]
