import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_python
from memory import NEEDS_PROC

from aftexport.system.process import collection_paused, usable_cores

_PROGRAM = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from aftexport.system.process import end_process

class Ring:
    def __init__(self):
        self.self = self
    def __del__(self):
        print("collected")

ring = Ring()
pool = ThreadPoolExecutor(1)
pool.submit(print, "worker")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
atexit.register(print, "exit function")
sys.stdout.flush()
sys.stdout = open(1, "w", closefd=False)
print("unflushed")
end_process(lambda: 3)
"""
_ENDING = """
import ctypes, sys
from aftexport.system.process import end_process
{}
end_process(lambda: {})
"""


def test_end_waits_for_threads_and_exit_functions(tmp_path: Path) -> None:
    """An idle thread of a pool ends, and objects in a ring are not collected."""
    outcome = run_python("-c", _PROGRAM, cwd=tmp_path)
    assert (outcome.code, outcome.err) == (3, "")
    assert sorted(outcome.out.splitlines()) == ["exit function", "thread", "unflushed", "worker"]
    assert outcome.out.index("thread") < outcome.out.index("exit function")


@pytest.mark.parametrize(
    ("code", "command", "expected"),
    [
        # The C library buffers its output, because standard output is a pipe here.
        ("ctypes.CDLL(None).puts(b'from C')", "0", (0, "from C\n", "")),
        ("", "sys.exit(None)", (0, "", "")),
        ("", "sys.exit(4)", (4, "", "")),
        ("", "sys.exit('text')", (1, "", "text\n")),
    ],
)
def test_end_keeps_output_and_status(
    code: str, command: str, expected: tuple[int, str, str], tmp_path: Path
) -> None:
    outcome = run_python("-c", _ENDING.format(code, command), cwd=tmp_path)
    assert (outcome.code, outcome.out, outcome.err) == expected


def test_end_reports_unwritable_output(tmp_path: Path) -> None:
    """As Python itself does, with its status."""
    code = "sys.stdout = open('/dev/full', 'w'); print('x')"
    outcome = run_python("-c", _ENDING.format(code, "0"), cwd=tmp_path)
    assert outcome.code == 120
    assert "No space left on device" in outcome.err


def test_command_ends_process(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "leave = os._exit\n"
        "os._exit = lambda status: (print('ended', status, flush=True), leave(status))\n"
        "sys.argv = ['aftexport', 'verify', 'missing.bundle']\n"
        "from aftexport.__main__ import run\n"
        "run()"
    )
    outcome = run_python("-c", code, cwd=tmp_path)
    assert (outcome.code, outcome.out) == (2, "ended 2\n")


def test_collection_stops_only_within_block() -> None:
    assert gc.isenabled()
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collection_paused():
        _ = 1 / 0
    assert gc.isenabled()


PROGRAM = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

from pathlib import Path
from aftexport.engines.onnxruntime import OnnxRuntimeEngine

before = len(os.listdir("/proc/self/task"))
engine = OnnxRuntimeEngine(Path(sys.argv[1]), fused=False)
print(len(os.listdir("/proc/self/task")) - before)
"""


@NEEDS_PROC
@pytest.mark.skipif(os.cpu_count() == 1, reason="this machine has one core anyway")
def test_engine_threads_stay_within_allowed_cores(bundle_folder: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(bundle_folder / "model.onnx")]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ended.stdout == "0\n"  # beside the one that calls it


def test_a_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loky.cpu_count", lambda: 1)
    assert usable_cores() == 1
