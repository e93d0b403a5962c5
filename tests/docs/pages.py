"""The README files and the pages of the documentation, and their code blocks."""

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

REPOSITORY = Path(__file__).parents[2]
_FOLDERS = (".", "docker", "export", "plugins", "serve", "tests/benchmarks")
_FILES = [
    *(REPOSITORY / folder / "README.md" for folder in _FOLDERS),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
PAGES = {str(path.relative_to(REPOSITORY)): path.read_text("utf-8") for path in _FILES}

NOT_RUN = {
    "deployment": "serves from a Ray of its own until it is stopped",
    "certificate": "needs a certificate",
    "docker": "needs a docker engine",
    "fragment": "is a part of a file",
    "gpu": "needs an NVIDIA GPU",
    "install": "changes the environment",
    "kubernetes": "needs a cluster",
    "make": "is a target of the Makefile, which takes minutes",
    "minutes": "takes minutes",
    "mlflow": "needs MLflow",
    "picture": "writes a picture of this documentation",
    "proxy": "needs a proxy",
    "tritonserver": "needs Triton's server",
}
"""Why a block does not run, by the kind that the comment before it names."""
COMMANDS = ("sh", "python")
"""The languages of blocks that run."""
OTHER_LANGUAGES = ("json", "nginx", "text", "toml", "yaml")
"""The languages of blocks that are data, or the output of a command."""
_MARK = re.compile(r"<!-- (not run|file|in): (.+?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of code, with the line of its fence and the word after it.

    ``mark`` is the kind of comment right before the block, or empty, and ``marked`` its rest.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str
    marked: str

    @property
    def place(self) -> str:
        """The block for messages."""
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, indented ones too, which have no language."""
    found, mark, marked = [], "", ""
    for token in MarkdownIt("commonmark").parse(PAGES[page]):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            language = token.info.strip()
            found.append(Block(page, token.map[0] + 1, language, token.content, mark, marked))
        comment = _MARK.fullmatch(token.content.strip()) if token.type == "html_block" else None
        mark, marked = (comment[1], comment[2]) if comment else ("", "")
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
