"""Files that are read again when they change, or when the operator asks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import anyio.to_thread

from aftexport.errors import UsageError

T = TypeVar("T")

_POLL_SECONDS = 0.5


class _Version(NamedTuple):
    """The properties of a file that change with its content."""

    device: int
    number: int
    bytes: int
    modified_ns: int
    changed_ns: int


class FileWatch(Generic[T]):
    """A watch that reads files again.

    If the files cannot be used, the log has an error, and the previous content stays in use. An
    unexpected exception has its traceback in the log, and the watch goes on.
    Polling finds changes also through links, as in a mounted Secret of Kubernetes, and on network
    file systems.
    """

    def __init__(
        self,
        paths: Sequence[Path],  # their current content is taken as read
        read: Callable[[], T],  # runs in a thread; raises UsageError if they cannot be used
        use: Callable[[T], str],  # returns the description of the content for the log
        *,
        name: str,  # of the content in the plural, for the log
        logger: logging.Logger,
    ) -> None:
        self._paths = paths
        self._read = read
        self._use = use
        self._name = name
        self._logger = logger
        self._turn = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()
        self._seen = self._versions()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the files again at each change within the block."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    def start_reload(self) -> "asyncio.Task[None]":
        """Begin to read the files again, also if they have not changed."""
        task = asyncio.create_task(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        last = self._seen
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            versions = await anyio.to_thread.run_sync(self._versions)
            # Wait until the files are the same at two looks: they may be written in parts.
            if versions == last and versions != self._seen:
                await self._reload()
            last = versions

    async def _reload(self) -> None:
        async with self._turn:
            # Note the versions before the read, or a change between both would be overlooked.
            self._seen = await anyio.to_thread.run_sync(self._versions)
            try:
                content = await anyio.to_thread.run_sync(self._read)
                self._logger.info("using the %s of %s", self._name, self._use(content))
            except UsageError as error:
                self._logger.error("the previous %s stay in use: %s", self._name, error)
            except Exception:  # a watch that ended would overlook every later change
                self._logger.exception("the previous %s stay in use", self._name)

    def _versions(self) -> list[_Version | None]:
        return [_version_of(path) for path in self._paths]


def _version_of(path: Path) -> _Version | None:
    """Return the version of a file; None if it cannot be found."""
    try:
        found = path.stat()
    except OSError:
        return None
    return _Version(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
