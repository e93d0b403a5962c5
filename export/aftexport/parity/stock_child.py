"""The child process of ``stock_session``: only ONNX Runtime and NumPy, without this package.

It is run as a file with the arguments MODEL INPUTS.npz OUTPUTS.npz. Inputs and outputs are named
``number of the case/name``. An exception of ONNX Runtime is the last line on
standard error.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

REFUSED = 3
"""The exit status after an exception of ONNX Runtime."""
_CPU = ["CPUExecutionProvider"]


def main(model: str, inputs: str, outputs: str) -> int:
    """Run every case in one session without options, and return the exit status."""
    cases: dict[str, dict[str, Any]] = defaultdict(dict)
    with np.load(inputs) as archive:
        for key in archive:
            number, _, name = key.partition("/")
            cases[number][name] = archive[key]
    try:
        session = _session(model)
        names = [output.name for output in session.get_outputs()]
        results = {
            f"{number}/{name}": array
            for number, feed in cases.items()
            for name, array in zip(names, session.run(names, feed), strict=True)
        }
    except Exception as error:  # ONNX Runtime can raise any exception for a graph of a user
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        return REFUSED
    np.savez(outputs, **results)
    return 0


def _session(model: str) -> onnxruntime.InferenceSession:
    source: str | bytes = model
    try:
        model.encode()
    except UnicodeEncodeError:  # ONNX Runtime needs UTF-8, but Linux file names can be any bytes
        source = Path(model).read_bytes()
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return onnxruntime.InferenceSession(source, providers=_CPU)  # required by this build
    return onnxruntime.InferenceSession(source)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
