"""The bundles that the settings name: single ones, and those in folders of bundles."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aftexport.bundle.output_path import folder_or_none, read_folder
from aftexport.errors import UsageError
from aftserve.model.load import model_name
from aftserve.settings import REFERENCE_SETTINGS, Settings

_CHECK = "Check the folder and its permissions."


@dataclass(frozen=True)
class FoundBundles:
    """The bundles on the disk at one time."""

    paths: Mapping[str, Sequence[Path]]  # of each name; a model with several cannot be loaded
    refused: Sequence[UsageError]  # with their paths
    unread: Mapping[Path, OSError]  # folders

    @property
    def problems(self) -> Sequence[UsageError]:
        """All problems, with paths of this machine."""
        unread = [
            UsageError(f"{str(path)!r}: the folder cannot be read ({error.strerror}).", _CHECK)
            for path, error in self.unread.items()
        ]
        return [*self.refused, *unread]

    def clash(self, name: str) -> str | None:
        """Return the reason why no bundle can be chosen for a name; None if one can."""
        return "several bundles have its name" if len(self.paths.get(name, ())) > 1 else None

    def is_gone(self, path: Path) -> bool:
        """Return whether nothing lies at a path where a bundle was; False if it cannot be seen."""
        if path in self.unread or path.parent in self.unread:
            return False
        try:
            return not path.exists()
        except OSError:
            return False


class BundlePaths:
    """The paths of the bundles by the names of their models, as they are on the disk.

    A folder of bundles has at least one bundle at the start; it may become empty later.

    Raises:
        UsageError: if a folder has no bundle, or the settings fit one bundle only.
    """

    def __init__(self, settings: Settings) -> None:
        self._folders, self._single = list[Path](), list[Path]()
        for path in settings.bundles:
            folder = folder_or_none(path)
            if folder is None:
                self._single.append(path)
            elif folder.bundles:
                self._folders.append(path)
            else:
                raise UsageError(
                    f"{path}: not a bundle, and the folder has none.",
                    "Name a folder written by aftexport, or a folder of such folders.",
                )
        self._settings = settings
        if self._folders or len(self._single) > 1:
            _check_fits_several(settings)
        # None if the settings name only folders of bundles.
        self.default_name = model_name(self._single[0], settings) if self._single else None

    def find(self) -> FoundBundles:
        """Look for the bundles, in the order of the settings, single bundles first.

        A bundle that the settings name twice counts once. A folder that cannot be read hides only
        its own bundles.
        """
        places, unread = [*self._single], dict[Path, OSError]()
        for path in self._folders:
            try:
                folder = read_folder(path)
            except OSError as error:
                unread[path] = error
            else:
                places += folder.bundles
                unread |= folder.unread
        paths, refused = dict[str, list[Path]](), list[UsageError]()
        for place in places:
            name = model_name(place, self._settings)
            if not name or not name.isprintable() or name in (".", ".."):
                refused.append(_unusable(name, place))
            elif not any(_is_same(place, one) for one in paths.get(name, ())):
                paths.setdefault(name, []).append(place)
        refused += [_clash(name, several) for name, several in paths.items() if len(several) > 1]
        return FoundBundles(paths, refused, unread)

    def obstacle(self, name: str, found: FoundBundles) -> str | None:
        """Return the reason why a bundle of a name may be there though it was not found.

        It tells the names of folders, and no other part of their paths.
        """
        for path, error in found.unread.items():
            if path in self._folders or model_name(path, self._settings) == name:
                return f"the folder {path.absolute().name!r} cannot be read ({error.strerror})"
        return None


def _is_same(first: Path, second: Path) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)


def _unusable(name: str, path: Path) -> UsageError:
    return UsageError(
        f"Expected a name of printable characters, got {name!r} of {str(path)!r}.",
        "Rename the folder.",
    )


def _clash(name: str, paths: Sequence[Path]) -> UsageError:
    return UsageError(
        f"Expected one bundle of the name {name!r}, got {' and '.join(map(str, paths))}.",
        "Rename the folder of one, or leave it out.",
    )


def _check_fits_several(settings: Settings) -> None:
    """Raise UsageError if a setting belongs to the model of a single bundle."""
    for name in REFERENCE_SETTINGS:
        if getattr(settings, name):
            raise UsageError(
                f"--{name.replace('_', '-')} belongs to the model of one bundle, got several "
                "bundles or a folder of them.",
                f"Set {name} in a section [models.NAME] of the file of --config.",
            )
    if settings.model_name is not None:
        raise UsageError(
            "--model-name names the model of one bundle, got several bundles or a folder of them.",
            "Rename the folders of the bundles.",
        )
