"""The files of a Triton repository: configuration, labels, model and kernels.

The files and fields follow Triton's documentation, "Model Repository" and "Model
Configuration", and ``model_config.proto``.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import onnx
from onnx import helper, numpy_helper
from rich.console import Console

import aftplugins
from aftexport._version import __version__
from aftexport.bundle.bundle import TOKENIZER, Bundle, is_bundle
from aftexport.bundle.features import Features
from aftexport.bundle.output_path import check_can_be_made
from aftexport.deploy.build_engine import build, wanted_here
from aftexport.engines.tensorrt.settings import MAX_BATCH
from aftexport.errors import UsageError
from aftexport.heads import Head
from aftexport.operators.portable_bodies import choose_kernels
from aftexport.system.contract import FEATURES
from aftexport.system.files import aside_folder, move_into_place
from aftexport.system.onnx_files import MODEL, MODEL_DATA

CONFIG = "config.pbtxt"
LABELS = "labels.txt"
PLAN = "model.plan"
VERSION = "1"
MOUNTED = "/models"
"""The default path of the repository in Triton's images."""
TIMEOUT_SECONDS = 60
MAX_QUEUE = 256

_TYPES: dict[int, str] = {
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.FLOAT16: "TYPE_FP16",
    onnx.TensorProto.BFLOAT16: "TYPE_BF16",
}
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("aftexport.deploy", "."),
    autoescape=False,  # the output is not HTML, and its values need no quoting
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_repository(
    bundle: Bundle,
    out: Path,  # repository, which may exist and contain other models
    *,
    name: str,
    mounted: str = MOUNTED,
    max_batch: int | None = None,
    force: bool = False,
    console: Console,
) -> Path:
    """Add a bundle's model to a Triton model repository.

    A bundle that was exported to ONNX uses the backend onnxruntime on the CPU, with the fused
    kernels if they are built. Its model normalizes features. A bundle with an engine uses the
    backend tensorrt and the engine for the GPU of this machine. A missing engine is built.
    """
    folder = check_place(out, name, mounted, force)
    if bundle.manifest.windows is not None:
        raise UsageError(
            f"Triton reads no documents in windows, which {bundle.path} declares.",
            "Give a bundle that was exported without --long-documents.",
        )
    heads = bundle.manifest.heads
    labels = [label for head in heads.values() for label in head.logit_names]
    if broken := [label for label in labels if "\n" in label]:
        raise UsageError(
            f"Expected labels without line breaks for Triton, got {broken[0]!r}.",
            "Export the model with other --labels.",
        )
    max_batch = _max_batch(bundle, max_batch)
    with aside_folder(folder) as aside:
        version = aside / VERSION
        version.mkdir()
        if bundle.manifest.engine is None:
            served = _onnxruntime(bundle, version, f"{mounted}/{name}/{VERSION}", max_batch)
        else:
            served = _tensorrt(bundle, version, max_batch, console)
        for output, head in heads.items():
            content = "".join(f"{label}\n" for label in head.logit_names)
            (aside / _labels_file(heads, output)).write_text(content, "utf-8")
        if TOKENIZER in bundle.files:
            shutil.copyfile(bundle.path / TOKENIZER, aside / TOKENIZER)
        graph = onnx.load(bundle.model_path, load_external_data=False).graph
        config = _TEMPLATES.get_template("triton.pbtxt").render(
            version=__version__,
            name=name,
            inputs=[_tensor(value) for value in graph.input],
            outputs=[
                _tensor(value)
                | {"labels": _labels_file(heads, value.name) if value.name in heads else None}
                for value in graph.output
            ],
            timeout_microseconds=TIMEOUT_SECONDS * 1_000_000,
            max_queue=MAX_QUEUE,
            features=bundle.manifest.features,
            **served,
        )
        (aside / CONFIG).write_text(config, "utf-8")
        move_into_place(aside, folder)
    return folder


def check_place(out: Path, name: str, mounted: str, force: bool) -> Path:
    """Return the folder of a model in a repository; see ``write_repository``."""
    if not re.fullmatch(r"(/[\w.-]+)+", mounted, re.ASCII):
        raise UsageError(
            "--mounted must be an absolute path of letters, digits, '.', '_' and '-', got "
            f"{mounted}.",
            "Give the path of the repository on Triton's machine.",
        )
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise UsageError(
            "--name must have only letters, digits, '_', '-' and '.', and start with a letter, a "
            f"digit or '_', got {name!r}.",
            "Choose another --name.",
        )
    folder = out / name
    if (out / CONFIG).exists() or is_bundle(out):
        raise UsageError(
            f"--out must be a repository, got {out}, a model or a bundle.", "Choose another --out."
        )
    if folder.is_symlink() or (folder.exists() and not _is_written_by_aftexport(folder)):
        raise UsageError(
            f"{folder} exists and was not written by aftexport.", "Choose another --name or --out."
        )
    if folder.exists() and not force:
        raise UsageError(
            f"{folder} exists.", "Add --force to replace it, or choose another --name."
        )
    check_can_be_made("--out", folder)
    return folder


