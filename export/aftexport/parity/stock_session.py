"""The model in a stock session of ONNX Runtime, without our kernels and session options.

``engines.onnxruntime`` switches off optimizer steps that break some graphs, so a graph may run
there and fail in a stock session. A crash ends the process, so the session has its own process.
"""

import math
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
from aftexport.parity import stock_child
from aftexport.parity.comparison import Comparison, compare
from aftexport.system.onnx_files import files_beside, is_unicode

SUBJECT = "model in a stock session"
_MAX_TOKENS = 2048
"""The maximum tokens of a short case, with padding."""
_SECONDS = 120.0
_SECONDS_PER_GIB = 60.0
_REMEDY = "Add --no-verify if only sessions of aftexport run the model."


def verify_stock(bundle: Bundle, cases: Sequence[Case]) -> list[Comparison]:
    """Compare short cases with PyTorch's outputs, run by plain ONNX Runtime in another process."""
    if has_bfloat16(onnx.load(bundle.model_path, load_external_data=False)):
        return []
    chosen = _short(cases)
    size = sum(file.stat().st_size for file in bundle.path.glob("model.onnx*"))
    seconds = _SECONDS + _SECONDS_PER_GIB * size / 2**30
    outputs = _run(bundle.model_path, chosen, seconds)
    manifest = bundle.manifest
    return [
        replace(result, subject=SUBJECT)
        for case, given in zip(chosen, outputs, strict=True)
        for result in compare(
            case, given, manifest.precision, bound=manifest.tolerance, heads=manifest.heads
        )
    ]


def _short(cases: Sequence[Case]) -> list[Case]:
    """Return the smallest case, the smallest with padding, and the longest of up to 64 tokens."""
    short = sorted(
        (c for c in cases if c.subject == "model" and math.prod(c.shape) <= _MAX_TOKENS),
        key=lambda case: math.prod(case.shape),
    )
    padded = [c for c in short if "lengths" in c.inputs and len(set(c.inputs["lengths"])) > 1]
    long = [c for c in short if c.shape[1] <= 64]
    chosen = (*short[:1], *long[-1:], *padded[:1])
    return list({case.name: case for case in chosen}.values())


def _run(model: Path, cases: Sequence[Case], seconds: float) -> list[dict[str, Array]]:
    inputs = {f"{i}/{name}": x for i, case in enumerate(cases) for name, x in case.inputs.items()}
    with tempfile.TemporaryDirectory() as folder:
        feeds, results = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        np.savez(feeds, **inputs)  # type: ignore[arg-type]
        # -P: modules in the folder of the file could shadow modules of the same name.
        files = map(str, (stock_child.__file__, _unlinked(model, Path(folder)), feeds, results))
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
                f"{_subject()} must run {len(cases)} short cases within {seconds:.0f} s, got a "
                "timeout.",
                _REMEDY,
            ) from error
        if done.returncode != 0:
            failure = _failure(done.returncode, done.stderr)
            remedy = "Export it with a lower --opset." if "opset" in failure.lower() else _REMEDY
            raise EngineError(failure, remedy)
        with np.load(results) as archive:
            outputs: list[dict[str, Array]] = [{} for _ in cases]
            for key in archive:
                number, _, name = key.partition("/")
                outputs[int(number)][name] = archive[key]
            return outputs


def _unlinked(model: Path, folder: Path) -> Path:
    """Return a path of the model for runtimes that neither follow links nor open any name.

    The empty folder gets hard links to such files, or copies of them.
    """
    names = files_beside(onnx.load(model, load_external_data=False))
    files = [model.parent / name for name in names]
    is_linked = any(file.is_symlink() for file in (model, *files))
    if not names or (is_unicode(model.resolve()) and not is_linked):
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


def _failure(status: int, stderr: bytes) -> str:
    if status < 0:
        return f"{_subject()} crashes on the model ({_signal(-status)})."
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    reason = lines[-1].rstrip(".") if lines else f"exit status {status}"
    return f"{_subject()} cannot run the model: {reason}."


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
