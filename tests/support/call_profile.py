"""Print the product's own files, and the number of its functions, that one request or export runs.

python tests/support/call_profile.py infer BUNDLE
python tests/support/call_profile.py export MODEL
"""

import json
import os
import signal
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from time import sleep
from types import FrameType

from servers import free_port

ROOT = Path(__file__).parents[2]
HOMES = tuple(f"{ROOT / home}{os.sep}" for home in ("export", "serve"))
BODY = json.dumps({"text": "A document that is long enough for a run. " * 100}).encode()
KIND = {"Content-Type": "application/json"}
Functions = set[tuple[str, int]]  # file and first line of each


def start_profile() -> Functions:
    """Return the set to which this thread and all later ones add the functions that they call."""
    called = Functions()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(HOMES) and not code.co_name.startswith("<"):
            called.add((code.co_filename, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    return called


def profile_request(bundle: str) -> Functions:
    """Serve a bundle in this process; return what each of three requests of one text calls."""
    from aftserve.cli import main

    called, of_requests = start_profile(), list[Functions]()
    address = f"http://127.0.0.1:{(port := free_port())}"

    def ask() -> None:
        sys.setprofile(None)  # the client is not the server's
        request = urllib.request.Request(f"{address}/infer", BODY, KIND)
        try:
            while not _has_measured(address):
                sleep(0.1)
            for _ in range(4):  # the first one loads
                called.clear()
                urllib.request.urlopen(request).close()
                sleep(0.1)  # the end of the run, and the access log
                of_requests.append(called.copy())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    main([bundle, "--port", str(port), "--drain-seconds", "0"])
    return set.intersection(*of_requests[1:])  # without work that comes now and then


def _has_measured(address: str) -> bool:
    """Return whether a server listens, and measures no longer beside the documents."""
    try:
        with urllib.request.urlopen(f"{address}/info") as answer:
            return not json.load(answer)["calibration"]["measuring"]
    except OSError:
        return False


def profile_export(model: str) -> Functions:
    """Return what ``aftexport MODEL --to onnx`` calls."""
    from aftexport.cli import main

    called = start_profile()
    with tempfile.TemporaryDirectory() as folder:
        if status := main([model, "--to", "onnx", "--out", f"{folder}/model.bundle"]):
            sys.exit(status)
    return called


if __name__ == "__main__":
    kind, path = sys.argv[1:]
    functions = {"infer": profile_request, "export": profile_export}[kind](path)
    sys.setprofile(None)
    files = sorted({os.path.relpath(file, ROOT) for file, _ in functions})
    print(*files, f"{len(functions)} functions in {len(files)} files", sep="\n")
