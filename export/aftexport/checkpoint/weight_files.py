"""The safetensors files of a folder: one, or several that an index lists."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

from aftexport.errors import CheckpointError
from aftexport.system.json_files import read_json

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PICKLE = "pytorch_model.bin"
_PICKLES = (PICKLE, f"{PICKLE}.index.json")


@dataclass(frozen=True)
class WeightFiles:
    """The files with the weights of a folder.

    Attributes:
        shapes: the shape of each weight by its name.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def count(self) -> int:
        """The number of numbers in all weights."""
        return sum(map(prod, self.shapes.values()))


def find_weight_files(folder: Path) -> WeightFiles:
    """Return the weight files of a folder, with the shapes in their headers.

    Raises:
        CheckpointError: if there are none, or a file that the index lists is missing.
        SafetensorError: if a file is not complete.
    """
    if (folder / WEIGHTS).is_file():
        names: tuple[str, ...] = (WEIGHTS,)
    elif (folder / INDEX).is_file():
        names = _listed(folder)
    else:
        raise _missing(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        shapes |= read_shapes(folder / name)
    return WeightFiles(shapes)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight in the header of a file.

    Raises:
        SafetensorError: if the file is not complete.
    """
    with safe_open(path, "pt") as file:
        keys = file.keys()
        return {key: tuple(file.get_slice(key).get_shape()) for key in keys}


def _listed(folder: Path) -> tuple[str, ...]:
    path = folder / INDEX
    content = read_json(path)
    try:
        places = content["weight_map"]
        names = tuple(dict.fromkeys(places.values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            path,
            f"expected a JSON object with weight_map, a file for each weight ({error!r})",
            "Copy it again.",
        ) from error
    for name in names:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise CheckpointError(
                path,
                f"expected names of .safetensors files beside it, got {str(name)[:80]!r}",
                "Save the model again by save_pretrained.",
            )
        if not (folder / name).is_file():
            raise CheckpointError(
                folder, f"it lacks {name}, which {INDEX} lists", "Copy or download it again."
            )
    return names


def _missing(folder: Path) -> CheckpointError:
    pickled = next((name for name in _PICKLES if (folder / name).is_file()), None)
    if pickled is None:
        return CheckpointError(
            folder,
            f"the folder has no {WEIGHTS} and no {INDEX}",
            "Give a folder that save_pretrained wrote, or a model file.",
        )
    return CheckpointError(
        folder,
        f"its weights are in {pickled}, a pickle, which can run code when loaded",
        "Save them as safetensors with a transformers version that reads them: "
        "model.save_pretrained(folder).",
    )
