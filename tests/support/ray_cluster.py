"""A Ray on this machine for the tests of several commands, and a look at its processes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import environment

_HOLDING = """
import os, sys
from aftserve.ray.cluster import connected, resolve

with connected(resolve(None), object_store_mib=256, cpus=8, logs=False):
    import ray
    print("ray at", ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], flush=True)
    sys.stdin.read()
"""


@contextmanager
def ray_running() -> Iterator[dict[str, str]]:
    """Yields the environment in which commands find it; ends it with all that runs there."""
    environment_ = environment()
    environment_.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLDING],
            env=environment_,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            said = next((line for line in process.stdout if line.startswith("ray at")), None)
            if said is None:
                log.seek(0)
                raise AssertionError(f"Ray did not start: {log.read()}")
            *_, address, token = said.split()
            yield {
                "RAY_ADDRESS": address,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": token,
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "RAY_USAGE_STATS_ENABLED": "0",
            }
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait(60)


def processes(variable: str, name: str = "") -> list[int]:
    """Those with ``NAME=VALUE`` in their environment whose title matches."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            variables = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        if re.search(name, title) and variable in variables.split("\0"):
            found.append(int(folder.name))
    return sorted(found)


def kill(number: int) -> None:
    """As the system does where memory is short."""
    os.kill(number, signal.SIGKILL)
