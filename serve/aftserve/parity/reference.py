"""The server's side of the PyTorch reference: it starts the worker, and restarts a dead one."""

import asyncio
import json
import logging
import math
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.bundle import Bundle
from aftexport.chunked.document import storing
from aftexport.errors import UsageError
from aftexport.extra_inputs import NO_EXTRAS, ExtraValues
from aftexport.heads.token_head import Column, file_opener
from aftserve.errors import RefusedError
from aftserve.settings import Settings
from aftserve.types import Tokens

logger = logging.getLogger("aftserve.reference_process")

_MAX_LOG_LINE_BYTES = 4096
_LINE_BYTES = 1 << 20
"""Maximum bytes of the worker's line, which has the shapes of outputs, or an error."""
_PART_BYTES = 1 << 20
_VALUES = "outputs of PyTorch"
"""The name of the values in files, for messages."""
_MAX_HELD_BYTES = 1 << 24
"""Maximum bytes of an output in memory; larger ones are kept in files."""


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
        if settings.reference_trust_remote_code:
            words += ["--trust-remote-code"]
        self._words = words
        self._folder = settings.spill
        self._check = partial(bundle.check_source, settings.reference)
        self._process: Process | None = None
        self._logging: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def outputs(
        self, ids: Tokens, extras: ExtraValues = NO_EXTRAS
    ) -> dict[str, NDArray[np.float64]]:
        """Return each output of one document, in float64 unless the model is a program.

        Args:
            ids: tokens of the document.
            extras: extra inputs of the document.

        Raises:
            ReferenceError: if the process cannot be started, dies or fails.
        """
        async with self._turn:
            before = self._process
            outputs = await self._ask(ids, extras)
            if outputs is None and self._process is before:
                # The process may have died before this document; ask a new one.
                outputs = await self._ask(ids, extras)
        if outputs is None:
            raise ReferenceError(
                "The PyTorch reference has ended.", "See the server's log, and try again."
            )
        return outputs

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _ask(self, ids: Tokens, extras: ExtraValues) -> dict[str, NDArray[np.float64]] | None:
        """Return the worker's outputs for a document; None if the process dies."""
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        answer, outputs, is_whole = {}, {}, False
        try:
            process.stdin.write(await anyio.to_thread.run_sync(_line, ids, extras))
            await process.stdin.drain()
            answer = json.loads(await process.stdout.readuntil(b"\n"))
            for name, shape in answer.get("outputs", {}).items():
                outputs[name] = await self._read(process.stdout, shape)
            is_whole = True
        except (ConnectionError, asyncio.IncompleteReadError):
            return None
        finally:
            # Kill the worker on cancellation: a late answer would be read as the next document's.
            if not is_whole:
                await self.close()
        if "error" in answer:
            raise ReferenceError(
                f"The PyTorch reference failed: {answer['error']}", "Send another document."
            )
        return outputs

    async def _read(
        self, stream: asyncio.StreamReader, shape: Sequence[int]
    ) -> NDArray[np.float64]:
        """Read an array in parts."""
        left = 8 * math.prod(shape)
        is_large = left > _MAX_HELD_BYTES
        open_file = file_opener(self._folder) if is_large else None
        with storing(_VALUES):
            column = Column(np.float64, open_file=open_file)
        while left:
            part = await stream.readexactly(min(left, _PART_BYTES))
            with storing(_VALUES):  # a lost connection is an OSError too, of another meaning
                column.add(np.frombuffer(part, np.float64))
            left -= len(part)
        with storing(_VALUES):
            return column.array().reshape(shape)

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
                *self._words, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_LINE_BYTES
            )
            assert self._process.stderr is not None
            # A pipe rather than the server's own stream: a write to that may block or fail.
            self._logging = asyncio.create_task(log_errors(self._process.stderr))
        return self._process


def _line(tokens: Tokens, extras: ExtraValues) -> bytes:
    """Return a document as a line of JSON, made in small parts so that other threads can run."""
    listed = ",".join(map(json.dumps, tokens.tolist()))
    return f'{{"tokens":[{listed}],"inputs":{json.dumps(extras.to_json())}}}\n'.encode()


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
