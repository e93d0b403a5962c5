"""The copyright files of Debian's packages, with the families that their fields name.

Machine-readable files only: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.documents.compose import Document
from benchmarks.documents.texts import family_of

FOLDER = Path("/usr/share/doc")
MAX_TOKENS = 131_072
_LICENSE = re.compile(r"^License:[ \t]*(\S.*)$", re.MULTILINE)
_SEPARATOR = re.compile(r"\s+(?:and/or|and|or|with\s.*?exception)\b|[,|/()]|_or_", re.IGNORECASE)
_NAMES = {
    "expat": "mit", "bsl": "boost", "apachev": "apache", "gplv": "gpl", "lgplv": "lgpl",
    "bsd-3-clause": "bsd-new", "bsd-3": "bsd-new", "bsd-2-clause": "bsd-simplified",
    "bsd-2": "bsd-simplified", "bsd-4-clause": "bsd-original", "bsd-4": "bsd-original",
    "psf": "python", "openssl": "openssl-ssleay", "ncsa": "uoi-ncsa", "mplv": "mpl",
}  # fmt: skip
"""The families by Debian's names in lower case, where they differ."""


def families_of(text: str) -> set[str]:
    """Return the names in the fields of a file, as families of licences."""
    names = set()
    for field in _LICENSE.findall(text):
        for part in _SEPARATOR.split(field):
            name = part.strip().lower().partition(" ")[0].rstrip("+.;")
            names.add(_NAMES.get(name) or _NAMES.get(family_of(name)) or family_of(name))
    return names - {""}


def read_files(tokenizer: Tokenizer, labels: Sequence[str], folder: Path) -> list[Document]:
    """Return the distinct files that name a known family; none on other systems."""
    texts = {path.read_text("utf-8", "replace") for path in sorted(folder.glob("*/copyright"))}
    found = []
    for text in sorted(text for text in texts if text.startswith("Format:")):
        target = np.array([int(label in families_of(text)) for label in labels])
        ids = np.array(tokenizer.encode(text).ids, np.int32)
        if target.any() and len(ids) <= MAX_TOKENS:
            found.append(Document(ids, target, is_clean=False))
    return found