def _is_written_by_aftexport(folder: Path) -> bool:
    try:
        return (folder / CONFIG).read_text("utf-8").startswith("# Written by aftexport ")
    except (OSError, UnicodeDecodeError):
        return False


def _max_batch(bundle: Bundle, asked: int | None) -> int | None:
    """Return the maximum number of documents in a run; None for the backend's default."""
    if bundle.manifest.batching:
        return asked
    if asked is not None and asked > 1:
        raise UsageError(
            f"--max-batch must be 1 for a bundle exported with --no-batching, got {asked}.",
            "Leave --max-batch out.",
        )
    return 1


def _onnxruntime(
    bundle: Bundle, version: Path, mounted: str, max_batch: int | None
) -> dict[str, Any]:
    for file in (MODEL, MODEL_DATA):
        if file in bundle.files:
            shutil.copyfile(bundle.path / file, version / file)
    library = aftplugins.library("onnxruntime") if bundle.manifest.operators else None
    if library is not None or bundle.manifest.features is not None:
        _adapt(version / MODEL, bundle.manifest.features, has_kernels=library is not None)
    if library is not None:
        shutil.copyfile(library, version / library.name)
    return {
        "backend": "onnxruntime",
        "file": MODEL,
        "max_batch": max_batch or MAX_BATCH,
        "library": library and f"{mounted}/{library.name}",
    }


def _adapt(path: Path, features: Features | None, *, has_kernels: bool) -> None:
    """Rename the nodes that the kernels take, and add the normalization of features."""
    model = onnx.load(path, load_external_data=False)
    is_changed = has_kernels and choose_kernels(model, "onnxruntime")
    if features is not None:
        add_normalization(model, features)
        is_changed = True
    if is_changed:
        onnx.save(model, path)


def _tensorrt(
    bundle: Bundle, version: Path, max_batch: int | None, console: Console
) -> dict[str, Any]:
    plan = bundle.manifest.engine
    assert plan is not None
    if plan.settings.runtime != "tensorrt":
        raise UsageError(
            "Expected an engine of TensorRT for Triton, got one of TensorRT-RTX.",
            "Export with --to trt, or with --to onnx.",
        )
    if max_batch is not None and bundle.manifest.batching:
        raise UsageError(
            f"--max-batch must be that of the engine, {plan.settings.max_batch}, got {max_batch}.",
            "Leave --max-batch out, or export the bundle again with it.",
        )
    content, _ = build(bundle, console=console).read(wanted_here(bundle, plan.settings))
    (version / PLAN).write_bytes(content)
    profiles = [str(index) for index in range(len(plan.settings.opt_lengths))]
    return {
        "backend": "tensorrt",
        "file": PLAN,
        "max_batch": max_batch or plan.settings.max_batch,
        "profiles": json.dumps(profiles),
    }


def _labels_file(heads: Mapping[str, Head], output: str) -> str:
    """Return the name of the file with the labels of an output."""
    return LABELS if len(heads) == 1 else f"{output}.{LABELS}"


def _tensor(value: onnx.ValueInfoProto) -> dict[str, Any]:
    """Return the name, the type, and the shape without the batch, in Triton's terms."""
    tensor = value.type.tensor_type
    dims = [dim.dim_value or -1 for dim in tensor.shape.dim[1:]]
    return {
        "name": value.name,
        "data_type": _TYPES[tensor.elem_type],
        "dims": dims or [1],  # Triton does not allow an empty shape
        "scalar": not dims,
    }


def start_command(folder: Path, mounted: str) -> str:
    """Return the command that starts Triton with the repository of a model's folder."""
    words = ["tritonserver", f"--model-repository={mounted}"]
    if (folder / VERSION / PLAN).exists():
        # The engine contains its plugins. TensorRT runs code of an engine only with this option.
        words.append("--backend-config=tensorrt,version-compatible=true")
    return " ".join(words)


_NORMALIZED = f"{FEATURES}_normalized"


def add_normalization(model: onnx.ModelProto, features: Features) -> None:
    """Let a model normalize its input: ``(x - mean) / scale`` in float32, as the server does."""
    steps = [("Sub", "mean", features.mean), ("Div", "scale", features.scale)]
    given = [(kind, name, numbers) for kind, name, numbers in steps if numbers is not None]
    if not given:
        return
    _rename_uses(model.graph, FEATURES, _NORMALIZED)
    value = FEATURES
    for place, (kind, name, numbers) in enumerate(given):
        constant = numpy_helper.from_array(np.array(numbers, np.float32), f"{FEATURES}_{name}")
        result = _NORMALIZED if place == len(given) - 1 else f"{FEATURES}_{kind}"
        model.graph.initializer.append(constant)
        model.graph.node.insert(place, helper.make_node(kind, [value, constant.name], [result]))
        value = result


def _rename_uses(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a value where nodes read it, also in the graphs of their attributes."""
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        inner: Sequence[onnx.GraphProto] = [
            graph for one in node.attribute for graph in (one.g, *one.graphs)
        ]
        for one in inner:
            _rename_uses(one, old, new)
