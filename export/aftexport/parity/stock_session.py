"""The model as other people run it: by ONNX Runtime without our kernels and session options.

``engines.onnxruntime`` switches off steps of the optimizer that break some graphs, so that a graph
may run there and nowhere else. A crash ends a process, hence the process of its own.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.golden import Array, Case
from aftexport.engines import onnxruntime as ort
from aftexport.engines.cast_graph import has_bfloat16
from aftexport.errors import EngineError
from aftexport.onnx_io import files_beside
from aftexport.parity import stock_child
from aftexport.parity.comparison import Comparison, compare

SUBJECT = "model in a stock session"
_MAX_TOKENS = 2048
"""The most tokens of a short case, padding included."""
_SECONDS = 120.0
_SECONDS_PER_GIB = 60.0
_REMEDY = "Try --precision fp32 or another --opset; --no-verify exports it for our own sessions."


def verify_stock(
    bundle: Bundle, cases: Sequence[Case], *, seconds: float | None = None
) -> list[Comparison]:
    """Compares short cases with PyTorch's outputs, run by plain ONNX Runtime in another process.

    Args:
        bundle: with the model.
        cases: to choose from; those of operators are left out.
        seconds: time limit of the process; None for one that grows with the model.

    Returns:
        One comparison for each case that was run; none for a bfloat16 graph, which ONNX Runtime
        has no products for on the CPU.

    Raises:
        EngineError: where the process crashes, is out of time, or cannot load or run the model.
    """
    if has_bfloat16(onnx.load(bundle.model_path, load_external_data=False)):
        return []
    chosen = _short(cases)
    if seconds is None:
        size = sum(file.stat().st_size for file in bundle.path.glob("model.onnx*"))
        seconds = _SECONDS + _SECONDS_PER_GIB * size / 2**30
    outputs = _run(bundle.model_path, chosen, seconds)
    manifest = bundle.manifest
    return [
        replace(compare(c, o, manifest.precision, bound=manifest.tolerance), subject=SUBJECT)
        for c, o in zip(chosen, outputs, strict=True)
    ]


def _short(cases: Sequence[Case]) -> list[Case]:
    """The smallest case, the smallest with padding, and the longest document of up to 64 tokens."""
    short = sorted(
        (c for c in cases if c.subject == "model" and c.inputs["input_ids"].size <= _MAX_TOKENS),
        key=lambda case: case.inputs["input_ids"].size,
    )
    padded = [c for c in short if "lengths" in c.inputs and len(set(c.inputs["lengths"])) > 1]
    long = [c for c in short if c.inputs["input_ids"].shape[1] <= 64]
    chosen = (*short[:1], *long[-1:], *padded[:1])
    return list({case.name: case for case in chosen}.values())


def _run(model: Path, cases: Sequence[Case], seconds: float) -> list[Array]:
    inputs = {f"{i}/{name}": x for i, case in enumerate(cases) for name, x in case.inputs.items()}
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        np.savez(given, **inputs)  # type: ignore[arg-type]
        # -P: the folder of the file has modules whose names others may have too.
        files = map(str, (stock_child.__file__, _unlinked(model, Path(folder)), given, found))
        try:
            done = subprocess.run(
                [sys.executable, "-P", *files],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=folder,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"{_subject()} did not run {len(cases)} short cases within {seconds:.0f} s.",
                _REMEDY,
            ) from error
        if done.returncode != 0:
            raise EngineError(_failure(done.returncode, done.stderr), _REMEDY)
        with np.load(found) as archive:
            return [archive[str(i)] for i in range(len(cases))]


def _unlinked(model: Path, folder: Path) -> Path:
    """Return a path of the model that a runtime can load which follows no links to weights.

    Args:
        model: the model file, which may be a link, as may the files of its weights.
        folder: an empty folder, for hard links or copies if there are such links.
    """
    names = files_beside(onnx.load(model, load_external_data=False))
    files = [model.parent / name for name in names]
    if not names or not any(file.is_symlink() for file in (model, *files)):
        return model.resolve()
    for file in (model, *files):
        target = folder / file.name
        try:
            target.hardlink_to(file.resolve())
        except OSError:  # another file system
            shutil.copyfile(file, target)
    return folder / model.name


def _subject() -> str:
    return f"A stock session of ONNX Runtime {ort.VERSION}"


def _failure(status: int, said: bytes) -> str:
    if status < 0:
        return f"{_subject()} crashes on the model ({_signal(-status)})."
    lines = said.decode("utf-8", "replace").strip().splitlines()
    reason = lines[-1].rstrip(".") if lines else f"exit status {status}"
    return f"{_subject()} cannot run the model: {reason}."


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
