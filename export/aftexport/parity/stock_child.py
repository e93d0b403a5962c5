"""The other process of ``stock_session``: plain ONNX Runtime and NumPy, nothing of this package.

Run as a file: MODEL INPUTS.npz OUTPUTS.npz. An input is named ``number of the case/name``, an
output by the number alone. What ONNX Runtime raises is the last line on standard error.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

OUTPUT = "logits"
REFUSED = 3
"""The exit status where ONNX Runtime raises."""
_CPU = ["CPUExecutionProvider"]


def main(model: str, inputs: str, outputs: str) -> int:
    """Runs every case in one session with no options; returns the exit status."""
    cases: dict[str, dict[str, Any]] = defaultdict(dict)
    with np.load(inputs) as archive:
        for key in archive:
            number, _, name = key.partition("/")
            cases[number][name] = archive[key]
    try:
        session = _session(model)
        found = {n: session.run([OUTPUT], given)[0] for n, given in cases.items()}
    except Exception as error:  # a graph of others raises anything
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        return REFUSED
    np.savez(outputs, **found)
    return 0


def _session(model: str) -> onnxruntime.InferenceSession:
    source: str | bytes = model
    try:
        model.encode()
    except UnicodeEncodeError:  # ONNX Runtime takes UTF-8, and a name in Linux is any bytes
        source = Path(model).read_bytes()
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return onnxruntime.InferenceSession(source, providers=_CPU)  # which it asks for there
    return onnxruntime.InferenceSession(source)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
