"""A user of a wheel: an environment outside the repository, and its commands without a compiler."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

OWN_PACKAGES = ("aftexport", "aftplugins", "aftserve")
MAX_INSTALL_SECONDS = 1_800
"""Some gigabytes of torch on a slow connection."""
MAX_COMMAND_SECONDS = 300
_WARNING = re.compile(r"(?m)^(\S+\.py):\d+: \w*Warning: .*\n(?:  .*\n)?")


class User:
    """A fresh environment, a folder, and the commands that are typed there.

    Attributes:
        folder: the working folder of all commands.
    """

    def __init__(self, python: Path, folder: Path, *, newest: bool = False) -> None:
        """Make the environment.

        Args:
            python: the interpreter.
            folder: an empty folder.
            newest: whether packages are the newest, which may warn of each other.
        """
        self.folder = folder
        self._newest = newest
        self._commands = folder / "venv" / "bin"
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        self._environment = {"PATH": str(self._commands), "HOME": str(folder)}
        assert shutil.which("c++", path=self._environment["PATH"]) is None

    def install(self, *words: str | Path) -> None:
        """Install packages from wheels; pip reads this machine's settings and cache."""
        options = ["--quiet", "--only-binary", ":all:"]
        if self._newest:  # which changes, so a cache would only grow
            options.append("--no-cache-dir")
        command = [self._commands / "python", "-m", "pip", "install", *options, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=MAX_INSTALL_SECONDS
        )
        assert done.returncode == 0, done.stderr

    def run(self, command: str, *words: str | Path, warns: bool = False) -> str:
        """Run a command, and return its output; only if it ``warns``, stderr may have text."""
        done = subprocess.run(
            [self._commands / command, *words],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=MAX_COMMAND_SECONDS,
        )
        assert done.returncode == 0, f"{command} {words}: {done.stdout}\n{done.stderr}"
        assert warns or not self._relevant(done.stderr), f"{command} {words}: {done.stderr}"
        return done.stdout

    def answer(self, bundle: Path | str, text: str) -> dict[str, Any]:
        """Serve a bundle, and return the answer to one document.

        The server must stop by SIGTERM with status 0, and may log only lines of level INFO.
        """
        log = self.folder / "server.log"
        with log.open("wb") as file:
            server = subprocess.Popen(
                [self._commands / "aftserve", bundle, "--port", "0"],
                cwd=self.folder,
                env=self._environment | {"AFTSERVE_DRAIN_SECONDS": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        try:
            address = _await_address(server, log)
            answer = httpx.post(f"{address}/infer", json={"text": text}, timeout=60)
        finally:
            server.terminate()
            status = server.wait(60)
        lines = self._relevant(log.read_text("utf-8")).splitlines()
        assert answer.status_code == 200, answer.text
        assert status == 0, lines
        assert not [line for line in lines if " INFO " not in line]
        content: dict[str, Any] = json.loads(answer.text)
        return content

    def _relevant(self, errors: str) -> str:
        return without_foreign_warnings(errors) if self._newest else errors


def without_foreign_warnings(text: str) -> str:
    """Return a text without the Python warnings whose line is in a file of another package."""

    def kept(found: re.Match[str]) -> str:
        is_own = any(name in OWN_PACKAGES for name in Path(found[1]).parts)
        return found[0] if is_own else ""

    return _WARNING.sub(kept, text)


def _await_address(server: "subprocess.Popen[bytes]", log: Path) -> str:
    end = time.monotonic() + 120
    while time.monotonic() < end and server.poll() is None:
        if found := re.search(r"running on (http://\S+)", log.read_text("utf-8")):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text('utf-8')}")
