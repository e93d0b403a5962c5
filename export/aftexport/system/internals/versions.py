"""The versions of a library that have the parts in use, and the error of another version."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from platform import python_version

from aftexport.errors import LibraryError


@dataclass(frozen=True)
class Versions:
    """The versions of a library that were tried."""

    library: str  # name of the distribution and of its package, or `python` for its own library
    oldest: str  # lower bound in pyproject.toml
    newest: str  # newest version that was tried. A newer one may work as well

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the library's version and the missing part if the block finds a part missing."""
        try:
            yield
        except (ImportError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == self.library:
                raise  # it is not installed
            installed = python_version() if self.library == "python" else version(self.library)
            raise LibraryError(
                f"Expected {self.library} {self.oldest} to {self.newest}, got "
                f"{installed}, which lacks a part: {error}.",
                f"Install {self.library} {self.newest}, or a newer aftexport.",
            ) from error
