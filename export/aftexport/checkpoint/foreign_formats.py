"""Files of other formats, which cannot be read: each raises CheckpointError."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

from aftexport.checkpoint.program_archive import check_members
from aftexport.checkpoint.torch_file import damaged_error
from aftexport.errors import CheckpointError

INDEX_SUFFIX = ".index.json"
"""The suffix of the file that lists the parts of a sharded state dict."""
_PART = ".distcp"
"""The suffix of the parts in a folder of torch.distributed.checkpoint."""


def refuse_shards(folder: Path) -> None:
    """Refuse a folder whose weights are in several files."""
    index = next(iter(sorted(folder.glob(f"*{INDEX_SUFFIX}"))), None)
    if index is not None and not (folder / "model.safetensors").is_file():
        raise CheckpointError(
            folder,
            f"its weights are in several files, which {index.name} lists",
            "Join them: read each by safetensors.torch.load_file into one dict, and write the dict "
            "by save_file.",
        )


def refuse_distributed(path: Path) -> None:
    """Refuse a folder of torch.distributed.checkpoint, or a file of one."""
    folder = path if path.is_dir() else path.parent
    if path.suffix == _PART or (path.is_dir() and any(path.glob(f"*{_PART}"))):
        raise CheckpointError(
            path,
            "a checkpoint of torch.distributed.checkpoint, which holds the weights in parts",
            "Join them: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{folder} model.pt, and give model.pt with --factory.",
        )


def refuse_other_formats(path: Path) -> None:
    """Refuse a file that torch.save did not write, or that is not complete."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise CheckpointError(path, "the file is empty", "Save or copy it again.")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(path, "a Git LFS pointer, not the file", "Run git lfs pull.")
    if path.suffix == ".onnx":
        raise CheckpointError(
            path,
            "an ONNX model, which holds no PyTorch module",
            "Give its PyTorch model; or make a bundle of the file: aftexport FILE --to onnx.",
        )
    if head.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                _refuse_other_archives(path, archive.namelist())
                check_members(path, archive, path)
        except CheckpointError:
            raise
        except Exception as error:  # a changed byte can cause any exception
            raise damaged_error(path) from error


def _refuse_other_archives(path: Path, names: Sequence[str]) -> None:
    if any("/code/" in name or name.endswith("/constants.pkl") for name in names):
        raise CheckpointError(
            path,
            "a TorchScript archive, which torch.export cannot read",
            "Save the module's state dict, or a torch.export program.",
        )
    if names and all(name.endswith(".npy") for name in names):
        raise CheckpointError(
            path,
            "a NumPy archive, which holds no tensors",
            "Save its arrays as tensors: torch.save({name: torch.from_numpy(array) for name, array "
            "in numpy.load(file).items()}, 'model.pt'), and give that file with --factory.",
        )
    if not any(name.endswith("/data.pkl") for name in names):
        raise CheckpointError(
            path, "a zip archive that torch.save did not write", "Give a model file."
        )
