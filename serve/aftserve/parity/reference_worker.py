"""The process that runs the PyTorch model for comparison.

Run it by ``python -m aftserve.parity.reference_worker BUNDLE SOURCE DIGEST``, with the model source
in JSON and the digest of the server's bundle. For each document it reads a JSON line with token ids
or features, and extra inputs. It writes a JSON line with an ``error``, or with the shapes of
``outputs``; their numbers follow in this order, as float64.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from aftexport.bundle.bundle import Bundle
from aftexport.errors import AftexportError, BundleError
from aftexport.extra_inputs import check_values
from aftexport.options import ModelSource
from aftexport.verify.reference_model import load_source, torch_engine

_NICENESS = 19


def main() -> int:
    """Answer until the input ends, which is at the latest when the server ends."""
    folder, source_json, digest = sys.argv[1:]
    if sys.platform != "win32":  # Windows has no niceness
        os.nice(_NICENESS)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # the model's own code may print
    bundle = Bundle.open(Path(folder))
    if digest != bundle.digest:
        raise BundleError(bundle.path, "the server has another bundle", "Reload the server.")
    source = load_source(bundle, ModelSource(**json.loads(source_json)))
    engine = torch_engine(bundle, source, threads=1, double=True)
    for line in sys.stdin:
        content = json.loads(line)
        tokens = content["tokens"]
        extras = check_values(bundle.manifest.extra_inputs, content["inputs"], len(tokens))
        given = np.array([tokens], np.int64 if bundle.manifest.features is None else np.float32)
        inputs = {
            bundle.manifest.main_input: given,
            "lengths": np.array([len(tokens)]),
            **extras.batch(),
        }
        try:
            found = engine.run({name: inputs[name] for name in bundle.manifest.inputs})
            outputs = {name: output[0].astype(np.float64) for name, output in found.items()}
            answer: dict[str, object] = {
                "outputs": {name: output.shape for name, output in outputs.items()}
            }
        except AftexportError as error:
            outputs, answer = {}, {"error": str(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        for output in outputs.values():
            answers.write(np.ascontiguousarray(output).data)
        answers.flush()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AftexportError, ModuleNotFoundError) as error:
        sys.exit(f"the reference cannot run: {error}")
