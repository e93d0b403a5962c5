"""The bundles that the settings name: single ones, and those in folders of bundles."""

from collections.abc import Sequence
from pathlib import Path

from aftexport.bundle.bundle import is_bundle
from aftexport.errors import UsageError
from aftserve.model.load import model_name
from aftserve.settings import Settings


class BundlePaths:
    """The paths of the bundles by the names of their models, as they are on the disk.

    A folder of bundles has at least one bundle at the start; it may become empty later.

    Args:
        settings: settings of the server.

    Raises:
        UsageError: if a folder cannot be read, or the settings fit one bundle only.

    Attributes:
        default_name: name of the only or first bundle that the settings name themselves; None if
            they name only folders of bundles.
    """

    def __init__(self, settings: Settings) -> None:
        self._folders = [path for path in settings.bundles if _bundles_in(path)]
        self._single = [path for path in settings.bundles if path not in self._folders]
        self._settings = settings
        if self._folders or len(self._single) > 1:
            _check_fits_several(settings)
        self.default_name = model_name(self._single[0], settings) if self._single else None

    def find(self) -> dict[str, Sequence[Path]]:
        """Return the paths of each name; several of one name are an error of that model.

        Raises:
            UsageError: if a folder cannot be read.
        """
        found = dict[str, list[Path]]()
        for path in [*self._single, *(one for folder in self._folders for one in _inside(folder))]:
            found.setdefault(model_name(path, self._settings), []).append(path)
        return dict(found)


def only_path(name: str, paths: Sequence[Path]) -> Path:
    """Return the path of a model.

    Raises:
        UsageError: if several bundles have its name, or it cannot be part of an address.
    """
    if len(paths) > 1:
        raise UsageError(
            f"Expected one bundle of the name {name!r}, got {' and '.join(map(str, paths))}.",
            "Rename the folder of one, or leave it out.",
        )
    if not name or not name.isprintable() or name in (".", ".."):
        raise UsageError(
            f"Expected a name of printable characters, got {name!r} of {str(paths[0])!r}.",
            "Rename the folder.",
        )
    return paths[0]


def _bundles_in(path: Path) -> list[Path]:
    """Return the bundles of a folder of bundles; none if the path is another one."""
    return _inside(path) if path.is_dir() and not is_bundle(path) else []


def _inside(folder: Path) -> list[Path]:
    """Return the bundles in a folder, in the order of their names; hidden folders do not count.

    Raises:
        UsageError: if the folder cannot be read.
    """
    try:
        children = [one for one in folder.iterdir() if not one.name.startswith(".")]
        return sorted(one for one in children if is_bundle(one))
    except OSError as error:
        raise UsageError(
            f"{folder}: the folder of bundles cannot be read ({error.strerror}).",
            "Check the folder and its permissions.",
        ) from error


def _check_fits_several(settings: Settings) -> None:
    """Raise UsageError if a setting belongs to the model of a single bundle."""
    names = ("reference", "reference_factory", "reference_allow_pickle")
    for name in (*names, "reference_trust_remote_code"):
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
