"""The file of API keys, which takes effect when it changes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

from aftexport.errors import UsageError
from aftserve.api.api_keys import Keys

logger = logging.getLogger("aftserve.keys")

_POLL_SECONDS = 0.5


class _Version(NamedTuple):
    """The properties of a file that change with its content."""

    device: int
    number: int
    bytes: int
    modified_ns: int
    changed_ns: int


class KeyFile:
    """The API keys of a file, which is read again when it changes.

    A file that cannot be used is reported in the log, and the previous keys stay. Polling finds
    changes also through links, as in a mounted Secret of Kubernetes, and on network file systems.

    Args:
        path: a TOML file of keys.

    Attributes:
        keys: the keys in use; one object, whose content changes.

    Raises:
        UsageError: if the file cannot be read or has no keys.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = _version_of(path)
        self.keys = Keys.read(path)
        self._turn = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Read the file again at each change within the block."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    def start_reload(self) -> "asyncio.Task[None]":
        """Begin to read the file again, also if it has not changed."""
        task = asyncio.create_task(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        seen = self._version
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            version = await anyio.to_thread.run_sync(_version_of, self._path)
            # Wait until the file is the same at two looks: an editor may write it in parts.
            if version == seen and version != self._version:
                await self._reload()
            seen = version

    async def _reload(self) -> None:
        async with self._turn:
            # Note the version before the read, or a change between both would be overlooked.
            self._version = await anyio.to_thread.run_sync(_version_of, self._path)
            try:
                keys = await anyio.to_thread.run_sync(Keys.read, self._path)
            except UsageError as error:
                logger.error("the previous API keys stay in use: %s", error)
                return
            self.keys.replace(keys)
            logger.info("using the API keys of %s", ", ".join(keys.owners))


def _version_of(path: Path) -> _Version | None:
    """Return the version of a file; None if it cannot be found."""
    try:
        found = path.stat()
    except OSError:
        return None
    return _Version(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
