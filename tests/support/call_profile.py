"""The product's own functions and files that run for one request, or for one export.

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
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from types import FrameType

from ports import free_port

ROOT = Path(__file__).parents[2]
TEXT = "A document that is long enough for a run. " * 100


class CallProfile:
    """The named functions that run while the block of ``with`` does, on all later threads."""

    def __init__(self) -> None:
        self.functions = set[tuple[str, int]]()  # file and first line
        self._homes = tuple(f"{ROOT / home}{os.sep}" for home in ("export", "serve"))
        self._records = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def __enter__(self) -> "CallProfile":
        self._records = True
        return self

    def __exit__(self, *_: object) -> None:
        self._records = False

    def __str__(self) -> str:
        files = sorted({os.path.relpath(file, ROOT) for file, _ in self.functions})
        return "\n".join([*files, f"{len(self.functions)} functions in {len(files)} files"])

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if self._records and code.co_filename.startswith(self._homes) and code.co_name[0] != "<":
            self.functions.add((code.co_filename, code.co_firstlineno))


def profile_request(bundle: str) -> CallProfile:
    """Profile the second request of one text to a server in this process."""
    profile, address = CallProfile(), f"http://127.0.0.1:{(port := free_port())}"

    def ask() -> None:
        sys.setprofile(None)  # the client is not the server's
        request = urllib.request.Request(f"{address}/infer", json.dumps({"text": TEXT}).encode())
        request.add_header("Content-Type", "application/json")
        try:
            while not _has_measured(address):
                sleep(0.1)
            urllib.request.urlopen(request).close()
            with profile:
                urllib.request.urlopen(request).close()
                sleep(0.1)  # the end of the run, and the access log
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    from aftserve.cli import main

    threading.Thread(target=ask).start()
    main([bundle, "--port", str(port), "--drain-seconds", "0"])
    return profile


def _has_measured(address: str) -> bool:
    """Return whether a server is ready, and measures no longer beside the documents."""
    try:
        with urllib.request.urlopen(f"{address}/info") as answer:
            return not json.load(answer)["calibration"]["measuring"]
    except OSError:  # it does not listen yet
        return False


def profile_export(model: str) -> CallProfile:
    """Profile ``aftexport MODEL --to onnx``."""
    from aftexport.cli import main

    with tempfile.TemporaryDirectory() as folder, CallProfile() as profile:
        main([model, "--to", "onnx", "--out", f"{folder}/model.bundle"])
    return profile


def main(words: Sequence[str]) -> None:
    """Print the profile of the named kind."""
    kind, path = words
    print({"infer": profile_request, "export": profile_export}[kind](path))
    sys.setprofile(None)


if __name__ == "__main__":
    main(sys.argv[1:])
