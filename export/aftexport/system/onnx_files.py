"""Reading and writing of ONNX models and the files of their weights, which may be links.

The onnx package refuses weights behind a link, and ONNX Runtime refuses links to targets outside
the folder of the model. Caches and mounted volumes consist of such links.
"""

import math
import os
from pathlib import Path

import onnx

from aftexport.errors import EngineError

MODEL = "model.onnx"
MODEL_DATA = "model.onnx.data"
MAX_MODEL_BYTES = (1 << 31) - (1 << 20)
"""The maximum size of a model with its weights in one file: protobuf messages end at 2 GiB."""


def write_model(folder: Path, model: onnx.ModelProto, max_bytes: int = MAX_MODEL_BYTES) -> None:
    """Write ``model.onnx``, with the weights in a second file if it exceeds ``max_bytes``."""
    is_external = model.ByteSize() > max_bytes
    onnx.save(
        model,
        folder / MODEL,
        save_as_external_data=is_external,
        location=MODEL_DATA if is_external else None,
        size_threshold=1024,
    )


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
    tensor.raw_data = _weights(folder, tensor)
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]


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


def _weights(folder: Path, tensor: onnx.TensorProto) -> bytes:
    place = {entry.key: entry.value for entry in tensor.external_data}
    name = Path(place.get("location", ""))
    if name.is_absolute() or ".." in name.parts or not (folder / name).is_file():
        raise ValueError(f"{tensor.name} must name a file beside the model, got {str(name)!r}")
    with (folder / name).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        offset = int(place.get("offset", 0))
        length = int(place.get("length", size - offset))
        if not 0 <= offset <= offset + length <= size:
            raise ValueError(
                f"{tensor.name} must end within the {size} bytes of {name}, got {offset + length}"
            )
        file.seek(offset)
        return file.read(length)
