"""The file of API keys, which takes effect when it changes."""

import logging
from functools import partial
from pathlib import Path

from aftserve.api.api_keys import Keys
from aftserve.observability.file_watch import FileWatch

logger = logging.getLogger("aftserve.keys")


class KeyFile:
    """The API keys of a file.

    Args:
        path: a TOML file of keys.

    Attributes:
        watch: watch that reads the file again.
        keys: the keys in use; one object, whose content changes.

    Raises:
        UsageError: if the file cannot be read or has no keys.
    """

    def __init__(self, path: Path) -> None:
        # Before the read, or a change between both would be overlooked.
        self.watch = FileWatch(
            [path], partial(Keys.read, path), self._use, name="API keys", logger=logger
        )
        self.keys = Keys.read(path)

    def _use(self, keys: Keys) -> str:
        self.keys.replace(keys)
        return ", ".join(keys.owners)
