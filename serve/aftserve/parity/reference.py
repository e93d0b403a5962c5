"""The server's side of the PyTorch reference: it starts the worker, and restarts a dead one."""

import asyncio
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from functools import partial

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.bundle import Bundle
from aftexport.errors import UsageError
from aftserve.errors import RefusedError
from aftserve.settings import Settings
from aftserve.types import Tokens

logger = logging.getLogger("aftserve.reference_process")

_MAX_LOG_LINE_BYTES = 4096
_LOGIT_BYTES = 32
_OTHER_BYTES = 1 << 16
"""Maximum bytes of the worker's line: for each logit, and for the rest, such as an error."""


class ReferenceError(RefusedError):
    """The PyTorch model is not available, or it failed."""

    status = 503


class ReferenceProcess:
    """PyTorch's outputs for documents, from a separate process.

    Args:
        bundle: the bundle to compare with.
        settings: settings of the server, with the model file.
    """

    def __init__(self, bundle: Bundle, settings: Settings) -> None:
        assert settings.reference is not None  # checked by the caller
        words = [sys.executable, "-m", "aftserve.parity.reference_worker", str(bundle.path)]
        words += [str(settings.reference), "--digest", bundle.digest]
        if settings.reference_factory is not None:
            words += ["--factory", settings.reference_factory]
        if settings.reference_allow_pickle:
            words += ["--allow-pickle"]
        self._words = words
        self._line_bytes = (
            _LOGIT_BYTES * sum(head.width for head in bundle.manifest.heads.values()) + _OTHER_BYTES
        )
        self._check = partial(bundle.check_source, settings.reference)
        self._process: Process | None = None
        self._logging: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def outputs(self, ids: Tokens) -> dict[str, NDArray[np.float64]]:
        """Return each output of one document, in float64 unless the model is a program.

        Raises:
            ReferenceError: if the process cannot be started, dies or fails.
        """
        async with self._turn:
            before = self._process
            line = await self._ask(ids)
            if not line and self._process is before:
                # The process may have died before this document; ask a new one.
                line = await self._ask(ids)
        if not line:
            raise ReferenceError(
                "The PyTorch reference has ended.", "See the server's log, and try again."
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ReferenceError(
                f"The PyTorch reference failed: {answer['error']}", "Send another document."
            )
        return {name: np.array(output, np.float64) for name, output in answer["outputs"].items()}

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _ask(self, ids: Tokens) -> bytes:
        """Return the worker's line for a document; empty if the process dies."""
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            process.stdin.write(json.dumps(ids.tolist()).encode() + b"\n")
            await process.stdin.drain()
            answer = await process.stdout.readline()
            line = answer if answer.endswith(b"\n") else b""
        except OSError:
            pass
        finally:
            # Kill the worker on cancellation: a late answer would be read as the next document's.
            if not line:
                await self.close()
        return line

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            try:
                # The worker checks this too, but only after it has imported PyTorch.
                await anyio.to_thread.run_sync(self._check)
            except UsageError as error:
                logger.error("%s", error)  # clients must not see its paths
                raise ReferenceError(
                    "The PyTorch reference is not the file that the bundle was exported from, or "
                    "cannot be read.",
                    "See the server's log.",
                ) from error
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=self._line_bytes
            )
            assert self._process.stderr is not None
            # A pipe rather than the server's own stream: a write to that may block or fail.
            self._logging = asyncio.create_task(log_errors(self._process.stderr))
        return self._process


async def log_errors(errors: asyncio.StreamReader) -> None:
    """Log each line of a process's standard error until its end; long lines in parts."""
    rest = b""
    while part := await errors.read(_MAX_LOG_LINE_BYTES):
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) >= _MAX_LOG_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            logger.warning("reference: %s", line.decode(errors="replace"))
    if rest:
        logger.warning("reference: %s", rest.decode(errors="replace"))
