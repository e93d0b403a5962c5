import os
import subprocess
import sys
from pathlib import Path

import pytest
from memory import NEEDS_PROC

from aftexport.system.cores import usable_cores

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
