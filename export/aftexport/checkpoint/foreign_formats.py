"""Files of other formats, which cannot be read: each raises CheckpointError."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

from aftexport.checkpoint.program_archive import check_members
from aftexport.checkpoint.torch_file import damaged_error
from aftexport.errors import CheckpointError

INDEX_SUFFIX = ".index.json"
"""The suffix of the file that lists the parts of a sharded state dict."""


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
    if not any(name.endswith("/data.pkl") for name in names):
        raise CheckpointError(
            path, "a zip archive that torch.save did not write", "Give a model file."
        )
