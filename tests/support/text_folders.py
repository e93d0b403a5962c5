"""Folders of text files, the input of ``aftserve batch``."""

from collections.abc import Sequence
from pathlib import Path


def write_texts(texts: Sequence[str | bytes], folder: Path) -> Path:
    """Write each text to a file in one of seven subfolders; return the folder."""
    for number, text in enumerate(texts):
        path = folder / f"{number % 7}" / f"{number:05}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder
